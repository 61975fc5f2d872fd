"""FlashAttention 3 (Shah et al., 2024), where it is installed, on Hopper GPUs (H100, H200).

The backend `flash3` calls the package flash-attn-3, and PyTorch's varlen attention runs on it where
it can be activated (`serves_varlen`). Read for it: hopper/ of Dao-AILab/flash-attention at
0251105a, version 3.0.0. Neither ALiBi nor dropout; softcap, windows and shared heads it has.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.attention.plan import (
    AttentionPlan,
    AttentionSpec,
    flash_refusal,
    packed_plan,
    working_dtype,
)
from llmfoundry.ops.packed_layout import Layout
from llmfoundry.ops.torch_private import activate_fa3

INSTALL = "install it from hopper/ of Dao-AILab/flash-attention, or write auto"
WIDTHS = (64, 96, 128, 192, 256)  # of heads; narrower ones are served by the next
TAKES = {"softmax_scale", "causal", "window_size", "softcap", "deterministic"}


def refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Why it cannot serve; None: it can."""
    reason = flash_refusal(device, dtype)
    if reason is not None:
        return reason
    if not is_hopper(device):
        major, minor = torch.cuda.get_device_capability(device)
        return f"its kernel is for compute capability 9.0 (H100), not {major}.{minor}; write auto"
    return _missing() or _left_out(spec, dtype, head_dim) or _undecided(head_dim)


def prepare(
    layout: Layout | None, spec: AttentionSpec, *, queries: int, past: int, device: torch.device
) -> AttentionPlan:
    """Where documents begin and end, where there are several in a row."""
    assert layout is None or layout.ends is None, "`plan` gives trees to other backends"
    if layout is None:
        return AttentionPlan("flash3", spec)
    return packed_plan("flash3", spec, layout, device, past=past)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd); (B, T, H, hd).

    Where there are fewer queries than keys they are the last: causality, windows and ALiBi are
    aligned to the bottom right.
    """
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    assert not dropout, "plan refuses it"
    spec, dtype, shape = plan.spec, working_dtype(v), q.shape
    missing = -shape[-1] % 8  # it takes heads of whole 16 bytes
    q, k, v = (F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype) for x in (q, k, v))
    options = {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": (spec.window, 0 if spec.window >= 0 else -1),
        "softcap": spec.softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if plan.borders is None:
        out = flash_attn_func(q, k, v, **options)
    else:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        borders, longest = (plan.borders, plan.key_borders), (plan.longest, plan.longest_keys)
        out = flash_attn_varlen_func(q, k, v, *borders, *longest, **options)
    if isinstance(out, tuple):  # before July 2025 with the log of the sums
        out = out[0]
    return out.view(*shape[:-1], -1)[..., : shape[-1]]


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def serves_varlen(device: torch.device) -> bool:
    """Whether PyTorch's varlen attention runs FlashAttention 3 here; makes it so where it can.

    From then on PyTorch's own attention over plain rows may run it too: one without dropout, which
    a model that varlen serves has not.
    """
    if not is_hopper(device) or _missing() is not None:
        return False
    try:
        return activate_fa3()
    except Exception as error:  # whatever is wrong with it, there is a kernel that serves
        line = str(error).split("\n")[0]
        warnings.warn(f"PyTorch's varlen attention runs FlashAttention 2: {line}", stacklevel=2)
        return False


@functools.cache
def _missing() -> str | None:
    """What keeps the package from being used; None: nothing."""
    try:
        module = importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError:
        return f"the package flash-attn-3 is not installed; {INSTALL}"
    except ImportError as error:  # built against another torch
        return f"flash-attn-3 does not load ({error}); build it again, or write auto"
    function = getattr(module, "flash_attn_varlen_func", None)
    takes = set(inspect.signature(function).parameters) if callable(function) else set()
    if lacking := sorted(TAKES - takes):
        return f"flash-attn-3 is too old: it takes no {', '.join(lacking)}; {INSTALL}"
    return None


def _left_out(spec: AttentionSpec, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """What this build was made without."""
    asked = ["BACKWARD", "VARLEN"]
    asked += ["SOFTCAP"] if spec.softcap is not None else []
    asked += ["LOCAL"] if spec.window >= 0 else []
    asked += ["FP16"] if dtype == torch.float16 else []
    if head_dim is not None:
        asked.append(f"HDIM{next(width for width in WIDTHS if head_dim <= width)}")
    flags = _build_flags()
    lacking = [name for name in asked if flags.get(f"FLASHATTENTION_DISABLE_{name}")]
    if lacking:
        return f"flash-attn-3 was built without {', '.join(lacking)}; build it again, or write auto"
    return None


@functools.cache
def _build_flags() -> dict[str, bool]:
    try:
        return importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except ImportError:  # before May 2025
        return {}


def _undecided(head_dim: int | None) -> str | None:
    """Its backward pass takes no notice of `deterministic` for the widest heads.

    `Deterministic_ && kHeadDim < 256` in hopper/flash_bwd_launch_template.h.
    """
    wide = head_dim is not None and head_dim > WIDTHS[-2]
    if wide and torch.are_deterministic_algorithms_enabled():
        return (
            f"it is not deterministic for heads wider than {WIDTHS[-2]}, which these are"
            f" ({head_dim}); write auto, or deterministic: false"
        )
    return None
