"""What others than the training processes write into the record of a run at a URL.

The monitor of hanging ranks and the supervisor write events, stacks and last words into the working
copy while no process is there that sends them to the store. `Mirror.begin`, which makes the working
copy what the store has, calls `Beside` before and after, so that those are sent then, and not lost.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from llmfoundry.events import NAME as EVENTS
from llmfoundry.exit_status import ENDS_FOLDER as SUPERVISED
from llmfoundry.files import parse_json

FOLDERS = ("supervise", "hangs")
"""Below a run's folder: what these two write beside events.jsonl."""


class Beside:
    """What a working copy has of them."""

    def __init__(self, folder: Path) -> None:
        """As it is before the record is fetched."""
        self._folder = folder
        self._first = _lines(folder / "metrics.jsonl")[:1]
        self._events = _lines(folder / EVENTS)

    def put_back(self) -> None:
        """Keep it, once the record is fetched, if it is of the same run.

        It is where the metrics begin with the same line, which has its time. Of a run that has none
        yet, what its supervisor has written since it began is its own.

        Raises:
            OSError: the events cannot be written.
        """
        is_same = bool(self._first) and self._first == _lines(self._folder / "metrics.jsonl")[:1]
        if not (is_same or SUPERVISED in os.environ):
            for name in FOLDERS:
                shutil.rmtree(self._folder / name, ignore_errors=True)
            return
        mine = self._events if is_same else _of_supervisor(self._events)
        there = set(_lines(self._folder / EVENTS))
        lost = [line for line in mine if line not in there]
        if lost:
            with (self._folder / EVENTS).open("ab") as file:
                file.write(b"\n".join(lost) + b"\n")


def _of_supervisor(lines: list[bytes]) -> list[bytes]:
    """The lines since a supervisor's first start; of one that goes on after a requeue all."""
    for index in range(len(lines) - 1, -1, -1):
        event = parse_json(lines[index])
        if event.get("kind") == "start" and event.get("attempt") == 1:
            return lines[index:]
    return lines


def _lines(path: Path) -> list[bytes]:
    """The whole lines of a file of JSON objects."""
    found = []
    with suppress(OSError):
        for line in path.read_bytes().split(b"\n"):
            with suppress(ValueError):
                found += [line] if isinstance(parse_json(line), dict) else []
    return found
