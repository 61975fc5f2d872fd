"""Chunked log-probabilities against PyTorch's log_softmax, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from llmfoundry.ops.loss import linear_cross_entropy, linear_log_probs, reference_log_probs
from llmfoundry.ops.packed_layout import IGNORE
from tests.ops.test_cross_entropy import SHAPES, inputs, small_chunks

__all__ = ["small_chunks"]  # a fixture of every test here too


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("everywhere", [False, True], ids=["some-labels", "all-labels"])
def test_values_and_gradients_equal_pytorchs(
    dtype: torch.dtype, tolerance: float, name: str, everywhere: bool
) -> None:
    hidden, weight, labels = inputs(dtype)
    labels = labels.clamp(min=0) if everywhere else labels
    counts = torch.linspace(-2, 3, labels.numel(), dtype=dtype).view(labels.shape)
    ours = linear_log_probs(hidden, weight, labels, **SHAPES[name])
    logits = hidden @ weight.T * SHAPES[name].get("scale", 1)
    softcap = SHAPES[name].get("softcap")
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    theirs = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    theirs = torch.where(labels == IGNORE, 0, theirs)
    assert ours.shape == labels.shape and ours.dtype == dtype
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    mine = torch.autograd.grad((ours * counts).sum(), (hidden, weight))
    right = torch.autograd.grad((theirs * counts).sum(), (hidden, weight))
    torch.testing.assert_close(mine, right, rtol=tolerance * 10, atol=tolerance * 10)
    reference = reference_log_probs(hidden, weight, labels, **SHAPES[name])
    torch.testing.assert_close(reference, theirs, rtol=tolerance, atol=tolerance)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, labels = inputs(torch.float64)
    small = (hidden[0, :5].detach().requires_grad_(), weight[:9].detach().requires_grad_())

    def found(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_log_probs(hidden, weight, labels[0, :5] % 9, scale=0.7, softcap=1.5)

    assert torch.autograd.gradcheck(found, small)


@pytest.mark.parametrize("name", SHAPES)
def test_their_sum_is_the_cross_entropy(name: str) -> None:
    hidden, weight, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, **SHAPES[name])
    found = -linear_log_probs(hidden, weight, labels, **SHAPES[name]).sum()
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(x, (hidden, weight)) for x in (found, loss))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_autocast_multiplies_in_bf16_and_adds_in_fp32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_log_probs(hidden, weight, labels)
    assert found.dtype == torch.float32
    low = (hidden.bfloat16() @ weight.bfloat16().T).float()  # the products alone are rounded
    exact = reference_log_probs(low, torch.eye(50), labels)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(found.sum(), (hidden, weight))
    exact = reference_log_probs(hidden.double(), weight.double(), labels)
    theirs = torch.autograd.grad(exact.sum(), (hidden, weight))
    for mine, right in zip(ours, theirs, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), right.flatten(), dim=0) > 0.999


def test_tokens_without_labels_have_neither_value_nor_gradient() -> None:
    hidden, weight, labels = inputs(torch.float32)
    found = linear_log_probs(hidden, weight, torch.full_like(labels, IGNORE))
    found.sum().backward()
    assert not found.any() and not hidden.grad.any() and not weight.grad.any()


def test_a_frozen_head_gets_no_gradient_and_hidden_states_the_same() -> None:
    hidden, weight, labels = inputs(torch.float32)
    both = torch.autograd.grad(linear_log_probs(hidden, weight, labels).sum(), (hidden, weight))
    alone = linear_log_probs(hidden, weight.detach(), labels).sum()
    assert torch.equal(torch.autograd.grad(alone, hidden)[0], both[0])


def test_no_more_than_a_chunk_of_logits_exists_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    multiply = torch.mm

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        made.append(a.shape[0] * b.shape[1])
        return multiply(a, b) if out is None else multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    hidden, weight, labels = inputs(torch.float32)
    linear_log_probs(hidden, weight, labels.clamp(min=0)).sum().backward()
    logits_made = [n for n in made if n % 50 == 0 and n != 50 * 16]
    assert max(logits_made) == 64 * 50 and sum(logits_made) == 2 * 700 * 50  # in both passes
