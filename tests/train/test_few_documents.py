"""Runs on what a newcomer has at hand, with the evaluation that recipes come with."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tiny import write_recipe
from tests.train.here import rows, train_here


def text(seed: int, n_lines: int = 200) -> str:
    lines = range(seed, seed + n_lines)
    return "".join(f"line {n}: {n * n + seed} is the square of {n} and {seed}\n" for n in lines)


def files(folder: Path, texts: list[str]) -> str:
    folder.mkdir()
    for n, text in enumerate(texts):
        (folder / f"{n}.txt").write_text(text)
    return f"data.paths=[{folder}]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("texts", "left_out"),
    [
        ([text(0)], ["continuations", "long_continuations"]),
        ([text(0, 4000)], ["continuations", "long_continuations"]),
        ([text(n) for n in range(5)], ["long_continuations"]),
        ([text(n) for n in range(60)], []),
    ],
)
def test_few_documents_train_and_what_they_cannot_feed_is_left_out(
    here: Path, capsys: pytest.CaptureFixture[str], texts: list[str], left_out: list[str]
) -> None:
    words = ("data.validation_fraction=0.05", "eval=generated_easy", "eval.icl_rows=2")
    run = train_here("few", files(here / "texts", texts), *words, "max_duration=1ba")
    told = capsys.readouterr().out
    (last,) = rows(run, "metrics/eval/bits_per_byte").values()
    asked = {name.split("/")[1] for name in last if "-shot/" in name}
    assert asked == {"brackets", "pronouns", "continuations", "long_continuations"} - {*left_out}
    lines = [line.split(":")[1].strip() for line in told.splitlines() if ": left out: " in line]
    assert set(lines) == {*left_out}
    assert "is not among icl_tasks" not in told, "it is, and was left out"


def test_a_run_of_few_rows_says_what_it_amounts_to(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("eval=validation", "data.validation_fraction=0.02", files(here / "texts", [text(0, 40)]))

    def told(duration: str, batch: int) -> str:
        size = f"global_train_batch_size={batch}"
        train_here(f"few-{batch}", *few, size, f"max_duration={duration}")
        return capsys.readouterr().out

    whole = told("1ep", 80)
    manifest = next((here / "cache/tokens").glob("*/manifest.json"))
    counts = json.loads(manifest.read_text())["counts"]
    n_rows = (counts["train"]["tokens"] - 1) // 64
    assert 20 < n_rows < 40
    assert f"there are {n_rows} rows of 64 tokens: the run is 1 step, each reading" in whole
    assert f" every row {80 / n_rows:.3g} times; write global_train_batch_size=2\n" in whole
    n_bytes = counts["validation"]["bytes"]
    assert f"eval.validation: {n_bytes} bytes are held out, on which runs differ by" in whole
    steps = math.ceil(n_rows / 20)
    assert f"max_duration: 1ep of {n_rows} rows is {steps} steps; write" in told("1ep", 20)
    assert f"max_duration: 17ep reads each of {n_rows} rows 17 times" in told("17ep", n_rows)


def test_one_word_is_trained_on_and_nothing_measured(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file = here / "row.jsonl"
    rows_file.write_text(json.dumps({"prompt": "say it", "response": "it " * 40}) + "\n")
    data = f"data={{name: files, paths: [{rows_file}], format: prompt_response}}"
    run = train_here("word", data, "eval=validation", "max_duration=1ba", "max_seq_len=256")
    told = capsys.readouterr().out
    assert "eval.validation: nothing could be held out, so no loss of it is measured" in told
    assert rows(run, "loss/train/total") and not rows(run, "metrics/eval/bits_per_byte")


def test_a_run_of_enough_rows_says_nothing_about_their_number(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = files(here / "texts", [text(n) for n in range(60)])
    train_here("many", paths, "eval=validation", "max_duration=1ba", "eval.validation_rows=1")
    told = capsys.readouterr().out
    assert "held out, on which" not in told and "rows of 64 tokens: the run" not in told
    assert "max_duration:" not in told


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ("Once upon a time\n", "'Once upon a'"),
        ("    def __init__(self): ...\n", "'def __init__(self'"),
    ],
)
def test_the_next_command_begins_as_the_text_does(
    here: Path, capsys: pytest.CaptureFixture[str], line: str, prompt: str
) -> None:
    train_here("next", files(here / "texts", [line * 50]), "eval=validation", "max_duration=1ba")
    assert f"generate.py runs/next prompt={prompt}\n" in capsys.readouterr().out
