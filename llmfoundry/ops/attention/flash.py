"""FlashAttention on CUDA: PyTorch's (`varlen`) and the packages flash-attn and flash-attn-3.

    varlen   PyTorch's variable-length attention; no bias, softcap or dropout. It runs
             FlashAttention 3 or 4 if one is installed that supports the GPU (`fastest_varlen`)
    flash    package flash-attn (Dao, 2023): the only fast kernel that supports dropout together
             with ALiBi or a window in packed sequences
    flash3   package flash-attn-3 (Shah et al., 2024), on Hopper GPUs (H100, H200): softcap, windows
             and shared heads, but neither ALiBi nor dropout. Source that was read: hopper/ of
             Dao-AILab/flash-attention at 0251105a, version 3.0.0

All documents of a batch are one call, without attention between documents: cheaper than a mask, and
nothing is compiled. `select.py` calls the three functions of each backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.attention.base import (
    AttentionPlan,
    AttentionSpec,
    document_segments,
    working_dtype,
)
from llmfoundry.ops.attention.sinks import attend_varlen
from llmfoundry.ops.packed_layout import PackedLayout
from llmfoundry.ops.torch_private import activate_fa3, activate_fa4, restore_fa2


def varlen_refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Return why varlen does not support a case; None: it does."""
    reason = _device_refusal(device, dtype)
    if reason is None and "window_size" not in _varlen_parameters():
        reason = f"it is too old in torch {torch.__version__}; install 2.11 or newer, or write auto"
    return reason


def varlen_prepare(
    layout: PackedLayout | None,
    spec: AttentionSpec,
    *,
    queries: int,
    past: int,
    device: torch.device,
) -> AttentionPlan:
    """Prepare the borders of documents."""
    plan = prepare("varlen", layout, spec, queries=queries, past=past, device=device)
    shared = "enable_gqa" in _varlen_parameters()  # since torch 2.12
    if layout is None:
        return replace(plan, shared_heads=shared, longest=queries, longest_keys=past + queries)
    return replace(plan, shared_heads=shared)


def varlen_attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Return attention of q (B, T, H, hd) over k, v (B, S, KV, hd), (B, T, H, hd)."""
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
    if sinks is not None:
        longest = plan.longest, plan.longest_keys
        out = attend_varlen(
            q, k, v, sinks, (borders, key_borders), longest, plan.spec.scale, plan.spec.window
        )
        return out.unflatten(0, (rows, queries))[..., :width]
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
def _varlen_parameters() -> frozenset[str]:
    """Return the parameters of the installed function: torch 2.10 had no window."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


OLDEST = (2, 6, 2)
"""ALiBi came with 2.4.2, the softcap with 2.6.2."""
DROPOUT_HEAD_DIM, DROPOUT_MEMORY = 192, 144 * 1024
"""Shared memory per block that wider heads with dropout need (A100, H100 have it). With less
(RTX 30, 40 and 50, L40), 2.7 and later return uninitialized gradients (`run_mha_bwd_hdim256` in
csrc/flash_attn/src/flash_bwd_launch_template.h), and 2.6 raises an error."""
_INSTALL_FLASH = "pip install flash-attn --no-build-isolation, or write auto"


def flash_refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Return why flash-attn does not support a case; None: it does."""
    reason = _device_refusal(device, dtype)
    if reason is None and spec.dropout and head_dim is not None and head_dim > DROPOUT_HEAD_DIM:
        properties = torch.cuda.get_device_properties(device)  # AMD's lack this attribute
        if getattr(properties, "shared_memory_per_block_optin", DROPOUT_MEMORY) < DROPOUT_MEMORY:
            reason = (
                f"on this GPU its kernel has no dropout for heads wider than {DROPOUT_HEAD_DIM},"
                f" which these are ({head_dim}); write auto, or attn_pdrop: 0"
            )
    return reason or _missing_flash()


def flash_attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Return attention of q (B, T, H, hd) over k, v (B, S, KV, hd), (B, T, H, hd).

    Fewer queries than keys are the last ones: causality, windows and ALiBi are aligned to the
    bottom right.
    """
    import flash_attn

    assert sinks is None, "plan refuses it"
    dtype, slopes = working_dtype(v), plan.spec.slopes
    slopes = None if slopes is None else slopes.float()
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return _call(flash_attn, q, k, v, plan, dropout_p=dropout, alibi_slopes=slopes)


@functools.cache
def _missing_flash() -> str | None:
    """Return why the package cannot be used; None: it can."""
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return f"the package flash-attn is not installed; {_INSTALL_FLASH}"
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < OLDEST:
        oldest = ".".join(str(part) for part in OLDEST)
        return f"flash-attn {version} is older than {oldest}; {_INSTALL_FLASH}"
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:  # built for another version of torch
        return f"flash-attn {version} does not load ({error}); build it again: {_INSTALL_FLASH}"
    return None


_INSTALL_FLASH3 = "install it from hopper/ of Dao-AILab/flash-attention, or write auto"
WIDTHS = (64, 96, 128, 192, 256)  # head widths; narrower heads use the next larger one
TAKES = {"softmax_scale", "causal", "window_size", "softcap", "deterministic"}


def flash3_refusal(
    spec: AttentionSpec, device: torch.device, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Return why flash-attn-3 does not support a case; None: it does."""
    reason = _device_refusal(device, dtype)
    if reason is not None:
        return reason
    if not is_hopper(device):
        major, minor = torch.cuda.get_device_capability(device)
        return f"its kernel is for compute capability 9.0 (H100), not {major}.{minor}; write auto"
    return _missing_flash3() or _left_out(spec, dtype, head_dim) or _undecided(head_dim)


def flash3_attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Return attention; see `flash_attend`."""
    import flash_attn_interface

    assert not dropout and sinks is None, "plan refuses it"
    dtype, width = working_dtype(v), q.shape[-1]
    missing = -width % 8  # heads must be multiples of 16 bytes
    q, k, v = (F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype) for x in (q, k, v))
    return _call(flash_attn_interface, q, k, v, plan)[..., :width]


def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a GPU of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


FLASH_4_WIDTHS = {9: ((8, 256),), 10: ((8, 128), (256, 256))}
"""Head widths of FlashAttention 4, from the first to the last, by compute capability
(asserts of flash_attn/cute/interface.py, 4.0.0b36)."""


@functools.cache
def fastest_varlen(device: torch.device, head_dim: int | None) -> str | None:
    """Activate the fastest installed kernel for PyTorch's varlen attention; return its name.

    FA3 on compute capability 9, else FA4 on 9 and 10, else None: PyTorch's own FlashAttention 2.
    After activation PyTorch's attention over sequences without packing may use it too. Neither has
    dropout, which models that use varlen do not have either; see `make_room`.
    """
    wanted = []
    if is_hopper(device) and _missing_flash3() is None:
        wanted.append(("FA3", activate_fa3))
    if serves_flash4(device, head_dim) and _has_flash4():
        wanted.append(("FA4", activate_fa4))
    for name, activate in wanted:
        try:
            if activate():
                return name
        except Exception as error:  # for any reason: another kernel can be used
            line = str(error).split("\n")[0]
            warnings.warn(f"PyTorch's varlen attention runs FlashAttention 2: {line}", stacklevel=2)
    return None


def make_room(device: torch.device, head_dim: int | None, *, dropout: bool) -> None:
    """Undo the activation of FlashAttention 4 for a model that it does not support."""
    if device.type != "cuda" or not _has_flash4():
        return
    if dropout or not serves_flash4(device, head_dim):
        restore_fa2()
        fastest_varlen.cache_clear()


def serves_flash4(device: torch.device, head_dim: int | None) -> bool:
    """Return whether FlashAttention 4 supports a GPU and a head width, padded to 16 bytes."""
    if device.type != "cuda":
        return False
    widths = FLASH_4_WIDTHS.get(torch.cuda.get_device_capability(device)[0], ())
    padded = -(-(head_dim or 8) // 8) * 8
    return any(first <= padded <= last for first, last in widths)


@functools.cache
def _has_flash4() -> bool:
    """Return whether the package flash-attn-4 is installed; activation reports if it is broken."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _missing_flash3() -> str | None:
    """Return why the package cannot be used; None: it can."""
    try:
        module = importlib.import_module("flash_attn_interface")
    except ModuleNotFoundError:
        return f"the package flash-attn-3 is not installed; {_INSTALL_FLASH3}"
    except ImportError as error:  # built for another version of torch
        return f"flash-attn-3 does not load ({error}); build it again, or write auto"
    function = getattr(module, "flash_attn_varlen_func", None)
    takes = set(inspect.signature(function).parameters) if callable(function) else set()
    if lacking := sorted(TAKES - takes):
        return f"flash-attn-3 is too old: it takes no {', '.join(lacking)}; {_INSTALL_FLASH3}"
    return None


def _left_out(spec: AttentionSpec, dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Return what this build was compiled without."""
    needed = ["BACKWARD", "VARLEN"]
    needed += ["SOFTCAP"] if spec.softcap is not None else []
    needed += ["LOCAL"] if spec.window >= 0 else []
    needed += ["FP16"] if dtype == torch.float16 else []
    if head_dim is not None:
        needed.append(f"HDIM{next(width for width in WIDTHS if head_dim <= width)}")
    flags = _build_flags()
    lacking = [name for name in needed if flags.get(f"FLASHATTENTION_DISABLE_{name}")]
    if lacking:
        return f"flash-attn-3 was built without {', '.join(lacking)}; build it again, or write auto"
    return None


@functools.cache
def _build_flags() -> dict[str, bool]:
    try:
        return importlib.import_module("flash_attn_config").CONFIG["build_flags"]
    except ImportError:  # versions before May 2025
        return {}


def _undecided(head_dim: int | None) -> str | None:
    """Return a refusal if the backward pass ignores `deterministic`, as for the widest heads.

    `Deterministic_ && kHeadDim < 256` in hopper/flash_bwd_launch_template.h.
    """
    wide = head_dim is not None and head_dim > WIDTHS[-2]
    if wide and torch.are_deterministic_algorithms_enabled():
        return (
            f"it is not deterministic for heads wider than {WIDTHS[-2]}, which these are"
            f" ({head_dim}); write auto, or deterministic: false"
        )
    return None


def _device_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no FlashAttention runs on a device."""
    if device.type != "cuda":
        return f"its kernel runs on CUDA alone, not on {device.type}; write auto"
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return f"its kernel takes bf16 and fp16, not {name}; write auto, or precision: amp_bf16"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return (
            "its kernel needs a GPU of compute capability 8.0 (A100) or newer, this one has"
            f" {major}.{minor}; write auto"
        )
    return None


def prepare(
    impl: str,
    layout: PackedLayout | None,
    spec: AttentionSpec,
    *,
    queries: int,
    past: int,
    device: torch.device,
) -> AttentionPlan:
    """Prepare the borders of documents, if a sequence has several.

    Documents before the first query have no queries. FlashAttention's kernels support this, and
    write zeros as the gradients of their keys (csrc/flash_attn/src/flash_bwd_kernel.h: "This also
    covers the case where actual_seqlen_q == 0").
    """
    if layout is None:
        return AttentionPlan(impl, spec)
    assert layout.ends is None, "`plan` gives trees to other backends"
    segments = document_segments(layout, past)
    borders, longest = _borders([n for n, _ in segments], device)
    keys, longest_keys = borders, longest
    if past:
        keys, longest_keys = _borders([n for _, n in segments], device)
    return AttentionPlan(
        impl,
        spec,
        borders=borders,
        longest=longest,
        key_borders=keys,
        longest_keys=longest_keys,
    )


def _borders(lengths: list[int], device: torch.device) -> tuple[Tensor, int]:
    """Return cumulative lengths (N + 1,), int32, on the device, and the largest length."""
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    if device.type == "cuda":
        borders = borders.pin_memory()  # a copy from pageable memory would synchronize
    return borders.to(device, non_blocking=True), max(lengths)


def _call(
    package: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, **options: Any
) -> Tensor:
    """Call the function of flash-attn or flash-attn-3 that the plan needs."""
    spec, shape = plan.spec, q.shape
    options |= {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": (spec.window, 0 if spec.window >= 0 else -1),
        "softcap": spec.softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if plan.borders is None:
        out = package.flash_attn_func(q, k, v, **options)
    else:
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        borders, longest = (plan.borders, plan.key_borders), (plan.longest, plan.longest_keys)
        out = package.flash_attn_varlen_func(q, k, v, *borders, *longest, **options)
    if isinstance(out, tuple):  # flash-attn-3 before July 2025 also returns the log-sum-exp
        out = out[0]
    return out.view(shape)
