"""Runs the Triton kernels of 8-bit formats on a CPU, by Triton's interpreter.

Not a test: `test_blockwise_triton.py` starts it as a process of its own, for the interpreter is
chosen by TRITON_INTERPRET before Triton is imported. Prints for each format and dtype how far the
kernels are from the format's definition, and from PyTorch's functions, as JSON. On a GPU
`test_kernels_on_gpus.py` calls `compare`.

The interpreter cuts digits where a GPU rounds to bf16, so that scales may be one unit off there;
and where it rounds to e4m3 up to a power of two it gives half of that (triton 3.7), so that such
values are left out.
"""

from __future__ import annotations

import json
import math

import torch

from llmfoundry.ops import blockwise, blockwise_triton
from llmfoundry.ops.blockwise import BLOCK, FORMATS, LARGEST, BlockwiseTensor

SIZES = (40, 3 * BLOCK, 20 * BLOCK + 7)  # the last is more than one program


def make(n: int) -> torch.Tensor:
    """Values of all magnitudes; blocks of zeros, with NaN and with inf."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x *= torch.logspace(-4, 4, -(-n // BLOCK)).repeat_interleave(BLOCK)[:n]
    if n > 3 * BLOCK:
        x[:BLOCK], x[BLOCK + 1] = 0, math.nan
        x[2 * BLOCK + 1] = math.inf
    return x


def compare(
    dtype: torch.dtype, kind: str, device: str = "cpu", *, carries: bool = True
) -> dict[str, float]:
    """The largest distances.

    Args:
        dtype: of the values.
        kind: a format.
        device: where they are.
        carries: whether e4m3 values are compared that are rounded up to a power of two.

    Returns:
        scale: from the definition's, relative. value: from the quotient, in half steps of the
        format. restored: from PyTorch's of the same bytes, relative. lost: values that are not NaN
        in a block that has one or inf, or are elsewhere.
    """
    found = {"scale": 0.0, "value": 0.0, "restored": 0.0, "lost": 0.0}
    most = LARGEST[FORMATS[kind]]
    for n in SIZES:
        x = make(n).to(device, dtype)
        mine = blockwise_triton.quantize(x, FORMATS[kind])
        wide = torch.nn.functional.pad(x.double(), (0, -n % BLOCK)).view(-1, BLOCK)
        scales = wide.abs().amax(1) / most
        lost = ~scales.isfinite()
        found["lost"] += float((mine.scales.isnan() != lost).sum())
        gaps = (mine.scales.double() - scales).abs()[~lost] / scales[~lost].clamp_min(1e-30)
        found["scale"] = max(found["scale"], float(gaps.max()))
        steps = mine.scales.double().repeat_interleave(BLOCK)[:n]
        fine = steps.isfinite() & (steps > 0)
        quotients = (x.double()[fine] / steps[fine]).clamp(-most, most)
        half = torch.full_like(quotients, 0.5)
        if kind == "fp8":
            powers = torch.exp2(quotients.abs().clamp_min(2**-6).log2().floor())
            half = powers * 2**-4
            same = carries | (quotients.abs() / powers < 1.9375)
        else:
            same = torch.ones_like(quotients, dtype=torch.bool)
        gaps = (mine.values.double()[fine] - quotients).abs() / half
        found["value"] = max(found["value"], float(gaps[same].max()))
        again = blockwise_triton.dequantize(BlockwiseTensor(*mine), dtype)
        expected = blockwise.dequantize(BlockwiseTensor(*mine), dtype)
        found["lost"] += float((again.isnan() != expected.isnan()).sum())
        gaps = (again - expected).double().abs() / expected.double().abs().clamp_min(1e-30)
        found["restored"] = max(found["restored"], float(gaps[expected.isfinite()].max()))
    return found


if __name__ == "__main__":
    blockwise_triton.WARPS = 1
    kinds = [(kind, dtype) for kind in FORMATS for dtype in (torch.float32, torch.bfloat16)]
    found = {f"{kind} {dtype}": compare(dtype, kind, carries=False) for kind, dtype in kinds}
    print(json.dumps(found))
