"""8-bit storage: its error, its size, and what it does to gradients."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from benchmarks.moe import saved_bytes
from llmfoundry.ops.moe import cpu as moe_cpu
from llmfoundry.ops.moe import gpu as moe_device
from llmfoundry.ops.moe import mixture as moe_grouped
from llmfoundry.ops.moe.experts import BLOCK, Experts, pack, packed_width, unpack
from llmfoundry.ops.moe.mixture import mixture
from tests.ops.moe_layers import Layer, choices, distances, inputs, run


@pytest.mark.parametrize("width", [BLOCK, 3 * BLOCK, 40, BLOCK + 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_error_is_at_most_half_a_step_of_the_block(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, width, generator=generator)
    x *= torch.logspace(-20, 20, 9)[:, None]  # rows of all magnitudes
    x = x.to(dtype)
    packed = pack(x)
    assert packed.dtype == torch.int8 and packed.shape == (9, packed_width(width))
    error = (unpack(packed, width, torch.float64) - x.double()).abs()
    for block in range(0, width, BLOCK):
        part = slice(block, block + BLOCK)
        largest = x[:, part].double().abs().amax(1, keepdim=True)
        # the scale itself is rounded to bf16, by one part in 256 at most
        assert (error[:, part] <= largest / 254 * (1 + 2**-8)).all()


def test_zeros_stay_zero_and_a_block_knows_nothing_of_the_next() -> None:
    x = torch.zeros(2, 2 * BLOCK)
    x[0, BLOCK:] = 1e6
    x[1, 3] = 0.5
    restored = unpack(pack(x), 2 * BLOCK, torch.float32)
    assert not restored[x == 0].any()
    torch.testing.assert_close(restored, x, rtol=5e-3, atol=0)


@pytest.mark.parametrize(("compress", "bound"), [(False, 35), (True, 18)])
def test_bytes_that_wait_for_backward(compress: bool, bound: float) -> None:
    """Per token, in d bytes, in bf16 and where k f / d is 8: DBRX's, and each recipe's."""
    layer = Layer(tokens=1024, d=512, f=1024, experts=8, top_k=4)
    x, weights, w = inputs(layer, torch.bfloat16)
    parameters = [None if t is None else torch.nn.Parameter(t.detach()) for t in w.tensors()]
    w = Experts(*parameters, activation=w.activation)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return mixture(x, weights, choices(layer), w, impl="grouped_mm", compress=compress)

    found = saved_bytes(ours, x) / layer.tokens / layer.d
    padding = moe_cpu.kept_rows(layer.top_k * layer.tokens, x.dtype) / (layer.top_k * layer.tokens)
    values = 1 + 2 * 8 * padding  # x and two pre-activations, in units of d
    expected = values * (1 + 2 / BLOCK) if compress else values * 2
    integers = layer.top_k * 3 * 4 / layer.d  # weight, order and inverse of a choice
    assert found == pytest.approx(expected + integers, rel=1e-3)  # ends: E integers
    assert found <= bound


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("path", [moe_cpu, moe_device], ids=["cpu", "device"])
def test_output_is_untouched_and_gradients_are_near(
    monkeypatch: pytest.MonkeyPatch, path: ModuleType, dtype: torch.dtype, gated: bool
) -> None:
    monkeypatch.setattr(moe_grouped, "_path", lambda device: path)
    layer = Layer(tokens=64, d=128, f=256, gated=gated, biased=True)
    exact = run(layer, "grouped_mm", dtype)
    low = run(layer, "grouped_mm", dtype, compress=True)
    assert torch.equal(low["y"], exact["y"])
    found = distances(low, run(layer, "torch", torch.float64))
    assert 0 < max(found.values()) < 2e-2
