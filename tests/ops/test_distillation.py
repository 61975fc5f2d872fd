"""The chunked distillation loss against autograd of the plain formula, torchtune and TRL."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops import loss
from llmfoundry.ops.distillation import (
    DistillationLosses,
    DistillationWeights,
    linear_distillation,
    reference_distillation,
)
from llmfoundry.ops.loss import VocabularyShard, linear_losses
from llmfoundry.ops.packed_layout import IGNORE, TeacherTokens

VOCABULARY, K = 50, 8
SHAPES: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled-and-capped": {"scale": 1.7, "softcap": 3.0},
    "z-loss": {"z_loss_weight": 0.05},
}
WEIGHTS = {
    "forward": DistillationWeights(0.3, 0.7, 0),
    "reverse": DistillationWeights(0.3, 0, 0.7),
    "both, hot": DistillationWeights(0.2, 0.4, 0.4, temperature=2.5),
    "forward alone, cold": DistillationWeights(0, 1, 0, temperature=0.5),
    "cross-entropy alone": DistillationWeights(1, 0, 0),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """700 tokens in chunks of 64, the last one short."""
    monkeypatch.setattr(loss, "MIN_CHUNK", 64)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 64 * VOCABULARY)


def inputs(dtype: torch.dtype, k: int = K) -> tuple[Tensor, Tensor, Tensor, TeacherTokens]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 100, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (7, 100), generator=generator)
    labels[torch.rand(7, 100, generator=generator) < 0.2] = IGNORE
    log_probs = torch.randn(7, 100, VOCABULARY, generator=generator).mul(2).log_softmax(-1)
    top = log_probs.to(dtype).topk(k)
    return hidden, weight, labels, TeacherTokens(top.indices.int(), top.values)


def plain(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TeacherTokens,
    by: DistillationWeights,
    **settings: Any,
) -> DistillationLosses:
    """The formulas of the module's docstring, with one-hot targets over the full vocabulary."""
    logits = hidden @ weight.T * settings.get("scale", 1.0)
    if (cap := settings.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    t, keep = by.temperature, labels != IGNORE
    weights = settings.get("weights")
    factor = keep.to(logits) if weights is None else weights * keep
    # the teacher's distribution: probabilities to the power of 1 / t, 0 outside of the k tokens
    powers = torch.zeros_like(logits).scatter(
        -1, teacher.ids.long(), teacher.log_probs.to(logits).exp() ** (1 / t)
    )
    q = powers / powers.sum(-1, keepdim=True)
    log_student = torch.log_softmax(logits / t, -1)
    forward = (torch.special.xlogy(q, q) - q * log_student).sum(-1)
    log_inside = torch.log_softmax(torch.where(q > 0, logits / t, -1e30), -1)
    ratio = torch.where(q > 0, log_inside - q.clamp(min=1e-300).log(), 0)
    reverse = log_inside.exp() * ratio
    divergence = t**2 * (by.forward * forward + by.reverse * reverse.sum(-1))
    nats = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="none"
    ).view(labels.shape)
    z_loss = settings.get("z_loss_weight", 0.0) * logits.logsumexp(-1).square()
    sums = [(value * factor).sum() for value in (nats, divergence, z_loss)]
    return DistillationLosses(by.cross_entropy * sums[0] + sums[1] + sums[2], *sums)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_losses_and_gradients_are_autograd_of_the_plain_formula(
    name: str, shape: str, weighted: bool
) -> None:
    hidden, weight, labels, teacher = inputs(torch.float64)
    factors = torch.linspace(0.5, 2, labels.numel(), dtype=torch.float64).view(labels.shape)
    settings: dict[str, Any] = {**SHAPES[shape], "weights": factors if weighted else None}
    ours = linear_distillation(hidden, weight, labels, teacher, WEIGHTS[name], **settings)
    right = plain(hidden, weight, labels, teacher, WEIGHTS[name], **settings)
    torch.testing.assert_close(tuple(ours), tuple(right), rtol=1e-12, atol=1e-10)
    assert [value.requires_grad for value in ours] == [True, False, False, False]
    mine = torch.autograd.grad(ours.total * 0.3, (hidden, weight))
    expected = torch.autograd.grad(right.total * 0.3, (hidden, weight))
    torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-11)
    reference = reference_distillation(hidden, weight, labels, teacher, WEIGHTS[name], **settings)
    torch.testing.assert_close(tuple(reference), tuple(right), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("name", WEIGHTS)
def test_fp32_and_autocast_are_near_float64(name: str) -> None:
    hidden, weight, labels, teacher = inputs(torch.float32)
    by = WEIGHTS[name]
    exact = plain(hidden.double(), weight.double(), labels, teacher, by)
    expected = torch.autograd.grad(exact.total, (hidden, weight), retain_graph=True)
    for autocast, tolerance, cosine in ((False, 1e-5, 0.999999), (True, 5e-3, 0.999)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            ours = linear_distillation(hidden, weight, labels, teacher, by)
        assert ours.total.dtype == torch.float32
        torch.testing.assert_close(
            [value.double() for value in ours], [*exact], rtol=tolerance, atol=1e-4
        )
        gradients = torch.autograd.grad(ours.total, (hidden, weight))
        for mine, right in zip(gradients, expected, strict=True):
            assert F.cosine_similarity(mine.flatten(), right.flatten(), dim=0) > cosine


def test_the_cross_entropy_alone_is_the_loss_without_a_teacher() -> None:
    hidden, weight, labels, teacher = inputs(torch.float32)
    ours = linear_distillation(hidden, weight, labels, teacher, WEIGHTS["cross-entropy alone"])
    total, _ = linear_losses(hidden, weight, labels)
    torch.testing.assert_close(ours.total, total)
    assert torch.equal(ours.total, ours.cross_entropy) and ours.divergence == 0


def peers_logits(seed: int) -> Tensor:
    """Four tokens of a vocabulary of 10, as in the run of the other libraries."""
    n = torch.arange(40, dtype=torch.float64)
    return (3 * torch.sin(n * (seed + 0.7) + seed)).view(4, 10)


PEERS = {
    # torchtune 0.6.1 leaves out the teacher's entropy of 1.5199746 in the forward divergence
    "torchtune ForwardKLLoss": (1, 0, 1.0, 3.749487161636 - 1.519974622, 1.187997359963),
    "torchtune ReverseKLLoss": (0, 1, 1.0, 2.072909593582, 1.629317143004),
    "torchtune SymmetricKLLoss": (0.5, 0.5, 1.0, 2.911198377609 - 0.759987311, 1.364964088778),
    "TRL beta=0": (1, 0, 1.0, 2.229512782479, 1.187997308367),
    "TRL beta=1": (0, 1, 1.0, 2.072909619910, 1.629316940673),
    # TRL 1.16.0 has no factor of temperature^2
    "TRL beta=0 temperature=2": (1, 0, 2.0, 4 * 0.915219300800, 4 * 0.469677460394),
    "TRL beta=1 temperature=2": (0, 1, 2.0, 4 * 0.864360280686, 4 * 0.501697167012),
}
"""Shares of both divergences, temperature, and what the library computed from `peers_logits`: the
mean over three labeled tokens, and the sum of the absolute values of the logits' gradient."""


@pytest.mark.parametrize("name", PEERS)
def test_with_all_tokens_of_the_vocabulary_it_is_the_loss_of_other_libraries(name: str) -> None:
    forward, reverse, temperature, value, gradient = PEERS[name]
    student, labels = peers_logits(1).requires_grad_(), torch.tensor([3, IGNORE, 0, 9])
    top = peers_logits(2).log_softmax(-1).topk(10)
    teacher = TeacherTokens(top.indices.int(), top.values)
    by = DistillationWeights(0, forward, reverse, temperature)
    head = torch.eye(10, dtype=torch.float64)
    mean = linear_distillation(student, head, labels, teacher, by).total / 3
    assert mean.item() == pytest.approx(value, abs=1e-6)  # torchtune computes in fp32
    (grad,) = torch.autograd.grad(mean, student)
    assert grad.abs().sum().item() == pytest.approx(gradient, abs=2e-6)
    assert not grad[1].any()


def test_a_truncated_teacher_is_renormalized() -> None:
    """Without its smallest tokens, a teacher is the softmax of the logits of the others."""
    student, labels = peers_logits(1), torch.tensor([3, IGNORE, 0, 9])
    top = peers_logits(2).log_softmax(-1).topk(4)
    hard = torch.full_like(student, -torch.inf).scatter(1, top.indices, top.values)
    expected = F.kl_div(
        student.log_softmax(-1), hard.log_softmax(-1), log_target=True, reduction="none"
    )
    right = torch.where(hard.isinf(), 0, expected)[labels != IGNORE].sum()
    teacher = TeacherTokens(top.indices.int(), top.values)
    by = DistillationWeights(0, 1, 0)
    head = torch.eye(10, dtype=torch.float64)
    ours = linear_distillation(student, head, labels, teacher, by).total
    assert ours.item() == pytest.approx(right.item(), rel=1e-12)


def test_stored_fp16_log_probs_down_to_the_smallest_are_finite() -> None:
    hidden, weight, labels, teacher = inputs(torch.float32)
    log_probs = teacher.log_probs.half()
    log_probs[..., 1:] = torch.finfo(torch.float16).min
    certain = TeacherTokens(teacher.ids, log_probs)
    for by in WEIGHTS.values():
        losses = linear_distillation(hidden, weight, labels, certain, by)
        gradients = torch.autograd.grad(losses.total, (hidden, weight))
        assert all(torch.isfinite(value).all() for value in (*losses, *gradients))


def test_tokens_without_a_label_have_neither_loss_nor_gradient() -> None:
    hidden, weight, labels, teacher = inputs(torch.float32)
    none = torch.full_like(labels, IGNORE)
    losses = linear_distillation(hidden, weight, none, teacher, WEIGHTS["both, hot"])
    losses.total.backward()
    assert not any(losses) and not hidden.grad.any() and not weight.grad.any()


def _sharded(rank: int, folder: str) -> None:
    """Compute the loss on one of two ranks, each with half of the head."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {}
    for name, by in WEIGHTS.items():
        hidden, weight, labels, teacher = inputs(torch.float64)
        first = rank * (VOCABULARY // 2)
        half = weight[first : first + VOCABULARY // 2].detach().requires_grad_()
        assert dist.group.WORLD is not None
        shard = VocabularyShard(dist.group.WORLD, first, VOCABULARY)
        losses = linear_distillation(
            hidden, half, labels, teacher, by, shard=shard, z_loss_weight=0.02, chunk=64
        )
        found[name] = (*losses, *torch.autograd.grad(losses.total, (hidden, half)))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_with_half_the_vocabulary_each_have_the_loss_of_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_sharded, args=(rank, str(tmp_path))) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, by in WEIGHTS.items():
        hidden, weight, labels, teacher = inputs(torch.float64)
        right = plain(hidden, weight, labels, teacher, by, z_loss_weight=0.02)
        of_hidden, of_weight = torch.autograd.grad(right.total, (hidden, weight))
        for found in (first[name], second[name]):
            torch.testing.assert_close(found[:4], tuple(right), rtol=1e-12, atol=1e-10)
        torch.testing.assert_close(
            first[name][4] + second[name][4], of_hidden, rtol=1e-9, atol=1e-9
        )
        heads = torch.cat([first[name][5], second[name][5]])
        torch.testing.assert_close(heads, of_weight, rtol=1e-9, atol=1e-9)
