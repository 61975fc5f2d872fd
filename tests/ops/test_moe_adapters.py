"""Adapters inside the grouped products, compared with experts whose weights hold W + B A."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmfoundry.ops.moe import mixture as moe_grouped
from llmfoundry.ops.moe.experts import Experts, LowRankExperts
from llmfoundry.ops.moe.mixture import mixture, reference
from tests.ops.moe_layers import LAYERS, Layer, choices, inputs

RANK = 8


def make(layer: Layer, dtype: torch.dtype, *, only: str = "") -> tuple[Tensor, Tensor, Experts]:
    """Leaves as `inputs` makes them, with frozen experts and random adapters that train."""
    x, weights, w = inputs(layer, dtype)
    frozen = w.map(lambda t: t.detach())
    generator = torch.Generator().manual_seed(7)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * 0.3
        return values.to(dtype).requires_grad_()

    n, f, d = layer.experts, layer.f, layer.d
    low = [leaf(n, RANK, d), leaf(n, f, RANK), leaf(n, RANK, d), leaf(n, f, RANK)]
    low += [leaf(n, RANK, f), leaf(n, d, RANK)]
    kept: list[Tensor | None] = list(low)
    for index, name in enumerate(LowRankExperts._fields):
        if (not layer.gated and name.startswith("v1")) or not name.startswith(only):
            kept[index] = None
    low_rank = LowRankExperts(*kept)
    experts = Experts(*frozen.tensors(), activation=w.activation, low=low_rank)  # type: ignore[arg-type]
    return x, weights, experts


def plain(layer: Layer, x: Tensor, weights: Tensor, w: Experts) -> Tensor:
    """The slow reference on W + B A of all experts."""
    low = w.low

    def added(weight: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return weight if weight is None or a is None or b is None else weight + b @ a

    w1, v1 = added(w.w1, low.w1_a, low.w1_b), added(w.v1, low.v1_a, low.v1_b)
    w2 = w.w2
    if low.w2_a is not None and low.w2_b is not None:
        w2 = w2 + (low.w2_b @ low.w2_a).transpose(1, 2)
    assert w1 is not None
    whole = Experts(w1, v1, w2, w.b1, w.bv, w.b2, w.activation)
    return reference(x, weights, choices(layer), whole)


def results(y: Tensor, x: Tensor, weights: Tensor, w: Experts) -> list[Tensor]:
    leaves = [x, weights, *(t for t in w.low if t is not None)]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return [y, *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.parametrize("impl", ["grouped_mm", "torch"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_sum(name: str, impl: str) -> None:
    layer = LAYERS[name]
    x, weights, w = make(layer, torch.float64)
    found = results(mixture(x, weights, choices(layer), w, impl=impl), x, weights, w)
    expected = results(plain(layer, x, weights, w), x, weights, w)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("only", ["w1", "v1", "w2"])
def test_one_matrix_alone_may_be_adapted(only: str) -> None:
    layer = LAYERS["a GLU"]
    x, weights, w = make(layer, torch.float64, only=only)
    found = results(mixture(x, weights, choices(layer), w, impl="grouped_mm"), x, weights, w)
    for one, other in zip(found, results(plain(layer, x, weights, w), x, weights, w), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["a GLU with biases", "an MLP", "experts that nobody chooses"])
def test_the_path_of_accelerators_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    x, weights, w = make(layer, torch.float32)
    expected = results(plain(layer, x, weights, w), x, weights, w)
    monkeypatch.setattr(moe_grouped, "_path", lambda device: moe_grouped.moe_device)
    found = results(mixture(x, weights, choices(layer), w, impl="grouped_mm"), x, weights, w)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_under_autocast_factors_keep_fp32_gradients() -> None:
    layer = LAYERS["a GLU"]
    x, weights, w = make(layer, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(mixture(x, weights, choices(layer), w, impl="grouped_mm"), x, weights, w)
    assert found[0].dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in found[1:])
    for one, other in zip(found, results(plain(layer, x, weights, w), x, weights, w), strict=True):
        distance = (one.float() - other).norm() / other.norm()
        assert distance < 0.02


def test_frozen_experts_cost_no_gradients_and_sums_are_never_built() -> None:
    layer = Layer(tokens=16, d=32, f=64, experts=4, top_k=2)
    x, weights, w = make(layer, torch.float32)
    rows, matrices = 16 * 2, 3 * 32 * 64
    adapters = RANK * 3 * (32 + 64)
    with FlopCounterMode(display=False) as counter:
        y = mixture(x, weights, choices(layer), w, impl="grouped_mm")
        forward = counter.get_total_flops()
        results(y, x, weights, w)
    assert forward == 2 * rows * (matrices + adapters)
    # backward: rows through the frozen matrices once, adapters for their rows and themselves
    assert counter.get_total_flops() - forward == 2 * rows * (matrices + 2 * adapters)
