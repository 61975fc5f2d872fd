"""What an adapter of low rank adds to a linear layer: LoRA, rsLoRA, DoRA, PiSSA.

`models.layers.Linear` calls `adapted` where a `LowRank` was put on it
(`models.adapter.add_adapter`). The parameters stand beside the frozen weight, which is never
changed and never added to:

    lora_A (P * r, in), lora_B (rows, r)   trained; P is the number of parts, mostly 1
    lora_magnitude (rows,)                 trained, DoRA's
    lora_A_init, lora_B_init               frozen, PiSSA's: what W is to be without

A fused layer whose architecture keeps queries, keys and values apart has a part for each, as peft
has there: rows of a part are B_p A_p's. The idea of PiSSA here: W - B0 A0 + B A, with W untouched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.devices import has_autocast, without_autocast

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
A_INIT, B_INIT = "lora_A_init", "lora_B_init"


@dataclass
class LowRank:
    """One layer's adapter.

    Attributes:
        r: rank.
        alpha: the product is scaled by alpha / r.
        parts: output rows [begin, end) of each part, in order; rows between them have no adapter.
        dropout: share of what enters A that is dropped in training.
        rslora: scale by alpha / sqrt(r).
        dora: each row's magnitude is learned apart.
        init: `default`, `gaussian` or `pissa`.
        shared: of stacked experts: all have the same pair.
        on: off: the layer is the base's.
    """

    r: int
    alpha: float
    parts: tuple[tuple[int, int], ...]
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: str = "default"
    shared: bool = False
    on: bool = field(default=True, compare=False)

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def rows(self) -> int:
        """Output rows with an adapter."""
        return sum(end - begin for begin, end in self.parts)


def adapted(layer: Any, x: Tensor, y: Tensor, lora: LowRank) -> Tensor:
    """The output of an adapted linear layer.

    Args:
        layer: has the parameters above, `bias` and `dense()`, its frozen weight (out, in).
        x: (..., in).
        y: (..., out), what the frozen layer gives.
        lora: its adapter.
    """
    kept = F.dropout(x, lora.dropout) if lora.dropout and layer.training else x
    added = _product(kept, layer.lora_A, layer.lora_B, lora)
    if lora.init == "pissa":
        added = added - _product(x, layer.lora_A_init, layer.lora_B_init, lora)
    if not lora.dora:
        return y + _spread(added.to(y.dtype), lora, y.shape[-1])
    plain = _plain(layer, kept, y, lora)
    scale = layer.lora_magnitude / row_norms(layer, lora)
    added = (scale - 1).to(y.dtype) * plain + scale.to(added.dtype) * added
    return y + _spread(added.to(y.dtype), lora, y.shape[-1])


def _product(x: Tensor, a: Tensor, b: Tensor, lora: LowRank) -> Tensor:
    """The adapter's own output s B A x, (..., rows); in the adapter's dtype, or autocast's."""
    if not has_autocast(x.device.type):
        x = x.to(a.dtype)
    inner = F.linear(x, a) * lora.scaling
    if len(lora.parts) == 1:
        return F.linear(inner, b)
    pieces = zip(inner.split(lora.r, -1), _by_part(b, lora), strict=True)
    return torch.cat([F.linear(u, part) for u, part in pieces], -1)


def _plain(layer: Any, kept: Tensor, y: Tensor, lora: LowRank) -> Tensor:
    """W x without its bias, of the adapted rows, of what dropout leaves of x: (..., rows)."""
    if lora.dropout and layer.training:
        y = layer.base(kept)
    if layer.bias is not None:
        y = y - layer.bias.to(y.dtype)
    return _gather(y, lora, -1)


@torch.no_grad()
def row_norms(layer: Any, lora: LowRank) -> Tensor:
    """(rows,), |W + s B A| of each adapted row, a constant for the gradient as DoRA's paper says.

    |w|^2 + 2 s <w, b A> + s^2 |b A|^2: the sum of W and B A is never built.
    """
    weight = layer.dense()
    with without_autocast(weight.device.type):
        norms = []
        for part, (a, b) in zip(lora.parts, _factors(layer, lora), strict=True):
            rows = weight[part[0] : part[1]]
            square = torch.linalg.vector_norm(rows, dim=1, dtype=a.dtype).square()
            cross = (F.linear(rows.to(a.dtype), a) * b).sum(1)
            own = (F.linear(b, a @ a.T) * b).sum(1)
            s = lora.scaling
            norms.append((square + 2 * s * cross + s * s * own).clamp_min(0).sqrt())
        return torch.cat(norms)


def _factors(layer: Any, lora: LowRank) -> list[tuple[Tensor, Tensor]]:
    """A (R, in) and B (rows of the part, R) of each part, PiSSA's start among them."""
    pairs = [(layer.lora_A, layer.lora_B)]
    if lora.init == "pissa":
        pairs.append((layer.lora_A_init, -layer.lora_B_init))
    split = [(a.split(lora.r), _by_part(b, lora)) for a, b in pairs]
    return [
        (torch.cat([a[p] for a, _ in split]), torch.cat([b[p] for _, b in split], 1))
        for p in range(len(lora.parts))
    ]


def _by_part(b: Tensor, lora: LowRank) -> tuple[Tensor, ...]:
    return b.split([end - begin for begin, end in lora.parts])


def _gather(y: Tensor, lora: LowRank, dim: int) -> Tensor:
    """The adapted rows of y (..., out), side by side."""
    if lora.rows == y.shape[dim]:
        return y
    return torch.cat([y.narrow(dim, begin, end - begin) for begin, end in lora.parts], dim)


def _spread(added: Tensor, lora: LowRank, width: int) -> Tensor:
    """`added` (..., rows) at its places of (..., width), zeros elsewhere."""
    if lora.rows == width:
        return added
    pieces, place = [], 0
    sizes = [end - begin for begin, end in lora.parts]
    for (begin, end), piece in zip(lora.parts, added.split(sizes, -1), strict=True):
        pieces += [added.new_zeros(*added.shape[:-1], begin - place), piece]
        place = end
    return torch.cat([*pieces, added.new_zeros(*added.shape[:-1], width - place)], -1)


def delta(layer: Any, lora: LowRank) -> Tensor:
    """What merging adds: s B A (out, in) in fp32, zeros where a row has no adapter."""
    out = torch.zeros(layer.out_features, layer.in_features, device=layer.lora_A.device)
    for (begin, end), (a, b) in zip(lora.parts, _factors(layer, lora), strict=True):
        out[begin:end] = lora.scaling * (b.float() @ a.float())
    return out


@torch.no_grad()
def merged_weight(layer: Any, lora: LowRank) -> Tensor:
    """The weight (out, in) in fp32 that does what the adapted layer does."""
    weight = layer.dense().float() + delta(layer, lora)
    if lora.dora:
        scale = torch.ones(layer.out_features, device=weight.device)
        factors = (layer.lora_magnitude / row_norms(layer, lora)).float()
        sizes = [end - begin for begin, end in lora.parts]
        for (begin, end), piece in zip(lora.parts, factors.split(sizes), strict=True):
            scale[begin:end] = piece
        weight *= scale[:, None]
    return weight


def head_operands(layer: Any, hidden: Tensor, lora: LowRank) -> tuple[Tensor, Tensor]:
    """Hidden states (..., D + R) and a weight (V, D + R) whose product is the adapted head's.

    The loss needs one weight for its chunks; W + B A in bfloat16 would lose what B A adds.
    """
    assert not (lora.dora and lora.dropout), "refused before"
    kept = F.dropout(hidden, lora.dropout) if lora.dropout and layer.training else hidden
    pieces, columns = [hidden], [layer.weight]
    pairs = [(kept, layer.lora_A, layer.lora_B)]
    if lora.init == "pissa":
        pairs.append((hidden, layer.lora_A_init, -layer.lora_B_init))
    for x, a, b in pairs:
        x = x if has_autocast(x.device.type) else x.to(a.dtype)
        pieces.append((F.linear(x, a) * lora.scaling).to(hidden.dtype))
        columns.append(b.to(columns[0].dtype))
    weight = torch.cat(columns, 1)
    if lora.dora:
        scale = layer.lora_magnitude / row_norms(layer, lora)
        weight = weight * scale[:, None].to(weight.dtype)
    return torch.cat(pieces, -1), weight


def embedded(layer: Any, tokens: Tensor, y: Tensor, lora: LowRank) -> Tensor:
    """Embeddings y (..., D) of tokens, with what A (r, V) and B (D, r) add."""
    inner = F.embedding(tokens, layer.lora_A.T) * lora.scaling
    return y + F.linear(inner, layer.lora_B).to(y.dtype)
