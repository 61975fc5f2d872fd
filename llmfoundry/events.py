"""`events.jsonl` of a run's folder: what happened to the run, and what was done about it.

Written by whoever sees something: the loop's watch, the monitor of hanging ranks, the supervisor;
read by the supervisor, the report, the loggers and people. The idea: a line is added by one write,
so that processes beside each other need no lock, and a torn line is passed over. What is decided
goes by the order of lines; their times are for people, as a clock may be set back, or on.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry.masking import public_texts

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
    """Add a line to a run's events, its secrets masked; the line.

    Args:
        folder: the run's, which is made if need be.
        kind: a word to select by, such as hang or loss_spike.
        what: what was seen, for people.
        step: the step (from 1) under way; None: none in particular.
        rank: the process that it is about; None: all, or none in particular.
        action: what was done: log, skip, roll_back, end, restart, stop ...
        more: further facts, as JSON.

    Raises:
        OSError: it cannot be written whole.
    """
    event = {"time": round(time.time(), 3), "kind": kind, "step": step, "rank": rank}
    event |= {"what": what, "action": action, **more}
    line = json.dumps(public_texts(event), default=str)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = ("\n" * is_torn + line + "\n").encode()
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
    written: dict[str, Any] = json.loads(line)
    return written


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
