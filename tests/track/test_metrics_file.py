"""metrics.jsonl survives kills, and after a resume equals an uninterrupted run's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.track.metrics import JsonLines, read_metrics


def train(path: Path, first: int, last: int) -> None:
    """What a deterministic run writes: a line a step, and an evaluation every third."""
    file = JsonLines(path)
    file.start(first)
    for batch in range(first + 1, last + 1):
        file.write({"time/batch": batch, "time/token": batch * 64, "loss/train/total": 1 / batch})
        if batch % 3 == 0:
            file.write({"time/batch": batch, "time/token": batch * 64, "eval": batch / 7})
    file.close()


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    train(whole, 0, 20)
    train(cut, 0, 14)  # killed after batch 14; its last checkpoint is of batch 9
    train(cut, 9, 20)
    assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_torn_last_line_is_dropped(tmp_path: Path, kept: int) -> None:
    path, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    train(path, 0, 5)
    lines = path.read_bytes().split(b"\n")[:-1]
    path.write_bytes(b"\n".join(lines[:-1]) + b"\n" + lines[-1][:kept])
    assert [row["time/batch"] for row in read_metrics(path)] == [1, 2, 3, 3, 4]
    train(path, 4, 8)
    train(whole, 0, 8)
    assert path.read_bytes() == whole.read_bytes()


def test_a_whole_last_line_without_its_line_feed_is_kept(tmp_path: Path) -> None:
    path, whole = tmp_path / "metrics.jsonl", tmp_path / "whole.jsonl"
    train(path, 0, 5)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_metrics(path)[-1]["time/batch"] == 5
    train(path, 5, 8)
    train(whole, 0, 8)
    assert path.read_bytes() == whole.read_bytes()


def test_a_new_run_begins_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train(path, 0, 5)
    train(path, 0, 2)
    assert [row["time/batch"] for row in read_metrics(path)] == [1, 2]


def test_every_line_is_on_disk_when_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from llmfoundry.track.metrics import JsonLines\n"
        "file = JsonLines(Path(sys.argv[1])); file.start(0)\n"
        "for b in range(1, 51): file.write({'time/batch': b, 'time/token': b})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == -9
    assert [row["time/batch"] for row in read_metrics(path)] == list(range(1, 51))


def test_numbers_keep_every_digit(tmp_path: Path) -> None:
    path, file = tmp_path / "m.jsonl", JsonLines(tmp_path / "m.jsonl")
    values = [1 / 3, 2**-1074, 1.7976931348623157e308, 0.1 + 0.2, 6e-4]
    file.start(0)
    for i, value in enumerate(values):
        file.write({"time/batch": i, "time/token": i, "x": value})
    file.close()
    assert [row["x"] for row in read_metrics(path)] == values


def test_numbers_that_json_lacks_are_strings_and_come_back(tmp_path: Path) -> None:
    path, file = tmp_path / "m.jsonl", JsonLines(tmp_path / "m.jsonl")
    file.start(0)
    row = {"time/batch": 1, "time/token": 2, "a": math.nan, "b": math.inf, "c": -math.inf}
    file.write(row)
    file.close()

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    strict = json.loads(path.read_text(), parse_constant=refuse)
    assert (strict["a"], strict["b"], strict["c"]) == ("NaN", "Infinity", "-Infinity")
    read = read_metrics(path)[0]
    assert math.isnan(read["a"]) and read["b"] == math.inf and read["c"] == -math.inf


def test_text_with_odd_line_separators_stays_one_line(tmp_path: Path) -> None:
    path, file = tmp_path / "samples.jsonl", JsonLines(tmp_path / "samples.jsonl")
    text = "a\nb\r\nc\u2028d\x85e\x00 \u65e5"
    file.start(0)
    file.write({"time/batch": 1, "text": text})
    file.write({"time/batch": 2, "text": text})
    file.close()
    assert [row["text"] for row in read_metrics(path)] == [text, text]


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    train(path, 0, 5)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "{broken\n", *lines[2:]]))
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl:3: .*delete the line"):
        JsonLines(path).start(2)
    assert path.read_bytes() == before
