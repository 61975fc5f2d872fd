"""Memory-bound steps of the mixture of experts as Triton kernels with one pass each.

The functions are documented in `experts.py`; `gpu.py` calls these versions on CUDA. All arithmetic
is in fp32. A program processes one row or one token and iterates along it, so that sums along a row
need no atomics and every run gives the same bits. `route_kernel` sorts all rows at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmfoundry.ops.moe import experts as plain_steps
from llmfoundry.ops.moe.experts import ScaledRows, SortedRows

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # others use `plain_steps`
WIDTH = 1024  # values of a row that a program loads at a time
WARPS = 4
PAIRS = 4096  # pairs of token and choice that a program of `route_kernel` loads at a time
PROGRAMS = 128  # of `route_kernel`; each reads all pairs, from the cache


@triton.jit
def _act(
    a: tl.tensor,
    ACT: tl.constexpr,
) -> tl.tensor:
    """Return the activation of fp32 values."""
    if ACT == "silu":
        return a * tl.sigmoid(a)
    elif ACT == "gelu":
        return 0.5 * a * (1.0 + tl.math.erf(a * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # (1 + tanh u) / 2 is sigmoid(2 u)
        return a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    else:
        return tl.where(a < 0.0, 0.0, a)  # tl.maximum would not propagate NaN


@triton.jit
def _slope(
    a: tl.tensor,
    ACT: tl.constexpr,
) -> tl.tensor:
    """Return the derivative of the activation of fp32 values."""
    if ACT == "silu":
        s = tl.sigmoid(a)
        return s * (1.0 + a * (1.0 - s))
    elif ACT == "gelu":
        normal = 0.3989422804014327 * tl.exp(-0.5 * a * a)
        return 0.5 * (1.0 + tl.math.erf(a * 0.7071067811865476)) + a * normal
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
        return s + a * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * a * a)
    else:
        return tl.where(a > 0.0, 1.0, 0.0)


@triton.jit
def route_kernel(
    experts: tl.tensor,
    order: tl.tensor,
    inverse: tl.tensor,
    ends: tl.tensor,
    n_pairs: tl.tensor,
    n_chunks: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Write the sorted rows of one expert's pairs in one chunk; the last chunk writes its end.

    A stable counting sort without atomics or communication between programs: each program counts
    the pairs that precede its own, those of lower experts and those of earlier chunks.
    """
    expert, chunk = tl.program_id(0), tl.program_id(1)
    n_blocks = tl.cdiv(n_pairs, PAIRS)
    begin = n_blocks * chunk // n_chunks * PAIRS
    end = tl.minimum(n_blocks * (chunk + 1) // n_chunks * PAIRS, n_pairs)
    counts = tl.zeros([PAIRS], dtype=tl.int32)
    for start in range(0, n_pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        chosen = tl.load(experts + pair, mask=pair < n_pairs, other=0).to(tl.int32)
        is_before = (chosen < expert) | ((chosen == expert) & (pair < begin))
        counts += (is_before & (pair < n_pairs)).to(tl.int32)
    row = tl.sum(counts, axis=0)
    for start in range(begin, end, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        chosen = tl.load(experts + pair, mask=pair < end, other=0).to(tl.int32)
        is_chosen = (chosen == expert) & (pair < end)
        rows = row + tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        tl.store(order + rows, pair, mask=is_chosen)
        tl.store(inverse + pair, rows, mask=is_chosen)
        row += tl.sum(is_chosen.to(tl.int32), axis=0)
    if chunk == n_chunks - 1:
        tl.store(ends + expert, row)


@triton.jit
def gather_kernel(
    x: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write row order[i] // K of x to row i of out (N, D)."""
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(order + row) // K).to(tl.int64)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = column < D
        tl.store(out + row * D + column, tl.load(x + token * D + column, mask=mask), mask=mask)


@triton.jit
def quantize_kernel(
    rows: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    D: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write row i (D,) in 8 bits, and its scale."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros([WIDTH], dtype=tl.float32)
    zeros = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        value = tl.load(rows + row * D + column, mask=column < D, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
        zeros += 0.0 * value  # NaN, which a maximum ignores, and inf
    quotient = LARGEST / tl.maximum(tl.max(most, axis=0), SMALLEST)
    factor = (quotient.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    tl.store(scales + row, 1.0 / factor + tl.sum(zeros, axis=0))
    for start in range(0, D, WIDTH):  # from the cache
        column = start + tl.arange(0, WIDTH)
        mask = column < D
        value = tl.load(rows + row * D + column, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(values + row * D + column, value.to(values.dtype.element_ty), mask=mask)


@triton.jit
def quantize_mx_kernel(
    x: tl.tensor,
    inverse: tl.tensor,
    ends: tl.tensor,
    values: tl.tensor,
    tiles: tl.tensor,
    n_experts: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write row i (D,) in MXFP8 to row i, or a token to its K rows, with scales in tiles.

    Numbers are those of `plain_steps.quantize_mx` and `swizzle_scales`.

    Args:
        x: rows (N, D), or tokens if K is positive.
        inverse: (N,), the row of each pair; not read if K is 0.
        ends: (n_experts,).
        values: (N, D).
        tiles: scales in the layout of `plain_steps.swizzle_scales`; zeros before.
        n_experts: E.
        D: length of a row.
        K: choices of a token; 0: x are sorted rows.
        EXPERTS: a power of two, n_experts at least.
        WIDTH: values that are loaded at a time.
    """
    source = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < n_experts, other=0x7FFFFFFF)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < n_experts), other=0)
    padded = tl.cdiv(end - begin, 128) * 128
    for choice in tl.static_range(K if K > 0 else 1):
        row = source
        if K > 0:
            row = tl.load(inverse + source * K + choice).to(tl.int64)
        # position of the row's first scale
        is_before = end <= row
        in_tiles = tl.sum(tl.where(is_before, padded, 0), axis=0)
        in_tiles += row - tl.max(tl.where(is_before, end, 0), axis=0)
        line = in_tiles // 128 * 128 * (tl.cdiv(D // 32, 4) * 4)
        line += in_tiles % 32 * 16 + in_tiles % 128 // 32 * 4
        for start in range(0, D // 32, WIDTH // 32):
            block = start + tl.arange(0, WIDTH // 32)
            column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
            mask = column < D
            value = tl.load(x + source * D + column, mask=mask, other=0.0).to(tl.float32)
            most = tl.max(tl.abs(value), axis=1)
            zero = tl.sum(0.0 * value, axis=1)  # NaN of NaN, which a maximum ignores, and of inf
            exponent = ((most.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
            exponent = tl.maximum(exponent, 0)
            factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            scale = tl.where(zero == zero, exponent, 255)
            position = line + block // 4 * 512 + block % 4
            tl.store(tiles + position, scale.to(tl.uint8), mask=block < D // 32)
            low = (value * factor[:, None]).to(values.dtype.element_ty)
            tl.store(values + row * D + column, low, mask=mask)


@triton.jit
def glu_kernel(
    a: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    F: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write act(a) * b, or act(a), to row i of h (N, F)."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, F, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = column < F
        value = _act(tl.load(a + row * F + column, mask=mask, other=0.0).to(tl.float32), ACT)
        if GATED:
            value *= tl.load(b + row * F + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(h + row * F + column, value, mask=mask)


@triton.jit
def glu_backward_kernel(
    dh: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    h: tl.tensor,
    da: tl.tensor,
    db: tl.tensor,
    inner: tl.tensor,
    F: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Recompute h, apply the router weight, and write the weight's gradient to `inner`."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row).to(tl.int64)
    weight = tl.load(weights + pair).to(tl.float32)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, F, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask, at = column < F, row * F + column
        grad = tl.load(dh + at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        s = _act(gate, ACT)
        value, slope = s, _slope(gate, ACT)
        if GATED:
            up = tl.load(b + at, mask=mask, other=0.0).to(tl.float32)
            value *= up
            slope *= up
            tl.store(db + at, grad * weight * s, mask=mask)
        total += grad * value
        tl.store(h + at, value * weight, mask=mask)
        tl.store(da + at, grad * weight * slope, mask=mask)
    tl.store(inner + pair, tl.sum(total, axis=0))


@triton.jit
def combine_kernel(
    rows: tl.tensor,
    more: tl.tensor,
    inverse: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MORE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write the weighted sum of the K rows of token t to row t of out (T, D)."""
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = column < D
        total = tl.zeros([WIDTH], dtype=tl.float32)
        for choice in tl.static_range(K):
            at = tl.load(inverse + token * K + choice).to(tl.int64) * D + column
            value = tl.load(rows + at, mask=mask, other=0.0).to(tl.float32)
            if MORE:
                value += tl.load(more + at, mask=mask, other=0.0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + token * K + choice).to(tl.float32)
            total += value
        tl.store(out + token * D + column, total, mask=mask)


@triton.jit
def combine_backward_kernel(
    grad: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    D: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write the weighted gradient of a token to row i of out; the weight's gradient to `inner`."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row).to(tl.int64)
    token = pair // K
    weight = tl.load(weights + pair).to(tl.float32)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        mask = column < D
        value = tl.load(grad + token * D + column, mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(rows + row * D + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * D + column, value * weight, mask=mask)
    tl.store(inner + pair, tl.sum(total, axis=0))


def route(experts: Tensor, n_experts: int) -> SortedRows:
    """`plain_steps.route`."""
    flat = experts.flatten()
    n_pairs = flat.shape[0]
    order, inverse = (flat.new_empty(n_pairs, dtype=torch.int32) for _ in range(2))
    ends = flat.new_empty(n_experts + 1, dtype=torch.int32)  # the last: pairs without an expert
    n_chunks = max(1, min(PROGRAMS // n_experts, triton.cdiv(n_pairs, PAIRS)))
    arguments = (flat, order, inverse, ends, n_pairs, n_chunks)
    with torch.cuda.device_of(flat):
        route_kernel[(n_experts + 1, n_chunks)](*arguments, PAIRS=PAIRS, num_warps=2 * WARPS)
    return SortedRows(order, inverse, ends[:-1])


def gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """`plain_steps.gather`."""
    out = x.new_empty(order.shape[0], x.shape[1])
    _launch(gather_kernel, out, x, order, out, x.shape[1], K=top_k, WIDTH=WIDTH)
    return out


def quantize(rows: Tensor) -> ScaledRows:
    """`plain_steps.quantize`, of contiguous rows."""
    values = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(rows.shape[:-1], dtype=torch.float32)
    d = rows.shape[-1]
    constants = {
        "LARGEST": plain_steps.E4M3_MAX,
        "SMALLEST": plain_steps.SMALLEST,
        "EXPONENT": plain_steps.EXPONENT_BITS,
    }
    flat = rows.view(-1, d)
    _launch(quantize_kernel, flat, flat, values, scales, d, **constants, WIDTH=WIDTH)
    return ScaledRows(values, scales)


quantize_mx = plain_steps.quantize_mx  # of the emulation


def quantize_mx_rows(rows: Tensor, ends: Tensor) -> ScaledRows:
    """`plain_steps.quantize_mx_rows`, of contiguous rows."""
    return _quantize_mx(rows, ends, ends, len(rows), 0)


def gather_mx(x: Tensor, routing: SortedRows, top_k: int) -> ScaledRows:
    """`plain_steps.gather_mx`; each token is read and quantized once."""
    return _quantize_mx(x, routing.inverse, routing.ends, len(routing.inverse), top_k)


def _quantize_mx(x: Tensor, inverse: Tensor, ends: Tensor, n_rows: int, top_k: int) -> ScaledRows:
    """Launch `quantize_mx_kernel` for N rows."""
    d, n_experts = x.shape[1], len(ends)
    values = x.new_empty(n_rows, d, dtype=torch.float8_e4m3fn)
    shape = plain_steps.tiled_shape(n_rows, d // plain_steps.MX_BLOCK, n_experts)
    tiles = x.new_zeros(shape, dtype=torch.uint8)
    sizes = {"K": top_k, "EXPERTS": triton.next_power_of_2(n_experts), "WIDTH": WIDTH}
    _launch(quantize_mx_kernel, x, x, inverse, ends, values, tiles, n_experts, d, **sizes)
    return ScaledRows(values, tiles)


def glu(a: Tensor, b: Tensor | None, activation: str) -> Tensor:
    """`plain_steps.glu`."""
    if activation not in ACTIVATIONS:
        return plain_steps.glu(a, b, activation)
    h, gated = torch.empty_like(a), b is not None
    up = b if gated else a
    _launch(glu_kernel, h, a, up, h, a.shape[1], ACT=activation, GATED=gated, WIDTH=WIDTH)
    return h


def glu_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, weights: Tensor, order: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """`plain_steps.glu_backward`."""
    if activation not in ACTIVATIONS:
        return plain_steps.glu_backward(dh, a, b, weights, order, activation)
    gated = b is not None
    h, da, inner = torch.empty_like(a), torch.empty_like(a), torch.empty_like(weights)
    up, db = (b, torch.empty_like(a)) if gated else (a, None)
    arguments = (dh, a, up, weights, order, h, da, db if gated else da, inner, a.shape[1])
    _launch(glu_backward_kernel, a, *arguments, ACT=activation, GATED=gated, WIDTH=WIDTH)
    return h, da, db, inner


def combine(
    rows: Tensor, inverse: Tensor, weights: Tensor | None, top_k: int, more: Tensor | None = None
) -> Tensor:
    """`plain_steps.combine`."""
    out = rows.new_empty(inverse.shape[0] // top_k, rows.shape[1])
    arguments = (
        rows,
        rows if more is None else more,
        inverse,
        rows if weights is None else weights,
        out,
        rows.shape[1],
    )
    flags = {"WEIGHTED": weights is not None, "MORE": more is not None}
    _launch(combine_kernel, out, *arguments, K=top_k, **flags, WIDTH=WIDTH)
    return out


def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """`plain_steps.combine_backward`."""
    out, inner = torch.empty_like(rows), torch.empty_like(weights)
    arguments = (grad, rows, weights, order, out, inner, rows.shape[1])
    _launch(combine_backward_kernel, rows, *arguments, K=weights.shape[1], WIDTH=WIDTH)
    return out, inner


def _launch(kernel: Any, rows: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch one program for each of `rows`, on their device."""
    if rows.shape[0] == 0:
        return
    with torch.cuda.device_of(rows):
        kernel[(rows.shape[0],)](*arguments, **constants, num_warps=WARPS)
