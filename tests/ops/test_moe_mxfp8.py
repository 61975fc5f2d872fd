"""MXFP8 of experts: blocks and tiles of torchao, of plain loops, and of what the kernel reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmfoundry.ops.moe import experts as moe_steps
from llmfoundry.ops.moe.experts import Experts, quantize_mx, swizzle_scales
from llmfoundry.ops.moe.fp8 import EMULATED, METHODS, MXFP8, fault
from llmfoundry.ops.moe.mixture import mixture
from tests.ops.moe_layers import Layer, choices, gradients, inputs
from tests.ops.test_moe_fp8 import in_fp8

CPU = torch.device("cpu")
TINY = 448 * 2.0**-127  # largest magnitude of the smallest scale; torchao writes zeros below


def of_torchao(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values and scales of torchao's training recipe, as bytes."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode.RCEIL
    scales, values = mx.to_mx(rows, torch.float8_e4m3fn, 32, mode)
    return values.view(torch.uint8), scales.view(torch.uint8)


def test_every_largest_value_of_bf16_gives_torchaos_block() -> None:
    """All positive finite numbers, with the values of a block below them."""
    draws = torch.Generator().manual_seed(3)
    most = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    shares = torch.rand(len(most), 32, generator=draws) * 2 - 1
    shares[:, 7] = 1
    rows = most[:, None] * shares.bfloat16()
    mine, (values, scales) = quantize_mx(rows), of_torchao(rows)
    assert torch.equal(mine.scales, scales)
    is_normal = most > TINY
    assert is_normal.sum() > 30_000
    assert torch.equal(mine.values.view(torch.uint8)[is_normal], values[is_normal])


@pytest.mark.parametrize("shape", [(400, 96), (3, 50, 64), (0, 32)])
def test_blocks_of_fp32_are_torchaos(shape: tuple[int, ...]) -> None:
    draws = torch.Generator().manual_seed(4)
    rows = torch.randn(shape, generator=draws) * torch.randn(shape, generator=draws).exp() ** 4
    rows[:2] = 0
    mine, (values, scales) = quantize_mx(rows), of_torchao(rows)
    assert torch.equal(mine.values.view(torch.uint8), values)
    assert torch.equal(mine.scales, scales)


def test_scales_are_rounded_up_at_448_times_a_power_of_two() -> None:
    """The next number of fp32 above it has twice the scale; a logarithm in fp32 would miss it."""
    most = 448 * 2.0 ** torch.arange(-100, 100)
    above = torch.nextafter(most, torch.tensor(torch.inf))
    rows = torch.stack([most, above]).unsqueeze(-1).expand(-1, -1, 32).contiguous()
    scales = quantize_mx(rows).scales[..., 0].int() - 127
    exponents = torch.arange(-100, 100)
    assert torch.equal(scales, torch.stack([exponents, exponents + 1]).int())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_becomes_nan_alone(bad: float) -> None:
    rows = torch.randn(3, 96)
    rows[1, 40] = bad
    back = quantize_mx(rows).dequantized()
    assert back[1, 32:64].isnan().all() and back.isfinite().sum() == 8 * 32


ENDS = {
    "uneven": [3, 131, 259, 700],
    "without rows": [0, 0, 128, 128, 129, 129],
    "rows after the last end": [5, 200],
    "one": [700],
    "no rows at all": [0, 0],
}


def in_tiles(scales: Tensor, ends: list[int]) -> dict[tuple[int, int], int]:
    """Place of each scale by plain loops: expert after expert, tile after tile, line after line."""
    places, offset, begin = {}, 0, 0
    across = -(-scales.shape[1] // 4)
    for end in [*ends, len(scales)]:  # and of rows after the last end
        for first in range(begin, end, 128):
            for tile in range(across):
                for line in range(32):
                    for quarter in range(4):
                        for column in range(4):
                            row = first + quarter * 32 + line
                            if row < end and tile * 4 + column < scales.shape[1]:
                                places[row, tile * 4 + column] = offset
                            offset += 1
        begin = end
    return places


@pytest.mark.parametrize("columns", [1, 4, 9])
@pytest.mark.parametrize("name", ENDS)
def test_scales_lie_in_tiles(name: str, columns: int) -> None:
    ends = ENDS[name]
    n_rows = 0 if name == "no rows at all" else 700
    scales = torch.randint(1, 255, (n_rows, columns), dtype=torch.uint8)
    tiles = swizzle_scales(scales, torch.tensor(ends, dtype=torch.int32))
    assert tiles.is_contiguous() and tiles.shape[0] >= n_rows
    assert (tiles.shape[0] % 128, tiles.shape[1] % 4) == (0, 0)
    places = in_tiles(scales, ends)
    assert len(places) == n_rows * columns
    right = torch.zeros_like(tiles).flatten()
    for (row, column), place in places.items():
        right[place] = scales[row, column]
    assert torch.equal(tiles.flatten(), right)


@pytest.mark.parametrize("columns", [2, 4, 12])
def test_tiles_are_torchaos(columns: int) -> None:
    quant = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    scales = torch.randint(1, 255, (700, columns), dtype=torch.uint8)
    for ends in (ENDS["uneven"], [0, 0, 128, 128, 699, 700, 700]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        mine = swizzle_scales(scales, offsets).flatten()
        if columns % 4 == 0:  # theirs has room for no other number
            right, _ = quant.torch_to_blocked_2d_M_groups(scales, offsets)
            right = right.flatten()
            size = min(len(mine), len(right))
            assert torch.equal(mine[:size], right[:size])
            assert not mine[size:].any() and not right[size:].any()
    weight = torch.randn(5, 200, 32 * columns).bfloat16()
    found = METHODS[MXFP8].scales.matrices(weight, moe_steps)
    values, scales = of_torchao(weight)
    assert torch.equal(found.values.view(torch.uint8), values)
    assert torch.equal(found.scales, quant.torch_to_blocked_per_group_3d(scales))


def kernel(
    left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor, **settings: Any
) -> Tensor:
    """What MSLK's grouped_common.cuh reads of each operand, multiplied in float64.

    By flat addresses: the rows of an expert, its matrix, and the first scale of both.
    """
    (n, k), (_, _, m) = left.shape, right.shape
    across = -(-(k // 32) // 4)
    product, begin, first_scale = torch.full((n, m), torch.nan), 0, 0
    matrices, numbers = right.transpose(1, 2).contiguous(), left_scales.view(torch.uint8).flatten()
    weight_numbers = right_scales.view(torch.uint8).flatten()
    size_of_weight = -(-m // 128) * 128 * across * 4

    def scaled(values: Tensor, numbers: Tensor) -> Tensor:
        row, column = torch.arange(len(values))[:, None], torch.arange(k // 32)
        place = (row // 128 * across + column // 4) * 512
        place = place + row % 32 * 16 + row // 32 % 4 * 4 + column % 4
        factors = (numbers[place].double() - 127).exp2().repeat_interleave(32, 1)
        return values.double() * factors

    for e, end in enumerate(settings["offs"].tolist()):
        rows = scaled(left[begin:end], numbers[first_scale:])
        matrix = scaled(matrices[e], weight_numbers[e * size_of_weight :])
        product[begin:end] = (rows @ matrix.T).float()
        first_scale += -(-(end - begin) // 128) * 128 * across * 4
        begin = end
    return product.to(settings["out_dtype"])


LAYERS = {
    "a GLU": Layer(tokens=150, d=64, f=96),
    "an MLP": Layer(tokens=60, d=160, f=288, gated=False, activation="gelu", biased=True),
    "experts that nobody chooses": Layer(tokens=130, d=32, f=64, load="first"),
    "skewed load": Layer(tokens=200, d=128, f=64, load="skewed"),
}


@pytest.mark.parametrize("known", [False, True], ids=["quantized", "quantized before"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_the_kernel_finds_the_scales_of_the_emulation(
    monkeypatch: pytest.MonkeyPatch, layer: Layer, known: bool
) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    found = []
    for method in (MXFP8, MXFP8 + EMULATED):
        x, weights, w = inputs(layer, torch.bfloat16)
        some: Experts = in_fp8(w, method, known=known)
        y = mixture(x, weights, choices(layer), some, impl="grouped_mm")
        found.append({"y": y.detach(), **gradients(y, x, weights, w)})
    for name, tensor in found[0].items():
        other = found[1][name].double()
        assert (tensor.double() - other).norm() <= 4e-3 * other.norm(), name


def test_a_gpu_that_multiplies_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A right result, one of scales in another order, none, and NaN."""
    assert "failed: " in str(fault(CPU, moe_steps))  # PyTorch has no such operator for a CPU
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    assert fault(CPU, moe_steps) is None

    def turned(left: Tensor, right: Tensor, scales: Tensor, *rest: Tensor, **settings: Any) -> Any:
        return kernel(left, right, scales.view(torch.uint8).roll(1, 1), *rest, **settings)

    def nothing(left: Tensor, right: Tensor, *scales: Tensor, **settings: Any) -> Tensor:
        return torch.full((len(left), right.shape[2]), torch.nan)

    for wrong in (turned, nothing):
        monkeypatch.setattr(torch, "_scaled_grouped_mm", wrong)
        assert "wrong result" in str(fault(CPU, moe_steps))
