"""Heartbeats: the step and phase of a process, and since when, for the hang monitor.

The training loop calls `beat` as it enters a phase; `resilience/hang` and the supervisor read the
files. The idea: a heartbeat is one write of a short line to a file in memory (/dev/shm), a few
microseconds, and whatever then blocks this process, the file can still be read. Times are
CLOCK_MONOTONIC's: the same in all processes of a machine, and never set.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from llmfoundry.files import read_json

PHASES = ("start", "data", "step", "update", "evaluation", "callbacks", "save", "end")
"""In the order of a step: data is the wait for its batch, step the forward and backward pass,
update the optimizer's, with the collectives before it."""
LEARNED = ("step", "update")
"""Phases that take the same time in each step, so that their limit is learned."""
STACKS = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""The signal at which a process writes its stacks; schedulers send USR1 and USR2 for other
purposes."""
BEATS = "LLMFOUNDRY_BEATS"
"""In the environment: the folder below which processes write heartbeats for the supervisor."""
RECORDER = "LLMFOUNDRY_RECORDER"
"""In the environment: where this process's NCCL flight recorder writes, if it has one."""
FLIGHT = "flight-"
"""Before the rank, in the name of a file of its flight recorder: its last messages, by PyTorch."""
READER = f"torchfrtrace --prefix {FLIGHT}"
"""PyTorch's program that compares those of all processes; their folder follows."""
MEMORY = "/dev/shm"
_FREE = 2**22  # bytes: 16 ranks' heartbeats and stacks
_SIZE = 512  # bytes of a line, padded: a write never leaves the end of a longer one
_NAME = 60  # characters of a callback's name
_WARM = 3  # steps that compile, tune and connect
_WINDOW = 100  # steps, the longest of which is reported


def memory_folder() -> str | None:
    """A folder in memory; None: there is none, or it is not writable or full."""
    if not os.access(MEMORY, os.W_OK):
        return None
    return MEMORY if shutil.disk_usage(MEMORY).free >= _FREE else None


class Heartbeat:
    """The heartbeat of this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Start in the phase `start`; from now on the signal `STACKS` writes the stacks."""
        self._rank = rank
        self._path = beat_path(folder, rank)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._stacks: IO[bytes] = stacks_path(folder, rank).open("wb")
        faulthandler.register(STACKS, file=self._stacks, all_threads=True, chain=False)
        self._times: dict[str, deque[float]] = {name: deque(maxlen=_WINDOW) for name in LEARNED}
        self._first: int | None = None
        self._count, self._step, self._phase, self._since = 0, 0, "", time.monotonic()
        self._saved = -1
        self.beat("start", 0)

    def beat(self, phase: str, step: int, saved: int | None = None) -> None:
        """Enter a phase of a step; arguments as of the function `beat`."""
        now = time.monotonic()
        self._saved = self._saved if saved is None else saved
        self._first = step if self._first is None and phase == "step" else self._first
        is_warm = self._first is not None and self._step >= self._first + _WARM
        if is_warm and self._phase in LEARNED:
            self._times[self._phase].append(now - self._since)
        self._step, self._phase, self._since = step, phase, now
        self._write(now, "")

    def enter(self, callback: str) -> None:
        """Enter a callback, or (empty) return from it, within the phase."""
        self._write(time.monotonic(), callback.encode("ascii", "replace").decode()[:_NAME])

    def _write(self, since: float, callback: str) -> None:
        self._count += 1
        longest = {name: round(max(times), 3) for name, times in self._times.items() if times}
        beat: dict[str, Any] = {"rank": self._rank, "pid": os.getpid(), "count": self._count}
        beat |= {"step": self._step, "phase": self._phase, "since": round(since, 4)}
        beat |= {"longest": longest, "saved": self._saved, "callback": callback}
        beat |= {"recorder": os.environ.get(RECORDER, "")}
        os.pwrite(self._file, json.dumps(beat).encode().ljust(_SIZE - 1) + b"\n", 0)

    def close(self) -> None:
        """Remove the heartbeat: nobody has to wait for this process."""
        faulthandler.unregister(STACKS)
        self._stacks.close()
        os.close(self._file)
        self._path.unlink(missing_ok=True)


_own: Heartbeat | None = None  # a process has one, as it has one log


def start_heartbeat(folder: Path, rank: int) -> None:
    """From now on `beat` writes to a folder."""
    global _own
    stop_heartbeat()
    _own = Heartbeat(folder, rank)


def stop_heartbeat() -> None:
    """From now on `beat` does nothing."""
    global _own
    if _own is not None:
        _own.close()
    _own = None


def beat(phase: str, step: int, saved: int | None = None) -> None:
    """Record that this process enters a phase of a step; does nothing without `start_heartbeat`.

    Args:
        phase: one of PHASES.
        step: the current step (from 1).
        saved: the batch of the run's newest checkpoint; -1: none, or not known; None: as before.
    """
    if _own is not None:
        _own.beat(phase, step, saved)


@contextmanager
def in_callback(name: str) -> Iterator[None]:
    """Record the callback that this process calls, which a monitor names if it does not return."""
    if _own is not None:
        _own.enter(name)
    yield
    if _own is not None:  # not after an error: the last heartbeat shows where this process ended
        _own.enter("")


def beat_path(folder: Path, rank: int) -> Path:
    """The file of a rank's heartbeat."""
    return folder / f"rank-{rank}.beat"


def stacks_path(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks."""
    return folder / f"rank-{rank}.stacks"


def read_heartbeats(folder: Path) -> list[dict[str, Any]]:
    """The newest heartbeat of every rank of this machine, by rank."""
    found = []
    for path in folder.glob("rank-*.beat"):
        with suppress(OSError, ValueError):
            beat = read_json(path)
            if _is_beat(beat):
                found.append(beat)
    return sorted(found, key=lambda beat: int(beat["rank"]))


def _is_beat(found: Any) -> bool:
    """Whether it is what a `Heartbeat` writes: everybody may write to /dev/shm."""
    kinds: dict[str, Any] = {"rank": int, "pid": int, "step": int, "longest": dict}
    kinds["since"] = (int, float)
    if not isinstance(found, dict) or found.get("phase") not in PHASES:
        return False
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())
