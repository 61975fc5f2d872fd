"""The mixture of experts on a CPU: one expert after another, its activations in the cache.

`mixture.py` calls it. Here the host knows the counts without waiting, and a matrix product an
expert is as fast as a dense layer's; products write straight into their place. A step of
`yamls/dbrx-tiny.yaml` takes 1.17 to 1.21 times as long by `mixture.reference` and 1.05 to 1.15
times by `gpu.py`, which on a CPU has no fp64 and no rows of odd width (AVX512-BF16, interleaved).

Products of narrow types are oneDNN's, compiled for every number of rows that they meet, which takes
half as long as the product. So a segment of theirs is padded to one of a few numbers of rows: by
the rows behind it, which belong to the next expert. Forward that writes over them in its turn;
backward their gradient is zero. Without, the same step takes 1.20 times as long.
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
)

PADDING = 64  # a segment is padded by less than this, and by less than a sixteenth of its rows


def forward(
    x: Tensor, weights: Tensor, routing: SortedRows, w: Experts, *, keep: bool
) -> tuple[Tensor, SavedActivations]:
    """Output (T, d), and the pre-activations where they are to be kept.

    Args:
        x: (T, d).
        weights: (T, k), fp32 or wider.
        routing: the N = T * k rows, sorted.
        w: the experts, in x's dtype, a wider one or 4 bits: each is cast when its turn comes, so
            that no copy of them all is written to memory, or kept there.
        keep: a backward pass will come.
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
    """All gradients from that of the output, grad (T, d); none of the experts where `frozen`.

    The router's weight is left out of all that is f wide. It is a factor of x and of grad where
    they meet those rows in the experts' gradients, and of the rows whose sum is the gradient of x.
    """
    n_rows = kept_rows(routing.order.shape[0], x.dtype)
    tokens = _tokens(routing, weights.shape[1], n_rows)
    row_weights = _row_weights(weights.to(x.dtype), routing, n_rows)
    grad_rows = x.new_empty(n_rows, x.shape[1])
    inner = weights.new_empty(n_rows)  # gradients of the router's weights, in sorted order
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
        db = dh  # its memory
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
    """Fill one expert's gradients, in the order of `Experts.tensors`; x and g are weighted."""
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
    """Add (x a^T) b^T to y, of an adapter's a (r, in) and b (out, r), where there is one."""
    if y is not None and a is not None and b is not None:
        y += torch.mm(torch.mm(x, a.T), b.T)


def _add_gradient(dx: Tensor, dy: Tensor, a: Tensor | None, b: Tensor | None) -> None:
    """Add dy b a to dx, the gradient of an adapter's rows."""
    if a is not None and b is not None:
        dx += torch.mm(torch.mm(dy, b), a)


def _adapter_gradients(
    grads: LowRankExperts, low: LowRankExperts,
    x: Tensor, g: Tensor, h: Tensor, da: Tensor, db: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of one expert's adapters; x and g are weighted."""
    pairs = ((x, da, *low[0:2], *grads[0:2]), (x, db, *low[2:4], *grads[2:4]))
    for rows, dy, a, b, grad_a, grad_b in (*pairs, (h, g, *low[4:6], *grads[4:6])):
        if a is not None and b is not None and grad_a is not None and grad_b is not None:
            grad_a.copy_(torch.mm(torch.mm(dy, b).T, rows))
            grad_b.copy_(torch.mm(dy.T, torch.mm(rows, a.T)))


def _zero_unused(grads: tuple[Tensor | None, ...], routing: SortedRows) -> None:
    """The gradients of experts without rows."""
    counts = torch.diff(routing.ends, prepend=routing.ends.new_zeros(1))
    for e in (counts == 0).nonzero().flatten().tolist():
        for grad in grads:
            if grad is not None:
                grad[e] = 0


def _segments(routing: SortedRows, dtype: torch.dtype) -> Iterator[tuple[int, int, slice]]:
    """Experts that have rows, how many, and where they and their padding are."""
    start = 0
    for e, end in enumerate(routing.ends.tolist()):
        if end > start:
            yield e, end - start, slice(start, start + _padded(end - start, dtype))
        start = end


def _padded(count: int, dtype: torch.dtype) -> int:
    """Rows of a product of `count`, where products are compiled: 16 numbers an octave at most."""
    if not _is_compiled(dtype):
        return count
    step = min(PADDING, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


def _is_compiled(dtype: torch.dtype) -> bool:
    """Whether a CPU's products are compiled for every shape that they meet: oneDNN's are."""
    return dtype.itemsize <= 2


def kept_rows(n_rows: int, dtype: torch.dtype) -> int:
    """The first dimension of what `forward` keeps of N rows: the last segment is padded, too."""
    return n_rows + (PADDING if _is_compiled(dtype) else 0)


def _tokens(routing: SortedRows, top_k: int, n_rows: int) -> Tensor:
    """Token (n_rows,) of each sorted row and of what pads them."""
    return F.pad(routing.order // top_k, (0, n_rows - routing.order.shape[0]))


def _row_weights(weights: Tensor, routing: SortedRows, n_rows: int) -> Tensor:
    """Router's weight (n_rows, 1) of each sorted row and of what pads them.

    They come in the rows' dtype: an operation on two dtypes writes out what it reads in the wider.
    """
    row_weights = weights.flatten().index_select(0, routing.order)
    return F.pad(row_weights, (0, n_rows - routing.order.shape[0]))[:, None]


def _sum_choices(rows: Tensor, routing: SortedRows, weights: Tensor) -> Tensor:
    """(T, d), the sum of each token's k rows times their weights (T, k), which are rounded."""
    places = routing.inverse.view_as(weights)
    return F.embedding_bag(places, rows, mode="sum", per_sample_weights=weights.to(rows.dtype))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    y = torch.mm(x, weight.T, out=out)
    return y if bias is None else y.add_(bias)


def _glu_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, act: Activation, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """Recompute h and turn dh (M, f), the gradient of h, into others.

    `inner` (M,) becomes <dh, h>, the gradient of the router's weights; dh's memory the gradient of
    b. Returns h and the gradient of a.
    """
    s = act.function(a)
    h = s if b is None else s * b
    torch.linalg.vecdot(dh.to(inner.dtype), h.to(inner.dtype), out=inner)
    da = act.backward(dh if b is None else dh * b, a)
    dh *= s
    return h, da


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
