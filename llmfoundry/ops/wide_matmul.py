"""Matmuls of bf16 and fp32 matrices at fp32's precision, without an fp32 copy of the bf16 one.

Entry points: `split`, `logits` and `gradients`, for the router of `models/router.py`, whose tokens
are bf16 and many and whose weight is fp32 and small. An fp32 number is the sum of three bf16
numbers (8 bits of its 24 each), and products of bf16 numbers are exact in fp32. One matmul of bf16
matrices that sums in fp32 therefore computes x w1 + x w2 + x w3 for w = w1 + w2 + w3, on tensor
cores. An fp32 copy of x would be written and read once for each of the three matmuls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfoundry.ops.devices import kind_of

BF16 = torch.bfloat16


def split(weight: Tensor) -> Tensor:
    """Return (5, E, D) bf16 for w (E, D) in fp32: w3, w2, w1, w1, w1; the first three sum to w.

    The order lets one tensor serve `logits` and `gradients`.
    """
    parts = weight.new_empty(5, *weight.shape, dtype=BF16)
    parts[2:] = weight
    rest = weight - parts[2]
    parts[1] = rest
    parts[0] = rest - parts[1]
    return parts


def logits(x: Tensor, parts: Tensor) -> Tensor:
    """Return x w^T (N, E) in fp32 for x (N, D) in bf16 and the parts of w."""
    terms = wide_mm(x, parts[:3].flatten(0, 1).T)  # (N, 3 E)
    return terms.view(len(x), 3, -1).sum(1)


def gradients(grad: Tensor, x: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (N, D) in bf16 and of w (E, D) in fp32.

    The gradient of x is g1 w2 + g1 w1 + g2 w1 + g3 w1. The terms that it leaves out are 2^-16 of
    it, and the result is rounded to 2^-9.

    Args:
        grad: (N, E), the gradient g of the logits, in fp32.
        x: (N, D).
        parts: of w.
    """
    g = grad.new_empty(len(grad), 4, grad.shape[1], dtype=BF16)  # g1, g1, g2, g3
    g[:, :2] = grad[:, None]
    rest = grad - g[:, 1]
    g[:, 2] = rest
    g[:, 3] = rest - g[:, 2]
    dx = g.flatten(1) @ parts[1:].flatten(0, 1)
    terms = wide_mm(g[:, 1:].flatten(1).T, x)  # (3 E, D)
    return dx, terms.view(3, *parts.shape[1:]).sum(0)


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of bf16 matrices, multiplied and summed in fp32."""
    if kind_of(a.device) == "cpu":  # for tests: PyTorch has this operator on CUDA alone
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)
