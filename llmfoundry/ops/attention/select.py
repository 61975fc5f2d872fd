"""Selection of the attention kernel: one function, and its backends.

Entry points: `AttentionKernels.plan`, which `models/decoder.py` calls once per forward pass for all
layers with the same `AttentionSpec`, so that masks and document borders are computed once; and
`attend`, which `models/attention.py` calls with the plan.

Every backend computes the same function: scaled logits, softcap, ALiBi's bias slope * (key -
query), mask, softmax, dropout, times values. A token attends to itself and to earlier tokens of its
document, or of its path in a tree, at most a window back; distances are those of positions. A sink
is one more logit of each head, without a value.
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
    Serve,
    autocast_dtype,
    padded_heads,
    repeat_heads,
)
from llmfoundry.ops.attention.sinks import scaled_by_sinks
from llmfoundry.ops.devices import kind_of
from llmfoundry.ops.packed_layout import PackedLayout, Ranges


class AttentionKernels:
    """Kernels of one model: chosen once per case, planned in each forward pass."""

    def __init__(self, impl: str = "auto", head_dim: int | None = None) -> None:
        """`impl`: the recipe's attn_impl; `head_dim` None: a width that all kernels support."""
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
        """Plan the attention of one forward pass, without waiting for the device.

        Tokens after cached ones, and single tokens, use sdpa (torch with a softcap) whatever the
        recipe selects: the training kernels have no advantage there. Trees, which occur only in
        evaluation, use the backend of `auto` if the selected one supports only documents.

        Args:
            layout: documents of the sequences; None: one document per sequence.
            spec: options of the layers.
            queries: T, tokens in a sequence.
            past: earlier tokens of each sequence, in a KV cache.
            device: device of the tokens.
            dtype: dtype of the weights; None: torch's default. Autocast's takes precedence.
            ranges: positions of the queries, if they are only some of the sequence's `queries`
                tokens, whose keys are all present; None: all tokens are queries.

        Raises:
            UserError: the recipe selects a backend that does not support the case.
        """
        trees = layout is not None and layout.ends is not None
        if layout is not None and not trees and all(len(row) == 1 for row in layout.lengths):
            layout = None
        assert layout is None or past == 0, "packed rows have no key-value cache"
        if spec.window >= past + queries - 1:
            spec = replace(spec, window=-1)
        if kind_of(device) != device.type and self._impl != "torch":
            # planning for a GPU: all its kernels save the same tensors, and no bias
            layout, spec = None, AttentionSpec(spec.scale, sinks=spec.sinks)
            plain = AttentionPlan("sdpa", spec)
            if ranges is None:
                return plain
            places = (RangePlan(stop - first, 0, stop, plain) for first, stop in ranges)
            return AttentionPlan("sdpa", spec, parts=tuple(places))
        if (past or queries == 1) and self._impl != "torch":
            impl = "sdpa" if spec.softcap is None else "torch"
        else:
            # only CUDA distinguishes sequences without packing
            packed = device.type == "cuda" and (layout is not None or ranges is not None)
            dtype = autocast_dtype(device.type, dtype or torch.get_default_dtype())
            impl = self._choose(spec, packed, device, dtype, trees=trees)
        if ranges is None:
            return PLANS[impl](layout, spec, queries=queries, past=past, device=device)
        parts = (range_plan(impl, layout, spec, *places, device) for places in ranges)
        return AttentionPlan(impl, spec, parts=tuple(parts))

    def masked(self, spec: AttentionSpec, bias: Tensor) -> AttentionPlan:
        """Plan with the caller's bias (`AttentionPlan.bias`), for one token per sequence."""
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
        """Return the backend of a case, from a cache."""
        options = (spec.softcap, spec.slopes is None, spec.window < 0, spec.dropout, spec.sinks)
        exact = torch.are_deterministic_algorithms_enabled()
        case = (options, packed, device, dtype, trees, exact)
        if case not in self._chosen:
            impl, head_dim = self._impl, self._head_dim
            if impl == "auto" or (trees and impl not in SERVE_TREES):
                impl = choose(spec, packed, device, dtype, head_dim, trees=trees)
            elif reason := refusal(impl, spec, device, dtype, head_dim=head_dim):
                raise UserError(f"model.attn_config.attn_impl: {reason}")
            flash.make_room(device, head_dim, dropout=bool(spec.dropout))
            if impl == "varlen":
                flash.fastest_varlen(device, head_dim)
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
    """Plan the attention of queries first..stop of a sequence to the keys before stop."""
    start = 0 if spec.window < 0 else max(0, first - spec.window)
    seen = None if layout is None else layout.span(start, stop)
    if seen is not None and all(len(row) == 1 for row in seen.lengths):
        seen = None
    if spec.window >= stop - start - 1:
        spec = replace(spec, window=-1)
    queries = stop - first
    plan = PLANS[impl](seen, spec, queries=queries, past=first - start, device=device)
    return RangePlan(queries, start, stop, plan)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    *,
    sinks: Tensor | None = None,
    training: bool = False,
) -> Tensor:
    """Return attention of q (B, T, H, hd) over k, v (B, S, KV, hd), (B, T, H, hd); KV divides H.

    Values may have another width than queries and keys. Backends other than NARROW get both padded
    with zeros to one width.
    Inputs and output have autocast's dtype if it is enabled, else that of the values. Dropout is
    applied only if `training`. Sinks (H,) are required if the plan's spec says that there are some.
    """
    assert plan.parts or plan.spec.sinks == (sinks is not None)
    if plan.parts:
        queries = q.split([part.queries for part in plan.parts], dim=1)
        outputs = []
        for part_queries, part in zip(queries, plan.parts, strict=True):
            keys, values = k[:, part.start : part.stop], v[:, part.start : part.stop]
            outputs.append(
                attend(part_queries, keys, values, part.plan, sinks=sinks, training=training)
            )
        return torch.cat(outputs, dim=1)
    if not plan.shared_heads:
        k, v = repeat_heads(q, k, v)
    width = v.shape[-1]
    is_padded = q.shape[-1] != width and plan.impl not in NARROW
    if is_padded:
        widest = max(q.shape[-1], width)
        q, k, v = (padded_heads(x, widest) for x in (q, k, v))
    if sinks is not None and kind_of(q.device) != q.device.type and plan.impl == "sdpa":
        # planning for a GPU, whose kernel returns the log-sum-exp: only shapes count
        out = IMPLS[plan.impl](q, k, v, plan, 0.0, None)
        out = scaled_by_sinks(out.transpose(1, 2), out[..., 0].mT, sinks).transpose(1, 2)
    else:
        out = IMPLS[plan.impl](q, k, v, plan, plan.spec.dropout if training else 0.0, sinks)
    return out[..., :width] if is_padded else out


def choose(
    spec: AttentionSpec,
    packed: bool,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int | None,
    *,
    trees: bool = False,
) -> str:
    """Return the backend for `auto`: the first that supports the case, the fastest first.

    On CUDA sequences without packing use SDPA. The order otherwise is: varlen (no mask, nothing to
    compile), flash3 (adds a softcap; on Hopper, if installed), flex (every option except dropout),
    flash (every option except dropout with a softcap; if installed), sdpa with a dense mask, and
    torch, which supports everything. If PyTorch cannot run varlen on FlashAttention 3 or 4, flash3
    comes before it.
    """
    order = ["sdpa", "torch"]
    plain = not (
        spec.slopes is not None or spec.softcap or spec.window >= 0 or spec.sinks or packed
    )
    if device.type == "cuda" and not plain:
        order = ["varlen", "flash3", "flex", "flash", *order]
    if trees:
        order = [name for name in order if name in SERVE_TREES]
    able = [name for name in order if not refusal(name, spec, device, dtype, head_dim=head_dim)]
    if able[:2] == ["varlen", "flash3"] and flash.fastest_varlen(device, head_dim) is None:
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
    """Return why a backend does not support a case, and what to write; None: it does.

    Args:
        impl: a name of the recipe's attn_impl; auto always works.
        spec: options of the layers.
        device: device of the tokens.
        dtype: dtype of attention: autocast's, or that of the weights.
        head_dim: width of a head; None: one that every kernel supports.
    """
    if impl == "auto":
        return None
    reason = limit(impl, spec.options, head_dim) or REFUSALS[impl](spec, device, dtype, head_dim)
    return None if reason is None else f"{impl}: {reason}"


NARROW = ("torch", "flex")  # serve values of another width than keys
SERVE_TREES = ("torch", "sdpa", "flex")  # FlashAttention's borders describe only documents
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
IMPLS: dict[str, Serve] = {
    "torch": base.torch_attend,
    "sdpa": base.sdpa_attend,
    "flex": flex.attend,
    "varlen": flash.varlen_attend,
    "flash": flash.flash_attend,
    "flash3": flash.flash3_attend,
}
