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
class Plan:
    """What every layer of one forward pass shares.

    Attributes:
        lengths: lengths of the documents of all rows, in order, where they are attended to one by
            one; None: a single call serves the whole batch.
        bias: broadcastable to (B, H, T, S): added to the logits, or a boolean mask, True where a
            query sees a key; with `lengths` its top-left corner serves a document. None: causal
            attention, nothing added.
        scale: factor on the logits.
    """

    lengths: tuple[int, ...] | None
    bias: Tensor | None
    scale: float


def alibi_slopes(n_heads: int, alibi_bias_max: int, device: torch.device) -> Tensor:
    """Slopes (H,) of ALiBi (Press et al., 2022), in MPT's order for any number of heads."""
    power = 1 << (n_heads - 1).bit_length()
    exponents = torch.arange(1, power + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-exponents * alibi_bias_max / power)
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads] if power != n_heads else slopes


def causal_bias(queries: int, keys: int, slopes: Tensor | None, device: torch.device) -> Tensor:
    """Who sees whom among the last `queries` of `keys` positions.

    Without slopes a boolean mask (1, 1, queries, keys), True where a query sees a key; with them
    ALiBi's bias (1, H, queries, keys) in fp32, minus infinity where it does not.
    """
    key = torch.arange(keys, device=device)
    distance = (key - key[keys - queries :, None])[None, None]
    if slopes is None:
        return distance <= 0
    bias = slopes.view(1, -1, 1, 1) * distance
    return bias.masked_fill(distance > 0, float("-inf"))


def plan(
    layout: Layout | None,
    *,
    queries: int,
    past: int,
    scale: float,
    slopes: Tensor | None,
    device: torch.device,
    impl: str,
) -> Plan:
    """Decide how one forward pass attends.

    Args:
        layout: documents of the rows; None: one document a row.
        queries: tokens in a row, T.
        past: earlier tokens of each row, in a key-value cache.
        scale: factor on the logits.
        slopes: (H,) ALiBi's slopes; None: no ALiBi.
        device: where the tokens are.
        impl: `sdpa` or `torch`.
    """
    packed = layout is not None and any(len(row) > 1 for row in layout.lengths)
    assert not (packed and past), "packed rows have no key-value cache"
    if not packed:
        plain = slopes is None and (past == 0 or queries == 1)
        bias = None if plain else causal_bias(queries, past + queries, slopes, device)
        return Plan(None, bias, scale)
    assert layout is not None
    if impl == "sdpa" and device.type == "cpu":  # cheaper there than one call with a mask
        lengths = tuple(n for row in layout.lengths for n in row)
        bias = None if slopes is None else causal_bias(max(lengths), max(lengths), slopes, device)
        return Plan(lengths, bias, scale)
    same = layout.documents[:, None, :, None] == layout.documents[:, None, None, :]
    bias = causal_bias(queries, queries, slopes, device)
    bias = bias & same if slopes is None else bias.masked_fill(~same, float("-inf"))
    return Plan(None, bias, scale)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, impl: str) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd), KV dividing H; (B, T, H, hd)."""
    return IMPLS[impl](q, k, v, plan)


def _torch(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """Plain matmul and softmax, in any dtype: the reference."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * plan.scale
    bias = plan.bias
    if bias is None:
        bias = causal_bias(q.shape[1], k.shape[1], None, q.device)
    is_mask = bias.dtype == torch.bool
    logits = logits.masked_fill(~bias, float("-inf")) if is_mask else logits + bias
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.einsum("bhts,bshd->bthd", wide.softmax(-1).to(v.dtype), v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """PyTorch's fused kernels; per document where the plan says so."""
    if plan.lengths is None:
        return _fused(q, k, v, plan.bias, plan.scale)
    # split and cat, not slices: their backward passes touch each gradient once
    parts = zip(*(x.flatten(0, 1).split(plan.lengths) for x in (q, k, v)), strict=True)
    outputs = []
    for q_doc, k_doc, v_doc in parts:
        n = len(q_doc)
        bias = None if plan.bias is None else plan.bias[..., :n, :n]
        out = _fused(q_doc[None], k_doc[None], v_doc[None], bias, plan.scale)
        outputs.append(out[0])
    return torch.cat(outputs).view(q.shape)


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return _call_sdpa(q, k, v, bias, scale)
    # The CPU's bf16 kernel is compiled for every length it meets, and each is kept: documents of
    # all lengths made it 8 times slower than fp32, and its memory grew without end.
    with torch.autocast("cpu", enabled=False):
        return _call_sdpa(q.float(), k.float(), v.float(), bias, scale).to(q.dtype)


def _call_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias if bias is None or bias.dtype == torch.bool else bias.to(q.dtype),
        is_causal=bias is None and q.shape[1] > 1,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


IMPLS: dict[str, Callable[[Tensor, Tensor, Tensor, Plan], Tensor]] = {
    "sdpa": _sdpa,
    "torch": _torch,
}
