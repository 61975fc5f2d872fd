"""What a device computes and copies, measured for some seconds: products, and bytes a second.

A GPU multiplies bf16 matrices of 8192, a CPU smaller ones in bf16 where it has instructions for it.
The idea of `mismatches`: the same product of the same numbers on the same device is the same to the
last bit (cuBLAS promises it for one stream), so a repeat that differs is silent corruption.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmfoundry.ops.cpu_features import HAS_BF16

GPU_SIZE, CPU_SIZE = 8192, 512  # rows and columns, multiples of 128
GPU_BYTES, CPU_BYTES = 1 << 30, 32 << 20  # copied at a time
WARM_UP = 0.2  # of the time: clocks rise first, and caches fill
LEAST = 5  # slices, however short the time: the median of fewer is one busy moment


@dataclass(frozen=True)
class Burn:
    """What was measured.

    Attributes:
        tflops: the median over slices, in 1e12 floating-point operations a second.
        slices: how many were measured.
        mismatches: products that differed from the first one of the same numbers.
        digest: of that first product; the same on every GPU of one kind.
        copy_gb_s: bytes read and written a second when memory is copied, in 1e9.
        dtype: of the products.
    """

    tflops: float
    slices: int
    mismatches: int
    digest: str
    copy_gb_s: float
    dtype: str


Multiply = Callable[[Tensor, Tensor], Tensor]


def burn(device: torch.device, seconds: float, *, multiply: Multiply = torch.matmul) -> Burn:
    """Multiply for `seconds`, then copy for a fifth of that.

    Raises:
        RuntimeError: the device failed.
    """
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu or HAS_BF16 else torch.float32
    n = GPU_SIZE if is_gpu else CPU_SIZE
    a, b = (_numbers(n, seed, dtype).to(device) for seed in (1, 2))
    first = multiply(a, b)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def product() -> None:
        wrong.add_((multiply(a, b) != first).any())

    per_slice = 10 if is_gpu else 1
    spans = _spans(product, device, seconds, times=per_slice)
    digest = hashlib.sha256(first.float().cpu().numpy().tobytes()).hexdigest()[:16]
    return Burn(
        tflops=2 * n**3 / statistics.median(spans) / 1e12,
        slices=len(spans),
        mismatches=int(wrong),
        digest=digest,
        copy_gb_s=_copies(device, seconds / 5),
        dtype=str(dtype)[6:],
    )


def _numbers(n: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The same on every machine: made on the CPU."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(n, n, generator=made).to(dtype)


def _copies(device: torch.device, seconds: float) -> float:
    size = GPU_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spans = _spans(lambda: target.copy_(source), device, seconds, times=4)
    return 2 * size / statistics.median(spans) / 1e9


def _spans(
    step: Callable[[], object], device: torch.device, seconds: float, *, times: int
) -> list[float]:
    """Seconds of a step, the mean of each slice of `times`; slices of the warm-up are left out."""
    spans: list[float] = []
    started = time.perf_counter()
    while True:
        at = time.perf_counter() - started
        if at > seconds and len(spans) >= LEAST:
            return spans
        begun = time.perf_counter()
        for _ in range(times):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if at >= WARM_UP * seconds:
            spans.append((time.perf_counter() - begun) / times)
