"""Grouped matmuls of experts in 8-bit floating point (e4m3), with one scale per row.

Entry points: `Matmuls`, for `gpu.py`, and `refusal`. Both operands of a matmul are quantized along
its inner dimension: a row of tokens has one scale, and so has each output column of an expert. The
scales are powers of two, as in torchao's rowwise recipe. `torch._scaled_grouped_mm` multiplies on
NVIDIA Hopper. Elsewhere the emulation multiplies the same quantized values in fp32, so that it
differs in the order and width of sums alone.

Output and gradient of the input are computed like this. Gradients of weights are sums over tokens,
and `gpu.py` computes them in bf16 (torchao's ROWWISE_WITH_GW_HP).

Requirements of `_scaled_grouped_mm` (ATen's GroupedBlas.cpp and ScaledGroupMM.cu): both sides of a
weight are multiples of 16, the left operand is row-major, the right one column-major, the result is
bf16, and there are fewer than 1,024 experts. An expert may have any number of rows: only a ragged
inner dimension would have to be padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.moe.experts import ScaledRows
from llmfoundry.ops.torch_private import scaled_grouped_mm

SCALED, EMULATED = "scaled", "emulated"  # values of `Experts.fp8`
MULTIPLE = 16  # of the sides of a weight
MOST_EXPERTS = 1023
HOPPER = 9  # major compute capability that the kernel is written for


def refusal(device: torch.device, n_experts: int, *, emulate: bool) -> str | None:
    """Return why a device does not multiply experts in fp8; None: it does."""
    if n_experts > MOST_EXPERTS:
        return f"a layer has {n_experts} experts, and fp8 matmuls take {MOST_EXPERTS} at most"
    if emulate:
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return "PyTorch has their fp8 matmuls for NVIDIA Hopper alone"
    major, minor = torch.cuda.get_device_capability(device)
    if major == HOPPER:
        return None
    return f"PyTorch has their fp8 matmuls for compute capability 9.0, and this is {major}.{minor}"


@dataclass(frozen=True)
class Matmuls:
    """Matmuls of sorted rows (N, K) with one matrix (K, M) per expert.

    Attributes:
        ends: (E,), end of each expert's rows.
        fp8: `Experts.fp8`.
        steps: module of memory-bound steps, such as `quantize`.
    """

    ends: Tensor
    fp8: str | None
    steps: Any

    def operand(self, rows: Tensor) -> Tensor | ScaledRows:
        """Return rows as a left operand, which several matmuls may share."""
        return rows if self.fp8 is None else self.steps.quantize(rows)

    def gather(self, x: Tensor, order: Tensor, top_k: int) -> Tensor | ScaledRows:
        """Return rows of x (T, K) as a left operand; see `experts.gather`.

        Tokens are quantized before they are gathered, so that fewer bytes are moved.
        """
        if self.fp8 is None:
            return self.steps.gather(x, order, top_k)
        values, scales = self.steps.quantize(x)
        rows = self.steps.gather(values.view(torch.uint8), order, top_k)
        return ScaledRows(rows.view(values.dtype), scales[order // top_k])

    def right(self, weight: Tensor) -> ScaledRows:
        """Return a weight (E, K, M), quantized along K, as (E, M, K)."""
        return self.steps.quantize(weight.transpose(1, 2).contiguous())

    def __call__(
        self, rows: Tensor | ScaledRows, weight: Tensor, quantized: ScaledRows | None = None
    ) -> Tensor:
        """Multiply an operand (N, K) with a weight (E, K, M).

        Args:
            rows: the result of `operand`.
            weight: in its dtype.
            quantized: the result of `right`, if it is known.
        """
        if isinstance(rows, Tensor):
            return F.grouped_mm(rows, weight, offs=self.ends)
        if len(rows.values) == 0:  # a rank without rows under expert parallelism
            return weight.new_empty(0, weight.shape[2])
        right = self.right(weight) if quantized is None else quantized
        if self.fp8 == EMULATED:
            product = F.grouped_mm(
                rows.dequantized(), right.dequantized().transpose(1, 2), offs=self.ends
            )
            return product.to(weight.dtype)
        columns = right.values.transpose(1, 2)
        return scaled_grouped_mm(rows.values, columns, rows.scales, right.scales, self.ends)
