"""Matrix products in fp32, by the faster of the two libraries that PyTorch carries on x86.

PyTorch multiplies fp32 matrices by MKL, which uses half the width of AMD's AVX-512: 190 GFLOP/s on
two cores where oneDNN has 430, both exact to fp32. The experts, the output head and the linear
layers of `models` ask here; everywhere else, and in other dtypes, these are PyTorch's functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

VENDORS = ("AuthenticAMD", "HygonGenuine")
NARROW = 64  # features of a side, below which MKL is up to twice as fast: adapters of low rank
WORTH = 1 << 26  # multiply-adds of a product without gradients: oneDNN compiles for each new shape


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """The product (M, N) of a (M, K) and b (K, N), in `out` if it is given. Without gradients."""
    if not _is_fast(a) or 0 in (*a.shape, *b.shape):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    product = torch.ops.mkldnn._linear_pointwise(a, b.T, None, "none", [], "")
    return product if out is None else out.copy_(product)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Differentiable x W^T + bias, (..., N), of x (..., K), W (N, K) and bias (N,): `F.linear`."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not _is_fast(x):
        return F.linear(x, weight, bias)
    if min(weight.shape) < NARROW:
        return F.linear(x, weight, bias)
    differentiable = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not x.numel() or not (differentiable or x.numel() * len(weight) >= WORTH):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def is_compiled(dtype: torch.dtype) -> bool:
    """Whether a CPU's products are compiled for every shape that they meet: oneDNN's are."""
    return dtype.itemsize <= 2 or (dtype == torch.float32 and _prefers_onednn())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # a frozen weight does not ask for its input again
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape, ctx.has_bias = x.shape, bias is not None
        y = mm(x.reshape(-1, x.shape[-1]), weight.T)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, wants = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad
        dx = mm(rows, weight).view(ctx.shape) if wants[0] else None
        dw = mm(rows.T, x.reshape(-1, x.shape[-1])) if wants[1] else None
        return dx, dw, rows.sum(0) if ctx.has_bias and wants[2] else None


def _is_fast(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and _prefers_onednn()


@cache
def _prefers_onednn() -> bool:
    """Whether this is a processor that MKL is slow on: the same answer in every run."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    facts = Path("/proc/cpuinfo")
    if not has_both or torch.backends.cpu.get_cpu_capability() != "AVX512" or not facts.exists():
        return False
    return any(vendor in facts.read_text(errors="replace") for vendor in VENDORS)


if torch.backends.mkldnn.is_available():

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        """Two a multiply-add."""
        return 2 * x[0] * x[1] * weight[0]
