"""`Model` and what takes one: its mode, and its name beside others."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import llmfoundry as lf
from llmfoundry.train.own_loss import LossModel


def modes(model: lf.Model) -> list[bool]:
    return [module.training for module in model.modules()]


def test_generate_and_evaluate_keep_the_mode_of_each_module(here: Path) -> None:
    model = lf.load("runs/quickstart")
    assert not any(modes(model)) and not any(modes(deepcopy(model)))
    assert not any(modes(lf.build("tiny.yaml")))
    model.train()
    model.module.norm_f.eval()  # type: ignore[union-attr]
    before = modes(model)
    assert any(before) and not all(before) and modes(deepcopy(model)) == before
    text = model.generate("line", max_new_tokens=2)
    assert isinstance(text, str) and modes(model) == before
    lf.evaluate(model, "generated_easy", rows=1)
    assert modes(model) == before


def test_a_model_in_train_mode_is_measured_without_dropout(here: Path) -> None:
    recipe = lf.recipe("tiny.yaml", {"model.resid_pdrop": 0.9, "run_name": "dropout"})
    recipe.max_duration = "1ba"
    model = lf.train(recipe, show="nothing").model()
    wanted = lf.evaluate(model, "generated_easy", rows=1).metrics
    assert lf.evaluate(model.train(), "generated_easy", rows=1).metrics == wanted


def test_a_model_in_memory_is_compared_with_the_run_it_is_of(here: Path) -> None:
    model = lf.load("runs/quickstart")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    changed, kept = lf.evaluate([model, "runs/quickstart"], "generated_easy", rows=2)
    assert changed.metrics != kept.metrics
    assert kept.metrics == lf.evaluate("runs/quickstart", "generated_easy", rows=2).metrics


def test_another_layout_of_a_batch_takes_another_pass() -> None:
    passes: list[Any] = []

    def run(tokens: Any, layout: Any) -> tuple[str, None]:
        passes.append(layout)
        return "another", None

    class Layout:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared by value")

    module: Any = SimpleNamespace(run=run, head=lambda hidden: hidden)
    batch: Any = SimpleNamespace(tokens=torch.zeros(1, 2), layout=Layout())
    model = LossModel(module, "step's", batch)  # type: ignore[arg-type]
    assert model(batch.tokens) == model(batch.tokens, batch.layout) == "step's"
    other: Any = Layout()
    assert model(batch.tokens, other) == "another"
    assert passes[0] is other


def test_a_loss_of_the_built_in_ones_name_is_refused(here: Path) -> None:
    def cross_entropy(model: Any, batch: Any) -> Any:
        return -model.log_probs()

    with pytest.raises(lf.UserError, match="loss: the function is called cross_entropy"):
        lf.train("tiny.yaml", {"run_name": "refused"}, loss=cross_entropy)
