"""Blockwise 8-bit storage of activations that wait for the backward pass.

The mixture of experts stores its input and pre-activations so where `compress` asks for it. A
block of 128 neighbouring values shares one scale, its largest magnitude over 127, kept in bf16;
the error of a value is at most half a scale. Scales lie behind the values of their row, so that
what is saved stays one tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # values that share a scale


def packed_width(width: int) -> int:
    """Bytes of a packed row of `width` values: the values and two bytes a block."""
    return width + 2 * -(-width // BLOCK)


def pack(x: Tensor) -> Tensor:
    """Quantize x (N, C), floating point, to int8 (N, packed_width(C))."""
    rows, width = x.shape
    if rows == 0:
        return x.new_empty(0, packed_width(width), dtype=torch.int8)
    blocks = F.pad(x.float(), (0, -width % BLOCK)).view(rows, -(-width // BLOCK), BLOCK)
    # quotients in fp32 by the scale as it is stored: in bf16 the training drifts
    scale = (blocks.abs().amax(-1) / 127).to(torch.bfloat16)
    step = scale.float().clamp_min_(torch.finfo(torch.float32).tiny)
    values = (blocks / step[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([values.flatten(1)[:, :width], scale.view(torch.int8)], dim=1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The (N, width) values of what `pack` made, in `dtype`."""
    if packed.shape[0] == 0:
        return packed.new_empty(0, width, dtype=dtype)
    scale = packed[:, width:].contiguous().view(torch.bfloat16).float()
    values = F.pad(packed[:, :width].float(), (0, -width % BLOCK))
    blocks = values.unflatten(1, (-1, BLOCK)) * scale[..., None]
    return blocks.flatten(1)[:, :width].to(dtype)
