"""The memory-bound steps between grouped matrix products, in PyTorch.

`moe_device.py` takes these where Triton does not run; `moe_triton.py` has the same functions as
kernels of one pass each, and its tests compare them with these. `pack` and `unpack` are
`moe_compress`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfoundry.ops.activations import from_text
from llmfoundry.ops.moe.compress import pack as pack
from llmfoundry.ops.moe.compress import unpack as unpack


def gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Rows (N, d) of tokens x (T, d): row i is the token of pair order[i], N = T * top_k."""
    return x.index_select(0, order // top_k)


def glu(a: Tensor, b: Tensor | None, activation: str) -> Tensor:
    """act(a) * b, of (N, f) each; without b act(a)."""
    s = from_text(activation).function(a)
    return s if b is None else s * b


def glu_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, weights: Tensor, order: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """What follows from dh (N, f), the gradient of the unweighted h = act(a) * b.

    Args:
        dh: gradient of h as if every router's weight were one.
        a: (N, f).
        b: (N, f) or None.
        weights: (T, k), the router's.
        order: (N,), the pair of each row.
        activation: as `activations.to_text` writes it.

    Returns:
        h times its weight (N, f); the gradients of a and b, the weight applied (N, f); <dh, h>, the
        gradient of the router's weights (T, k).
    """
    act, weight = from_text(activation), weights.flatten()[order][:, None]
    s = act.function(a)
    h = s if b is None else s * b
    inner = torch.empty_like(weights).flatten()
    inner[order] = (dh * h).sum(-1, dtype=weights.dtype)  # each place once: deterministic
    dh = (dh * weight).to(a.dtype)
    da = act.backward(dh if b is None else dh * b, a)
    db = None if b is None else dh * s
    return (h * weight).to(a.dtype), da, db, inner.view_as(weights)


def combine(
    rows: Tensor, inverse: Tensor, weights: Tensor | None, top_k: int, more: Tensor | None = None
) -> Tensor:
    """Sum over its choices of each token's rows, (T, d), accumulated in fp32 or wider.

    Args:
        rows: (N, d).
        inverse: (N,), the row of each pair t * top_k + choice.
        weights: (T, k), factors of the rows; None: one.
        top_k: choices of a token.
        more: (N, d), added to the rows.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    picked = rows.index_select(0, inverse).to(wide)
    if more is not None:
        picked += more.index_select(0, inverse)
    picked = picked.view(-1, top_k, rows.shape[1])
    if weights is not None:
        picked *= weights[..., None]
    return picked.sum(1).to(rows.dtype)
