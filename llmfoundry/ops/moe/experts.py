"""Experts of a layer, routing of rows to them, and the steps between matmuls, in PyTorch.

Entry points: `Experts`, `route`, and the memory-bound steps `gather` to `combine`. A row is a
(token, choice) pair. Rows are sorted by expert, in the order of their tokens, so that each expert
reads one segment; `mixture.py` sorts once per layer. Nothing waits for the device, because row
counts stay on it. `gpu.py` uses these steps where Triton does not run; `triton_kernels.py` has the
same functions as kernels with one pass each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.activations import Activation, from_text
from llmfoundry.ops.nf4 import Nf4Layout, dequantize


class LowRankExperts(NamedTuple):
    """Low-rank adapters of each expert's weights, with their scale in b; None: no adapter.

    For w1 and v1 the result for a row x becomes x w1^T + (x a^T) b^T. For w2, which is not
    transposed, h w2 becomes h w2 + (h a^T) b^T. The sum of a weight and b a is never materialized.

    Attributes:
        w1_a, w1_b: (E, r, d) and (E, f, r).
        v1_a, v1_b: (E, r, d) and (E, f, r).
        w2_a, w2_b: (E, r, f) and (E, d, r).
    """

    w1_a: Tensor | None = None
    w1_b: Tensor | None = None
    v1_a: Tensor | None = None
    v1_b: Tensor | None = None
    w2_a: Tensor | None = None
    w2_b: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> LowRankExperts:
        """Return the adapters with a function applied to every tensor."""
        return LowRankExperts(*(None if t is None else change(t) for t in self))

    def of(self, e: int) -> LowRankExperts:
        """Return the adapters of one expert, without the first dimension."""
        return self.map(lambda stacked: stacked[e])


NO_ADAPTERS = LowRankExperts()
E4M3_MAX = 448.0
SMALLEST = 1e-12  # magnitude that a scale is computed for, as in torchao
EXPONENT_BITS = 0x7F800000  # of a positive fp32 number
MX_BLOCK = 32  # values that share a scale in MXFP8
MX_CARRY = 0x1FFFFF  # raises the exponent of an fp32 number whose mantissa is above 1.75
MX_EXPONENT = 8  # the greatest of e4m3 is 1.75 * 2^8
MX_LARGEST = 254  # biased exponents of a scale and of its reciprocal add up to it
MX_NAN = 255  # of e8m0
TILE_ROWS, TILE_COLUMNS = 128, 4  # scales of a tile


@dataclass(frozen=True)
class Experts:
    """E feed-forward layers: act(x w1^T) w2, or with a gate (act(x w1^T) * x v1^T) w2.

    Weights are stacked as in megablocks and DBRX; w2 is not transposed. Frozen weights may be
    quantized per expert: each tensor is then uint8 (E, packing.nbytes) and has no gradient.

    Attributes:
        w1: (E, f, d), the gate; in an MLP the up projection.
        v1: (E, f, d), the up projection of a GLU; None: an MLP.
        w2: (E, f, d), the down projection.
        b1: (E, f) or None.
        bv: (E, f) or None.
        b2: (E, d) or None.
        activation: name and arguments, in the format of `activations.to_text`.
        low: adapters.
        packing: byte layout of one expert's matrix; None: not quantized.
        fp8: how matmuls in fp8 are computed, a key of `fp8.METHODS`; None: in the rows' dtype.
        quantized: values and scales of the matrices in fp8, if they are known: of w1, v1 and w2 in
            this order, each quantized along d, with values (E, f, d), and along f, with values
            (E, d, f). The scales have the shape that the method needs.
    """

    w1: Tensor
    v1: Tensor | None
    w2: Tensor
    b1: Tensor | None = None
    bv: Tensor | None = None
    b2: Tensor | None = None
    activation: str = "silu"
    low: LowRankExperts = NO_ADAPTERS
    packing: Nf4Layout | None = None
    fp8: str | None = None
    quantized: tuple[Tensor, ...] = ()

    @property
    def act(self) -> Activation:
        """Activation and its derivative."""
        return from_text(self.activation)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Weights and biases in the order of the fields."""
        return self.w1, self.v1, self.w2, self.b1, self.bv, self.b2

    def every(self) -> tuple[Tensor | None, ...]:
        """Weights, biases and adapters."""
        return *self.tensors(), *self.low

    def flat(self) -> tuple[list[Tensor], str]:
        """Return the tensors that are set, and a text of the rest, for custom operators."""
        names = (*EXPERT_FIELDS, *LowRankExperts._fields)
        there = {n: t for n, t in zip(names, self.every(), strict=True) if t is not None}
        there |= {f"{QUANTIZED}{i}": t for i, t in enumerate(self.quantized)}
        packing = self.packing
        packed = "" if packing is None else f"{packing.values} {int(packing.double)}"
        return [*there.values()], f"{' '.join(there)}|{self.activation}|{packed}|{self.fp8 or ''}"

    @staticmethod
    def from_flat(tensors: Sequence[Tensor], how: str) -> Experts:
        """Return the experts from the result of `flat`."""
        names, activation, packing, fp8 = read_how(how)
        there = dict(zip(names, tensors, strict=True))
        fields: dict[str, Any] = {name: there.pop(name, None) for name in EXPERT_FIELDS}
        quantized = tuple(there.pop(name) for name in names if name.startswith(QUANTIZED))
        return Experts(
            **fields,
            activation=activation,
            low=LowRankExperts(**there),
            packing=packing,
            fp8=fp8,
            quantized=quantized,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Experts:
        """Return the experts with a function applied to every tensor but `quantized`."""

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        biases = (maybe(self.b1), maybe(self.bv), maybe(self.b2))
        return Experts(
            change(self.w1),
            maybe(self.v1),
            change(self.w2),
            *biases,
            activation=self.activation,
            low=self.low.map(change),
            packing=self.packing,
            fp8=self.fp8,
            quantized=self.quantized,
        )

    def in_fp8(self, name: str, *, along: str) -> ScaledRows | None:
        """Return w1, v1 or w2 quantized along dimension d or f, if it is known."""
        if not self.quantized:
            return None
        names = [n for n in ("w1", "v1", "w2") if getattr(self, n) is not None]
        first = 4 * names.index(name) + (2 if along == "f" else 0)
        return ScaledRows(*self.quantized[first : first + 2])

    def hidden(self, d: int) -> int:
        """Return f, for tokens of width d."""
        return self.w1.shape[1] if self.packing is None else self.packing.values // d

    def matrix(self, stacked: Tensor, d: int, dtype: torch.dtype) -> Tensor:
        """Return w1, v1 or w2 in `dtype`: of all experts (E, f, d), or of a single one (f, d)."""
        if self.packing is None:
            return stacked.to(dtype)
        shape, double = (self.hidden(d), d), self.packing.double
        if stacked.ndim == 1:
            return dequantize(stacked, shape, dtype, double=double)
        out = torch.empty(len(stacked), *shape, dtype=dtype, device=stacked.device)
        for one, data in zip(out, stacked, strict=True):
            one.copy_(dequantize(data, shape, dtype, double=double))
        return out

    def one(self, e: int, d: int, dtype: torch.dtype) -> Experts:
        """Return one expert in `dtype`, with matrices (f, d), without the first dimension."""
        return self.map(lambda stacked: stacked[e]).dense(d, dtype)

    def dense(self, d: int, dtype: torch.dtype) -> Experts:
        """Return the experts in `dtype`, dequantized."""

        def change(tensor: Tensor) -> Tensor:
            is_bytes = not tensor.is_floating_point()
            return self.matrix(tensor, d, dtype) if is_bytes else tensor.to(dtype)

        return dataclasses.replace(self.map(change), packing=None)


EXPERT_FIELDS = ("w1", "v1", "w2", "b1", "bv", "b2")
QUANTIZED = "quantized"  # names of `Experts.quantized` in `Experts.flat`, before a number


@lru_cache
def read_how(how: str) -> tuple[tuple[str, ...], str, Nf4Layout | None, str | None]:
    """Return tensor names, activation, byte layout and fp8 from the text of `Experts.flat`."""
    names, activation, packed, fp8 = how.split("|")
    packing = None
    if packed:
        values, double = packed.split()
        packing = Nf4Layout(int(values), double == "1")
    return tuple(names.split()), activation, packing, fp8 or None


class SavedActivations(NamedTuple):
    """Pre-activations of all N = T * k rows, saved for the backward pass; on a CPU with padding.

    Attributes:
        gate: (N, f), x w1^T + b1; (N, 0) without a backward pass.
        up: the same for v1; no rows in an MLP.
    """

    gate: Tensor
    up: Tensor


class Gradients(NamedTuple):
    """Result of a backward pass.

    Attributes:
        x: (T, d).
        weights: (T, k).
        experts: in the order of `Experts.tensors`; None: the weight is absent or frozen.
        low: gradients of the adapters; None: no adapter.
    """

    x: Tensor
    weights: Tensor
    experts: tuple[Tensor | None, ...]
    low: LowRankExperts = NO_ADAPTERS


class ScaledRows(NamedTuple):
    """Rows in 8-bit floating point, with scales.

    Attributes:
        values: (..., K), float8_e4m3fn.
        scales: factors of the values: (...), fp32, one for a row; or (..., K / 32), bytes of
            float8_e8m0fnu, one for a block of MXFP8. `swizzle_scales` arranges the latter in tiles.
    """

    values: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Return the rows in fp32, of scales that are not in tiles."""
        if self.scales.dtype == torch.float32:
            return self.values.float() * self.scales[..., None]
        factors = self.scales.view(torch.float8_e8m0fnu).float()
        blocks = self.values.float().unflatten(-1, (-1, MX_BLOCK))
        return (blocks * factors[..., None]).flatten(-2)


class SortedRows(NamedTuple):
    """Sorted rows of a layer, N = T * k. Integers are 32-bit, as they are saved for backward.

    Attributes:
        order: (N,), the pair t * k + choice of each sorted row.
        inverse: (N,), the sorted row of each pair.
        ends: (E,), end of each expert's segment: the argument `offs` of grouped_mm.
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor


def route(experts: Tensor, n_experts: int) -> SortedRows:
    """Sort the pairs of experts (T, k), integers up to `n_experts`, by expert.

    `n_experts` itself stands for no expert. Such pairs come last, after the last end: no matmul
    computes their rows, whose results are undefined.
    """
    flat = experts.flatten().to(_key_dtype(n_experts))
    by_expert, order = flat.sort(stable=True)
    rows = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
    inverse = torch.empty_like(rows)
    inverse[order] = rows  # each index occurs once: deterministic
    # ends from the sorted experts: bincount would synchronize
    number = torch.arange(n_experts, dtype=flat.dtype, device=flat.device)
    ends = torch.searchsorted(by_expert, number, right=True, out_int32=True)
    return SortedRows(order.to(torch.int32), inverse, ends)


def _key_dtype(n_experts: int) -> torch.dtype:
    """Return the smallest dtype of expert numbers: a radix sort has one pass per 8 bits."""
    if n_experts < 1 << 8:
        return torch.uint8
    return torch.int16 if n_experts < 1 << 15 else torch.int32


def gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return rows (N, d) of tokens x (T, d): row i is the token of pair order[i], N = T * top_k."""
    return x.index_select(0, order // top_k)


def quantize(rows: Tensor) -> ScaledRows:
    """Quantize rows (..., K) to e4m3; a row with NaN or inf becomes NaN.

    The stored scale is the smallest power of two by which every magnitude divides to at most the
    greatest of e4m3, so that only the rounding of values to 4 significant bits loses information.
    """
    most = torch.linalg.vector_norm(rows, torch.inf, dim=-1, dtype=torch.float32)
    # the greatest power of two that is at most the quotient: its bits without the mantissa
    quotient = E4M3_MAX / most.clamp_min(SMALLEST)
    factors = (quotient.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    values = (rows.float() * factors[..., None]).to(torch.float8_e4m3fn)
    return ScaledRows(values, factors.reciprocal() + 0 * most)


def quantize_mx(rows: Tensor) -> ScaledRows:
    """Quantize rows (..., K) to MXFP8, in blocks of 32 values; a block with NaN or inf becomes NaN.

    The scale of a block is the smallest power of two by which every magnitude divides to at most
    the greatest of e4m3 (RCEIL, the rounding of torchao's training recipes). It is the exponent of
    the largest magnitude, minus 8, and plus 1 if the mantissa is above 1.75. The OCP's MX format
    has no inf; torchao saturates it.
    """
    blocks = rows.float().unflatten(-1, (-1, MX_BLOCK))
    most = blocks.abs().amax(-1)
    exponents = ((most.view(torch.int32) + MX_CARRY) >> 23) - MX_EXPONENT
    exponents = exponents.clamp_min(0)
    factors = ((MX_LARGEST - exponents) << 23).view(torch.float32)
    values = (blocks * factors[..., None]).to(torch.float8_e4m3fn)
    scales = torch.where(most.isfinite(), exponents, MX_NAN)
    return ScaledRows(values.flatten(-2), scales.to(torch.uint8))


def swizzle_scales(scales: Tensor, ends: Tensor) -> Tensor:
    """Arrange the scales of MXFP8 in tiles, as tensor cores read them.

    The layout is PyTorch's SWIZZLE_32_4_4, which cuBLAS's documentation describes. The rows of each
    expert begin at a multiple of 128. A tile of 128 rows and 4 columns is stored as 32 rows of 16
    bytes, with scale (r, c) in row r % 32 at 4 (r // 32) + c. The host does not wait for the number
    of rows, because the size of the result is an upper bound. Other scales are zero, not NaN.

    Args:
        scales: (N, C), bytes.
        ends: (E,), end of each expert's rows. Scales of rows after the last end come last.

    Returns:
        Bytes, in the shape of `tiled_shape`.
    """
    n_rows, n_columns = scales.shape

    # row of each scale, with every expert's rows padded to tiles
    begins = F.pad(ends, (1, 0))
    tiles = (torch.diff(begins) + TILE_ROWS - 1) // TILE_ROWS
    first_rows = F.pad(tiles.cumsum(0) * TILE_ROWS, (1, 0))
    row = torch.arange(n_rows, dtype=ends.dtype, device=ends.device)
    expert = torch.searchsorted(ends, row, right=True)  # E after the last end
    row = (first_rows[expert] + row - begins[expert])[:, None]

    # position of each scale in its tile
    column = torch.arange(n_columns, device=ends.device)
    out = scales.new_zeros(tiled_shape(n_rows, n_columns, len(ends)))
    tiles_across = out.shape[1] // TILE_COLUMNS
    tile = row // TILE_ROWS * tiles_across + column // TILE_COLUMNS
    in_tile = row % 32 * 16 + row % TILE_ROWS // 32 * TILE_COLUMNS + column % TILE_COLUMNS
    position = tile * TILE_ROWS * TILE_COLUMNS + in_tile
    out.view(-1)[position] = scales  # each index occurs once: deterministic
    return out


def tiled_shape(n_rows: int, n_columns: int, n_experts: int) -> tuple[int, int]:
    """Return the shape of `swizzle_scales`, with rows enough for any distribution over experts."""
    most_rows = n_rows + (TILE_ROWS - 1) * n_experts
    return round_up(most_rows, TILE_ROWS), round_up(n_columns, TILE_COLUMNS)


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple that is at least `number`."""
    return -(-number // multiple) * multiple


def quantize_mx_rows(rows: Tensor, ends: Tensor) -> ScaledRows:
    """Quantize sorted rows (N, K) to MXFP8, with scales in tiles; see `swizzle_scales`."""
    values, scales = quantize_mx(rows)
    return ScaledRows(values, swizzle_scales(scales, ends))


def gather_mx(x: Tensor, routing: SortedRows, top_k: int) -> ScaledRows:
    """Return `quantize_mx_rows` of the sorted rows (N, K) of tokens x (T, K); see `gather`."""
    values, scales = quantize_mx(x)
    rows = gather(values.view(torch.uint8), routing.order, top_k).view(values.dtype)
    return ScaledRows(rows, swizzle_scales(gather(scales, routing.order, top_k), routing.ends))


def glu(a: Tensor, b: Tensor | None, activation: str) -> Tensor:
    """Return act(a) * b, (N, f) each, or act(a) if b is None; b is clamped in a clamped GLU."""
    act = from_text(activation)
    s = act.function(a)
    return s if b is None else s * act.up(b)


def glu_backward(
    dh: Tensor, a: Tensor, b: Tensor | None, weights: Tensor, order: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients that follow from dh (N, f), the gradient of the unweighted h.

    Here h = act(a) * b, or act(a).

    Args:
        dh: gradient of h as if every router weight were one.
        a: (N, f).
        b: (N, f) or None.
        weights: (T, k), router weights.
        order: (N,), the pair of each row.
        activation: in the format of `activations.to_text`.

    Returns:
        Weighted h (N, f); gradients of a and b with the weight applied, (N, f); <dh, h>, the
        gradient of the router weights (T, k).
    """
    act, weight = from_text(activation), weights.flatten()[order][:, None]
    s, up = act.function(a), None if b is None else act.up(b)
    h = s if up is None else s * up
    inner = row_dots(dh, h, order, weights)
    dh = (dh * weight).to(a.dtype)
    da = act.backward(dh if up is None else dh * up, a)
    db = None if b is None else act.up_backward(dh * s, b)
    return (h * weight).to(a.dtype), da, db, inner


def combine(
    rows: Tensor, inverse: Tensor, weights: Tensor | None, top_k: int, more: Tensor | None = None
) -> Tensor:
    """Return (T, d), each token's rows summed over its choices, in fp32 or wider.

    Args:
        rows: (N, d).
        inverse: (N,), the row of each pair t * top_k + choice.
        weights: (T, k), factors of the rows; None: 1.
        top_k: choices of a token.
        more: (N, d), added to the rows.
    """
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    picked = rows.index_select(0, inverse).to(wide)
    if more is not None:
        picked += more.index_select(0, inverse)
    picked = picked.view(-1, top_k, rows.shape[1])
    if weights is not None:
        picked *= weights[..., None]
    return picked.sum(1).to(rows.dtype)


def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine`'s weighted rows.

    Args:
        grad: (T, d), of the output.
        rows: (N, d).
        weights: (T, k).
        order: (N,), the pair of each row.

    Returns:
        Gradients of the rows (N, d), in their dtype, and of the weights (T, k).
    """
    grad_rows = gather(grad, order, weights.shape[1])
    grad_weights = row_dots(grad_rows, rows, order, weights)
    grad_rows *= weights.flatten()[order][:, None]  # in place, without an (N, d) copy in fp32
    return grad_rows, grad_weights


def row_dots(a: Tensor, b: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Dot product of rows a and b (N, d), multiplied and summed in the dtype of weights (T, k).

    Returns:
        (T, k): the dot product of each pair's row.
    """
    dots = torch.empty_like(weights).flatten()
    dots[order] = (a.to(weights.dtype) * b).sum(-1)  # each index occurs once: deterministic
    return dots.view_as(weights)
