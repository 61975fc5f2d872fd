"""events.jsonl: lines of several processes, torn ones, and secrets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmfoundry.events import NAME, add_event, read_events


def test_a_line_behind_a_torn_one_is_whole(tmp_path: Path) -> None:
    add_event(tmp_path, "hang", "first")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"time": 1.0, "kind": "ha')  # the disk was full
    add_event(tmp_path, "hang", "second")
    add_event(tmp_path, "hang", "third")
    assert [event["what"] for event in read_events(tmp_path)] == ["first", "second", "third"]


def test_a_line_that_is_cut_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:9]))
    with pytest.raises(OSError, match="No space left"):
        add_event(tmp_path, "hang", "x")
    monkeypatch.undo()
    add_event(tmp_path, "hang", "next")
    assert [event["what"] for event in read_events(tmp_path)] == ["next"]


@pytest.mark.parametrize(
    "line",
    [
        '{"time": NaN, "kind": "hang", "what": "x"}',
        '{"time": 1e300, "kind": "hang", "what": "x"}',
        '{"time": 1.0, "what": "x"}',
        '{"time": 1.0, "kind": ["x"], "what": "x"}',
        f'{{"time": 1.0, "kind": "hang", "what": "x", "step": {"9" * 400}}}',
        f'{{"time": 1.0, "kind": "hang", "what": {"[" * 200_000}',
        f'{{"time": {"9" * 5000}, "kind": "hang", "what": "x"}}',
        "[]",
    ],
    ids=range(8),
)
def test_a_line_of_others_is_passed_over(tmp_path: Path, line: str) -> None:
    add_event(tmp_path, "hang", "first")
    with (tmp_path / NAME).open("a") as file:
        file.write(line + "\n")
    add_event(tmp_path, "hang", "\u2028 last")
    assert [event["what"] for event in read_events(tmp_path)] == ["first", "\u2028 last"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_what_is_no_file_holds_no_events(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / NAME)
    assert [*read_events(tmp_path)] == []  # nobody waits for the pipe's writer
    with pytest.raises(OSError):
        add_event(tmp_path, "hang", "x")


def test_no_secret_is_kept_and_what_is_returned_is_what_was_written(tmp_path: Path) -> None:
    words = ["train.py", "logger.tracking_uri=http://me:secret@host"]
    event = add_event(tmp_path, "start", "at http://me:secret@host", command=words)
    assert "secret" not in (tmp_path / NAME).read_text()
    assert [*read_events(tmp_path)] == [event]
    assert event["command"][0] == "train.py"
