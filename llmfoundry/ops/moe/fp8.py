"""Grouped matmuls of experts in 8-bit floating point (e4m3): rowwise, or MXFP8.

Entry points: `Matmuls`, for `gpu.py`, and `refusal`, `method_of` and `fault`, for
`models/float8.py`. Both operands of a matmul are quantized along its inner dimension, with scales
that are powers of two. `METHODS` lists how:

    rowwise   one scale for a row of tokens and for an output column of an expert, as in torchao's
              rowwise recipe; on NVIDIA Hopper
    mxfp8     one scale for 32 values of the inner dimension, rounded as in torchao's MXFP8_RCEIL;
              on NVIDIA Blackwell of data centers

`torch._scaled_grouped_mm` multiplies both. Elsewhere an emulation multiplies the same quantized
values in fp32, so that it differs in the order and width of sums alone.

Output and gradient of the input are computed like this. Gradients of weights are sums over tokens,
and `gpu.py` computes them in bf16 (torchao's ROWWISE_WITH_GW_HP and MXFP8_RCEIL_WGRAD_WITH_HP).

Requirements of `_scaled_grouped_mm` (ATen's GroupedBlas.cpp and ScaledGroupMM.cu, MSLK's
grouped_common.cuh for MXFP8): both sides of a weight are multiples of 16, or of 32 for MXFP8, the
left operand is row-major, the right one column-major, the result is bf16, and there are fewer than
1,024 experts. An expert may have any number of rows: only a ragged inner dimension would have to be
padded. PyTorch's own tests of MXFP8 have multiples of 32 rows, and no Blackwell GPU has run this
code yet. `fault` therefore compares a small matmul with the exact result at the start of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.moe.experts import TILE_ROWS, ScaledRows, SortedRows, round_up
from llmfoundry.ops.torch_private import scaled_grouped_mm

ROWWISE, MXFP8, EMULATED = "rowwise", "mxfp8", "_emulated"  # names of methods; a suffix
MOST_EXPERTS = 1023
CAPABILITIES = {9: ROWWISE, 10: MXFP8}  # by major compute capability


@dataclass(frozen=True)
class PlainScales:
    """Quantization with scales in the order of the values.

    Attributes:
        step: name of the function of `experts.py` that quantizes.
    """

    step: str

    def rows(self, rows: Tensor, routing: SortedRows, steps: Any) -> ScaledRows:
        """Return sorted rows (N, K) as a left operand."""
        return self.matrices(rows, steps)

    def gather(self, x: Tensor, routing: SortedRows, top_k: int, steps: Any) -> ScaledRows:
        """Return the sorted rows of tokens x (T, K) as a left operand.

        Tokens are quantized before they are gathered, so that fewer bytes are moved.
        """
        values, scales = self.matrices(x, steps)
        rows = steps.gather(values.view(torch.uint8), routing.order, top_k)
        return ScaledRows(rows.view(values.dtype), scales[routing.order // top_k])

    def matrices(self, matrices: Tensor, steps: Any) -> ScaledRows:
        """Return matrices (E, M, K), quantized along K, as a right operand."""
        return getattr(steps, self.step)(matrices)


class TiledScales:
    """Quantization to MXFP8 with scales in the tiles that tensor cores read; see `PlainScales`."""

    def rows(self, rows: Tensor, routing: SortedRows, steps: Any) -> ScaledRows:
        """Return sorted rows (N, K) as a left operand."""
        return steps.quantize_mx_rows(rows, routing.ends)

    def gather(self, x: Tensor, routing: SortedRows, top_k: int, steps: Any) -> ScaledRows:
        """Return the sorted rows of tokens x (T, K) as a left operand."""
        return steps.gather_mx(x, routing, top_k)

    def matrices(self, matrices: Tensor, steps: Any) -> ScaledRows:
        """Return matrices (E, M, K), quantized along K, as a right operand."""
        n, m, k = matrices.shape
        ends = torch.arange(1, n + 1, dtype=torch.int32, device=matrices.device) * m
        values, scales = steps.quantize_mx_rows(matrices.view(n * m, k), ends)
        used = scales[: n * round_up(m, TILE_ROWS)]  # the size was a bound
        return ScaledRows(values.view(n, m, k), used.view(n, -1))


@dataclass(frozen=True)
class Method:
    """How experts multiply in fp8.

    Attributes:
        scales: quantization of operands.
        multiple: what both sides of a weight must be multiples of.
        multiply: function of a left operand, a right operand and the experts' ends.
    """

    scales: PlainScales | TiledScales
    multiple: int
    multiply: Callable[[ScaledRows, ScaledRows, Tensor], Tensor]


def _scaled(left: ScaledRows, right: ScaledRows, ends: Tensor) -> Tensor:
    columns = right.values.transpose(1, 2)
    return scaled_grouped_mm(left.values, columns, left.scales, right.scales, ends)


def _emulated(left: ScaledRows, right: ScaledRows, ends: Tensor) -> Tensor:
    return F.grouped_mm(left.dequantized(), right.dequantized().transpose(1, 2), offs=ends)


METHODS = {  # by the value of `Experts.fp8`
    ROWWISE: Method(PlainScales("quantize"), 16, _scaled),
    ROWWISE + EMULATED: Method(PlainScales("quantize"), 16, _emulated),
    MXFP8: Method(TiledScales(), 32, _scaled),
    MXFP8 + EMULATED: Method(PlainScales("quantize_mx"), 32, _emulated),
}


def refusal(device: torch.device, n_experts: int, *, emulate: bool) -> str | None:
    """Return why a device does not multiply experts in fp8; None: it does."""
    if n_experts > MOST_EXPERTS:
        return f"a layer has {n_experts} experts, and fp8 matmuls take {MOST_EXPERTS} at most"
    if emulate:
        return None
    has = "PyTorch has their fp8 matmuls for compute capability 9 (Hopper) and 10 (Blackwell)"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{has} of NVIDIA GPUs alone"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in CAPABILITIES else f"{has}, and this is {major}.{minor}"


def method_of(device: torch.device, *, emulate: bool) -> str:
    """Return the key of METHODS for a device that `refusal` accepts.

    The emulation of a GPU is that of its own method, and rowwise elsewhere.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    major = torch.cuda.get_device_capability(device)[0] if is_nvidia else None
    name = CAPABILITIES.get(major or 0, ROWWISE)
    return name + EMULATED if emulate else name


def fault(device: torch.device, steps: Any) -> str | None:
    """Return why a device's MXFP8 matmul cannot be used; None: a small one is exact.

    PyTorch may be built without it, or for another GPU of compute capability 10. The operands are
    numbers that MXFP8 represents, with an expert without rows, experts whose last tile is not full,
    and scales that do not fill a tile. An error in the layout of scales changes the result by
    powers of two.
    """
    generator = torch.Generator("cpu").manual_seed(1)

    def sample(*size: int) -> Tensor:
        numbers = torch.randint(-7, 8, (*size, 3, 32), generator=generator, device="cpu")
        powers = torch.randint(-2, 3, (*size, 3, 1), generator=generator, device="cpu")
        return (numbers * 2.0**powers).flatten(-2).double()

    # the exact result, and the sum of magnitudes, which bounds rounding
    counts = (1, 0, 130, 37)
    parts, matrices = [sample(count) for count in counts], sample(len(counts), 64)
    pairs = list(zip(parts, matrices, strict=True))
    exact = torch.cat([part @ matrix.T for part, matrix in pairs])
    magnitude = torch.cat([part.abs() @ matrix.abs().T for part, matrix in pairs])

    # the device's result
    method, ends = METHODS[MXFP8], torch.tensor(counts, device="cpu").cumsum(0)
    try:
        ends = ends.to(device, torch.int32)
        routing = SortedRows(ends, ends, ends)  # only the ends are read
        rows = torch.cat(parts).to(device, torch.bfloat16)
        left = method.scales.rows(rows, routing, steps)
        right = method.scales.matrices(matrices.to(device, torch.bfloat16), steps)
        product = method.multiply(left, right, ends).double().cpu()
    except Exception as error:  # of whatever kind: experts can stay bf16
        lines = str(error).splitlines() or [type(error).__name__]
        return f"PyTorch's MXFP8 matmul failed: {lines[0]}"
    is_right = bool(((product - exact).abs() <= 2**-8 * magnitude).all())
    return None if is_right else "PyTorch's MXFP8 matmul gave a wrong result in a test"


@dataclass(frozen=True)
class Matmuls:
    """Matmuls of sorted rows (N, K) with one matrix (K, M) per expert.

    Attributes:
        routing: order and ends of the rows.
        fp8: `Experts.fp8`.
        steps: module of memory-bound steps, such as `quantize`.
    """

    routing: SortedRows
    fp8: str | None
    steps: Any

    def operand(self, rows: Tensor) -> Tensor | ScaledRows:
        """Return rows as a left operand, which several matmuls may share."""
        if self.fp8 is None:
            return rows
        return METHODS[self.fp8].scales.rows(rows, self.routing, self.steps)

    def gather(self, x: Tensor, top_k: int) -> Tensor | ScaledRows:
        """Return the rows of tokens x (T, K) as a left operand; see `experts.gather`."""
        if self.fp8 is None:
            return self.steps.gather(x, self.routing.order, top_k)
        return METHODS[self.fp8].scales.gather(x, self.routing, top_k, self.steps)

    def __call__(
        self, rows: Tensor | ScaledRows, weight: Tensor, quantized: ScaledRows | None = None
    ) -> Tensor:
        """Multiply an operand (N, K) with a weight (E, K, M).

        Args:
            rows: the result of `operand`.
            weight: in its dtype.
            quantized: the weight as a right operand, if it is known.
        """
        if isinstance(rows, Tensor):
            return F.grouped_mm(rows, weight, offs=self.routing.ends)
        if len(rows.values) == 0:  # a rank without rows under expert parallelism
            return weight.new_empty(0, weight.shape[2])
        method = METHODS[str(self.fp8)]
        if quantized is None:
            matrices = weight.transpose(1, 2).contiguous()
            quantized = method.scales.matrices(matrices, self.steps)
        return method.multiply(rows, quantized, self.routing.ends).to(weight.dtype)
