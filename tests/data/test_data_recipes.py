"""Every choice of the group data/ trains two steps, on data that a test can write."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmfoundry.cli.commands.train import train
from llmfoundry.errors import UserError
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe
from tests.shards import texts, write_mds, write_tokens
from tests.tiny import losses, write_recipe


def hugging_face(folder: Path) -> list[str]:
    """A folder that `datasets` loads, in place of the hub."""
    pytest.importorskip("datasets")
    folder.mkdir()
    lines = [json.dumps({"text": text}) for text in texts("hub", 60)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return [f"data.dataset={folder}", "data.subset=null"]


def files(folder: Path) -> list[str]:
    folder.mkdir()
    for n, text in enumerate(texts("file", 60)):
        (folder / f"{n}.txt").write_text(text)
    return [f"data.paths=[{folder}]"]


def jsonl(folder: Path) -> list[str]:
    folder.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts("line", 60)]
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    return [f"data.paths=[{folder}/*.jsonl.gz]"]


def mds(folder: Path) -> list[str]:
    write_mds(folder / "train", "train")
    write_mds(folder / "val", "val", rows=4)
    return [f"data.local={folder}"]


def mixed(folder: Path) -> list[str]:
    """Both formats in one mixture; the recipe finds its root in the environment."""
    write_mds(folder / "web" / "train", "web")
    write_mds(folder / "web" / "validation", "held out", rows=4)
    write_mds(folder / "math" / "train", "math")
    for name in ("code", "books", "reference"):
        write_tokens(folder / name / "train", name)
    return []


def standard_library(folder: Path) -> list[str]:
    return ["data.filter.max_chars=300"]


def supervised(row: Callable[[int], dict[str, object]], *more: str) -> Callable[..., list[str]]:
    """Sixty rows; the tokenizer gets a chat template that fits any."""

    def write(folder: Path) -> list[str]:
        folder.mkdir()
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(row(n)) for n in range(60)))
        return [f"data.paths=[{folder}]", "tokenizer.chat_template=zephyr", *more]

    return write


def instructions(folder: Path) -> list[str]:
    return ["data.rows=60", "tokenizer.chat_template=zephyr", "max_seq_len=1024"]


def chat(n: int) -> dict[str, object]:
    turns = [("user", f"{n}?"), ("assistant", f"{n}!")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


WRITE: dict[str, Callable[[Path], list[str]]] = {
    "c4": hugging_face,
    "chat": supervised(chat),
    "instructions": instructions,
    "prompt_response": supervised(lambda n: {"prompt": f"{n}?", "response": f"{n}!"}),
    "dbrx-mix": mixed,
    "files": files,
    "huggingface": hugging_face,
    "jsonl": jsonl,
    "mds": mds,
    "stdlib": standard_library,
}
SLOW = {"stdlib"}  # it reads the whole standard library
CHOICES = [
    pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem in SLOW))
    for path in sorted(YAMLS.glob("data/*.yaml"))
    if path.stem != "preference"  # refused here; the tests of preference tuning train on such rows
]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_of_data_trains_two_steps(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "data"))
    overrides = [
        f"data={choice}",
        *WRITE[choice](tmp_path / "data"),
        f"data.cache_folder={tmp_path / 'cache'}",
        f"save_folder={tmp_path / 'run'}",
        "max_duration=2ba",
        "global_train_batch_size=8",
        "save_interval=0ba",
    ]
    train(checked(TrainRecipe, write_recipe(tmp_path / "recipe"), overrides).resolve())
    assert sorted(losses(tmp_path / "run")) == [1, 2]


def test_pairs_of_answers_are_not_learned_alike(tmp_path: Path) -> None:
    overrides = ["data=preference", f"data.paths=[{tmp_path}]", "tokenizer.chat_template=zephyr"]
    with pytest.raises(UserError, match=r"data.format: preference has answers to compare, which"):
        checked(TrainRecipe, write_recipe(tmp_path / "recipe"), overrides)
