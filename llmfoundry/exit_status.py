"""How a process of a run ends, and what a supervisor and the run's processes exchange.

    0    done
    1    it failed, and may succeed if it is started again (so any status that is not listed)
    2    a mistake of the user's, reported in a line: the same command fails again
    3    scripts/check.py, or a run with health_check.before_run: a machine is bad
    75   run the same command again (EX_TEMPFAIL of sysexits.h): stopped by a signal and saved, or
         out of memory, and it will begin with a smaller microbatch
    93   the supervisor gives up: do not start it again before somebody has looked
    130  Ctrl-C before there was anything to save

torchrun makes 1 of every status but 0, and reports no more than a number of each process. So each
process also writes a file into the supervisor's folder, with the line that it ended with. In the
other direction the supervisor sets, in the environment, from which checkpoint an attempt may resume
(`ResumeLimits`; `builders/resume.py` reads it): a process that finds fewer checkpoints than the
supervisor, on another machine perhaps, must not silently start over.
"""

from __future__ import annotations

import json
import os
import signal
import socket
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
"""The kind of end, as `record_end` has it, after which the processes are to be started again."""
ENDS_FOLDER = "LLMFOUNDRY_ENDS"
"""In the environment: the folder for these files; without it none are written."""
STOP_FILE = "stop"
"""An empty file in the supervisor's folder of heartbeats: the run is asked to stop."""
STOPS = tuple(getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "USR1", "HUP"))
"""Signals that make a run save and end: of schedulers, Ctrl-C, and a terminal that is closed."""
_MOST_LOST = 8  # ranks that record a lost one: 3,072 files would add nothing


def own_node() -> str:
    """This machine's name as its scheduler knows it, else as it calls itself."""
    env = os.environ
    return env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or socket.gethostname()


def on_stops(handler: Handler) -> dict[signal.Signals, Any]:
    """From now on call `handler` at each of STOPS that is not ignored, as nohup ignores SIGHUP.

    One that came before, and was held back for it, is delivered now.

    Returns:
        What was called before, to be set again.
    """
    numbers = [number for number in STOPS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    return before


def record_end(status: int, kind: str, lines: Sequence[str]) -> None:
    """Record how this process ends, if it has a supervisor.

    Args:
        status: its exit status.
        kind: mistake, lost (another process was), error, full (a disk), memory (out of it, and a
            start with a smaller microbatch may do), stopped or done.
        lines: its message, without secrets.
    """
    folder, rank = os.environ.get(ENDS_FOLDER), int(os.environ.get("RANK", 0))
    if folder is None or (kind == "lost" and rank >= _MOST_LOST):
        return
    end = {"rank": rank, "status": status, "kind": kind, "time": time.time()}
    end |= {"node": own_node(), "lines": [line[:1000] for line in lines[:20]]}
    _write(Path(folder) / f"rank-{rank}.json", end)


def record_ranks(folder: Path, ranks: Sequence[int]) -> None:
    """Record which ranks are on this machine; called by the first of them."""
    _write(folder / f"place-{ranks[0]}.json", {"node": own_node(), "ranks": list(ranks)})


def _write(path: Path, record: dict[str, Any]) -> None:
    """An atomic write without fsync, for which `files.write_json` would wait."""
    with suppress(OSError):  # the disk may be what failed
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(path)


def read_ranks(folder: Path) -> dict[int, str]:
    """The machine of each rank that has begun."""
    found = dict[int, str]()
    for path in folder.glob("place-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # damaged
            place = read_json(path)
            found |= dict.fromkeys(map(int, place["ranks"]), str(place["node"]))
    return found


def read_ends(folder: Path) -> list[dict[str, Any]]:
    """The ends that processes have recorded, in the order of the file system's one clock."""
    found = list[tuple[int, dict[str, Any]]]()
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError):
            end = read_json(path)
            if _is_end(end):
                found.append((path.stat().st_mtime_ns, end))
    return [end for _, end in sorted(found, key=lambda pair: pair[0])]


def _is_end(found: Any) -> bool:
    """Whether it is what `record_end` writes."""
    kinds = {"rank": int, "status": int, "kind": str, "node": str, "lines": list}
    if not isinstance(found, dict):
        return False
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())


_SAVED, _BEFORE = "LLMFOUNDRY_SAVED_BATCH", "LLMFOUNDRY_RESUME_BEFORE"


@dataclass(frozen=True)
class ResumeLimits:
    """From which checkpoint an attempt may resume.

    Attributes:
        saved: the batch of the newest, which must exist; -1: none has to.
        before: resume from one of fewer batches than this; None: from the newest.
    """

    saved: int = -1
    before: int | None = None

    @property
    def until(self) -> int | None:
        """The most batches that may be done where it resumes; None: any number."""
        return None if self.before is None else self.before - 1

    def environment(self) -> dict[str, str]:
        """The variables of an attempt's environment."""
        return {_SAVED: str(self.saved), _BEFORE: "" if self.before is None else str(self.before)}


def resume_limits() -> ResumeLimits:
    """The limits that this process's supervisor has set; none without one.

    Nor where torchrun itself has restarted the processes, as there may be newer checkpoints.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return ResumeLimits()
    saved, before = os.environ.get(_SAVED, ""), os.environ.get(_BEFORE, "")
    return ResumeLimits(
        saved=int(saved) if saved.isdecimal() else -1,
        before=int(before) if before.isdecimal() else None,
    )
