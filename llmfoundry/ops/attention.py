"""Attention over packed rows: a slow reference, PyTorch's fused kernels, and what picks.

`models/attention.py` calls `attend`. A `Plan` is made once a forward pass from the layout and
shared by all layers, so that masks and document borders are worked out once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.layout import Layout


@dataclass(frozen=True)
class Rules:
    """What a layer asks of attention.

    Attributes:
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale and before any bias.
        slopes: (H,) ALiBi's slopes; None: no ALiBi.
        window: a query sees itself and so many keys before it; -1: all.
        dropout: share of the attention weights that are dropped while training.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    window: int = -1
    dropout: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What the layers of one forward pass that have the same rules share.

    Attributes:
        impl: the backend that serves.
        rules: what the layers ask.
        lengths: lengths of the documents of all rows, in order, where they are attended to one by
            one; None: a single call serves the whole batch.
        bias: broadcastable to (B, H, T, S): added to the logits, or a boolean mask, True where a
            query sees a key; with `lengths` its top-left corner serves a document. None: causal
            attention, nothing added.
    """

    impl: str
    rules: Rules
    lengths: tuple[int, ...] | None
    bias: Tensor | None


def alibi_slopes(n_heads: int, alibi_bias_max: int, device: torch.device) -> Tensor:
    """Slopes (H,) of ALiBi (Press et al., 2022), in MPT's order for any number of heads."""
    power = 1 << (n_heads - 1).bit_length()
    exponents = torch.arange(1, power + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-exponents * alibi_bias_max / power)
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads] if power != n_heads else slopes


def causal_bias(queries: int, keys: int, rules: Rules, device: torch.device) -> Tensor:
    """Who sees whom among the last `queries` of `keys` positions.

    Without slopes a boolean mask (1, 1, queries, keys), True where a query sees a key; with them
    ALiBi's bias (1, H, queries, keys) in fp32, minus infinity where it does not.
    """
    key = torch.arange(keys, device=device)
    distance = (key - key[keys - queries :, None])[None, None]
    sees = distance <= 0
    if rules.window >= 0:
        sees &= distance >= -rules.window
    if rules.slopes is None:
        return sees
    return (rules.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))


def plan(
    layout: Layout | None,
    rules: Rules,
    *,
    queries: int,
    past: int,
    device: torch.device,
    impl: str,
) -> Plan:
    """Decide how one forward pass attends.

    Args:
        layout: documents of the rows; None: one document a row.
        rules: what the layers ask.
        queries: tokens in a row, T.
        past: earlier tokens of each row, in a key-value cache.
        device: where the tokens are.
        impl: a name of the recipe's attn_impl.
    """
    if impl == "auto":
        impl = "sdpa" if rules.softcap is None else "torch"
    packed = layout is not None and any(len(row) > 1 for row in layout.lengths)
    assert not (packed and past), "packed rows have no key-value cache"
    keys = past + queries
    bounded = 0 <= rules.window < keys - 1
    if not packed:
        plain = rules.slopes is None and not bounded and (past == 0 or queries == 1)
        bias = None if plain else causal_bias(queries, keys, rules, device)
        return Plan(impl, rules, None, bias)
    assert layout is not None
    if impl == "sdpa" and device.type == "cpu":  # cheaper there than one call with a mask
        lengths = tuple(n for row in layout.lengths for n in row)
        plain = rules.slopes is None and not 0 <= rules.window < max(lengths) - 1
        bias = None if plain else causal_bias(max(lengths), max(lengths), rules, device)
        return Plan(impl, rules, lengths, bias)
    same = layout.documents[:, None, :, None] == layout.documents[:, None, None, :]
    bias = causal_bias(queries, queries, rules, device)
    bias = bias & same if rules.slopes is None else bias.masked_fill(~same, float("-inf"))
    return Plan(impl, rules, None, bias)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, training: bool = False) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd), KV dividing H; (B, T, H, hd).

    Dropout only where `training`.
    """
    return IMPLS[plan.impl](q, k, v, plan, plan.rules.dropout if training else 0.0)


def _torch(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """Plain matmul and softmax, in any dtype: the reference."""
    rules, groups = plan.rules, q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * rules.scale
    if rules.softcap is not None:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    bias = plan.bias
    if bias is None:
        bias = causal_bias(q.shape[1], k.shape[1], Rules(rules.scale), q.device)
    is_mask = bias.dtype == torch.bool
    logits = logits.masked_fill(~bias, float("-inf")) if is_mask else logits + bias
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights = F.dropout(wide.softmax(-1), dropout)
    return torch.einsum("bhts,bshd->bthd", weights.to(v.dtype), v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """PyTorch's fused kernels; per document where the plan says so."""
    scale = plan.rules.scale
    if plan.lengths is None:
        return _fused(q, k, v, plan.bias, scale, dropout)
    # split and cat, not slices: their backward passes touch each gradient once
    parts = zip(*(x.flatten(0, 1).split(plan.lengths) for x in (q, k, v)), strict=True)
    outputs = []
    for q_doc, k_doc, v_doc in parts:
        n = len(q_doc)
        bias = None if plan.bias is None else plan.bias[..., :n, :n]
        out = _fused(q_doc[None], k_doc[None], v_doc[None], bias, scale, dropout)
        outputs.append(out[0])
    return torch.cat(outputs).view(q.shape)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return _call_sdpa(q, k, v, bias, scale, dropout)
    # The CPU's bf16 kernel is compiled for every length it meets, and each is kept: documents of
    # all lengths made it 8 times slower than fp32, and its memory grew without end.
    with torch.autocast("cpu", enabled=False):
        return _call_sdpa(q.float(), k.float(), v.float(), bias, scale, dropout).to(q.dtype)


def _call_sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float
) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype),
        dropout_p=dropout,
        is_causal=bias is None and q.shape[1] > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


IMPLS: dict[str, Callable[[Tensor, Tensor, Tensor, Plan, float], Tensor]] = {
    "sdpa": _sdpa,
    "torch": _torch,
}
