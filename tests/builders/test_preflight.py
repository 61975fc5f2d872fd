"""What a run refuses before it prepares data; its dry run refuses the same with the same line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from llmfoundry.api import conversion, training
from llmfoundry.builders import data, resume, trainer
from llmfoundry.builders.preflight import check_recipe
from llmfoundry.builders.resume import StartPoint
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.cli import dry_run, dry_run_models
from llmfoundry.cli.commands import evaluate, prepare_data
from llmfoundry.cli.dry_run import print_plan
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ConvertRecipe, EvalRecipe
from llmfoundry.recipe.before_training import PrepareRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.shards import bytes_tokenizer
from tests.tiny import write_recipe

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
EXPENSIVE = ("open_data", "build_model", "open_reference", "fill_weights")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tiny.yaml, and rows of several kinds."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    rows = {"chat": [CHAT] * 3, "wrong": [*[CHAT] * 3, {"messages": "hello"}]}
    for name, of_file in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in of_file))
    (tmp_path / "broken.jinja").write_text("{% for message in messages %}")
    (tmp_path / "nothing").mkdir()
    task = {"label": "talk", "icl_task_type": "generation_task_with_answers", "num_fewshot": [0]}
    tasks = {"icl_tasks": [{**task, "dataset_uri": "instructions://reverse?rows=4"}]}
    (tmp_path / "talk.yaml").write_text(json.dumps(tasks))
    return tmp_path


def fails(name: str) -> Callable[..., Any]:
    def called(*args: Any, **keys: Any) -> Any:
        pytest.fail(f"{name} was called before the refusal")

    return called


SUPERVISED = ("data.format=chat", "eval=off", "data.paths=[chat.jsonl]")
ROWS = ("data.format=chat", "eval=off", "tokenizer.chat_template=zephyr")
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "conversations without a template": (
        ("eval.gauntlet=talk.yaml",),
        "eval.icl_chat_template: rows of talk are conversations, and the model has no chat",
    ),
    "a template that is not there": (
        ("eval.gauntlet=talk.yaml", "eval.icl_chat_template=none.jinja"),
        "eval.icl_chat_template: ",
    ),
    "prompts longer than the positions": (
        (
            "model.attn_config.rope=false",
            "model.learned_pos_emb=true",
            "eval.icl_seq_len=4096",
            "eval.gauntlet=talk.yaml",
        ),
        "eval.icl_seq_len: 4096, but the model's learned positions end at 64",
    ),
    "rows without a template": (SUPERVISED, "tokenizer.chat_template: "),
    "a row that is no conversation": (
        (*ROWS, "data.paths=[wrong.jsonl]"),
        "wrong.jsonl:4: ",
    ),
    "a row that is too long": (
        (*ROWS, "data.paths=[chat.jsonl]", "max_seq_len=8", "data.supervised.too_long=error"),
        "more than max_seq_len: 8",
    ),
    "a rank that is not there": (
        ("profile.trace=true", "profile.ranks=[3]"),
        "profile.ranks: 3, but the run has ranks 0 to 0",
    ),
    "samples of rows that are not there": (
        ("callbacks.generate.from_validation=2",),
        "callbacks.generate.from_validation: 2, but no supervised rows are held out",
    ),
    "a vocabulary that is too small": (("model.vocab_size=10",), "model.vocab_size: 10 is less"),
}


def start(recipe: Any, run_folder: Storage) -> None:
    """What training does up to the first step (`api/training.py`)."""
    check_recipe(recipe, ALONE)
    trainer.build_trainer(recipe, ALONE, MagicMock(), run_folder)


def test_training_checks_the_recipe_before_it_fetches_a_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "open_base", fails("open_base"))
    words = ["model.pretrained=hub/id", "data.name=files", "data.paths=[nothing]", "run_name=x"]
    recipe = checked(FinetuneRecipe, None, [*words, "max_duration=2ba"]).resolve()
    hooks = MagicMock(console=None)
    (line,) = refusal(lambda: training._train(recipe, ALONE, MagicMock(), hooks))
    assert line.startswith("data.paths: ")
    assert refusal(lambda: print_plan("train", recipe)) == (line,)


def refusal(function: Callable[[], Any]) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        function()
    return caught.value.problems


@pytest.mark.parametrize("case", CASES)
def test_a_run_and_its_dry_run_refuse_before_data_is_prepared(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, message = CASES[case]
    before = sorted(folder.rglob("*"))
    for name in EXPENSIVE:
        monkeypatch.setattr(trainer, name, fails(name))

    def resolved() -> Any:
        return checked(TrainRecipe, folder / "tiny.yaml", list(words)).resolve()

    planned = refusal(lambda: print_plan("train", resolved()))
    assert sorted(folder.rglob("*")) == before, "a dry run writes nothing"
    run_folder = Storage(folder / "runs" / "tiny")
    started = refusal(lambda: start(resolved(), run_folder))
    assert planned == started and message in planned[0]
    assert not (folder / "cache" / "supervised").exists() and not (folder / "runs").exists()


STREAMS = (
    "~data.paths",
    "data.name=mixture",
    "data.streams={a: {name: files, paths: [corpus], proportion: 0.5},"
    " b: {name: files, paths: [nothing], proportion: 0.5}}",
)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (STREAMS, "data.streams.b.paths: "),
        (("tokenizer.chat_template=broken.jinja",), "tokenizer.chat_template: "),
        (("data.paths=[nothing]",), "data.paths: "),
    ],
)
def test_no_tokenizer_is_trained_for_a_run_that_is_refused(
    words: tuple[str, ...], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmfoundry.data.preparation import build_tokenizer

    monkeypatch.setitem(build_tokenizer._KINDS, "train", fails("training of the tokenizer"))
    words = ("tokenizer.name=train", *words)
    recipe = checked(TrainRecipe, folder / "tiny.yaml", list(words)).resolve()
    run_folder = Storage(folder / "runs" / "tiny")
    started = refusal(lambda: start(recipe, run_folder))
    assert message in started[0]
    assert not (folder / "cache").exists() and not (folder / "runs").exists()


def test_a_checkpoint_of_another_model_is_refused_before_data_is_prepared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in EXPENSIVE:
        monkeypatch.setattr(trainer, name, fails(name))
    found = StartPoint(Checkpoint(Storage(folder / "runs/first"), folder / "runs/first/ba1"))
    for module in (trainer, dry_run):
        monkeypatch.setattr(module, "find_start", lambda *args: found)
    identity = {"model.n_layers": 2, "tokenizer": bytes_tokenizer().fingerprint}
    state = {"order": {}, "identity": identity}
    monkeypatch.setattr(resume, "read_state", lambda checkpoint: state)
    words = ["model.n_layers=3"]

    def resolved() -> Any:
        return checked(TrainRecipe, folder / "tiny.yaml", words).resolve()

    planned = refusal(lambda: print_plan("train", resolved()))
    run_folder = Storage(folder / "runs" / "second")
    started = refusal(lambda: start(resolved(), run_folder))
    assert planned == started and any(
        "model.n_layers: 3, but checkpoint" in line for line in started
    )


def test_a_dry_run_names_what_it_did_not_check(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "both.yaml").write_text(
        json.dumps(
            {
                "icl_tasks": [
                    {"label": label, "icl_task_type": kind, "num_fewshot": [0], "dataset_uri": uri}
                    for label, kind, uri in (
                        ("near", "language_modeling", "generated://repeat_copy?rows=4"),
                        ("far", "language_modeling", "s3://bucket/rows.jsonl"),
                        ("own", "multiple_choice", "heldout://continuations"),
                    )
                ]
            }
        )
    )
    words = ["eval.gauntlet=both.yaml"]
    print_plan("train", checked(TrainRecipe, folder / "tiny.yaml", words).resolve())
    out = " ".join(capsys.readouterr().out.split())
    assert "prompts of the gauntlet" in out and "all of this was checked" not in out
    assert "task far (s3://bucket/rows.jsonl), task own (heldout://continuations)" in out
    words = ["tokenizer.name=train"]
    print_plan("train", checked(TrainRecipe, folder / "tiny.yaml", words).resolve())
    out = " ".join(capsys.readouterr().out.split())
    assert "for which the tokenizer is trained first" in out
    assert not (folder / "cache").exists()


def test_missing_shards_are_refused_before_a_corpus_is_tokenized(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "prepare_corpus", fails("preparation of a corpus"))
    streams = (
        "~data.paths",
        "data.name=mixture",
        "data.streams={a: {name: files, paths: [corpus], proportion: 0.5},"
        " b: {name: shards, local: nothing, proportion: 0.5}}",
    )
    recipe = checked(TrainRecipe, folder / "tiny.yaml", list(streams)).resolve()
    (line,) = refusal(lambda: data.open_data(recipe, bytes_tokenizer(), ALONE))
    assert line.startswith("data.streams.b")


def test_preparation_refuses_a_used_output_before_a_tokenizer_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_data, "build_tokenizer", fails("training of the tokenizer"))
    (folder / "used").mkdir()
    (folder / "used" / "mine.txt").write_text("mine")
    words = ["tokenizer.name=train", "prepare.output=used"]
    recipe = checked(PrepareRecipe, folder / "tiny.yaml", words).resolve()
    started = refusal(lambda: prepare_data.prepare_data(recipe))
    assert "mine.txt is not of a preparation" in started[0]
    assert refusal(lambda: print_plan("prepare_data", recipe)) == started
    words = ["tokenizer.name=train", "data.paths=[nothing]"]
    recipe = checked(PrepareRecipe, folder / "tiny.yaml", words).resolve()
    started = refusal(lambda: prepare_data.prepare_data(recipe))
    assert started[0].startswith("data.paths: ")
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("to", ["hf", "gguf", "peft"])
def test_a_conversion_refuses_a_used_output_before_it_reads_a_checkpoint(
    to: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("find_address", "open_checkpoint"):
        monkeypatch.setattr(conversion, name, fails(name))
    output = folder / "used.gguf"
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    recipe = checked(ConvertRecipe, None, ["checkpoint=runs/x", f"to={to}", f"output={output}"])
    (line,) = refusal(lambda: conversion.convert(recipe))
    assert line.startswith(f"output: {output} exists")
    assert refusal(lambda: print_plan("convert", recipe)) == (line,)


def test_an_evaluation_refuses_missing_rows_before_processes_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("with_local_ranks", "join_layout"):
        monkeypatch.setattr(evaluate, name, fails(name))
    for module in (evaluate, dry_run_models):
        monkeypatch.setattr(module, "check_models", lambda recipe: None)
    task = {"label": "gone", "icl_task_type": "language_modeling", "num_fewshot": [0]}
    tasks = {"icl_tasks": [{**task, "dataset_uri": "gone.jsonl"}]}
    (folder / "gone.yaml").write_text(json.dumps(tasks))
    words = ["checkpoint=runs/x", "eval.gauntlet=gone.yaml"]
    recipe = checked(EvalRecipe, None, words)
    started = refusal(lambda: evaluate.evaluate(recipe))
    assert "icl_tasks: gone: dataset_uri: " in started[0]
    monkeypatch.setattr(dry_run_models, "with_addresses", lambda recipe, world, note: (recipe, {}))
    assert refusal(lambda: print_plan("evaluate", recipe)) == started
