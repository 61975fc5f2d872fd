"""metrics.jsonl survives kills, and after a resume equals an uninterrupted run's."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.loggers import metrics_file
from llmfoundry.loggers.metrics_file import JsonLines, read_metrics


def train(path: Path, first: int, last: int) -> None:
    """What a deterministic run writes: a line a step, and an evaluation every third."""
    file = JsonLines(path, pytest.fail)
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
        "from llmfoundry.loggers.metrics_file import JsonLines\n"
        "file = JsonLines(Path(sys.argv[1]), print); file.start(0)\n"
        "for b in range(1, 51): file.write({'time/batch': b, 'time/token': b})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60)
    assert done.returncode == -9
    assert [row["time/batch"] for row in read_metrics(path)] == list(range(1, 51))


def test_lines_for_which_there_never_was_room_are_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    path = tmp_path / "mine" / "metrics.jsonl"
    file = JsonLines(path, said.append)
    file.start(0)
    file.write({"time/batch": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics_file, "append", full)
    monkeypatch.setattr(metrics_file.tempfile, "tempdir", str(tmp_path))
    for batch in (2, 3):
        file.write({"time/batch": batch})
    file.close()
    (kept,) = tmp_path.glob("mine-metrics-*.jsonl")
    assert len(said) == 2 and f"lacks 2 lines: No space left on device; 2 are in {kept}" in said[1]
    path.write_bytes(path.read_bytes() + kept.read_bytes())  # as it says
    assert [row["time/batch"] for row in read_metrics(path)] == [1, 2, 3]


def test_numbers_keep_every_digit(tmp_path: Path) -> None:
    path, file = tmp_path / "m.jsonl", JsonLines(tmp_path / "m.jsonl", pytest.fail)
    values = [1 / 3, 2**-1074, 1.7976931348623157e308, 0.1 + 0.2, 6e-4]
    file.start(0)
    for i, value in enumerate(values):
        file.write({"time/batch": i, "time/token": i, "x": value})
    file.close()
    assert [row["x"] for row in read_metrics(path)] == values


def test_numbers_that_json_lacks_are_strings_and_come_back(tmp_path: Path) -> None:
    path, file = tmp_path / "m.jsonl", JsonLines(tmp_path / "m.jsonl", pytest.fail)
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
    path, file = tmp_path / "samples.jsonl", JsonLines(tmp_path / "samples.jsonl", pytest.fail)
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
        JsonLines(path, pytest.fail).start(2)
    assert path.read_bytes() == before


def test_a_full_disk_stops_nothing_and_lines_are_written_once_there_is_room(tmp_path: Path) -> None:
    """The file may not grow beyond 1000 bytes for a while, as on a disk that fills."""
    code = (
        "import json, resource, sys; from pathlib import Path\n"
        "from llmfoundry.loggers.metrics_file import JsonLines, read_metrics\n"
        "path, said = Path(sys.argv[1]), []\n"
        "file = JsonLines(path, said.append); file.start(0)\n"
        "def limit(n): resource.setrlimit(resource.RLIMIT_FSIZE, (n, resource.RLIM_INFINITY))\n"
        "def write(first, last):\n"
        "    for b in range(first, last):\n"
        "        file.write({'time/batch': b, 'loss/train/total': 1 / b, 'time/token': b * 64})\n"
        "limit(1000); write(1, 51); full = path.read_bytes()\n"
        "if sys.argv[2] == 'cleared': limit(resource.RLIM_INFINITY); write(51, 61)\n"
        "file.close()\n"
        "print(json.dumps([said, len(read_metrics(path)), full.endswith(b'\\n'), len(full)]))\n"
    )
    results = {}
    for end in ("full", "cleared"):
        path = tmp_path / f"{end}.jsonl"
        arguments = [sys.executable, "-c", code, str(path), end]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
        results[end] = json.loads(done.stdout)
        said, lines, is_whole, size = results[end]
        assert is_whole and 900 < size <= 1000  # no torn line at the edge
        assert [row["time/batch"] for row in read_metrics(path)] == list(range(1, lines + 1))
        assert "full.jsonl cannot be written: File too large; training continues" in said[0] or (
            "cleared.jsonl cannot be written: File too large; training continues" in said[0]
        )
    said, lines, _, _ = results["full"]
    assert len(said) == 2 and f"lacks {50 - lines} lines: File too large" in said[1]
    said, lines, _, _ = results["cleared"]
    assert lines == 60 and len(said) == 2 and "is written again; 0 lines were lost" in said[1]


def test_norms_of_every_parameter_stay_one_line_a_step_and_can_be_left_out(tmp_path: Path) -> None:
    path, file = tmp_path / "m.jsonl", JsonLines(tmp_path / "m.jsonl", pytest.fail)
    file.start(0)
    norms = {f"l2_norm/grad/blocks.{i}.ffn.up_proj.weight": i / 7 for i in range(500)}
    for batch in range(1, 6):
        file.write({"time/batch": batch, "loss/train/total": 1 / batch, **norms})
    file.close()
    assert path.read_bytes().count(b"\n") == 5
    assert read_metrics(path)[2] == {"time/batch": 3, "loss/train/total": 1 / 3, **norms}
    slim = read_metrics(path, lambda name: not name.startswith("l2_norm/"))
    assert slim[2] == {"time/batch": 3, "loss/train/total": 1 / 3}


def test_a_folder_that_cannot_be_written_is_a_user_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"save_folder: .*File exists.*another folder"):
        JsonLines(tmp_path / "file" / "metrics.jsonl", pytest.fail).start(0)
