"""scripts/inspect_data.py: what it shows is what is in the shards, and what training reads."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.cli.command_line import parse
from llmfoundry.cli.commands.inspect_data import (
    SegmentFacts,
    SequenceFacts,
    inspect_data,
    learned_lines,
)
from llmfoundry.cli.commands.train import train
from llmfoundry.cli.recipe_types import inspected
from llmfoundry.data.batch import SequenceBatch
from llmfoundry.data.loader import Loader
from llmfoundry.errors import UserError
from llmfoundry.recipe.before_training import InspectFinetuneRecipe, InspectRecipe
from llmfoundry.recipe.load import checked, load
from llmfoundry.recipe.train import TrainRecipe
from tests.shards import bytes_tokenizer, write_mds, write_tokens
from tests.tiny import write_recipe

Facts = dict[str, list[dict[str, Any]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe of 24 rows of MDS in 3 steps an epoch."""
    write_recipe(tmp_path)
    write_mds(tmp_path / "mds", "web")
    return tmp_path


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        "data=mds",
        f"data.local={folder / 'mds'}",
        "data.split=null",
        "data.validation=null",
        "eval.validation=false",
        "eval.validation_rows=null",
        f"data.cache_folder={folder / 'cache'}",
        f"save_folder={folder / 'run'}",
        "global_train_batch_size=8",
        *more,
    ]


def mixture(folder: Path, *more: str) -> list[str]:
    streams = {"web": folder / "mds", "code": folder / "tokens"}
    return [
        *overrides(folder, "data.local=null", "data.name=mixture"),
        *(f"data.streams.{name}.local={path}" for name, path in streams.items()),
        "data.streams.web.proportion=3",
        "data.streams.code.proportion=1",
        *more,
    ]


def look(folder: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> Facts:
    """The JSON lines by their kind."""
    capsys.readouterr()
    recipe = checked(InspectRecipe, folder / "tiny.yaml", [*asked, "json=true"])
    inspect_data(recipe.resolve())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {kind: [x for x in lines if x["kind"] == kind] for kind in ("row", "stream", "phase")}


def test_rows_are_those_of_the_shards_and_an_epoch_has_each_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = write_mds(folder / "again", "web")
    index = json.loads((folder / "mds" / "index.json").read_text())
    starts, n = {}, 0
    for shard in index["shards"]:
        starts[shard["raw_data"]["basename"]] = n
        n += shard["samples"]
    tokenizer, seen = bytes_tokenizer(), Counter()
    for step in range(3):
        facts = look(folder, overrides(folder, f"at={step}ba", "n=8"), capsys)
        for row in facts["row"]:
            shard, place = re.fullmatch(r"(.+), sample ([\d,]+)", row["where"]).groups()  # type: ignore[union-attr]
            sample = starts[shard] + int(place)
            assert row["text"] == tokenizer.decode(samples[sample])
            assert sum(row["documents"]) == 64
            assert len(row["documents"]) == 1 + samples[sample][:-1].count(tokenizer.eos_id)
            seen[sample] += 1
    assert seen == Counter(range(24))


def test_rows_are_those_that_training_reads(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(folder / "tokens", "code")
    read: dict[int, SequenceBatch] = {}
    rows = Loader.rows

    def record(loader: Loader, step: int) -> SequenceBatch:
        read[step] = rows(loader, step)
        return read[step]

    monkeypatch.setattr(Loader, "rows", record)
    asked = mixture(folder, "max_duration=4ba", "save_interval=0ba")
    train(checked(TrainRecipe, folder / "tiny.yaml", asked).resolve())
    monkeypatch.undo()
    facts = look(folder, [*asked, "save_overwrite=true", "at=2ba", "n=8"], capsys)
    decode, ids = bytes_tokenizer().decode, read[2].ids[:, :-1].tolist()
    assert [row["text"] for row in facts["row"]] == [decode(row) for row in ids]
    assert {row["stream"] for row in facts["row"]} == {"web", "code"}


def test_streams_and_phases_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokens(folder / "tokens", "code")
    phases = "data.phases=[{at: 0.5dur, proportions: {web: 1, code: 1}}]"
    facts = look(folder, mixture(folder, phases, "at=6ba"), capsys)
    web, code = facts["stream"]
    assert (web["rows"], code["rows"]) == (36, 12)  # 6 steps of 8 rows, 3 to 1
    assert (web["tokens"], web["share"], web["epochs"]) == (36 * 64, 0.75, 36 / 24)
    assert web["rows_of_run"] == 36 + 24  # and 6 steps, 1 to 1
    before, now = facts["phase"]
    assert (before["in_force"], now["in_force"], now["step"]) == (False, True, 6)
    assert before["proportions"] == {"web": 0.75, "code": 0.25}


def test_a_run_that_went_on_with_other_proportions_is_shown_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(folder / "tokens", "code")
    train(checked(TrainRecipe, folder / "tiny.yaml", mixture(folder, "max_duration=4ba")).resolve())
    other = ["data.streams.web.proportion=1", "max_duration=12ba"]
    facts = look(folder, mixture(folder, *other, "at=8ba"), capsys)
    assert [stream["rows"] for stream in facts["stream"]] == [24 + 16, 8 + 16]


def test_the_tables_name_stream_shard_and_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(folder / "tokens", "code")
    recipe = checked(InspectRecipe, folder / "tiny.yaml", mixture(folder, "at=512tok", "n=2"))
    inspect_data(recipe.resolve())
    shown = capsys.readouterr().out
    assert "step 1 of 12, counted from 0, 512 tokens" in shown
    assert re.search(r"^ +0  (web|code) +0  \S+, (sample|row) \d+ +\d+  ", shown, re.MULTILINE)
    assert re.search(r"^web +6 +384 +75\.0% +0\.25 +3\.00$", shown, re.MULTILINE)


def test_the_end_of_the_run_has_totals_and_no_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = look(folder, overrides(folder, "at=1dur"), capsys)
    assert facts["row"] == [] and facts["stream"][0]["rows"] == 12 * 8


def test_a_time_beyond_the_run_is_refused(folder: Path) -> None:
    recipe = checked(InspectRecipe, folder / "tiny.yaml", overrides(folder, "at=1e9tok"))
    with pytest.raises(UserError, match=r"at: 1e9tok lies beyond the run, which ends after 12"):
        inspect_data(recipe.resolve())


def test_what_is_no_time_is_refused_before_anything_is_read(folder: Path) -> None:
    with pytest.raises(UserError, match="at: '1e9' is not a duration"):
        checked(InspectRecipe, folder / "tiny.yaml", overrides(folder, "at=1e9"))


def test_what_is_learned_of_supervised_rows_is_marked(folder: Path, capsys: Any) -> None:
    turns = [{"role": "user", "content": "q\x1b[2J"}, {"role": "assistant", "content": "a\nb"}]
    rows = [json.dumps({"messages": [*turns, *turns]}) for _ in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    asked = [
        "data=chat",
        f"data.paths=[{folder / 'rows.jsonl'}]",
        "data.validation_fraction=0",
        "tokenizer.chat_template=zephyr",
        "eval.validation=false",
        "eval.validation_rows=null",
        f"data.cache_folder={folder / 'cache'}",
        "max_seq_len=256",
        "n=1",
    ]
    recipe = checked(InspectRecipe, folder / "tiny.yaml", [*asked, "json=true"])
    inspect_data(recipe.resolve())
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (row,) = (fact for fact in facts if fact["kind"] == "row")
    assert "".join(part["text"] for part in row["parts"]) == row["text"]
    assert [part["weight"] for part in row["parts"] if part["document"] == 0] == [0, 1, 0, 1]
    learned = [part["text"] for part in row["parts"] if part["weight"]]
    assert learned == ["a\nb<|endoftext|>\n"] * 2 * len(row["documents"])
    assert sum(part["tokens"] for part in row["parts"]) + row["padding"] == 256
    inspect_data(checked(InspectRecipe, folder / "tiny.yaml", asked).resolve())
    out = capsys.readouterr().out
    assert "---- document 2 of 3: " in out and " tokens of padding ----" in out
    assert "<|assistant|>\n{+a\nb<|endoftext|>\n+}<|user|>\nq\\x1b[2J<|endoftext|>" in out
    assert "\x1b" not in out
    parts = [SegmentFacts(0, 0, 0.0, 1, "q\n"), SegmentFacts(0, 1, 1.0, 2, "a\x1b")]
    shown = SequenceFacts(0, "data", 0, 0, "f:1", [3], "", parts)
    lines = ["\x1b[90mq\x1b[0m", "\x1b[90m\x1b[0m\x1b[32ma\\x1b\x1b[0m"]
    assert learned_lines(shown, color=True)[3:] == lines


def test_the_kind_of_recipe_is_known_by_its_model(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("model: {pretrained: runs/x}\n")
    assert inspected(parse([str(file)])) is InspectFinetuneRecipe
    recipe = load(InspectFinetuneRecipe, file)
    assert recipe.model.pretrained == "runs/x" and recipe.tokenizer.name == "pretrained"
    file.write_text("model: {d_model: 64}\n")
    assert inspected(parse([str(file)])) is InspectRecipe
    assert inspected(parse([str(file), "model.pretrained=runs/x"])) is InspectFinetuneRecipe
