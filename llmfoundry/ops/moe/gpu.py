"""Mixture of experts on an accelerator: grouped matmuls over all experts at once.

Entry points: `forward` and `backward`, for `mixture.py`. Row counts stay on the device, as offsets
of grouped_mm, so that the host never waits. Four memory-bound steps connect the matmuls; on CUDA
they are kernels of `triton_kernels.py`.

Requirements of grouped_mm: offsets in int32; contiguous operands; no fp64; row sizes in multiples
of 16 bytes (`mixture.refusal` names the sizes). Results of rows after the last offset are
uninitialized; `route` puts only rows without an expert there, whose results are not used.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.devices import planned
from llmfoundry.ops.moe import experts as plain_steps
from llmfoundry.ops.moe.experts import (
    Experts,
    Gradients,
    LowRankExperts,
    SavedActivations,
    SortedRows,
)
from llmfoundry.ops.moe.fp8 import Matmuls

STEPS = (
    "route",
    "gather",
    "quantize",
    "quantize_mx",
    "quantize_mx_rows",
    "gather_mx",
    "glu",
    "glu_backward",
    "combine",
    "combine_backward",
)
ONES = 8  # columns of ones for sums by expert; fewer are not a multiple of 16 bytes


def forward(
    x: Tensor, weights: Tensor, routing: SortedRows, w: Experts, *, keep: bool
) -> tuple[Tensor, SavedActivations]:
    """Return the output (T, d), and the pre-activations if they are saved; see `cpu.forward`."""
    steps, top_k, ends = steps_of(x.device), weights.shape[1], routing.ends
    multiply = Matmuls(routing, w.fp8, steps)
    rows = multiply.gather(x, top_k)  # (N, d), sorted by expert
    # Two matmuls, not one with concatenated weights: copying w1 and v1 in each step moves more
    # bytes than reading the rows twice if experts are large, and checkpoints have two tensors.
    dense = partial(w.matrix, d=x.shape[1], dtype=x.dtype)  # of a quantized one, while it is used
    a = multiply(rows, dense(w.w1).transpose(1, 2), w.in_fp8("w1", along="d"))  # (N, f)
    _add_bias(a, w.b1, ends)
    b = None  # (N, f), as h
    if w.v1 is not None:
        b = multiply(rows, dense(w.v1).transpose(1, 2), w.in_fp8("v1", along="d"))
        _add_bias(b, w.bv, ends)
    low = w.low
    if isinstance(rows, Tensor):  # no adapters in fp8
        _add_product(a, rows, low.w1_a, low.w1_b, ends)
        _add_product(b, rows, low.v1_a, low.v1_b, ends)
    del rows
    h = steps.glu(a, b, w.activation)
    y_rows = multiply(multiply.operand(h), dense(w.w2), w.in_fp8("w2", along="f"))  # (N, d)
    _add_product(y_rows, h, low.w2_a, low.w2_b, ends)
    del h
    _add_bias(y_rows, w.b2, ends)
    y = steps.combine(y_rows, routing.inverse, weights, top_k)  # (T, d)
    up = a.new_empty(0, a.shape[1]) if b is None else b
    if not keep:
        return y, SavedActivations(a.new_empty(a.shape[0], 0), up.new_empty(up.shape[0], 0))
    return y, SavedActivations(a, up)


def backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    kept: SavedActivations,
    routing: SortedRows,
    w: Experts,
    *,
    frozen: bool,
) -> Gradients:
    """Return all gradients from that of the output, grad (T, d); see `cpu.backward`."""
    steps, top_k, ends = steps_of(x.device), weights.shape[1], routing.ends
    dense = partial(w.matrix, d=x.shape[1], dtype=x.dtype)
    a, b = kept.gate, None if w.v1 is None else kept.up
    g = steps.gather(grad, routing.order, top_k)  # (N, d)
    low = w.low
    multiply = Matmuls(routing, w.fp8, steps)
    left = multiply.operand(g)
    dh = multiply(left, dense(w.w2).transpose(1, 2), w.in_fp8("w2", along="d"))  # (N, f), as h
    del left
    _add_gradient(dh, g, low.w2_a, low.w2_b, ends)
    h, da, db, inner = steps.glu_backward(dh, a, b, weights, routing.order, w.activation)
    del dh, a, b
    if w.b2 is not None:
        biases = w.b2[_experts(ends, g)]  # (N, d)
        inner = inner + plain_steps.row_dots(g, biases, routing.order, weights)
    dx_rows = multiply(multiply.operand(da), dense(w.w1), w.in_fp8("w1", along="f"))  # (N, d)
    dx_up = None
    if w.v1 is not None and db is not None:
        dx_up = multiply(multiply.operand(db), dense(w.v1), w.in_fp8("v1", along="f"))
    _add_gradient(dx_rows, da, low.w1_a, low.w1_b, ends)
    _add_gradient(dx_rows, db, low.v1_a, low.v1_b, ends)
    dx = steps.combine(dx_rows, routing.inverse, None, top_k, dx_up)  # (T, d)
    del dx_rows, dx_up
    has_adapters = any(t is not None for t in low)
    if frozen and not has_adapters:
        return Gradients(dx, inner, (None,) * 6)
    rows = steps.gather(x, routing.order, top_k)
    of_low = _adapter_gradients(low, rows, g, h, da, db, ends)
    if frozen:
        return Gradients(dx, inner, (None,) * 6, of_low)
    dw2 = _weight_gradient(h, g, ends)  # (E, f, d), as dw1 and dv1
    dw1 = _weight_gradient(da, rows, ends)
    dv1 = None if db is None else _weight_gradient(db, rows, ends)
    db1 = None if w.b1 is None else _sums(da, ends)
    dbv = None if w.bv is None or db is None else _sums(db, ends)
    db2 = None
    if w.b2 is not None:
        weighted = g * weights.flatten()[routing.order][:, None]
        db2 = _sums(weighted.to(g.dtype), ends)
    return Gradients(dx, inner, (dw1, dv1, dw2, db1, dbv, db2), of_low)


def kept_rows(n_rows: int, dtype: torch.dtype) -> int:
    """Return the number of rows that `forward` saves for N rows."""
    return n_rows


def steps_of(device: torch.device) -> Any:
    """Return the module of Triton kernels on CUDA, else that of PyTorch functions.

    If a GPU is planned for, these are PyTorch functions, each of which counts as one kernel.
    """
    what = planned()
    if what is not None and what.kind == "cuda":
        return SimpleNamespace(**{n: what.kernel(getattr(plain_steps, n)) for n in STEPS})
    return _steps_of(device.type)


@cache
def _steps_of(kind: str) -> ModuleType:
    if kind != "cuda" or find_spec("triton") is None:
        return plain_steps
    from llmfoundry.ops.moe import triton_kernels as moe_triton

    return moe_triton


def _add_bias(rows: Tensor, bias: Tensor | None, ends: Tensor) -> None:
    """Add the bias of each row's expert."""
    if bias is not None:
        rows += bias[_experts(ends, rows)]


def _add_product(
    y: Tensor | None, x: Tensor, a: Tensor | None, b: Tensor | None, ends: Tensor
) -> None:
    """Add (x a^T) b^T to y by expert, for adapters a (E, r, in) and b (E, out, r)."""
    if y is not None and a is not None and b is not None:
        inner = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
        y += F.grouped_mm(inner, b.transpose(1, 2), offs=ends)


def _add_gradient(
    dx: Tensor, dy: Tensor | None, a: Tensor | None, b: Tensor | None, ends: Tensor
) -> None:
    """Add dy b a to dx by expert, the gradient of an adapter's input."""
    if dy is not None and a is not None and b is not None:
        dx += F.grouped_mm(F.grouped_mm(dy, b, offs=ends), a, offs=ends)


def _adapter_gradients(
    low: LowRankExperts, rows: Tensor, g: Tensor, h: Tensor,
    da: Tensor, db: Tensor | None, ends: Tensor,
) -> LowRankExperts:  # fmt: skip
    """Return the gradients of adapters; h, da and db have the router weight, rows and g do not."""
    grads: list[Tensor | None] = []
    pairs = ((rows, da, *low[0:2]), (rows, db, *low[2:4]), (h, g, *low[4:6]))
    for x, dy, a, b in pairs:
        if dy is None or a is None or b is None:
            grads += [None, None]
            continue
        inner = F.grouped_mm(x, a.transpose(1, 2), offs=ends)
        grads.append(_weight_gradient(F.grouped_mm(dy, b, offs=ends), x, ends))
        grads.append(_weight_gradient(dy, inner, ends))
    return LowRankExperts(*grads)


def _weight_gradient(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return (E, n, m), left^T right of each expert's rows of left (N, n) and right (N, m)."""
    product = F.grouped_mm(left.T, right, offs=ends)
    if left.is_cuda and torch.cuda.get_device_capability(left.device)[0] >= 10:
        # on Blackwell, experts without rows are uninitialized (pytorch issue 172439)
        empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
        product.masked_fill_(empty[:, None, None], 0)
    return product


def _sums(rows: Tensor, ends: Tensor) -> Tensor:
    """Return (E, n), the sum of each expert's rows (N, n), by a matmul with ones: no atomics."""
    return _weight_gradient(rows, rows.new_ones(rows.shape[0], ONES), ends)[..., 0].contiguous()


def _experts(ends: Tensor, rows: Tensor) -> Tensor:
    """Return (N,), the expert of each sorted row; any expert for rows after the last end."""
    number = torch.arange(rows.shape[0], dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends[:-1], number, right=True)
