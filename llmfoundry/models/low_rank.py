"""Forward pass and merging of low-rank adapters on a linear layer: LoRA, rsLoRA, DoRA, PiSSA.

`models.layers.Linear` calls `adapted` if `models.adapter.add_adapter` has set its `LowRank`. The
frozen weight W is never modified. The parameters of an adapter are

    lora_A (P * r, in), lora_B (rows, r)   trained; P is the number of parts, usually 1
    lora_magnitude (rows,)                 trained; DoRA only
    lora_A_init, lora_B_init               frozen; PiSSA only

A fused layer has one part each for queries, keys and values if its architecture has separate
projections, as in peft. The output rows of part p get B_p A_p. PiSSA (Meng et al., 2024) is
computed as W - B0 A0 + B A, which leaves W unchanged.
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
TOKEN_ROWS = "lora_rows"
"""In a folder's tensors: rows (len(tokens), D) of `LowRank.tokens`, in place of A and B."""


@dataclass
class LowRank:
    """Adapter of one layer.

    Attributes:
        r: rank.
        alpha: B A is scaled by alpha / r.
        parts: output rows [begin, end) of each part, in order. Other rows have no adapter.
        dropout: dropout probability of the input of A, in training.
        rslora: scale by alpha / sqrt(r).
        dora: train the magnitude of each output row separately (Liu et al., 2024).
        init: `default`, `gaussian` or `pissa`.
        shared: all stacked experts share one pair A, B.
        tokens: ids of the tokens whose rows of an embedding or head the adapter changes. The frozen
            factor selects them (A of an embedding, B of a head), and the other has the changes.
        on: if False, the layer computes the base model.
    """

    r: int
    alpha: float
    parts: tuple[tuple[int, int], ...]
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: str = "default"
    shared: bool = False
    tokens: tuple[int, ...] = ()
    on: bool = field(default=True, compare=False)

    @property
    def scaling(self) -> float:
        """Factor that multiplies B A."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def rows(self) -> int:
        """Number of output rows with an adapter."""
        return sum(end - begin for begin, end in self.parts)


def adapted(layer: Any, x: Tensor, y: Tensor, lora: LowRank) -> Tensor:
    """Return the output of an adapted linear layer.

    Args:
        layer: has the parameters above, `bias` and `dense()`, which returns its weight (out, in).
        x: (..., in).
        y: (..., out), the output of the frozen layer.
        lora: the adapter.
    """
    dropped = F.dropout(x, lora.dropout) if lora.dropout and layer.training else x
    update = _low_rank_product(dropped, layer.lora_A, layer.lora_B, lora)
    if lora.init == "pissa":
        update = update - _low_rank_product(x, layer.lora_A_init, layer.lora_B_init, lora)
    if lora.dora:
        # magnitude / norm * (W x + update), written as a change of y
        base_output = _base_output(layer, dropped, y, lora)
        scale = layer.lora_magnitude / row_norms(layer, lora)
        update = (scale - 1).to(y.dtype) * base_output + scale.to(update.dtype) * update
    return y + _scatter(update.to(y.dtype), lora, y.shape[-1])


def _low_rank_product(x: Tensor, a: Tensor, b: Tensor, lora: LowRank) -> Tensor:
    """Return s B A x, (..., rows), in the adapter's dtype or autocast's."""
    if not has_autocast(x.device.type):
        x = x.to(a.dtype)
    inner = F.linear(x, a) * lora.scaling
    if len(lora.parts) == 1:
        return F.linear(inner, b)
    inner_parts = inner.split(lora.r, -1)
    outputs = [F.linear(u, w) for u, w in zip(inner_parts, _by_part(b, lora), strict=True)]
    return torch.cat(outputs, -1)


def _base_output(layer: Any, dropped: Tensor, y: Tensor, lora: LowRank) -> Tensor:
    """Return W x without the bias for the adapted rows, (..., rows), with x after dropout."""
    if lora.dropout and layer.training:
        y = layer.base(dropped)
    if layer.bias is not None:
        y = y - layer.bias.to(y.dtype)
    return _gather(y, lora, -1)


@torch.no_grad()
def row_norms(layer: Any, lora: LowRank) -> Tensor:
    """Return the norm |W + s B A| of each adapted row, (rows,), without a gradient (DoRA, 4.3).

    The square is computed as |w|^2 + 2 s <w, b A> + s^2 |b A|^2, so that W + B A is never built.
    """
    weight = layer.dense()
    with without_autocast(weight.device.type):
        norms = []
        for part, (a, b) in zip(lora.parts, _factors(layer, lora), strict=True):
            rows = weight[part[0] : part[1]]
            square = torch.linalg.vector_norm(rows, dim=1, dtype=a.dtype).square()
            cross = (F.linear(rows.to(a.dtype), a) * b).sum(1)
            update_square = (F.linear(b, a @ a.T) * b).sum(1)
            s = lora.scaling
            norms.append((square + 2 * s * cross + s * s * update_square).clamp_min(0).sqrt())
        return torch.cat(norms)


def _factors(layer: Any, lora: LowRank) -> list[tuple[Tensor, Tensor]]:
    """Return A (R, in) and B (rows of the part, R) of each part.

    R is r, or 2 r with PiSSA, whose initial pair is appended with a negative sign.
    """
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
    """Return the adapted rows of y (..., out), concatenated: (..., rows)."""
    if lora.rows == y.shape[dim]:
        return y
    return torch.cat([y.narrow(dim, begin, end - begin) for begin, end in lora.parts], dim)


def _scatter(update: Tensor, lora: LowRank, width: int) -> Tensor:
    """Return `update` (..., rows) at the adapted rows of (..., width), zeros elsewhere."""
    if lora.rows == width:
        return update
    leading, blocks, offset = update.shape[:-1], list[Tensor](), 0
    sizes = [end - begin for begin, end in lora.parts]
    for (begin, end), block in zip(lora.parts, update.split(sizes, -1), strict=True):
        blocks += [update.new_zeros(*leading, begin - offset), block]
        offset = end
    blocks.append(update.new_zeros(*leading, width - offset))
    return torch.cat(blocks, -1)


def delta(layer: Any, lora: LowRank) -> Tensor:
    """Return the change of the weight on merging: s B A (out, in) in fp32, zero in other rows."""
    out = torch.zeros(layer.out_features, layer.in_features, device=layer.lora_A.device)
    for (begin, end), (a, b) in zip(lora.parts, _factors(layer, lora), strict=True):
        out[begin:end] = lora.scaling * (b.float() @ a.float())
    return out


@torch.no_grad()
def merged_weight(layer: Any, lora: LowRank) -> Tensor:
    """Return the fp32 weight (out, in) of a plain layer that equals the adapted layer."""
    weight = layer.dense().float() + delta(layer, lora)
    if lora.dora:
        scale = torch.ones(layer.out_features, device=weight.device)
        factors = (layer.lora_magnitude / row_norms(layer, lora)).float()
        sizes = [end - begin for begin, end in lora.parts]
        for (begin, end), part_scale in zip(lora.parts, factors.split(sizes), strict=True):
            scale[begin:end] = part_scale
        weight *= scale[:, None]
    return weight


def head_operands(layer: Any, hidden: Tensor, lora: LowRank) -> tuple[Tensor, Tensor]:
    """Return hidden states (..., D + R) and a weight (V, D + R) whose matmul is the adapted head.

    The chunked loss needs a single weight, and W + B A rounded to bfloat16 would lose B A.
    """
    assert not (lora.dora and lora.dropout), "refused by check_fit"
    dropped = F.dropout(hidden, lora.dropout) if lora.dropout and layer.training else hidden
    inputs, weights = [hidden], [layer.weight]
    pairs = [(dropped, layer.lora_A, layer.lora_B)]
    if lora.init == "pissa":
        pairs.append((hidden, layer.lora_A_init, -layer.lora_B_init))
    for x, a, b in pairs:
        x = x if has_autocast(x.device.type) else x.to(a.dtype)
        inputs.append((F.linear(x, a) * lora.scaling).to(hidden.dtype))
        weights.append(b.to(layer.weight.dtype))
    weight = torch.cat(weights, 1)
    if lora.dora:
        scale = layer.lora_magnitude / row_norms(layer, lora)
        weight = weight * scale[:, None].to(weight.dtype)
    return torch.cat(inputs, -1), weight


def tied_head_operands(layer: Any, hidden: Tensor, lora: LowRank) -> tuple[Tensor, Tensor]:
    """Return the operands of `head_operands` for a head that is the embedding.

    The adapter changes rows of tokens: B (D, R) has the changes, and A (R, V) selects the rows.
    """
    assert lora.tokens, "refused by check_tied"
    x = hidden if has_autocast(hidden.device.type) else hidden.to(layer.lora_B.dtype)
    change = (F.linear(x, layer.lora_B.T) * lora.scaling).to(hidden.dtype)
    weight = torch.cat([layer.weight, layer.lora_A.T.to(layer.weight.dtype)], 1)
    return torch.cat([hidden, change], -1), weight


def embedded(layer: Any, tokens: Tensor, y: Tensor, lora: LowRank) -> Tensor:
    """Return embeddings y (..., D) plus the adapter of A (r, V) and B (D, r)."""
    inner = F.embedding(tokens, layer.lora_A.T) * lora.scaling
    return y + F.linear(inner, layer.lora_B).to(y.dtype)
