"""The backend `flash`: the package flash-attn (Dao, 2023), where it is installed.

The only kernel beside the plain one that has dropout with ALiBi or a window in packed rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata

import torch
from torch import Tensor

from llmfoundry.ops.attention.plan import (
    AttentionPlan,
    AttentionSpec,
    flash_refusal,
    packed_plan,
    working_dtype,
)
from llmfoundry.ops.packed_layout import Layout

OLDEST = (2, 6, 2)
"""ALiBi came with 2.4.2, the softcap with 2.6.2."""
DROPOUT_HEAD_DIM, DROPOUT_MEMORY = 192, 144 * 1024
"""Wider heads with dropout need so many bytes of shared memory a block (A100, H100); with less
(RTX 30, 40 and 50, L40) 2.7 and later return gradients that were never written
(`run_mha_bwd_hdim256` in csrc/flash_attn/src/flash_bwd_launch_template.h), 2.6 refuses."""
INSTALL = "pip install flash-attn --no-build-isolation, or write auto"


def refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Why it cannot serve; None: it can."""
    reason = flash_refusal(device, dtype)
    if reason is None and spec.dropout and head_dim is not None and head_dim > DROPOUT_HEAD_DIM:
        properties = torch.cuda.get_device_properties(device)  # AMD's lack this one
        if getattr(properties, "shared_memory_per_block_optin", DROPOUT_MEMORY) < DROPOUT_MEMORY:
            reason = (
                f"on this GPU its kernel has no dropout for heads wider than {DROPOUT_HEAD_DIM},"
                f" which these are ({head_dim}); write auto, or attn_pdrop: 0"
            )
    return reason or _missing()


def prepare(
    layout: Layout | None, spec: AttentionSpec, *, queries: int, past: int, device: torch.device
) -> AttentionPlan:
    """Where documents begin and end, where there are several in a row."""
    assert layout is None or layout.ends is None, "`plan` gives trees to other backends"
    if layout is None:
        return AttentionPlan("flash", spec)
    return packed_plan("flash", spec, layout, device, past=past)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd); (B, T, H, hd).

    Where there are fewer queries than keys they are the last: causality, windows and ALiBi are
    aligned to the bottom right.
    """
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    spec, dtype, shape = plan.spec, working_dtype(v), q.shape
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    options = {
        "dropout_p": dropout,
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": (spec.window, 0 if spec.window >= 0 else -1),
        "softcap": spec.softcap or 0.0,
        "alibi_slopes": None if spec.slopes is None else spec.slopes.float(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if plan.borders is None:
        return flash_attn_func(q, k, v, **options)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    borders, longest = (plan.borders, plan.key_borders), (plan.longest, plan.longest_keys)
    out = flash_attn_varlen_func(q, k, v, *borders, *longest, **options)
    return out.view(shape)


@functools.cache
def _missing() -> str | None:
    """What keeps the package from being used; None: nothing."""
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return f"the package flash-attn is not installed; {INSTALL}"
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        return f"flash-attn {version} is older than {oldest}; {INSTALL}"
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:  # built against another torch
        return f"flash-attn {version} does not load ({error}); build it again: {INSTALL}"
    return None
