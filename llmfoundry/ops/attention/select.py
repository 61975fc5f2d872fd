"""Which attention kernel runs: one function, its backends, and what picks among them.

`models/decoder.py` plans each forward pass (`AttentionKernels.plan`) once for all layers with the
same `AttentionSpec`, so that masks and document borders are worked out once; `models/attention.py`
calls `attend` with the plan.

Every backend computes the same: logits times scale, softcap, ALiBi's bias slope * (key - query),
mask, softmax, dropout, times values. A token sees itself and earlier tokens of its own document, or
of its path in a tree, no further back than the window; distances are those of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from llmfoundry.attention_limits import limit
from llmfoundry.errors import UserError
from llmfoundry.ops.attention import base, flash, flex
from llmfoundry.ops.attention.base import (
    AttentionPlan,
    AttentionSpec,
    RangePlan,
    autocast_dtype,
    repeat_heads,
)
from llmfoundry.ops.devices import kind_of
from llmfoundry.ops.packed_layout import PackedLayout, Ranges


class AttentionKernels:
    """The kernels of one model: chosen once for each case, planned each forward pass."""

    def __init__(self, impl: str = "auto", head_dim: int | None = None) -> None:
        """`impl` is of the recipe's attn_impl; without `head_dim` heads fit every kernel."""
        self._impl, self._head_dim = impl, head_dim
        self._chosen: dict[Hashable, str] = {}

    def plan(
        self,
        layout: PackedLayout | None,
        spec: AttentionSpec,
        *,
        queries: int,
        past: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        ranges: Ranges | None = None,
    ) -> AttentionPlan:
        """Decide how one forward pass attends. Nothing here waits for the device.

        Tokens after cached ones, and single ones, are served by sdpa (torch, where there is a
        softcap) whatever was named: the kernels for training have no use there. Trees, which only
        evaluation has, are served by what `auto` finds where the one that was named knows
        documents alone.

        Args:
            layout: documents of the rows; None: one document a row.
            spec: what the layers ask.
            queries: tokens in a row, T.
            past: earlier tokens of each row, in a key-value cache.
            device: where the tokens are.
            dtype: of the weights; None: torch's default. Autocast's goes before it.
            ranges: places of the queries, where they are not all of the row's `queries` tokens,
                whose keys are all there; None: they are.

        Raises:
            UserError: the backend was named, and cannot serve.
        """
        trees = layout is not None and layout.ends is not None
        if layout is not None and not trees and all(len(row) == 1 for row in layout.lengths):
            layout = None
        assert layout is None or past == 0, "packed rows have no key-value cache"
        if spec.window >= past + queries - 1:
            spec = replace(spec, window=-1)
        if kind_of(device) != device.type and self._impl != "torch":
            # planned for a GPU, all of whose kernels keep as much, and no bias
            layout, spec = None, AttentionSpec(spec.scale)
            plain = AttentionPlan("sdpa", spec)
            if ranges is None:
                return plain
            places = (RangePlan(stop - first, 0, stop, plain) for first, stop in ranges)
            return AttentionPlan("sdpa", spec, parts=tuple(places))
        if (past or queries == 1) and self._impl != "torch":
            impl = "sdpa" if spec.softcap is None else "torch"
        else:
            # plain rows are a case of their own on CUDA alone
            packed = device.type == "cuda" and (layout is not None or ranges is not None)
            dtype = autocast_dtype(device.type, dtype or torch.get_default_dtype())
            impl = self._choose(spec, packed, device, dtype, trees=trees)
        if ranges is None:
            return PLANS[impl](layout, spec, queries=queries, past=past, device=device)
        parts = (range_plan(impl, layout, spec, *places, device) for places in ranges)
        return AttentionPlan(impl, spec, parts=tuple(parts))

    def masked(self, spec: AttentionSpec, bias: Tensor) -> AttentionPlan:
        """Attention under a bias of the caller's, as `AttentionPlan` has it: of one token a row."""
        impl = "sdpa" if spec.softcap is None and self._impl != "torch" else "torch"
        shared = impl == "sdpa" and bias.device.type != "cuda"
        return AttentionPlan(impl, spec, shared_heads=shared, bias=bias)

    def _choose(
        self,
        spec: AttentionSpec,
        packed: bool,
        device: torch.device,
        dtype: torch.dtype,
        *,
        trees: bool,
    ) -> str:
        """The backend of a case, asked for once."""
        asked = (spec.softcap, spec.slopes is None, spec.window < 0, spec.dropout)
        exact = torch.are_deterministic_algorithms_enabled()
        case = (asked, packed, device, dtype, trees, exact)
        if case not in self._chosen:
            impl, head_dim = self._impl, self._head_dim
            if impl == "auto" or (trees and impl not in SERVE_TREES):
                impl = choose(spec, packed, device, dtype, head_dim, trees=trees)
            elif reason := refusal(impl, spec, device, dtype, head_dim=head_dim):
                raise UserError(f"model.attn_config.attn_impl: {reason}")
            self._chosen[case] = impl
        return self._chosen[case]


def range_plan(
    impl: str,
    layout: PackedLayout | None,
    spec: AttentionSpec,
    first: int,
    stop: int,
    device: torch.device,
) -> RangePlan:
    """How the queries first..stop of a row see the keys up to the last of them."""
    start = 0 if spec.window < 0 else max(0, first - spec.window)
    seen = None if layout is None else layout.span(start, stop)
    if seen is not None and all(len(row) == 1 for row in seen.lengths):
        seen = None
    if spec.window >= stop - start - 1:
        spec = replace(spec, window=-1)
    queries = stop - first
    made = PLANS[impl](seen, spec, queries=queries, past=first - start, device=device)
    return RangePlan(queries, start, stop, made)


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, *, training: bool = False
) -> Tensor:
    """Attention of q (B, T, H, hd) over k, v (B, S, KV, hd), KV dividing H; (B, T, H, hd).

    In and out of autocast's dtype where autocast is on, else of that of the values. Dropout only
    where `training`.
    """
    if plan.parts:
        queries = q.split([part.queries for part in plan.parts], dim=1)
        mixed = []
        for own, part in zip(queries, plan.parts, strict=True):
            keys, values = k[:, part.start : part.stop], v[:, part.start : part.stop]
            mixed.append(attend(own, keys, values, part.plan, training=training))
        return torch.cat(mixed, dim=1)
    if not plan.shared_heads:
        k, v = repeat_heads(q, k, v)
    return IMPLS[plan.impl](q, k, v, plan, plan.spec.dropout if training else 0.0)


def choose(
    spec: AttentionSpec,
    packed: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int | None,
    *,
    trees: bool = False,
) -> str:
    """The backend that `auto` stands for: the first that can serve, the cheapest first.

    On CUDA plain rows are SDPA's own case; then varlen (no mask, nothing to compile), flash3 (with
    a softcap too, on Hopper, where it is installed), flex (every option but dropout), flash (every
    option but dropout under a softcap, where it is installed). Where PyTorch cannot run varlen on
    FlashAttention 3, flash3 goes before it. What is left is sdpa with a dense mask, and torch,
    which has all.
    """
    order = ["sdpa", "torch"]
    plain = spec.slopes is None and spec.softcap is None and spec.window < 0 and not packed
    if device.type == "cuda" and not plain:
        order = ["varlen", "flash3", "flex", "flash", *order]
    if trees:
        order = [name for name in order if name in SERVE_TREES]
    able = [name for name in order if not refusal(name, spec, device, dtype, head_dim=head_dim)]
    if able[:2] == ["varlen", "flash3"] and not flash.serves_varlen(device):
        return "flash3"
    return able[0]


def refusal(
    impl: str,
    spec: AttentionSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int | None = None,
) -> str | None:
    """Why a backend cannot serve this specification here, and what to write; None: it can.

    Args:
        impl: a name of the recipe's attn_impl; auto always can.
        spec: what the layers ask.
        device: where the tokens will be.
        dtype: what attention will compute in: autocast's dtype, or that of the weights.
        head_dim: width of a head; None: one that every kernel has.
    """
    if impl == "auto":
        return None
    reason = limit(impl, spec.options, head_dim) or REFUSALS[impl](spec, device, dtype, head_dim)
    return None if reason is None else f"{impl}: {reason}"


SERVE_TREES = ("torch", "sdpa", "flex")  # FlashAttention's borders know documents alone
REFUSALS: dict[
    str, Callable[[AttentionSpec, torch.device, torch.dtype, int | None], str | None]
] = {
    "torch": lambda *_: None,
    "sdpa": lambda *_: None,
    "flex": flex.refusal,
    "varlen": flash.varlen_refusal,
    "flash": flash.flash_refusal,
    "flash3": flash.flash3_refusal,
}
PLANS: dict[str, Callable[..., AttentionPlan]] = {
    "torch": base.torch_prepare,
    "sdpa": base.sdpa_prepare,
    "flex": flex.prepare,
    "varlen": flash.varlen_prepare,
    "flash": partial(flash.prepare, "flash"),
    "flash3": partial(flash.prepare, "flash3"),
}
IMPLS: dict[str, Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor]] = {
    "torch": base.torch_attend,
    "sdpa": base.sdpa_attend,
    "flex": flex.attend,
    "varlen": flash.varlen_attend,
    "flash": flash.flash_attend,
    "flash3": flash.flash3_attend,
}
