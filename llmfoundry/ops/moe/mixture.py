"""A dropless mixture of experts: one fast operator, a slow reference, megablocks, and what picks.

`models/moe.py` calls `mixture` with the router's choice. Every token visits all of its k experts,
whatever their load; y_t is the sum over its choices of weight * expert(x_t).

The default, `grouped`, is one differentiable operator whose backward pass is written by hand. It
saves its input, the pre-activations and the routing, and nothing else: activations are recomputed,
and the gradient of the router's weights comes from the experts' own products, <dy w2^T, h>, without
the experts' outputs (Guo et al., 2025, SonicMoE). It is a custom operator of PyTorch, so that
torch.compile takes it whole, in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from llmfoundry.ops.moe import cpu as moe_cpu
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.moe.experts import (
    Experts,
    LowRankExperts,
    SavedActivations,
    SortedRows,
    packed_width,
    route,
)
from llmfoundry.ops.nf4 import Nf4Layout

RANKS = 8  # an adapter's rank on an accelerator is a multiple of it: 16 bytes of bfloat16
MEGABLOCKS = ("megablocks", "megablocks_ops", "grouped_gemm")  # packages that it is
ROW_BYTES = 16  # grouped_mm's strides on an accelerator are multiples of it


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w: Experts,
    *,
    impl: str,
    compress: bool = False,
) -> Tensor:
    """Send each token through its experts and add up what they say, (T, d).

    Under autocast the tokens and the experts are cast to its dtype and the output stays in it, as a
    linear layer's does; the router's weights stay as they are.

    Args:
        x: (T, d), tokens to route: no padding.
        weights: (T, k), the router's, in fp32 (fp64 beside an x in fp64).
        experts: (T, k), int64: k different experts of a token, each below E.
        w: the experts.
        impl: `torch` (the reference), `grouped_mm`, or `megablocks`; see `refusal`.
        compress: what waits for the backward pass is kept in 8 bits (`grouped_mm` alone).
    """
    assert impl == "grouped_mm" or not compress, f"{impl} has no 8-bit storage"
    device = x.device.type
    multiply = partial(grouped, compress=True) if compress else IMPLS[impl]
    if w.packing is not None and impl != "grouped_mm":
        w = w.dense(x.shape[1], x.dtype)
    if device not in ("cpu", "meta"):
        w = replace(w, low=_whole_strides(w.low))
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta has no autocast to ask for
        return multiply(x, weights, experts, w)
    dtype = torch.get_autocast_dtype(device)  # grouped_mm does not know of it
    x = x.to(dtype)
    if device != "cpu" or impl != "grouped_mm":  # which casts an expert at a time there
        w = w.map(lambda stacked: stacked.to(dtype) if stacked.is_floating_point() else stacked)
    with torch.autocast(device, enabled=False):
        return multiply(x, weights, experts, w)


def refusal(impl: str, device: str, dtype: torch.dtype, d: int, f: int) -> str | None:
    """Why a backend cannot serve, and what to write instead; None if it can.

    Args:
        impl: a name of IMPLS.
        device: `cpu`, `cuda`, ...
        dtype: of the matrix products: autocast's where it is on.
        d: width of a token.
        f: inner width of an expert.
    """
    if impl == "torch" or (impl == "grouped_mm" and device == "cpu"):
        return None
    if device != "cuda":
        if impl == "megablocks":
            return f"megablocks runs on CUDA alone, not on {device}; write grouped_mm"
        return f"grouped_mm runs on CPU and CUDA, not on {device}; write torch"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"{impl} has no {_name(dtype)} on CUDA; write torch"
    if impl == "megablocks":
        return _missing_megablocks(dtype)
    step = ROW_BYTES // dtype.itemsize
    for name, size in (("d_model", d), ("ffn_hidden_size", f)):
        if size % step:
            near = max(step, round(size / step) * step)
            return f"grouped_mm takes {name} in multiples of {step} in {_name(dtype)}; write {near}"
    return None


def _missing_megablocks(dtype: torch.dtype) -> str | None:
    """Why megablocks cannot serve on CUDA, and what to write instead; None if it can."""
    if dtype != torch.bfloat16:
        return "megablocks multiplies in bfloat16 alone; write grouped_mm"
    absent = [name for name in MEGABLOCKS if find_spec(name) is None]
    if absent:
        return (
            f"megablocks needs {', '.join(absent)}, built as constraints-megablocks.txt says; write"
            " grouped_mm"
        )
    return None


def reference(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """One expert after another over its segment of the sorted rows, by plain autograd."""
    top_k = experts.shape[1]
    order, inverse, ends = route(experts, w.w1.shape[0])
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    segments = x[order // top_k].split(counts)  # (rows of e, d) each
    # unbind, not w1[e]: the gradient of an index is as large as the whole stack
    every = (*w.tensors(), *w.low)
    stacks = [[None] * len(counts) if t is None else t.unbind(0) for t in every]
    function = w.act.function
    parts = zip(segments, *stacks, strict=True)
    rows = torch.cat([_expert(*part, act=function) for part in parts])  # (T * k, d)
    picked = rows[inverse].view(*weights.shape, x.shape[1])  # (T, k, d)
    return (picked * weights[..., None]).sum(1).to(x.dtype)


def _expert(
    x: Tensor,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    bv: Tensor | None,
    b2: Tensor | None,
    *low: Tensor | None,
    act: Callable[[Tensor], Tensor],
) -> Tensor:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, place: int) -> Tensor:
        y, a, b = F.linear(x, weight, bias), *low[place : place + 2]
        return y if a is None or b is None else y + F.linear(F.linear(x, a), b)

    h = act(product(x, w1, b1, 0))  # (rows of e, f)
    if v1 is not None:
        h = h * product(x, v1, bv, 2)
    return product(h, w2.T, b2, 4)  # (rows of e, d)


def megablocks(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """The mixture by megablocks' gather and scatter and grouped_gemm's products, to compare with.

    It is never a dependency: megablocks 0.10 is built from source against the torch that it pins,
    for a GPU, and its kernels ask the host for the row counts.
    """
    from grouped_gemm.ops import gmm
    from megablocks import ops

    assert w.b1 is None and w.bv is None and w.b2 is None, "megablocks' experts have no biases"
    assert not any(t is not None for t in w.low), "refused before: they have no adapters"
    top_k = experts.shape[1]
    order, _, ends = route(experts, w.w1.shape[0])
    by_expert = experts.flatten().to(torch.int32)[order]
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).cpu().to(torch.int64)
    rows = ops.gather(x, order, by_expert, ends, top_k)
    h = w.act.function(gmm(rows, w.w1, counts, trans_b=True))
    if w.v1 is not None:
        h = h * gmm(rows, w.v1, counts, trans_b=True)
    y_rows = gmm(h, w.w2, counts)
    return ops.scatter(y_rows, order, by_expert, weights.flatten(), ends, top_k)


def _whole_strides(low: LowRankExperts) -> LowRankExperts:
    """The same adapters, of a rank that grouped_mm takes in every dtype: zeros are added."""

    def padded(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if a is None or b is None or a.shape[1] % RANKS == 0:
            return a, b
        more = -a.shape[1] % RANKS
        return F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))

    return LowRankExperts(*padded(*low[0:2]), *padded(*low[2:4]), *padded(*low[4:6]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, ...]  # of x, weights, the six of `Experts.tensors`, and of the adapters


# written out: what PyTorch infers from annotations differs by its version and Python's
STACKED = "Tensor w1, Tensor? v1, Tensor w2, Tensor? b1, Tensor? bv, Tensor? b2, str activation"
LOW = ", ".join(f"Tensor? {name}=None" for name in LowRankExperts._fields)
REST = f"{LOW}, int packed=0, bool double=False"  # as `_how` makes it
FORWARD = (
    f"(Tensor x, Tensor weights, Tensor experts, {STACKED}, bool keep, bool compress, {REST})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weights, Tensor gate, Tensor up, Tensor order, Tensor inverse,"
    f" Tensor ends, {STACKED}, bool frozen, {REST})"
    f" -> ({', '.join(['Tensor'] * 14)})"
)


def grouped(
    x: Tensor, weights: Tensor, experts: Tensor, w: Experts, *, compress: bool = False
) -> Tensor:
    """The mixture of x (T, d), weights and experts (T, k): (T, d). See `mixture`."""
    inputs = [t for t in (x, weights, *w.tensors(), *w.low) if t is not None]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    out = torch.ops.llmfoundry.moe_forward(
        x, weights, experts, *w.tensors(), w.activation, keep, compress, *w.low, *_how(w.packing)
    )
    return out[0]


def _how(packing: Nf4Layout | None) -> tuple[int, bool]:
    """Values of a quantized matrix, 0 where none is, and whether scales are quantized again."""
    return (0, False) if packing is None else (packing.values, packing.double)


def _rest(rest: Sequence[Any]) -> tuple[LowRankExperts, Nf4Layout | None]:
    """What REST says, whose last arguments PyTorch leaves out where they are the defaults."""
    packed, double = list(rest[6:]) + [0, False][len(rest[6:]) :]
    return LowRankExperts(*rest[:6]), Nf4Layout(packed, double) if packed else None


@torch.library.custom_op("llmfoundry::moe_forward", mutates_args=(), schema=FORWARD)
def _forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    bv: Tensor | None,
    b2: Tensor | None,
    activation: str,
    keep: bool,
    compress: bool,
    *rest: Any,
) -> Forward:
    """Output; what is kept of gate and up; x packed, or empty; order, inverse and ends."""
    w = Experts(w1, v1, w2, b1, bv, b2, activation, *_rest(rest)).map(Tensor.contiguous)
    x, weights = x.contiguous(), weights.contiguous()
    routing = route(experts, w1.shape[0])
    path = _path(x.device)
    y, kept = path.forward(x, weights, routing, w, keep=keep, compress=compress)
    packed = path.pack(x) if keep and compress else x.new_empty(0, dtype=torch.int8)
    return (y, *kept, packed, *routing)


@torch.library.custom_op("llmfoundry::moe_backward", mutates_args=(), schema=BACKWARD)
def _backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    bv: Tensor | None,
    b2: Tensor | None,
    activation: str,
    frozen: bool,
    *rest: Any,
) -> Backward:
    """Gradients of x, weights and the experts' tensors; empty for those that have none."""
    w = Experts(w1, v1, w2, b1, bv, b2, activation, *_rest(rest)).map(Tensor.contiguous)
    path = _path(x.device)
    if x.dtype == torch.int8:
        x = path.unpack(x, grad.shape[1], grad.dtype)
    dx, dweights, experts, of_low = path.backward(
        grad.contiguous(),  # a sum's gradient is expanded, of stride 0
        x.contiguous(),
        weights.contiguous(),
        SavedActivations(gate, up),
        SortedRows(order, inverse, ends),
        w,
        frozen=frozen,
    )
    return dx, dweights, *(x.new_empty(0) if t is None else t for t in (*experts, *of_low))


def _path(device: torch.device) -> ModuleType:
    return moe_cpu if device.type == "cpu" else moe_device


@_forward.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    bv: Tensor | None,
    b2: Tensor | None,
    activation: str,
    keep: bool,
    compress: bool,
    *rest: Any,
) -> Forward:
    n_rows, packing = experts.shape[0] * experts.shape[1], _rest(rest)[1]
    f = w1.shape[1] if packing is None else packing.values // x.shape[1]
    kept_rows = _path(x.device).kept_rows(n_rows, x.dtype)
    width = 0 if not keep else packed_width(f) if compress else f
    dtype = torch.int8 if compress and keep else x.dtype
    packed = (x.shape[0], packed_width(x.shape[1])) if keep and compress else (0,)
    return (
        _like(x),
        x.new_empty(kept_rows, width, dtype=dtype),
        x.new_empty(0 if v1 is None else kept_rows, width, dtype=dtype),
        x.new_empty(packed, dtype=torch.int8),
        x.new_empty(n_rows, dtype=torch.int32),
        x.new_empty(n_rows, dtype=torch.int32),
        x.new_empty(w1.shape[0], dtype=torch.int32),
    )


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    w1: Tensor,
    v1: Tensor | None,
    w2: Tensor,
    b1: Tensor | None,
    bv: Tensor | None,
    b2: Tensor | None,
    activation: str,
    frozen: bool,
    *rest: Any,
) -> Backward:
    def gradient(stacked: Tensor | None) -> Tensor:
        return grad.new_empty(0) if stacked is None or frozen else _like(stacked)

    experts = gradient(w1), gradient(v1), gradient(w2), gradient(b1), gradient(bv), gradient(b2)
    adapters = (grad.new_empty(0) if t is None else _like(t) for t in _rest(rest)[0])
    return _like(grad), _like(weights), *experts, *adapters


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Forward) -> None:
    x, weights, _, *stacked, activation, _, compress = inputs[:12]
    _, gate, up, packed, *routing = output
    low, packing = _rest(inputs[12:])
    if not any(ctx.needs_input_grad[3:9]) and not any(t is not None for t in low):
        x = packed = x.new_empty(0, x.shape[1])  # frozen experts do not ask for their input again
    kept = (packed if compress else x, weights, gate, up, *routing, *stacked)
    ctx.save_for_backward(*kept, *low)
    ctx.activation, ctx.packing = activation, packing
    ctx.set_materialize_grads(False)  # what is kept has no gradient


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    n_inputs = len(ctx.needs_input_grad)
    if grad is None:
        return (None,) * n_inputs
    saved, wants = ctx.saved_tensors, ctx.needs_input_grad
    frozen = not any(wants[3:9])
    rest = (*saved[13:], *_how(ctx.packing))
    grads = torch.ops.llmfoundry.moe_backward(grad, *saved[:13], ctx.activation, frozen, *rest)
    wanted = (*wants[:2], *wants[3:9], *wants[12:18])
    dx, dweights, *stacked = (
        g if want else None for g, want in zip(grads[: len(wanted)], wanted, strict=True)
    )
    found = (dx, dweights, None, *stacked[:6], None, None, None, *stacked[6:])
    return *found, *(None,) * (n_inputs - len(found))


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@register_flop_formula(torch.ops.llmfoundry.moe_forward)
def _flops(
    x: Sequence[int], weights: Sequence[int], experts: Sequence[int], w1: Sequence[int],
    v1: Sequence[int] | None, *rest: Any, **__: Any,
) -> int:  # fmt: skip
    """Two a multiply-add, of T * k rows through two matrices, or three with a gate."""
    low, packing = _rest(rest[7:])
    values = w1[1] * w1[2] if packing is None else packing.values
    matrices = values * (2 if v1 is None else 3) + _adapter_size(low)
    return 2 * experts[0] * experts[1] * matrices


def _adapter_size(low: Sequence[Any]) -> int:
    """Numbers of one expert's adapters, from their shapes."""
    return sum(shape[1] * shape[2] for shape in low if shape is not None)


@register_flop_formula(torch.ops.llmfoundry.moe_backward)
def _backward_flops(
    grad: Sequence[int], x: Sequence[int], weights: Sequence[int], gate: Sequence[int],
    up: Sequence[int], order: Sequence[int], inverse: Sequence[int], ends: Sequence[int],
    w1: Sequence[int], v1: Sequence[int] | None, *rest: Any, **__: Any,
) -> int:  # fmt: skip
    """Gradients of the rows and, unless frozen, of the matrices."""
    frozen, (low, packing) = rest[5], _rest(rest[6:])
    values = w1[1] * w1[2] if packing is None else packing.values
    matrices = values * (2 if v1 is None else 3) * (1 if frozen else 2)
    return 2 * weights[0] * weights[1] * (matrices + 2 * _adapter_size(low))


IMPLS: dict[str, Callable[[Tensor, Tensor, Tensor, Experts], Tensor]] = {
    "grouped_mm": grouped,
    "torch": reference,
    "megablocks": megablocks,
}
