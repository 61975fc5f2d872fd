"""Blockwise 8-bit formats: values that lie side by side share a scale.

`compression.py` keeps activations in them. A block's scale is its largest magnitude over the
format's largest, kept in bf16: 8.125 bits a value. The error of int8 is at most half a step, 1/254
of the largest; that of fp8 (e4m3, three bits of mantissa) at most 1/16 of the value itself.

`blockwise_triton.py` has the same functions as kernels of one pass each, and its tests compare them
with these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # values that share a scale
FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class BlockwiseTensor(NamedTuple):
    """n values in 8 bits.

    Attributes:
        values: (n,), int8 or float8_e4m3fn.
        scales: (ceil(n / BLOCK),), bf16.
    """

    values: Tensor
    scales: Tensor


def quantize(x: Tensor, kind: torch.dtype) -> BlockwiseTensor:
    """Values of x (n,), contiguous; a block with NaN or inf in it becomes NaN as a whole."""
    n, most = x.shape[0], LARGEST[kind]
    blocks = F.pad(x, (0, -n % BLOCK)).view(-1, BLOCK).float()
    # quotients in fp32 by the scale as it is stored: in bf16 the training drifts
    scales = (torch.linalg.vector_norm(blocks, torch.inf, dim=1) / most).bfloat16()
    scales += 0 * scales  # NaN of inf, whose values are lost
    steps = scales.float().clamp_min_(torch.finfo(torch.float32).tiny)
    quotients = blocks / steps[:, None]
    if kind == torch.int8:
        quotients.round_()
    values = quotients.clamp_(-most, most).to(kind).flatten()
    return BlockwiseTensor(values if n % BLOCK == 0 else values[:n].clone(), scales)


def dequantize(packed: BlockwiseTensor, dtype: torch.dtype) -> Tensor:
    """The (n,) values of what `quantize` made."""
    n = packed.values.shape[0]
    values = packed.values.float()
    blocks = F.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    return (blocks * packed.scales.float()[:, None]).flatten()[:n].to(dtype)
