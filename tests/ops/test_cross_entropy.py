"""The chunked loss against PyTorch's, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from llmfoundry.ops import cross_entropy
from llmfoundry.ops.batch import IGNORE
from llmfoundry.ops.cross_entropy import linear_cross_entropy, reference_cross_entropy


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
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK", 64)
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 64 * 50)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value_and_gradients_equal_pytorchs(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, labels = inputs(dtype)
    loss = linear_cross_entropy(hidden, weight, labels)
    expected = reference_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    ours = torch.autograd.grad(loss * 0.3, (hidden, weight))
    theirs = torch.autograd.grad(expected * 0.3, (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=tolerance * 10, atol=tolerance * 10)


def test_autocast_loss_is_near_float64_and_its_gradients_too() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.dtype == torch.float32
    exact = reference_cross_entropy(hidden.double(), weight.double(), labels)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    ours = torch.autograd.grad(loss, (hidden, weight))
    theirs = torch.autograd.grad(exact, (hidden, weight))
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), right.flatten(), dim=0) > 0.999


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
