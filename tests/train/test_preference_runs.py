"""Preference tuning as users start it: resumed, on two processes, and what is refused."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmfoundry.builders.data import open_data
from llmfoundry.builders.preference import with_places
from llmfoundry.data.generators import CHATS, load_generator
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.preference import FORMATS
from llmfoundry.recipe.typed import Problem, build
from tests.shards import bytes_tokenizer
from tests.tiny import losses, run, write_recipe

CPU = torch.device("cpu")
RECIPE: dict[str, Any] = {
    "model": {"pretrained": "runs/base"},
    "tokenizer": {"chat_template": "zephyr"},
    "max_seq_len": 256,
    "max_duration": "4ba",
    "global_train_batch_size": 4,
    "device_train_microbatch_size": 2,
    "precision": "fp32",
    "eval_interval": "0ba",
    "save_interval": "2ba",
    "save_async": False,
    "data": {
        "name": "instructions",
        "format": "preference",
        "rows": 60,
        "tasks": ["reverse", "sort"],
        "validation_fraction": 0.2,
        "cache_folder": "cache",
    },
    "preference": {"name": "dpo"},
    "optimizer": {"lr": 3e-3},
    "schedule": {"name": "constant_with_warmup", "t_warmup": "0ba"},
    "logger": {"mlflow": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model and dpo.yaml."""
    folder = tmp_path_factory.mktemp("preference")
    words = ("max_duration=2ba", "run_name=base", "max_seq_len=256")
    run("train.py", write_recipe(folder), *words, cwd=folder)
    (folder / "dpo.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def last(run_folder: Path) -> dict[str, float]:
    """The last evaluation and the last step."""
    found: dict[str, float] = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line)
    return {k: v for k, v in found.items() if k.split("/")[0] in ("rewards", "logps", "loss")}


@pytest.mark.slow
def test_a_resumed_run_repeats_itself_also_where_the_cache_was_lost(folder: Path) -> None:
    run("finetune.py", "dpo.yaml", "run_name=whole", cwd=folder)
    whole = losses(folder / "runs/whole")
    assert whole[1] == pytest.approx(0.6931472, abs=1e-5) and whole[4] < 0.6  # log 2, and it learns
    run("finetune.py", "dpo.yaml", "run_name=parts", "max_duration=2ba", cwd=folder)
    shutil.rmtree(folder / "cache/reference")
    done = run("finetune.py", "dpo.yaml", "run_name=parts", cwd=folder)
    assert "preference.reference: asking the model" in done.stdout
    assert losses(folder / "runs/parts") == whole
    assert last(folder / "runs/parts") == last(folder / "runs/whole")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto", "kto-off", "orpo", "simpo"])
def test_processes_and_microbatches_change_nothing(folder: Path, method: str) -> None:
    words = [f"preference.name={method.removesuffix('-off')}", "optimizer.lr=3e-4"]
    if method.startswith("kto"):
        words.append("data.format=unpaired")
    words += ["data.supervised.packing=off"] * method.endswith("-off")
    name = f"one-{method}"
    run("finetune.py", "dpo.yaml", f"run_name={name}", *words, cwd=folder)
    shutil.rmtree(folder / "cache/reference", ignore_errors=True)
    for how in ("ddp", "fsdp"):
        shard = "parallel.data_parallel_shard_degree=2"
        more = [*words, "device_train_microbatch_size=1", *([shard] if how == "fsdp" else [])]
        run("finetune.py", "dpo.yaml", f"run_name={how}-{method}", *more, cwd=folder, processes=2)
        expected, found = (losses(folder / "runs" / n) for n in (name, f"{how}-{method}"))
        assert found == pytest.approx(expected, rel=1e-4)
        ours, theirs = (last(folder / "runs" / n) for n in (name, f"{how}-{method}"))
        assert theirs == pytest.approx(ours, rel=2e-3, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_an_adapter_switched_off_is_the_reference_that_is_computed_once(
    folder: Path, method: str
) -> None:
    words = ["adapter.name=lora", "adapter.r=4", f"preference.name={method}", "optimizer.lr=1e-2"]
    if method == "kto":
        words.append("data.format=unpaired")
    for reference in ("precompute", "adapter"):
        named = (f"run_name={reference}-{method}", f"preference.reference={reference}")
        run("finetune.py", "dpo.yaml", *named, *words, cwd=folder)
    ours, theirs = (losses(folder / f"runs/{n}-{method}") for n in ("precompute", "adapter"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    one, other = (last(folder / f"runs/{n}-{method}") for n in ("precompute", "adapter"))
    assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "low", "high"), [("right", 0.75, 1.0), ("shuffled", 0.38, 0.62)])
def test_held_out_pairs_are_learned_and_shuffled_ones_stay_at_chance(
    folder: Path, kind: str, low: float, high: float
) -> None:
    """About 150 pairs: a standard error of 4 % at chance."""
    coin, lines = random.Random(3), []
    for row in load_generator(CHATS).instruction_rows(
        ["reverse", "sort"], 800, seed=1, format="preference"
    ):
        if kind == "shuffled" and coin.random() < 0.5:
            row = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
        lines.append(json.dumps(row) + "\n")
    (folder / f"{kind}.jsonl").write_text("".join(lines))
    words = ["data.name=files", f"data.paths=[{kind}.jsonl]", "~data.tasks", "~data.rows"]
    words += ["max_seq_len=512", "max_duration=40ba", "eval_first=true", f"run_name={kind}"]
    words += ["save_interval=0ba", "eval.validation_rows=40"]
    run("finetune.py", "dpo.yaml", *words, cwd=folder)
    lines = (folder / "runs" / kind / "metrics.jsonl").read_text().splitlines()
    shares = [json.loads(line).get("rewards/eval/accuracies") for line in lines]
    first, reached = [share for share in shares if share is not None]
    assert first == 0.5  # the model is its own reference
    assert low < reached < high


CHECKED = {
    "data.format=chat": "data.format: chat, but preference.name: dpo reads rows of preference",
    "preference.name=none": "data.format: preference, whose rejected answers would be learned",
    "preference.name=kto": "data.format: preference, but preference.name: kto reads rows of unp",
    "preference.beta=0": "preference.beta: 0",
    "preference.beta=-1": "preference.beta: -1",
    "preference.label_smoothing=0.5": "preference.label_smoothing: 0.5",
    "preference.label_smoothing=0.1 preference.loss=ipo": "label_smoothing: has no effect with",
    "loss.z_loss_weight=1e-4": "loss.z_loss_weight: has no effect with preference.name: dpo, whose",
    "preference.gamma=1": "preference.gamma: has no effect with preference.name: dpo, only",
    "preference.reference=adapter": "preference.reference: adapter needs one to switch off",
    "data.supervised.target_prompts=all": "data.supervised.target_prompts: all, but dpo",
    "data.supervised.loss=sequences": "data.supervised.loss: has no effect",
    "data.attend_across_documents=true": "data.attend_across_documents: true lets the answers",
}


@pytest.mark.parametrize("words", CHECKED)
def test_a_recipe_that_cannot_be_is_refused(words: str) -> None:
    values = copy.deepcopy(RECIPE)
    for word in words.split():
        key, _, value = word.partition("=")
        *sections, name = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = yaml.safe_load(value)
    problems: list[Problem] = []
    recipe = build(FinetuneRecipe, values, problems)
    assert not problems
    assert any(CHECKED[words] in line for line in recipe.check())


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "long": (
        {"prompt": "a" * 90, "chosen": "b", "rejected": "c"},
        "dpo",
        "rows.jsonl:1: has 188 tokens in two answers, which share a row, each with the prompt",
    ),
    "one kind": (
        {"prompt": "a", "completion": "b", "label": True},
        "kto",
        "data: the label of every row is true, and kto learns from both kinds",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_that_cannot_be_compared_are_one_line(tmp_path: Path, case: str) -> None:
    row, method, said = ROWS[case]
    path = tmp_path / "rows.jsonl"
    rows = [{**row, "prompt": f"{n} {row['prompt']}"} for n in range(6)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = FinetuneRecipe(max_seq_len=100)
    recipe.preference.name = method
    recipe.data.name, recipe.data.paths = "files", [str(path)]
    recipe.data.format, recipe.data.cache_folder = FORMATS[method], str(tmp_path / "cache")
    recipe.data.supervised.too_long = "error"
    recipe = recipe.resolve()
    with pytest.raises(UserError, match=re.escape(said)) as raised:
        with_places(open_data(recipe, bytes_tokenizer(), World(0, 1, 0, CPU)), recipe)
    assert len(raised.value.problems) == 1
