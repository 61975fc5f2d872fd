"""`events.jsonl` of a run's folder: what happened to the run, and what was done about it.

Written by whoever sees something: the loop's watch, the monitor of hanging ranks, the supervisor;
read by the supervisor, the report and people. The idea: a line is added by one write, so that
processes beside each other need no lock, and a torn last line is passed over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "events.jsonl"


def add_event(
    folder: Path,
    kind: str,
    what: str,
    *,
    step: int | None = None,
    rank: int | None = None,
    action: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Add a line to a run's events; the line.

    Args:
        folder: the run's, which is made if need be.
        kind: a word to select by, such as hang or loss_spike.
        what: what was seen, for people.
        step: the step (from 1) under way; None: none in particular.
        rank: the process that it is about; None: all, or none in particular.
        action: what was done: log, skip, roll_back, end, restart, stop ...
        more: further facts, as JSON.

    Raises:
        OSError: it cannot be written.
    """
    event = {"time": round(time.time(), 3), "kind": kind, "step": step, "rank": rank}
    event |= {"what": what, "action": action, **more}
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, (json.dumps(event, default=str) + "\n").encode())
    finally:
        os.close(descriptor)
    return event


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in the order in which they were written; none where there is no file."""
    try:
        lines = (folder / NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("time"), int | float):
            yield event
