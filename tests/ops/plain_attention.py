"""Attention as its definition says, query by query in float64, and how far a backend is from it.

`python -m tests.ops.plain_attention` prints the largest errors of the backends that run here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec, alibi_slopes
from llmfoundry.ops.attention.select import IMPLS, AttentionKernels, attend, refusal
from llmfoundry.ops.packed_layout import PackedLayout

CPU = torch.device("cpu")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# largest error allowed, as a share of the largest value: (output, gradients)
TOLERANCE = {"fp64": (1e-13, 1e-13), "fp32": (2e-6, 4e-6), "bf16": (6e-3, 2e-2)}


@dataclass(frozen=True)
class Case:
    """One point of the grid; `lengths` are the documents of each row."""

    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    lengths: tuple[tuple[int, ...], ...] = ((19,), (19,))
    alibi: bool = False
    softcap: float | None = None
    window: int = -1
    scale: float = 0.3

    def spec(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> AttentionSpec:
        """What the backends are asked; fp64 slopes for fp64, so that the bias is that precise."""
        slopes = alibi_slopes(self.heads, 8, device).to(dtype) if self.alibi else None
        return AttentionSpec(self.scale, self.softcap, slopes, self.window)

    def layout(self) -> PackedLayout:
        return PackedLayout.from_lengths(self.lengths)

    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v and the gradient of the output; float64 that bf16 can hold."""
        generator = torch.Generator().manual_seed(len(self.lengths) + self.heads)
        shape = (len(self.lengths), sum(self.lengths[0]))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        sizes = [(*shape, n, self.head_dim) for n in heads]
        return tuple(torch.randn(s, generator=generator).bfloat16().double() for s in sizes)


ROW, PACKED = ((19,), (19,)), ((7, 1, 11), (19,), (3, 3, 3, 10))
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}


def grid() -> dict[str, Case]:
    """Every combination of heads, ALiBi, window, softcap and packing, and what stands alone."""
    options = product(HEADS, (False, True), (-1, 4), (None, 2.0), (ROW, PACKED))
    cases = {}
    for heads, alibi, window, softcap, lengths in options:
        q_heads, kv_heads = HEADS[heads]
        words = ["alibi" * alibi, "window" * (window > 0), "softcap" * (softcap is not None)]
        name = "-".join([heads, *filter(None, words), "packed" if lengths is PACKED else "rows"])
        cases[name] = Case(q_heads, kv_heads, 8, lengths, alibi, softcap, window)
    return cases | {
        "head_dim 5": Case(head_dim=5, scale=5**-0.5),
        "head_dim 80": Case(head_dim=80, lengths=((19,),), scale=0.1),
        "one token": Case(lengths=((1,), (1,))),
        "window of itself": Case(window=0, lengths=PACKED),
        "window wider than rows": Case(window=18),
        "long row": Case(heads=1, kv_heads=1, lengths=((1024,),)),
        "chunks": Case(heads=2, kv_heads=1, lengths=((256,),)),
        "chunks of documents": Case(heads=1, kv_heads=1, lengths=((300, 84, 84, 3), (471,))),
        "chunks with alibi": Case(heads=2, kv_heads=2, lengths=((256,),), alibi=True),
        "chunks with a window": Case(heads=1, kv_heads=1, lengths=((384,),), window=40),
        "chunks with all": Case(heads=2, kv_heads=1, lengths=((290, 30),), window=130, alibi=True),
    }


GRID = grid()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, case: Case, past: int = 0) -> Tensor:
    """By the definition: q (B, T, H, hd) over k, v (B, past + T, KV, hd), in their dtype."""
    groups = case.heads // case.kv_heads
    rows = []
    for row, lengths in enumerate(case.lengths):
        first_key = [sum(lengths[:n]) for n, length in enumerate(lengths) for _ in range(length)]
        outputs = []
        for query, head in product(range(q.shape[1]), range(case.heads)):
            here = past + query
            first = (
                first_key[query] if case.window < 0 else max(first_key[query], here - case.window)
            )
            seen = slice(first, here + 1)
            logits = k[row, seen, head // groups] @ q[row, query, head] * case.scale
            if case.softcap is not None:
                logits = case.softcap * torch.tanh(logits / case.softcap)
            if case.alibi:
                away = torch.arange(first - here, 1, dtype=logits.dtype, device=q.device)
                logits = logits + plain_slope(head, case.heads) * away
            outputs.append(logits.softmax(0) @ v[row, seen, head // groups])
        rows.append(torch.stack(outputs).view(q.shape[1:]))
    return torch.stack(rows)


def plain_slope(head: int, heads: int) -> float:
    """The paper's: powers of 2^(-8/n); between them for heads beyond a power of two, as in MPT."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8 * (n + 1) / power) for n in range(power)]
    return slopes[head] if power == heads else (slopes[1::2] + slopes[::2])[head]


@functools.cache
def expected(case: Case) -> tuple[Tensor, ...]:
    """Output, and gradients of q, k, v, in float64."""
    *qkv, weight = case.tensors()
    leaves = [x.requires_grad_() for x in qkv]
    out = plain_attention(*leaves, case)
    return (out.detach(), *torch.autograd.grad(out, leaves, weight))


def distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Largest difference, as a share of the largest value of all."""
    pairs = [(a.detach().cpu().double(), b) for a, b in zip(ours, theirs, strict=True)]
    assert all(a.shape == b.shape for a, b in pairs)
    largest = max(b.abs().max().item() for _, b in pairs)
    return max((a - b).abs().max().item() for a, b in pairs) / largest


def plan(
    layout: PackedLayout | None,
    spec: AttentionSpec,
    *,
    impl: str,
    head_dim: int | None = None,
    **forward: Any,
) -> AttentionPlan:
    """Of a model whose recipe names this backend."""
    return AttentionKernels(impl, head_dim).plan(layout, spec, **forward)


def errors(case: Case, impl: str, dtype: str, device: torch.device = CPU) -> tuple[float, float]:
    """Largest error of the output and of the gradients."""
    *qkv, weight = (x.to(device, DTYPES[dtype]) for x in case.tensors())
    leaves = [x.requires_grad_() for x in qkv]
    chosen = plan(
        case.layout().to(device),
        case.spec(torch.float64 if dtype == "fp64" else torch.float32, device),
        queries=leaves[0].shape[1],
        past=0,
        device=device,
        impl=impl,
        dtype=DTYPES[dtype],
    )
    out = attend(*leaves, chosen)
    assert out.dtype == DTYPES[dtype]
    theirs, *gradients = expected(case)
    ours = torch.autograd.grad(out, leaves, weight)
    return distance([out], [theirs]), distance(ours, gradients)


def largest_errors(device: torch.device) -> Iterator[tuple[str, str, int, float, float]]:
    """Of each backend and dtype that serves here: cases, largest error of output and gradients."""
    for impl, dtype in product(IMPLS, DTYPES):
        cases = [
            case
            for case in GRID.values()
            if not refusal(impl, case.spec(), device, DTYPES[dtype], head_dim=case.head_dim)
        ]
        if cases:
            both = [errors(case, impl, dtype, device) for case in cases]
            yield impl, dtype, len(cases), max(a for a, _ in both), max(b for _, b in both)


if __name__ == "__main__":
    print("| device | backend | dtype | cases | output | gradients |\n|---|---|---|---|---|---|")
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for impl, dtype, cases, forward, backward in largest_errors(torch.device(kind)):
            print(f"| {kind} | {impl} | {dtype} | {cases} | {forward:.1e} | {backward:.1e} |")
