"""Blockwise 8-bit formats, in which adjacent values share a scale.

`compression.py` stores activations in them. The scale of a block is its largest magnitude divided
by the largest value of the format, in bf16: 8.125 bits per value. The error of int8 is at most half
a step, 1/254 of the largest magnitude; that of fp8 (e4m3, three mantissa bits) at most 1/16 of the
value. `blockwise_triton.py` has the same functions as Triton kernels.
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
    """A tensor of n values in 8 bits.

    Attributes:
        values: (n,), int8 or float8_e4m3fn.
        scales: (ceil(n / BLOCK),), bf16.
    """

    values: Tensor
    scales: Tensor


def quantize(x: Tensor, kind: torch.dtype) -> BlockwiseTensor:
    """Quantize x (n,), contiguous. A block that contains NaN or inf becomes NaN."""
    n, most = x.shape[0], LARGEST[kind]
    blocks = F.pad(x, (0, -n % BLOCK)).view(-1, BLOCK).float()
    # divide in fp32 by the stored (rounded) scale: with bf16 quotients training drifts
    scales = (torch.linalg.vector_norm(blocks, torch.inf, dim=1) / most).bfloat16()
    scales += 0 * scales  # turns inf into NaN, as the values are lost
    steps = scales.float().clamp_min_(torch.finfo(torch.float32).tiny)
    quotients = blocks / steps[:, None]
    if kind == torch.int8:
        quotients.round_()
    values = quotients.clamp_(-most, most).to(kind).flatten()
    return BlockwiseTensor(values if n % BLOCK == 0 else values[:n].clone(), scales)


def dequantize(packed: BlockwiseTensor, dtype: torch.dtype) -> Tensor:
    """Return the (n,) values of a quantized tensor."""
    n = packed.values.shape[0]
    values = packed.values.float()
    blocks = F.pad(values, (0, -n % BLOCK)).view(-1, BLOCK)
    return (blocks * packed.scales.float()[:, None]).flatten()[:n].to(dtype)
