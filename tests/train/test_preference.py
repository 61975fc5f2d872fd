"""Objectives of preference tuning against TRL's, and the same on any split of a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmfoundry.data.batch import SequenceBatch, TrainingSequence
from llmfoundry.hf.read_folder import from_hf
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import IGNORE, Batch
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.preference import PreferenceConfig
from llmfoundry.train.optim.optimizers import new_optimizer
from llmfoundry.train.preference_loss import (
    ALMOST_CERTAIN,
    AnswerMeasures,
    Preference,
    answer_log_probs,
    build_preference,
    mismatched,
)
from llmfoundry.train.step import Guard, StepHooks, StepResult, StepSettings, train_step
from tests.train.preference_goldens import (
    CASES,
    GOLDENS,
    REFERENCE,
    SINGLES,
    llama,
    pairs_of,
)

T = 60
Document = tuple[list[int], list[int], int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model and the reference, as transformers saves them."""
    found = {}
    for name, shift in (("model", 0.0), ("reference", REFERENCE)):
        found[name] = tmp_path_factory.mktemp(name)
        llama(shift).save_pretrained(found[name])
    return found


def decoder(folder: Path) -> Decoder:
    config, weights = from_hf(str(folder))
    config.attn_config.attn_impl = "torch"
    model = Decoder(config)
    model.load_state_dict(dict(weights))
    return model


def row(documents: list[Document]) -> TrainingSequence:
    ids = [i for prompt, answer, _ in documents for i in prompt + answer]
    weights = [w for prompt, answer, _ in documents for w in [0] * len(prompt) + [1] * len(answer)]
    lengths = [len(prompt) + len(answer) for prompt, answer, _ in documents]
    sides = [side for *_, side in documents]
    return TrainingSequence(np.array(ids), lengths, 0, np.array(weights, np.float32), sides)


def documents_of(case: str) -> list[Document]:
    if CASES[case]["name"] == "kto":
        return [(prompt, answer, 1 if good else -1) for prompt, answer, good in SINGLES]
    pairs = pairs_of(case)
    return [d for p, good, bad in pairs for d in ((p, good, 1), (p, bad, -1))]


def batch_of(rows: list[list[Document]], reference: Decoder | None) -> Batch:
    batch = SequenceBatch.fill([row(documents) for documents in rows], T, 0).batch(with_layout=True)
    assert batch.answers is not None
    if reference is None:
        return batch
    with torch.no_grad():
        known = Root(reference)(batch.tokens, batch.layout, answer_log_probs(batch))
        moved, _ = mismatched(batch)
        other = Root(reference)(moved.tokens, moved.layout, answer_log_probs(moved))
    return replace(batch, answers=replace(batch.answers, reference=known, mismatched=other))


def objective_of(case: str, switched_off: Any = None) -> Preference:
    config = PreferenceConfig(**CASES[case])
    config.fill()
    objective = build_preference(config, switched_off)
    assert objective is not None
    return objective


def step(
    model: Decoder, batch: Batch, objective: Preference, microbatch: int = 99
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """What a step gives, and its gradients by name."""
    config = OptimizerConfig(name="adamw", lr=1e-6)
    config.fill()
    root, seen = Root(model), {}

    def keep() -> None:
        seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    result = train_step(
        root,
        new_optimizer(root.parameters(), config),
        batch,
        StepSettings(
            microbatch=microbatch,
            autocast=nullcontext,
            clipping=GradientClippingConfig("norm", 1e9),
            objective=objective,
        ),
        number=0,
        guard=Guard(torch.device("cpu")),
        hooks=StepHooks(on_gradients=keep),
    )
    return result, seen


def reported(objective: Preference, result: StepResult) -> dict[str, float]:
    return objective.metrics({name: value.item() for name, value in result.reported.items()})


@pytest.mark.parametrize("case", CASES)
def test_loss_rewards_and_gradients_are_trls(case: str, folders: dict[str, Path]) -> None:
    """All documents of TRL's batch in one packed row, by our decoder; TRL's by its own trainer."""
    golden = json.loads(GOLDENS.read_text())["cases"][case]
    needed = CASES[case]["name"] in ("dpo", "kto")
    batch = batch_of([documents_of(case)], decoder(folders["reference"]) if needed else None)
    objective = objective_of(case)
    result, gradients = step(decoder(folders["model"]), batch, objective)
    close = partial(pytest.approx, rel=1e-5, abs=1e-5)
    assert result.loss.item() == close(golden["loss"])
    assert result.grad_norm.item() == close(golden["norm"])
    assert gradients["lm_head.weight"].sum(1).tolist() == close(golden["head"])
    ours = reported(objective, result)
    theirs = {
        (f"rewards/train/{key}" if key == "kl" else key.replace("/", "/train/")): value
        for key, value in golden["metrics"].items()
    }
    assert {key: ours[key] for key in theirs} == close(theirs)
    assert case != "kto" or ours["rewards/train/kl"] > 0.1, "the estimate must count for something"


def test_kto_of_rows_that_are_not_packed_is_trls_too(folders: dict[str, Path]) -> None:
    """A row of each answer, with the one before it in its padding, on neither side."""
    golden = json.loads(GOLDENS.read_text())["cases"]["kto"]
    documents = documents_of("kto")
    others = [(*document[:2], 0) for document in [documents[-1], *documents[:-1]]]
    rows = [list(pair) for pair in zip(documents, others, strict=True)]
    batch, objective = batch_of(rows, decoder(folders["reference"])), objective_of("kto")
    for microbatch in (1, 3, 99):
        result, gradients = step(decoder(folders["model"]), batch, objective, microbatch)
        close = partial(pytest.approx, rel=1e-5, abs=1e-5)
        assert result.loss.item() == close(golden["loss"])
        assert gradients["lm_head.weight"].sum(1).tolist() == close(golden["head"])
        ours = reported(objective, result)
        assert ours["rewards/train/kl"] == close(golden["metrics"]["kl"])
        assert ours["rewards/train/chosen"] == close(golden["metrics"]["rewards/chosen"])


@cache
def _split_rows(case: str) -> list[list[Document]]:
    """The documents in several rows, one of them empty."""
    found, size = documents_of(case), 2
    cut = [found[n : n + size] for n in range(0, len(found), size)]
    return [cut[0] + cut[1], *cut[2:], [([1, 2], [], 0)], cut[0]]


@pytest.mark.parametrize("case", ["sigmoid", "with-sft", "orpo", "simpo-with-sft", "kto"])
def test_no_split_into_microbatches_changes_a_step(case: str, folders: dict[str, Path]) -> None:
    needed = CASES[case]["name"] in ("dpo", "kto")
    batch = batch_of(_split_rows(case), decoder(folders["reference"]) if needed else None)
    objective = objective_of(case)
    whole, gradients = step(decoder(folders["model"]), batch, objective)
    assert whole.loss > 0 and whole.grad_norm > 1e-3
    for microbatch in (1, 2, 3):
        part, others = step(decoder(folders["model"]), batch, objective, microbatch)
        torch.testing.assert_close(part.loss, whole.loss, rtol=1e-5, atol=1e-6)
        assert reported(objective, part) == pytest.approx(
            reported(objective, whole), rel=1e-4, abs=1e-5
        )
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["sigmoid", "kto"])
def test_a_model_switched_off_is_its_own_reference(case: str, folders: dict[str, Path]) -> None:
    """In place of an adapter, weights that change places."""
    model, reference = decoder(folders["model"]), decoder(folders["reference"])

    @contextmanager
    def switched_off() -> Iterator[None]:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(reference.state_dict())
        yield
        model.load_state_dict(state)

    known = batch_of(_split_rows(case), reference)
    expected, gradients = step(decoder(folders["model"]), known, objective_of(case))
    unknown = batch_of(_split_rows(case), None)
    found, others = step(model, unknown, objective_of(case, switched_off), 2)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


def test_mismatched_rows_give_each_prompt_the_answer_before_it() -> None:
    rows = [
        [([1, 2], [11, 12, 13], 1), ([3], [14], -1), ([4, 5, 6], [15, 16], 1)],
        [([7, 8], [17], 1)],
    ]
    batch = batch_of(rows, None)
    moved, others = mismatched(batch)
    assert moved.layout is not None and batch.layout is not None and moved.answers is not None
    assert moved.tokens[0, :12].tolist() == [1, 2, 15, 16, 3, 11, 12, 13, 4, 5, 6, 14]
    assert moved.layout.lengths[0] == (4, 4, 4, T - 12)
    assert moved.answers.begins[0] == (2, 5, 11, T)
    labels = moved.labels[0]
    assert labels[labels != IGNORE].tolist() == [15, 16, 11, 12, 13, 14]
    assert (labels != IGNORE).nonzero()[:, 0].tolist() == [1, 2, 4, 5, 6, 10]
    assert others.tolist() == [[True, True, True, False], [False] * 4]
    assert torch.equal(moved.tokens[1], batch.tokens[1])  # no other answer in its row
    assert moved.layout.padding == batch.layout.padding


def test_an_answer_that_is_certain_keeps_orpo_finite() -> None:
    side = torch.tensor([[1, -1]])
    certain = torch.tensor([[0.0, -3.0]], requires_grad=True)
    compared = AnswerMeasures(side, certain, torch.tensor([[4.0, 2.0]]))
    loss, _ = objective_of("orpo").sums(compared)
    (gradient,) = torch.autograd.grad(loss, certain)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()
    odds = [p - np.log(-np.expm1(p)) for p in (ALMOST_CERTAIN, -1.5)]
    assert loss.item() == pytest.approx(0.25 * np.log1p(np.exp(odds[1] - odds[0])), abs=1e-6)


def test_a_step_whose_rows_could_not_be_had_is_empty(folders: dict[str, Path]) -> None:
    """As the trainer makes one, so that all processes can undo it together."""
    labels = torch.full((2, T), IGNORE)
    batch = Batch(torch.zeros_like(labels), labels, None)
    for case in ("sigmoid", "kto", "simpo"):
        result, gradients = step(decoder(folders["model"]), batch, objective_of(case))
        assert result.loss == 0 and not any(g.any() for g in gradients.values())
        assert reported(objective_of(case), result) == {}
