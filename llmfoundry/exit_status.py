"""Exit statuses, and the data that a supervisor and the ranks of a run exchange.

    0    complete
    1    failed; a restart may succeed (also any status that is not listed)
    2    mistake of the user, reported in one line; the same command fails again
    3    a machine is bad (scripts/check.py, or a run with health_check.before_run)
    75   run the same command again (EX_TEMPFAIL of sysexits.h): stopped by a signal and saved, or
         out of memory, and the next start uses a smaller microbatch
    93   the supervisor gives up: do not restart before a person has looked at the cause
    130  Ctrl-C before there was anything to save

torchrun replaces every status but 0 by 1, and reports only a number for each rank. Each rank
therefore also writes a file with its last message into the supervisor's folder. In the other
direction, the supervisor sets environment variables with the checkpoints from which an attempt may
resume (`ResumeLimits`, read by `builders/resume.py`). A rank that finds fewer checkpoints than the
supervisor, for example on another machine, must not silently start over.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from llmfoundry.files import read_json

Handler = Callable[[int, FrameType | None], None]
DONE, FAILED, MISTAKE, BAD_MACHINE, SAVED, GIVE_UP, INTERRUPTED = 0, 1, 2, 3, 75, 93, 130
MEMORY = "memory"
"""Kind of end for `record_end`: out of memory; the ranks are restarted."""
ENDS_FOLDER = "LLMFOUNDRY_ENDS"
"""Environment variable: folder for the files of `record_end`; unset: none are written."""
STOP_FILE = "stop"
"""Empty file in the supervisor's heartbeat folder: a stop of the run was requested."""
STOPS = tuple(getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "USR1", "HUP"))
"""Signals at which a run saves and ends: from schedulers, Ctrl-C, and a closed terminal."""
_MOST_LOST = 8  # ranks that record the loss of another rank; more would add nothing


def own_node() -> str:
    """Return this machine's name in its scheduler, or its host name."""
    env = os.environ
    return env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or socket.gethostname()


def on_stops(handler: Handler) -> dict[signal.Signals, Any]:
    """Set the handler of all STOPS signals that are not ignored (nohup ignores SIGHUP).

    Also unblocks the signals: a signal that arrived while they were blocked is delivered now. Does
    nothing outside the main thread, where Python sets no handlers.

    Returns:
        The previous handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    return before


def record_end(status: int, kind: str, lines: Sequence[str]) -> None:
    """Record how this rank ends, if it has a supervisor.

    Args:
        status: exit status.
        kind: mistake, lost (contact with another rank was lost), error, full (a disk is full),
            memory (out of memory; a smaller microbatch may help), stopped or done.
        lines: message, without secrets.
    """
    folder, rank = os.environ.get(ENDS_FOLDER), int(os.environ.get("RANK", 0))
    if folder is None or (kind == "lost" and rank >= _MOST_LOST):
        return
    end = {"rank": rank, "status": status, "kind": kind, "time": time.time()}
    end |= {"node": own_node(), "lines": [line[:1000] for line in lines[:20]]}
    _write(Path(folder) / f"rank-{rank}.json", end)


def record_ranks(folder: Path, ranks: Sequence[int]) -> None:
    """Record the ranks of this machine; called by the first of them."""
    _write(folder / f"place-{ranks[0]}.json", {"node": own_node(), "ranks": list(ranks)})


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file atomically, but without the fsync of `files.write_json`."""
    with suppress(OSError):  # the disk may have failed
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(path)


def read_ranks(folder: Path) -> dict[int, str]:
    """Return the machine of each rank that has begun."""
    nodes = dict[int, str]()
    for path in folder.glob("place-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # damaged
            place = read_json(path)
            nodes |= dict.fromkeys(map(int, place["ranks"]), str(place["node"]))
    return nodes


def read_ends(folder: Path) -> list[dict[str, Any]]:
    """Return the recorded ends of ranks, ordered by modification time on the shared file system."""
    ends = list[tuple[int, dict[str, Any]]]()
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError):
            end = read_json(path)
            if _is_end(end):
                ends.append((path.stat().st_mtime_ns, end))
    return [end for _, end in sorted(ends, key=lambda pair: pair[0])]


def _is_end(found: Any) -> bool:
    """Return whether a value has the fields that `record_end` writes."""
    kinds = {"rank": int, "status": int, "kind": str, "node": str, "lines": list}
    if not isinstance(found, dict):
        return False
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())


_SAVED, _BEFORE = "LLMFOUNDRY_SAVED_BATCH", "LLMFOUNDRY_RESUME_BEFORE"


@dataclass(frozen=True)
class ResumeLimits:
    """Limits on the checkpoint from which an attempt resumes.

    Attributes:
        saved: batch of the newest checkpoint, which must exist; -1: none must exist.
        before: resume from a checkpoint of fewer batches than this; None: from the newest.
    """

    saved: int = -1
    before: int | None = None

    @property
    def until(self) -> int | None:
        """Maximum batch of the checkpoint to resume from; None: any."""
        return None if self.before is None else self.before - 1

    def environment(self) -> dict[str, str]:
        """Return the environment variables of an attempt."""
        return {_SAVED: str(self.saved), _BEFORE: "" if self.before is None else str(self.before)}


def resume_limits() -> ResumeLimits:
    """Return the limits that the supervisor has set; no limits without a supervisor.

    There are no limits either if torchrun itself has restarted the ranks, because newer checkpoints
    may exist.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return ResumeLimits()
    saved, before = os.environ.get(_SAVED, ""), os.environ.get(_BEFORE, "")
    return ResumeLimits(
        saved=int(saved) if saved.isdecimal() else -1,
        before=int(before) if before.isdecimal() else None,
    )
