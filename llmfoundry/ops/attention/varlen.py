"""The backend `varlen`: PyTorch's variable-length FlashAttention, on CUDA alone.

All documents of a batch, one after the other, in one call that never looks across a border: cheaper
than a mask, and nothing to compile. It has neither bias nor softcap nor dropout. On Hopper it runs
FlashAttention 3 where that is installed (`flash3`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.attention.flash3 import serves_varlen
from llmfoundry.ops.attention.plan import (
    AttentionPlan,
    AttentionSpec,
    flash_refusal,
    packed_plan,
    working_dtype,
)
from llmfoundry.ops.packed_layout import Layout


def refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Why it cannot serve; None: it can."""
    reason = flash_refusal(device, dtype)
    if reason is None and "window_size" not in _parameters():
        reason = f"it is too old in torch {torch.__version__}; install 2.11 or newer, or write auto"
    return reason


def prepare(
    layout: Layout | None, spec: AttentionSpec, *, queries: int, past: int, device: torch.device
) -> AttentionPlan:
    """Where documents begin and end."""
    assert layout is None or layout.ends is None, "`plan` gives trees to other backends"
    serves_varlen(device)
    shared = "enable_gqa" in _parameters()  # since torch 2.12
    if layout is None:
        keys = past + queries
        return AttentionPlan(
            "varlen", spec, shared_heads=shared, longest=queries, longest_keys=keys
        )
    return packed_plan("varlen", spec, layout, device, past=past, shared_heads=shared)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd); (B, T, H, hd)."""
    from torch.nn.attention import varlen

    assert not dropout, "plan refuses it"
    (rows, queries, heads, width), keys = q.shape, k.shape[1]
    dtype, missing = working_dtype(v), -width % 8  # it takes heads of whole 16 bytes
    q, k, v = (x.to(dtype).flatten(0, 1) for x in (q, k, v))
    if missing:
        q, k, v = (F.pad(x, (0, missing)) for x in (q, k, v))
    borders, key_borders = plan.borders, plan.key_borders
    if borders is None or key_borders is None:
        places = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
        borders = places * queries
        key_borders = borders if keys == queries else places * keys
    shared = {"enable_gqa": True} if k.shape[1] != heads else {}
    kernel: Callable[..., Any] = varlen.varlen_attn
    out = kernel(
        q,
        k,
        v,
        borders,
        key_borders,
        plan.longest,
        plan.longest_keys,
        scale=plan.spec.scale,
        window_size=(plan.spec.window, 0),
        **shared,
    )
    return out.unflatten(0, (rows, queries))[..., :width]


@functools.cache
def _parameters() -> frozenset[str]:
    """What the installed function takes: torch 2.10 had no window, 2.11 no shared heads."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
