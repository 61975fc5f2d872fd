"""A dropless mixture of experts: a slow reference, one fast operator, megablocks, and what picks.

`models/moe.py` calls `mixture` with the router's choice. Every token visits all of its k experts,
whatever their load; y_t is the sum over its choices of weight * expert(x_t).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.moe.experts import Experts, LowRankExperts, route
from llmfoundry.ops.moe.grouped import grouped

RANKS = 8  # an adapter's rank on an accelerator is a multiple of it: 16 bytes of bfloat16
MEGABLOCKS = ("megablocks", "megablocks_ops", "grouped_gemm")  # packages that it is
ROW_BYTES = 16  # grouped_mm's strides on an accelerator are multiples of it


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w: Experts,
    *,
    impl: str,
    compress: bool = False,
) -> Tensor:
    """Send each token through its experts and add up what they say, (T, d).

    Under autocast the tokens and the experts are cast to its dtype and the output stays in it, as a
    linear layer's does; the router's weights stay as they are.

    Args:
        x: (T, d), tokens to route: no padding.
        weights: (T, k), the router's, in fp32 (fp64 beside an x in fp64).
        experts: (T, k), int64: k different experts of a token, each below E.
        w: the experts.
        impl: `torch` (the reference), `grouped_mm`, or `megablocks`; see `refusal`.
        compress: what waits for the backward pass is kept in 8 bits (`grouped_mm` alone).
    """
    assert impl == "grouped_mm" or not compress, f"{impl} has no 8-bit storage"
    device = x.device.type
    multiply = partial(grouped, compress=True) if compress else IMPLS[impl]
    if w.packing is not None and impl != "grouped_mm":
        w = w.dense(x.shape[1], x.dtype)
    if device not in ("cpu", "meta"):
        w = replace(w, low=_whole_strides(w.low))
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast to ask for
        return multiply(x, weights, experts, w)
    dtype = torch.get_autocast_dtype(device)  # grouped_mm does not know of it
    x = x.to(dtype)
    if device != "cpu" or impl != "grouped_mm":  # which casts an expert at a time there
        w = w.map(lambda stacked: stacked.to(dtype) if stacked.is_floating_point() else stacked)
    with torch.autocast(device, enabled=False):
        return multiply(x, weights, experts, w)


def refusal(impl: str, device: str, dtype: torch.dtype, d: int, f: int) -> str | None:
    """Why a backend cannot serve, and what to write instead; None if it can.

    Args:
        impl: a name of IMPLS.
        device: `cpu`, `cuda`, ...
        dtype: of the matrix products: autocast's where it is on.
        d: width of a token.
        f: inner width of an expert.
    """
    if impl == "torch" or (impl == "grouped_mm" and device == "cpu"):
        return None
    if device != "cuda":
        if impl == "megablocks":
            return f"megablocks runs on CUDA alone, not on {device}; write grouped_mm"
        return f"grouped_mm runs on CPU and CUDA, not on {device}; write torch"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{impl} has no {_name(dtype)} on CUDA; write torch"
    if impl == "megablocks":
        return _missing_megablocks(dtype)
    step = ROW_BYTES // dtype.itemsize
    for name, size in (("d_model", d), ("ffn_hidden_size", f)):
        if size % step:
            near = max(step, round(size / step) * step)
            return f"grouped_mm takes {name} in multiples of {step} in {_name(dtype)}; write {near}"
    return None


def _missing_megablocks(dtype: torch.dtype) -> str | None:
    """Why megablocks cannot serve on CUDA, and what to write instead; None if it can."""
    if dtype != torch.bfloat16:
        return "megablocks multiplies in bfloat16 alone; write grouped_mm"
    absent = [name for name in MEGABLOCKS if find_spec(name) is None]
    if absent:
        return (
            f"megablocks needs {', '.join(absent)}, built as constraints-megablocks.txt says; write"
            " grouped_mm"
        )
    return None


def reference(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """One expert after another over its segment of the sorted rows, by plain autograd."""
    top_k = experts.shape[1]
    order, inverse, ends = route(experts, w.w1.shape[0])
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    segments = x[order // top_k].split(counts)  # (rows of e, d) each
    # unbind, not w1[e]: the gradient of an index is as large as the whole stack
    every = (*w.tensors(), *w.low)
    stacks = [[None] * len(counts) if t is None else t.unbind(0) for t in every]
    function = w.act.function
    parts = zip(segments, *stacks, strict=True)
    rows = torch.cat([_expert(*part, act=function) for part in parts])  # (T * k, d)
    picked = rows[inverse].view(*weights.shape, x.shape[1])  # (T, k, d)
    return (picked * weights[..., None]).sum(1).to(x.dtype)


def _expert(
    x: Tensor,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    bv: Tensor | None,
    b2: Tensor | None,
    *low: Tensor | None,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, place: int) -> Tensor:
        y, a, b = F.linear(x, weight, bias), *low[place : place + 2]
        return y if a is None or b is None else y + F.linear(F.linear(x, a), b)

    h = act(product(x, w1, b1, 0))  # (rows of e, f)
    if v1 is not None:
        h = h * product(x, v1, bv, 2)
    return product(h, w2.T, b2, 4)  # (rows of e, d)


def megablocks(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """The mixture by megablocks' gather and scatter and grouped_gemm's products, to compare with.

    It is never a dependency: megablocks 0.10 is built from source against the torch that it pins,
    for a GPU, and its kernels ask the host for the row counts.
    """
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


def _whole_strides(low: LowRankExperts) -> LowRankExperts:
    """The same adapters, of a rank that grouped_mm takes in every dtype: zeros are added."""

    def padded(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if a is None or b is None or a.shape[1] % RANKS == 0:
            return a, b
        more = -a.shape[1] % RANKS
        return F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))

    return LowRankExperts(*padded(*low[0:2]), *padded(*low[2:4]), *padded(*low[4:6]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


IMPLS: dict[str, Callable[[Tensor, Tensor, Tensor, Experts], Tensor]] = {
    "grouped_mm": grouped,
    "torch": reference,
    "megablocks": megablocks,
}
