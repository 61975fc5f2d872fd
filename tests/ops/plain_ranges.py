"""Queries that are some of a row's tokens over all of its keys, held to the definition."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from llmfoundry.ops.attention.base import AttentionPlan
from llmfoundry.ops.attention.select import attend, range_plan
from llmfoundry.ops.packed_layout import Ranges, at
from tests.ops.plain_attention import (
    CPU,
    DTYPES,
    GRID,
    TOLERANCE,
    Case,
    distance,
    plain_attention,
    plan,
)

# of rows of 19: both ends, the middle, single tokens, all
RANGES: tuple[Ranges, ...] = (((0, 5), (14, 19)), ((5, 14),), ((3, 4), (18, 19)), ((0, 19),))
CASES = [
    name
    for name, case in GRID.items()
    if sum(case.lengths[0]) == 19 and name.startswith(("gqa", "mqa-alibi", "window"))
]
PAIRS = [(name, RANGES[i % 4]) for i, name in enumerate(CASES)]
PAIRS += [(name, RANGES[0]) for name in CASES[1::4]]


def planned(impl: str, case: Case, ranges: Ranges, dtype: str) -> AttentionPlan:
    """As `plan` makes it; of kernels that a CPU lacks as it does on CUDA."""
    wide = dtype == "fp64" and impl in ("torch", "sdpa", "auto")
    spec = case.spec(torch.float64 if wide else torch.float32)
    packed = any(len(row) > 1 for row in case.lengths)
    layout = case.layout() if packed else None
    if impl in ("torch", "sdpa", "auto"):
        return plan(layout, spec, queries=19, past=0, device=CPU, impl=impl, ranges=ranges)
    parts = (range_plan(impl, layout, spec, *places, CPU) for places in ranges)
    return AttentionPlan(impl, spec, parts=tuple(parts))


def range_errors(
    impl: str, case: Case, ranges: Ranges, dtype: str = "fp64", *, backward: bool = True
) -> tuple[float, float]:
    """Errors of the output and of the gradients, as shares of what `dtype` allows."""
    *qkv, weight = (x.to(DTYPES[dtype]) for x in case.tensors())
    leaves = [x.requires_grad_(backward) for x in qkv]
    chosen = planned(impl, case, ranges, dtype)
    assert sum(part.queries for part in chosen.parts) == sum(b - a for a, b in ranges)
    out = attend(at(leaves[0], ranges), *leaves[1:], chosen)
    theirs, *gradients = expected(case, ranges)
    # ALiBi's slopes are fp32 where a kernel asks for that
    kernel = dtype == "fp64" and case.alibi and impl not in ("torch", "sdpa", "auto")
    allowed = (1e-6, 1e-6) if kernel else TOLERANCE[dtype]
    forward = distance([out], [theirs]) / allowed[0]
    if not backward:
        return forward, 0.0
    ours = torch.autograd.grad(out, leaves, at(weight, ranges))
    return forward, distance(ours, gradients) / allowed[1]


@functools.cache
def expected(case: Case, ranges: Ranges) -> tuple[Tensor, ...]:
    """Output at the ranges, and gradients of q, k, v, in float64."""
    *qkv, weight = case.tensors()
    leaves = [x.requires_grad_() for x in qkv]
    out = at(plain_attention(*leaves, case), ranges)
    return (out.detach(), *torch.autograd.grad(out, leaves, at(weight, ranges)))
