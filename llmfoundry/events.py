"""`events.jsonl` of a run's folder: what happened to the run, and what was done about it.

Written by the loop's watch, the hang monitor and the supervisor; read by the supervisor, the
report, the loggers and people. The idea: a line is appended by one write, so that several processes
need no lock; a torn or foreign line is skipped. Decisions rely on the order of lines; their times
are for people, as a clock may be set.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry.files import open_guarded, parse_json
from llmfoundry.redaction import public_texts

NAME = "events.jsonl"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
FOLDERS = ("supervise", "hangs")
"""Beside events.jsonl: what the supervisor and the hang monitor write into a run's folder."""
_LAST = 253_402_300_799  # seconds: the year 9999 ends


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
        folder: the run's, created if need be.
        kind: a word to select by, such as hang or loss_spike.
        what: what was seen, for people.
        step: the current step (from 1); None: none in particular.
        rank: the process that it is about; None: all, or none in particular.
        action: what was done: log, skip, roll_back, end, restart, stop ...
        more: further facts, as JSON.

    Raises:
        OSError: it cannot be written completely.
    """
    event = {"time": round(time.time(), 3), "kind": kind, "step": step, "rank": rank}
    event |= {"what": what, "action": action, **more}
    line = json.dumps(public_texts(event), default=str)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):  # a pipe would block once it is full
            raise OSError(errno.EINVAL, "not a file", str(folder / NAME))
        size = found.st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = ("\n" * is_torn + line + "\n").encode()
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
    written: dict[str, Any] = json.loads(line)
    return written


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in the order in which they were written; none without a file."""
    path = folder / NAME
    try:
        with open_guarded(path) as file:
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            event = parse_json(line.decode(errors="replace"))
            if _is_event(event):
                yield event


def is_restart(event: Mapping[str, Any]) -> bool:
    """Whether it is a supervisor's decision to start the run again."""
    return event.get("kind") == "decision" and str(event.get("action")).startswith("restart")


def names_in(event: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names that an event lists under a key, such as nodes."""
    found = event.get(key)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else ()


def _is_event(found: Any) -> bool:
    """Whether a line has the fields that `add_event` writes, so that readers need not check."""
    if not isinstance(found, dict):
        return False
    when, step, action = found.get("time"), found.get("step"), found.get("action")
    return (
        isinstance(when, int | float)
        and 0 <= when <= _LAST
        and (step is None or (type(step) is int and 0 <= step < 2**63))
        and isinstance(found.get("kind"), str)
        and isinstance(found.get("what"), str)
        and (action is None or isinstance(action, str))
    )
