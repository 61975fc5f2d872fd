"""`events.jsonl` in a run's folder: what happened to the run, and which action was taken.

Written by the watch callback, the hang monitor and the supervisor; read by the supervisor, the
report and the loggers. Each line is appended with a single write, so several processes need no
lock. Damaged lines and other records are skipped. Decisions rely on the order of the lines and not
on their times, because a clock may be set.
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
"""Subfolder of a run's folder for checkpoints."""
FOLDERS = ("supervise", "hangs")
"""Subfolders of a run's folder, written by the supervisor and the hang monitor."""
_LAST = 253_402_300_799  # end of the year 9999, in seconds since 1970


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
    """Append an event to a run's events, with secrets masked, and return it.

    Args:
        folder: of the run; created if it is missing.
        kind: of the event, such as hang or loss_spike.
        what: description for people.
        step: current step (from 1); None: no particular step.
        rank: affected rank; None: all ranks, or no particular one.
        action: action taken: log, skip, roll_back, end, restart, stop ...
        more: further fields, as JSON values.

    Raises:
        OSError: the line cannot be written completely.
    """
    event = {"time": round(time.time(), 3), "kind": kind, "step": step, "rank": rank}
    event |= {"what": what, "action": action, **more}
    line = json.dumps(public_texts(event), default=str)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):  # a full pipe would block
            raise OSError(errno.EINVAL, "not a file", str(folder / NAME))
        # terminate a last line that was written incompletely
        size = status.st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = ("\n" * is_torn + line + "\n").encode()
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
    written: dict[str, Any] = json.loads(line)
    return written


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run in the order of their lines; none if there is no file."""
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
    """Return whether an event is a supervisor's decision to restart the run."""
    return event.get("kind") == "decision" and str(event.get("action")).startswith("restart")


def names_in(event: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of names under a key of an event, such as `nodes`."""
    names = event.get(key)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def _is_event(found: Any) -> bool:
    """Return whether a line has the fields that `add_event` writes, with valid types."""
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
