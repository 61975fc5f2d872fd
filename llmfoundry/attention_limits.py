"""What each attention backend cannot serve, whatever the GPU: one table for checks and for `auto`.

`recipe/` refuses a backend that a recipe names by it, `ops/attention/select.py` refuses and
chooses by it. An option is known by its key of `model.attn_config`; what depends on the device, its
dtypes or what is installed is in the `refusal` of each backend.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SOFTCAP, ALIBI, DROPOUT = "attn_logit_softcapping", "alibi", "attn_pdrop"
SINKS = "sinks"


@dataclass(frozen=True)
class Limit:
    """Options that a backend cannot serve together.

    Attributes:
        options: keys of `model.attn_config`, all of them set.
        why: in a few words.
    """

    options: tuple[str, ...]
    why: str


LIMITS: dict[str, tuple[Limit, ...]] = {
    "sdpa": (
        Limit((SOFTCAP,), "PyTorch's fused attention has no softcap"),
        Limit((SINKS, DROPOUT), "dropout would also drop the sink"),
    ),
    "flex": (Limit((DROPOUT,), "FlexAttention has no dropout"),),
    "varlen": (
        Limit((ALIBI,), "PyTorch's varlen attention adds no bias"),
        Limit((SOFTCAP,), "PyTorch's varlen attention has no softcap"),
        Limit((DROPOUT,), "PyTorch's varlen attention has no dropout"),
    ),
    # csrc/flash_attn/flash_api.cpp, 2.6.2 to 2.8.3: "Softcapping does not support dropout for now"
    "flash": (
        Limit((SOFTCAP, DROPOUT), "flash-attn has no dropout under a softcap"),
        Limit((SINKS,), "flash-attn has no sinks"),
    ),
    # hopper/flash_attn_interface.py, 3.0.0: its functions take neither
    "flash3": (
        Limit((ALIBI,), "FlashAttention 3 adds no bias"),
        Limit((DROPOUT,), "FlashAttention 3 has no dropout"),
        Limit((SINKS,), "FlashAttention 3 has no sinks"),
    ),
    "torch": (),
}
MAX_HEAD_DIM = {"varlen": 256, "flash": 256, "flash3": 256}
"""Width of a head in FlashAttention's kernels, PyTorch's build or its own; others have no limit."""


def limit(impl: str, options: Collection[str], head_dim: int | None) -> str | None:
    """Why a backend cannot serve these options, and what to write; None: it can.

    Args:
        impl: a name of the recipe's attn_impl but auto.
        options: the keys of `model.attn_config` that are set.
        head_dim: width of a head; None: one that every kernel has.
    """
    *others, last = ["auto", *able(options, head_dim)]  # torch is always one of them
    advice = f"write {', '.join(others)} or {last}"
    for found in LIMITS[impl]:
        if set(found.options) <= set(options):
            return f"cannot serve {' with '.join(found.options)}: {found.why}; {advice}"
    most = MAX_HEAD_DIM.get(impl)
    if most is not None and head_dim is not None and head_dim > most:
        return f"serves heads at most {most} wide, not {head_dim}; {advice}"
    return None


def able(options: Collection[str], head_dim: int | None) -> list[str]:
    """The backends that serve these options on some GPU."""
    return [
        impl
        for impl, limits in LIMITS.items()
        if not any(set(found.options) <= set(options) for found in limits)
        and (head_dim or 0) <= MAX_HEAD_DIM.get(impl, head_dim or 0)
    ]
