"""Dropless mixture of experts: a fast operator, a slow reference, megablocks, and their selection.

Entry point: `mixture`, which `models/moe.py` calls with the routing. Every token is processed by
all of its k experts, whatever their load: y_t is the sum over its choices of weight * expert(x_t).

The default, `grouped`, is one differentiable operator with a handwritten backward pass. It saves
only its input, the pre-activations and the routing. Activations are recomputed, and the gradient of
the router weights is <dy w2^T, h>, from a matmul that is needed anyway, so that outputs of experts
are not saved (Guo et al., 2025, SonicMoE). It is a custom operator of PyTorch, so that
torch.compile does not trace into it, in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from llmfoundry.ops.activations import Activation
from llmfoundry.ops.devices import has_autocast, kind_of, planned
from llmfoundry.ops.moe import cpu as moe_cpu
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.moe.experts import (
    QUANTIZED,
    Experts,
    LowRankExperts,
    SavedActivations,
    SortedRows,
    read_how,
    route,
)

RANKS = 8  # adapters are padded to multiples of this rank on an accelerator: 16 bytes of bfloat16
MEGABLOCKS = ("megablocks", "megablocks_ops", "grouped_gemm")  # packages that it consists of
ROW_BYTES = 16  # strides of grouped_mm on an accelerator must be multiples of it


def mixture(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w: Experts,
    *,
    impl: str,
) -> Tensor:
    """Process each token by its experts and return the weighted sum of their outputs, (T, d).

    Under autocast tokens and experts are cast to its dtype, and the output has this dtype, as for a
    linear layer; router weights are not cast.

    Args:
        x: (T, d), tokens to route, without padding.
        weights: (T, k), router weights in fp32 (fp64 if x is fp64).
        experts: (T, k), int64: k different experts per token, each below E.
        w: the experts.
        impl: `torch` (the reference), `grouped_mm`, or `megablocks`; see `refusal`.
    """
    device, multiply = x.device.type, IMPLS[impl]
    if w.packing is not None and impl != "grouped_mm":
        w = w.dense(x.shape[1], x.dtype)
    if kind_of(x.device) not in ("cpu", "meta"):
        w = replace(w, low=_whole_strides(w.low))
    if not has_autocast(device):
        return multiply(x, weights, experts, w)
    dtype = torch.get_autocast_dtype(device)  # autocast does not cast for grouped_mm
    x = x.to(dtype)
    if kind_of(x.device) != "cpu" or impl != "grouped_mm":  # a CPU casts one expert at a time
        w = w.map(lambda stacked: stacked.to(dtype) if stacked.is_floating_point() else stacked)
    with torch.autocast(device, enabled=False):
        return multiply(x, weights, experts, w)


def refusal(impl: str, device: str, dtype: torch.dtype, d: int, f: int) -> str | None:
    """Return why a backend does not support a case, and what to write instead; None: it does.

    Args:
        impl: a name of IMPLS.
        device: device type.
        dtype: dtype of matmuls: autocast's if it is enabled.
        d: width of a token.
        f: hidden width of an expert.
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
    """Return why megablocks does not run on CUDA, and what to write instead; None: it does."""
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
    """Compute one expert after another on its segment of the sorted rows, with autograd."""
    top_k = experts.shape[1]
    order, inverse, ends = route(experts, w.w1.shape[0])
    what = planned()
    counts = (
        torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        if what is None
        else what.rows(len(order), len(ends))[0]
    )
    segments = x[order // top_k].split(counts)  # (rows of e, d) each
    # unbind, not w1[e]: the gradient of an index is as large as the whole stack
    every = w.every()
    stacks = [[None] * len(counts) if t is None else t.unbind(0) for t in every]
    act = w.act
    parts = zip(segments, *stacks, strict=True)
    rows = torch.cat([_expert(*part, act=act) for part in parts])  # (T * k, d)
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
    act: Activation,
) -> Tensor:
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, place: int) -> Tensor:
        y, a, b = F.linear(x, weight, bias), *low[place : place + 2]
        return y if a is None or b is None else y + F.linear(F.linear(x, a), b)

    h = act.function(product(x, w1, b1, 0))  # (rows of e, f)
    if v1 is not None:
        h = h * act.up(product(x, v1, bv, 2))
    return product(h, w2.T, b2, 4)  # (rows of e, d)


def megablocks(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """Compute the mixture with megablocks' gather and scatter and grouped_gemm, for comparison.

    megablocks is not a dependency: version 0.10 is built from source for a GPU, against the torch
    version that it pins, and its kernels synchronize to read the row counts.
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
        h = h * w.act.up(gmm(rows, w.v1, counts, trans_b=True))
    y_rows = gmm(h, w.w2, counts)
    return ops.scatter(y_rows, order, by_expert, weights.flatten(), ends, top_k)


def _whole_strides(low: LowRankExperts) -> LowRankExperts:
    """Return the adapters with their rank padded by zeros to one that grouped_mm supports."""

    def padded(a: Tensor | None, b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if a is None or b is None or a.shape[1] % RANKS == 0:
            return a, b
        more = -a.shape[1] % RANKS
        return F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))

    return LowRankExperts(*padded(*low[0:2]), *padded(*low[2:4]), *padded(*low[4:6]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FORWARD = (  # explicit, because the schema that PyTorch infers depends on versions
    "(Tensor x, Tensor weights, Tensor experts, Tensor[] w, str how, bool keep)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor grad, Tensor x, Tensor weights, Tensor[] kept, Tensor[] w, str how, bool frozen)"
    " -> Tensor[]"
)
Shape = Sequence[int]


def grouped(x: Tensor, weights: Tensor, experts: Tensor, w: Experts) -> Tensor:
    """Return the mixture (T, d) of x (T, d), weights and experts (T, k); see `mixture`."""
    tensors, how = w.flat()
    inputs = (x, weights, *tensors)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    return torch.ops.llmfoundry.moe_forward(x, weights, experts, tensors, how, keep)[0]


def _run_forward(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w: list[Tensor],
    how: str,
    keep: bool,
) -> tuple[Tensor, ...]:
    """Return the output, the saved gate and up, and order, inverse and ends of the routing."""
    layer = Experts.from_flat(w, how).map(Tensor.contiguous)
    x, weights = x.contiguous(), weights.contiguous()
    routing = moe_device.steps_of(x.device).route(experts, layer.w1.shape[0])
    y, saved = _path_of(layer, x.device).forward(x, weights, routing, layer, keep=keep)
    return (y, *saved, *routing)


def _run_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    kept: list[Tensor],
    w: list[Tensor],
    how: str,
    frozen: bool,
) -> list[Tensor]:
    """Return the gradients of x, weights and the experts' tensors; empty if not needed."""
    layer = Experts.from_flat(w, how).map(Tensor.contiguous)
    (gate, up, *routing), path = kept, _path_of(layer, x.device)
    gradients = path.backward(
        grad.contiguous(),  # a sum's gradient is expanded, of stride 0
        x.contiguous(),
        weights.contiguous(),
        SavedActivations(gate, up),
        SortedRows(*routing),
        layer,
        frozen=frozen,
    )
    every = zip(layer.every(), (*gradients.experts, *gradients.low), strict=True)
    grads = [gradient for tensor, gradient in every if tensor is not None]
    grads += [None] * len(layer.quantized)
    return [gradients.x, gradients.weights, *(x.new_empty(0) if g is None else g for g in grads)]


_forward = torch.library.custom_op(
    "llmfoundry::moe_forward", _run_forward, mutates_args=(), schema=FORWARD
)
_backward = torch.library.custom_op(
    "llmfoundry::moe_backward", _run_backward, mutates_args=(), schema=BACKWARD
)
BODIES: dict[Any, Callable[..., Any]] = {
    torch.ops.llmfoundry.moe_forward.default: _run_forward,
    torch.ops.llmfoundry.moe_backward.default: _run_backward,
}
"""Functions that the operators consist of, which `plan/meter.py` traces into."""


def _path(device: torch.device) -> ModuleType:
    return moe_cpu if kind_of(device) == "cpu" else moe_device


def _path_of(layer: Experts, device: torch.device) -> ModuleType:
    return moe_device if layer.fp8 is not None else _path(device)


@_forward.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w: list[Tensor],
    how: str,
    keep: bool,
) -> tuple[Tensor, ...]:
    layer, n_rows = Experts.from_flat(w, how), experts.shape[0] * experts.shape[1]
    f = layer.hidden(x.shape[1])
    kept_rows, width = _path_of(layer, x.device).kept_rows(n_rows, x.dtype), f if keep else 0
    return (
        _like(x),
        x.new_empty(kept_rows, width),
        x.new_empty(0 if layer.v1 is None else kept_rows, width),
        x.new_empty(n_rows, dtype=torch.int32),
        x.new_empty(n_rows, dtype=torch.int32),
        x.new_empty(layer.w1.shape[0], dtype=torch.int32),
    )


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    kept: list[Tensor],
    w: list[Tensor],
    how: str,
    frozen: bool,
) -> list[Tensor]:
    names, *_ = read_how(how)
    without = {name for name in names if frozen and name not in LowRankExperts._fields}
    without |= {name for name in names if name.startswith(QUANTIZED)}
    each = zip(names, w, strict=True)
    grads = (grad.new_empty(0) if name in without else _like(t) for name, t in each)
    return [_like(grad), _like(weights), *grads]


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    x, weights, _, w, ctx.how, _ = inputs
    _, gate, up, *routing = output
    ctx.names, *_ = read_how(ctx.how)
    wanted = any(ctx.needs_input_grad[3 : 3 + len(w)])  # one entry per tensor of the list
    if not wanted and not set(ctx.names) & set(LowRankExperts._fields):
        x = x.new_empty(0, x.shape[1])  # the backward pass of frozen experts does not need x
    ctx.save_for_backward(x, weights, gate, up, *routing, *w)
    ctx.set_materialize_grads(False)  # saved tensors have no gradient


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    wants = ctx.needs_input_grad  # the fourth entry is a list, and so is its gradient
    if grad is None:
        return None, None, None, [None] * len(ctx.names), None, None
    x, weights, *rest = ctx.saved_tensors  # read once: recomputation provides them once
    saved, w = rest[:5], rest[5:]
    adapters = LowRankExperts._fields
    each = zip(ctx.names, wants[3], strict=True)
    frozen = not any(want for name, want in each if name not in adapters)
    grads = torch.ops.llmfoundry.moe_backward(grad, x, weights, saved, w, ctx.how, frozen)
    dx, dweights, *dw = (
        g if want else None for g, want in zip(grads, (*wants[:2], *wants[3]), strict=True)
    )
    return dx, dweights, None, dw, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


@register_flop_formula(torch.ops.llmfoundry.moe_forward)
def _flops(
    x: Shape, weights: Shape, experts: Shape, w: Sequence[Shape], how: str, *_: Any, **__: Any
) -> int:
    """Return the FLOPs of T * k rows in each matrix and each adapter; a multiply-add is two."""
    matrices, adapters = _values(w, how)
    return 2 * experts[0] * experts[1] * (matrices + adapters)


@register_flop_formula(torch.ops.llmfoundry.moe_backward)
def _backward_flops(
    grad: Shape, x: Shape, weights: Shape, kept: Any, w: Sequence[Shape], how: str, frozen: bool,
    **_: Any,
) -> int:  # fmt: skip
    """Return the FLOPs of the gradients of rows and, unless frozen, of matrices."""
    matrices, adapters = _values(w, how)
    return 2 * weights[0] * weights[1] * (matrices * (1 if frozen else 2) + 2 * adapters)


def _values(w: Sequence[Shape], how: str) -> tuple[int, int]:
    """Return the number of values of an expert's matrices, and of its adapters."""
    names, _, packing, _ = read_how(how)
    shapes = dict(zip(names, w, strict=True))
    values = math.prod(shapes["w1"][1:]) if packing is None else packing.values
    adapters = sum(math.prod(shapes[n][1:]) for n in names if n in LowRankExperts._fields)
    return values * (2 + ("v1" in names)), adapters


IMPLS: dict[str, Callable[[Tensor, Tensor, Tensor, Experts], Tensor]] = {
    "grouped_mm": grouped,
    "torch": reference,
    "megablocks": megablocks,
}
