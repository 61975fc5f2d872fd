"""Mixture of experts on a CPU: one expert after another, so that its activations stay in the cache.

Entry points: `forward` and `backward`, for `mixture.py`. On a CPU the row counts are known without
waiting, and a matmul per expert is as fast as a dense layer's; matmuls write directly to their
destination. A step of `yamls/dbrx-tiny.yaml` takes 1.17 to 1.21 times as long with
`mixture.reference`, and 1.05 to 1.15 times with `gpu.py`, which on a CPU supports neither fp64 nor
rows of odd width (AVX512-BF16, interleaved).

oneDNN compiles matmuls of 16-bit types for every number of rows, which takes half as long as the
matmul. Segments of these types are therefore padded to one of a few numbers of rows, with the rows
that follow, which belong to the next expert. In the forward pass the next expert overwrites them;
in the backward pass their gradient is zero. Without padding the step takes 1.20 times as long.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.activations import Activation
from llmfoundry.ops.moe.experts import (
    Experts,
    Gradients,
    LowRankExperts,
    SavedActivations,
    SortedRows,
    glu,
    round_up,
)

PADDING = 64  # a segment is padded by fewer rows, and by less than a sixteenth of its rows


def forward(
    x: Tensor, weights: Tensor, routing: SortedRows, w: Experts, *, keep: bool
) -> tuple[Tensor, SavedActivations]:
    """Return the output (T, d), and the pre-activations if they are saved.

    Args:
        x: (T, d).
        weights: (T, k), fp32 or wider.
        routing: the N = T * k rows, sorted by expert.
        w: the experts, in x's dtype, a wider one or 4 bits. Each expert is cast when it is used, so
            that no cast copy of all experts is in memory.
        keep: whether a backward pass follows.
    """
    n_rows, f = kept_rows(routing.order.shape[0], x.dtype), w.hidden(x.shape[1])
    width = f if keep else 0
    gate = x.new_empty(n_rows, width)  # (N and padding, f), or no columns
    up = x.new_empty(0 if w.v1 is None else n_rows, width)
    tokens = _tokens(routing, weights.shape[1], n_rows)
    y_rows = x.new_empty(n_rows, x.shape[1])
    for e, _, rows in _segments(routing, x.dtype):
        x_e = x.index_select(0, tokens[rows])  # (M, d), the rows of expert e and their padding
        one = w.one(e, x.shape[1], x.dtype)
        a = _linear(x_e, one.w1, one.b1, gate[rows] if keep else None)  # (M, f), as b and h
        b = None if one.v1 is None else _linear(x_e, one.v1, one.bv, up[rows] if keep else None)
        _add_product(a, x_e, one.low.w1_a, one.low.w1_b)
        _add_product(b, x_e, one.low.v1_a, one.low.v1_b)
        h = glu(a, b, w.activation)
        y = torch.mm(h, one.w2, out=y_rows[rows])  # (M, d)
        _add_product(y, h, one.low.w2_a, one.low.w2_b)
        if one.b2 is not None:
            y += one.b2
    return _sum_choices(y_rows, routing, weights), SavedActivations(gate, up)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    kept: SavedActivations,
    routing: SortedRows,
    w: Experts,
    *,
    frozen: bool,
) -> Gradients:
    """Return all gradients from that of the output, grad (T, d); none of experts if `frozen`.

    The router weight is not applied to tensors of width f. It is applied to x and grad in the
    gradients of the experts, and to the rows that are summed to the gradient of x.
    """
    n_rows = kept_rows(routing.order.shape[0], x.dtype)
    tokens = _tokens(routing, weights.shape[1], n_rows)
    row_weights = _row_weights(weights.to(x.dtype), routing, n_rows)
    grad_rows = x.new_empty(n_rows, x.shape[1])
    inner = weights.new_empty(n_rows)  # gradients of the router weights, in sorted order
    grads = tuple(None if p is None or frozen else torch.empty_like(p) for p in w.tensors())
    low = w.low.map(torch.empty_like)
    _zero_unused((*grads, *low), routing)
    for e, count, rows in _segments(routing, x.dtype):
        one = w.one(e, x.shape[1], x.dtype)
        g = grad.index_select(0, tokens[rows])  # (M, d)
        g[count:] = 0
        a = kept.gate[rows]  # (M, f), as b
        b = None if one.v1 is None else kept.up[rows]
        dh = torch.mm(g, one.w2.T)  # (M, f), as h, da and db
        _add_gradient(dh, g, one.low.w2_a, one.low.w2_b)
        h, da = _glu_backward(dh, a, b, w.act, inner[rows])
        db = dh  # reuses its memory
        if one.b2 is not None:
            inner[rows] += g.to(inner.dtype) @ one.b2.to(inner.dtype)
        dx = torch.mm(da, one.w1, out=grad_rows[rows])  # (M, d)
        if one.v1 is not None:
            dx += torch.mm(db, one.v1)
        _add_gradient(dx, da, one.low.w1_a, one.low.w1_b)
        _add_gradient(dx, db, one.low.v1_a, one.low.v1_b)
        if frozen and not any(t is not None for t in w.low):
            continue
        x_e = x.index_select(0, tokens[rows])
        x_e *= row_weights[rows]
        g *= row_weights[rows]
        _adapter_gradients(low.of(e), one.low, x_e, g, h, da, db)
        if not frozen:
            mine = tuple(None if p is None else p[e] for p in grads)
            _expert_gradients(mine, row_weights[rows], x_e, g, h, da, db)
    grad_weights = inner.index_select(0, routing.inverse).view_as(weights)
    return Gradients(_sum_choices(grad_rows, routing, weights), grad_weights, grads, low)


def _expert_gradients(
    grads: tuple[Tensor | None, ...], weights: Tensor,
    x: Tensor, g: Tensor, h: Tensor, da: Tensor, db: Tensor,
) -> None:  # fmt: skip
    """Write one expert's gradients, in the order of `Experts.tensors`; x and g are weighted."""
    w1, v1, w2, b1, bv, b2 = grads
    for weight, left, right in ((w1, da, x), (w2, h, g), (v1, db, x)):
        if weight is not None and weight.dtype == x.dtype:
            torch.mm(left.T, right, out=weight)
        elif weight is not None:
            weight.copy_(left.T @ right)
    for bias, rows in ((b1, da), (bv, db)):
        if bias is not None:
            bias.copy_((rows * weights).sum(0, dtype=_wide(rows.dtype)))
    if b2 is not None:
        b2.copy_(g.sum(0, dtype=_wide(g.dtype)))


def _add_product(y: Tensor | None, x: Tensor, a: Tensor | None, b: Tensor | None) -> None:
    """Add (x a^T) b^T to y for an adapter with a (r, in) and b (out, r), if there is one."""
    if y is not None and a is not None and b is not None:
        y += torch.mm(torch.mm(x, a.T), b.T)


def _add_gradient(dx: Tensor, dy: Tensor, a: Tensor | None, b: Tensor | None) -> None:
    """Add dy b a to dx, the gradient of an adapter's input, if there is one."""
    if a is not None and b is not None:
        dx += torch.mm(torch.mm(dy, b), a)


def _adapter_gradients(
    grads: LowRankExperts, low: LowRankExperts,
    x: Tensor, g: Tensor, h: Tensor, da: Tensor, db: Tensor,
) -> None:  # fmt: skip
    """Write the gradients of one expert's adapters; x and g are weighted."""
    pairs = ((x, da, *low[0:2], *grads[0:2]), (x, db, *low[2:4], *grads[2:4]))
    for rows, dy, a, b, grad_a, grad_b in (*pairs, (h, g, *low[4:6], *grads[4:6])):
        if a is not None and b is not None and grad_a is not None and grad_b is not None:
            grad_a.copy_(torch.mm(torch.mm(dy, b).T, rows))
            grad_b.copy_(torch.mm(dy.T, torch.mm(rows, a.T)))


def _zero_unused(grads: tuple[Tensor | None, ...], routing: SortedRows) -> None:
    """Set the gradients of experts without rows to zero."""
    counts = torch.diff(routing.ends, prepend=routing.ends.new_zeros(1))
    for e in (counts == 0).nonzero().flatten().tolist():
        for grad in grads:
            if grad is not None:
                grad[e] = 0


def _segments(routing: SortedRows, dtype: torch.dtype) -> Iterator[tuple[int, int, slice]]:
    """Yield expert, number of rows, and slice including padding of each expert with rows."""
    start = 0
    for e, end in enumerate(routing.ends.tolist()):
        if end > start:
            yield e, end - start, slice(start, start + _padded(end - start, dtype))
        start = end


def _padded(count: int, dtype: torch.dtype) -> int:
    """Return a padded row count: at most 16 different ones between n and 2 n."""
    if not _is_compiled(dtype):
        return count
    step = min(PADDING, 1 << max(0, count.bit_length() - 5))
    return round_up(count, step)


def _is_compiled(dtype: torch.dtype) -> bool:
    """Return whether matmuls are compiled per shape on a CPU, as oneDNN does."""
    return dtype.itemsize <= 2


def kept_rows(n_rows: int, dtype: torch.dtype) -> int:
    """Return the number of rows that `forward` saves for N rows, including padding."""
    return n_rows + (PADDING if _is_compiled(dtype) else 0)


def _tokens(routing: SortedRows, top_k: int, n_rows: int) -> Tensor:
    """Return (n_rows,), the token of each sorted row, including padding."""
    return F.pad(routing.order // top_k, (0, n_rows - routing.order.shape[0]))


def _row_weights(weights: Tensor, routing: SortedRows, n_rows: int) -> Tensor:
    """Return (n_rows, 1), the router weight of each sorted row, including padding.

    The result has the rows' dtype: an operation on two dtypes would first write a wider copy.
    """
    row_weights = weights.flatten().index_select(0, routing.order)
    return F.pad(row_weights, (0, n_rows - routing.order.shape[0]))[:, None]


def _sum_choices(rows: Tensor, routing: SortedRows, weights: Tensor) -> Tensor:
    """Return (T, d), the sum of each token's k rows times their weights (T, k), rounded."""
    places = routing.inverse.view_as(weights)
    return F.embedding_bag(places, rows, mode="sum", per_sample_weights=weights.to(rows.dtype))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    y = torch.mm(x, weight.T, out=out)
    return y if bias is None else y.add_(bias)


def _glu_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, act: Activation, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """Recompute h, and compute the gradients that follow from dh (M, f), the gradient of h.

    Writes <dh, h>, the gradient of the router weights, to `inner` (M,), and the gradient of b to
    the memory of dh. Returns h and the gradient of a.
    """
    s, up = act.function(a), None if b is None else act.up(b)
    h = s if up is None else s * up
    torch.linalg.vecdot(dh.to(inner.dtype), h.to(inner.dtype), out=inner)
    da = act.backward(dh if up is None else dh * up, a)
    dh *= s
    if b is not None and act.limit is not None:
        dh.copy_(act.up_backward(dh, b))
    return h, da


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
