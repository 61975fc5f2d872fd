"""`blockwise.quantize` and `dequantize` as Triton kernels with one pass each, for CUDA.

`compression.py` calls them. A program processes WIDTH values; all arithmetic is in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmfoundry.ops.blockwise import BLOCK, LARGEST, BlockwiseTensor

WIDTH = 2048  # values per program
WARPS = 4


@triton.jit
def quantize_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    n: tl.tensor,
    LARGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize x (n,) to 8-bit values (n,) and a bf16 scale per BLOCK values."""
    first = tl.program_id(0).to(tl.int64) * WIDTH
    at = first + tl.arange(0, WIDTH)
    blocks = tl.reshape(
        tl.load(x + at, mask=at < n, other=0.0).to(tl.float32), (WIDTH // BLOCK, BLOCK)
    )
    widest = tl.max(tl.abs(blocks), axis=1)
    lost = tl.max(
        (blocks - blocks != 0.0).to(tl.int32), axis=1
    )  # NaN, which a maximum ignores, inf
    scale = (tl.where(lost > 0, float("nan"), widest) / LARGEST).to(tl.bfloat16)
    step = tl.maximum(scale.to(tl.float32), 1.1754943508222875e-38)
    exact = blocks / step[:, None]
    if values.dtype.element_ty == tl.int8:
        # round to nearest; ties round away from zero (PyTorch rounds them to even)
        rounded = tl.floor(tl.abs(exact) + 0.5)
        exact = tl.where(exact < 0, -rounded, rounded)
    exact = tl.minimum(tl.maximum(exact, -LARGEST), LARGEST)
    flat = tl.reshape(exact, (WIDTH,)).to(values.dtype.element_ty)
    tl.store(values + at, flat, mask=at < n)
    block = first // BLOCK + tl.arange(0, WIDTH // BLOCK)
    tl.store(scales + block, scale, mask=block * BLOCK < n)


@triton.jit
def dequantize_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the values (n,) of a quantized tensor to `out`."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    mask = at < n
    value = tl.load(values + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + at // BLOCK, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value * scale, mask=mask)


def quantize(x: Tensor, kind: torch.dtype) -> BlockwiseTensor:
    """`blockwise.quantize`."""
    n = x.shape[0]
    scales = x.new_empty(triton.cdiv(n, BLOCK), dtype=torch.bfloat16)
    packed = BlockwiseTensor(torch.empty_like(x, dtype=kind), scales)
    _launch(quantize_kernel, n, x, *packed, n, LARGEST=LARGEST[kind])
    return packed


def dequantize(packed: BlockwiseTensor, dtype: torch.dtype) -> Tensor:
    """`blockwise.dequantize`."""
    out, n = torch.empty_like(packed.values, dtype=dtype), packed.values.shape[0]
    _launch(dequantize_kernel, n, *packed, out, n)
    return out


def _launch(kernel: Any, n: int, tensor: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch enough programs for n values on the tensor's device."""
    if n == 0:
        return
    with torch.cuda.device_of(tensor):
        programs = (triton.cdiv(n, WIDTH),)
        sizes = {"WIDTH": WIDTH, "BLOCK": BLOCK, "num_warps": WARPS}
        kernel[programs](tensor, *arguments, **constants, **sizes)
