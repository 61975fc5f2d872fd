"""The memory-bound steps between grouped matrix products, and 8-bit storage, in PyTorch.

`device.py` takes these where Triton does not run; `triton_steps.py` has the same functions as
kernels of one pass each, and its tests compare them with these.

Blockwise 8-bit storage is for activations that wait for the backward pass, where `compress` asks
for it: a block of 128 neighbouring values shares one scale, its largest magnitude over 127, kept in
bf16; the error of a value is at most half a scale. Scales lie behind the values of their row, so
that what is saved stays one tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.activations import from_text

BLOCK = 128  # values that share a scale


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


def packed_width(width: int) -> int:
    """Bytes of a packed row of `width` values: the values and two bytes a block."""
    return width + 2 * -(-width // BLOCK)


def pack(x: Tensor) -> Tensor:
    """Quantize x (N, C), floating point, to int8 (N, packed_width(C))."""
    rows, width = x.shape
    if rows == 0:
        return x.new_empty(0, packed_width(width), dtype=torch.int8)
    blocks = F.pad(x.float(), (0, -width % BLOCK)).view(rows, -(-width // BLOCK), BLOCK)
    # quotients in fp32 by the scale as it is stored: in bf16 the training drifts
    scale = (blocks.abs().amax(-1) / 127).to(torch.bfloat16)
    step = scale.float().clamp_min_(torch.finfo(torch.float32).tiny)
    values = (blocks / step[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([values.flatten(1)[:, :width], scale.view(torch.int8)], dim=1)


def unpack(packed: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The (N, width) values of what `pack` made, in `dtype`."""
    if packed.shape[0] == 0:
        return packed.new_empty(0, width, dtype=dtype)
    scale = packed[:, width:].contiguous().view(torch.bfloat16).float()
    values = F.pad(packed[:, :width].float(), (0, -width % BLOCK))
    blocks = values.unflatten(1, (-1, BLOCK)) * scale[..., None]
    return blocks.flatten(1)[:, :width].to(dtype)
