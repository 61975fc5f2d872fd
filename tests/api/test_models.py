"""`Model` and what takes one: its mode, and its name beside others."""

from __future__ import annotations

import shutil
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
    overrides = {"run_name": "refused", "loss.z_loss_weight": 1e-4}
    with pytest.raises(lf.UserError, match=r"loss\.z_loss_weight is of the built-in loss"):
        lf.train("tiny.yaml", overrides, loss=lambda model, batch: -model.log_probs())


def test_texts_of_a_program_are_taken_literally(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLY_HERE", "secret")
    name = f"{tmp_path}/it's ${{oc.env:ONLY_HERE}}, 'null'"
    shutil.copytree("runs/quickstart", name)
    model = lf.load(name)
    assert model.name == name
    for prompt in ("'x'", "null", "", "???", "${oc.env:ONLY_HERE}", '"\\', "[a, b]"):
        ids = model.generate(model.tokenizer(prompt), max_new_tokens=2)
        text = model.generate(prompt, max_new_tokens=2)
        assert text.startswith(prompt) and model.tokenizer.decode(ids[:, 1:]).startswith(prompt)
    output = Path(f"{tmp_path}/${{oc.env:ONLY_HERE}}")
    lf.evaluate(name, "generated_easy", rows=1, output=output)
    assert (output / "results.json").is_file()
    assert lf.convert(name, f"{output}/'hf'").is_dir()
    with pytest.raises(lf.UserError, match=r"unknown key 'max_new_token'"):
        model.generate("x", max_new_token=2)
    with pytest.raises(lf.UserError, match="is there more than once"):
        lf.evaluate([name, name], "generated_easy")


def test_a_model_is_converted_from_its_own_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = lf.train(
        "tiny.yaml", {"run_name": "converted", "max_duration": "2ba", "save_interval": "1ba"},
        show="nothing",
    )  # fmt: skip
    first = lf.load(run.folder / "checkpoints" / "ba0000001")
    newest = run.model()
    lf.train(
        "tiny.yaml", {"run_name": "converted", "max_duration": "3ba", "save_interval": "1ba"},
        show="nothing",
    )  # fmt: skip
    for model, batch in ((first, 1), (newest, 2)):
        capsys.readouterr()
        lf.convert(model, tmp_path / str(batch))
        assert f"checkpoints/ba000000{batch} is " in capsys.readouterr().out


def test_a_run_is_in_a_folder_of_this_machine(here: Path) -> None:
    for given, line in (
        ("s3://bucket/runs/mine", "folder: s3://bucket/runs/mine is an address; write a run's"),
        ("runs/quickstar", "folder: nothing at runs/quickstar; did you mean"),
    ):
        with pytest.raises(lf.UserError, match=line):
            lf.Run(given)


def test_a_version_that_has_no_run_needs_a_choice_of_tasks(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(lf.convert("runs/quickstart", "version-hf"))
    monkeypatch.setattr("llmfoundry.api.examine.find_address", lambda *_, **__: folder)
    with pytest.raises(lf.UserError, match="version-hf has no run that says what to measure"):
        lf.evaluate("models:/mine@best")


def test_a_layout_is_for_the_decoder(here: Path) -> None:
    (batch, *_) = lf.data("tiny.yaml")
    model = lf.load(lf.convert("runs/quickstart", "class-hf"))
    opened = model.opened
    assert opened.load_class is not None
    by_class = lf.Model(opened, opened.load_class("a reason"))
    assert not any(modes(by_class)) and by_class(batch.tokens).shape == model(batch.tokens).shape
    with pytest.raises(lf.UserError, match=r"layout: .* of transformers takes no packed documents"):
        by_class(batch.tokens, batch.layout)
