"""The chunked loss against PyTorch's, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from llmfoundry.ops import loss
from llmfoundry.ops.loss import (
    cap,
    linear_cross_entropy,
    linear_losses,
    reference_cross_entropy,
)
from llmfoundry.ops.packed_layout import IGNORE

SHAPES: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 2.5},
    "scaled-and-capped": {"scale": 1.7, "softcap": 3.0},
}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 100, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 50, (7, 100), generator=generator)
    labels[torch.rand(7, 100, generator=generator) < 0.2] = IGNORE
    return hidden, weight, labels


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """700 tokens in chunks of 64, the last one short."""
    monkeypatch.setattr(loss, "MIN_CHUNK", 64)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 64 * 50)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value_and_gradients_equal_pytorchs(
    dtype: torch.dtype, tolerance: float, name: str
) -> None:
    hidden, weight, labels = inputs(dtype)
    loss = linear_cross_entropy(hidden, weight, labels, **SHAPES[name])
    expected = reference_cross_entropy(hidden, weight, labels, **SHAPES[name])
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(loss * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(expected * 0.3, (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=tolerance * 10, atol=tolerance * 10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_z_loss_is_autograd_of_the_plain_formula(
    dtype: torch.dtype, tolerance: float, name: str, weighted: bool
) -> None:
    hidden, weight, labels = inputs(dtype)
    scale, softcap = SHAPES[name].get("scale", 1.0), SHAPES[name].get("softcap")
    logits = hidden @ weight.T * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    factors = torch.linspace(0.5, 2, labels.numel(), dtype=dtype).view(labels.shape)
    factors = factors if weighted else torch.ones_like(factors)
    z_loss = 0.05 * (factors * logits.logsumexp(-1).square())[labels != IGNORE].sum()
    nats = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    total = (nats * factors.flatten()).sum() + z_loss
    settings = {**SHAPES[name], "z_loss_weight": 0.05, "weights": factors if weighted else None}
    ours = linear_losses(hidden, weight, labels, **settings)
    torch.testing.assert_close(ours, (total, z_loss), rtol=tolerance, atol=tolerance)
    assert not ours[1].requires_grad
    mine = torch.autograd.grad(ours[0] * 0.3, (hidden, weight))
    right = torch.autograd.grad(total * 0.3, (hidden, weight))
    torch.testing.assert_close(mine, right, rtol=tolerance * 10, atol=tolerance * 10)
    reference = reference_cross_entropy(hidden, weight, labels, **settings)
    torch.testing.assert_close(reference, total, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, labels = inputs(torch.float64)
    small = (hidden[0, :5].detach().requires_grad_(), weight[:9].detach().requires_grad_())

    def loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, labels[0, :5] % 9, scale=0.7, softcap=1.5)

    assert torch.autograd.gradcheck(loss, small)


def test_logits_are_scaled_and_then_capped() -> None:
    logits = torch.linspace(-40, 40, 33)
    torch.testing.assert_close(cap(logits, 0.5, 6.0), 6 * torch.tanh(logits * 0.5 / 6))
    assert cap(logits, 1.0, None) is logits
    low = cap(logits.bfloat16(), 0.3, 6.0)
    assert low.dtype == torch.bfloat16  # rounded once, at the end
    assert torch.equal(low, (6 * torch.tanh(logits.bfloat16().float() * 0.3 / 6)).bfloat16())


@pytest.mark.parametrize("name", SHAPES)
def test_autocast_loss_is_near_float64_and_its_gradients_too(name: str) -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, **SHAPES[name])
    assert loss.dtype == torch.float32
    exact = reference_cross_entropy(hidden.double(), weight.double(), labels, **SHAPES[name])
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    ours = torch.autograd.grad(loss, (hidden, weight))
    theirs = torch.autograd.grad(exact, (hidden, weight))
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), right.flatten(), dim=0) > 0.999


def test_the_divisor_of_the_mean_is_not_rounded_to_bf16() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    whole, part = (
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) / n, hidden)[0].double()
        for n in (1, 491)
    )
    ratio = (part * whole).sum() / whole.square().sum()  # roundings cancel, a bias stays
    assert ratio.item() == pytest.approx(1 / 491, rel=5e-4)  # bfloat16(1 / 491) is off by 0.36 %


def test_rows_without_labels_cost_nothing() -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, reference_cross_entropy(hidden, weight, labels).detach())
