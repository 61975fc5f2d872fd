"""The default mixture of experts: one differentiable operator, its backward pass written by hand.

`backends.py` calls `grouped`. The operator saves its input, the pre-activations and the routing,
and nothing else: activations are recomputed, and the gradient of the router's weights comes from
the experts' own products, <dy w2^T, h>, without the experts' outputs (Guo et al., 2025, SonicMoE).
It is a custom operator of PyTorch, so that torch.compile takes it whole, in every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from llmfoundry.ops.moe import cpu as moe_cpu
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.moe.elementwise import packed_width
from llmfoundry.ops.moe.experts import Experts, LowRankExperts, SavedActivations, SortedRows, route
from llmfoundry.ops.nf4 import Nf4Layout

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, ...]  # of x, weights, the six of `Experts.tensors`, and of the adapters


# written out: what PyTorch infers from annotations differs by its version and Python's
STACKED = "Tensor w1, Tensor? v1, Tensor w2, Tensor? b1, Tensor? bv, Tensor? b2, str activation"
LOW = ", ".join(f"Tensor? {name}=None" for name in LowRankExperts._fields)
REST = f"{LOW}, int packed=0, bool double=False"  # as `_how` tells it
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
    """The mixture of x (T, d), weights and experts (T, k): (T, d). See `backends.mixture`."""
    inputs = [t for t in (x, weights, *w.tensors(), *w.low) if t is not None]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    out = torch.ops.llmfoundry.moe_forward(
        x, weights, experts, *w.tensors(), w.activation, keep, compress, *w.low, *_how(w.packing)
    )
    return out[0]


def _how(packing: Nf4Layout | None) -> tuple[int, bool]:
    """Values of a quantised matrix, 0 where none is, and whether scales are quantised again."""
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
