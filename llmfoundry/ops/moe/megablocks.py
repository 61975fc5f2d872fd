"""megablocks' grouped matrix products behind the same seam, where megablocks can be had.

It is never a dependency: megablocks 0.10 is built from source against the torch that it pins, for
a GPU, and its kernels ask the host for the row counts. This adapter is for comparing the two.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from llmfoundry.ops.moe.experts import Experts
from llmfoundry.ops.moe.routing import route

MODULES = ("megablocks", "megablocks_ops", "grouped_gemm")


def missing(dtype: torch.dtype) -> str | None:
    """Why megablocks cannot serve on CUDA, and what to write instead; None if it can."""
    if dtype != torch.bfloat16:
        return "megablocks multiplies in bfloat16 alone; write grouped_mm"
    absent = [name for name in MODULES if find_spec(name) is None]
    if absent:
        return (
            f"megablocks needs {', '.join(absent)}, built as constraints-megablocks.txt says; write"
            " grouped_mm"
        )
    return None


def megablocks(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """The mixture by megablocks' gather and scatter and grouped_gemm's products."""
    from grouped_gemm.ops import gmm
    from megablocks import ops

    assert w.b1 is None and w.bv is None and w.b2 is None, "megablocks' experts have no biases"
    assert not any(t is not None for t in w.low), "refused before: they have no adapters"
    top_k = experts.shape[1]
    order, _, ends = route(experts, w.w1.shape[0])
    by_expert = experts.flatten().to(torch.int32)[order]
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).cpu().to(torch.int64)
    rows = ops.gather(x, order, by_expert, ends, top_k)
    h = w.act.function(gmm(rows, w.w1, counts, trans_b=True))
    if w.v1 is not None:
        h = h * gmm(rows, w.v1, counts, trans_b=True)
    y_rows = gmm(h, w.w2, counts)
    return ops.scatter(y_rows, order, by_expert, weights.flatten(), ends, top_k)
