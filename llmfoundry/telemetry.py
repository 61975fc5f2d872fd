"""Telemetry of a rank: its current phase (heartbeats), and the parts of a step (spans).

The training loop calls `beat` when it enters a phase. A heartbeat is one write of a short line to a
file in memory (/dev/shm) and takes a few microseconds. `resilience/hang` and the supervisor read
the files even if the rank is blocked. Times are of CLOCK_MONOTONIC, which is the same in all
processes of a machine and is never set.

The loop, the step and code that waits for other processes write `with span("forward"):`. Observers
are notified: `SpanClock` adds up the time of each span (`train/callbacks.py` logs it), and
`train/profiler.py` shows spans in traces. Without an observer a span costs two tests of an empty
tuple, a quarter of a microsecond.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from llmfoundry.files import read_json

PHASES = ("start", "data", "step", "update", "evaluation", "callbacks", "save", "end")
"""Phases in the order of a step: data is the wait for the batch, step the forward and backward
pass, update the optimizer's step and the collectives before it."""
LEARNED = ("step", "update")
"""Phases that take the same time in each step. Their timeout is derived from earlier steps."""
STACKS = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal at which a process writes its stacks. Schedulers use USR1 and USR2 for other purposes."""
BEATS = "LLMFOUNDRY_BEATS"
"""Environment variable: folder for heartbeats that the supervisor reads."""
RECORDER = "LLMFOUNDRY_RECORDER"
"""Environment variable: folder of this rank's NCCL flight recorder, if it has one."""
FLIGHT = "flight-"
"""Prefix of a file of PyTorch's flight recorder; the rank follows."""
READER = f"torchfrtrace --prefix {FLIGHT}"
"""PyTorch's command that compares the flight recorders of all ranks; their folder follows."""
MEMORY = "/dev/shm"
_FREE = 2**22  # bytes: heartbeats and stacks of 16 ranks
_SIZE = 512  # bytes of a padded line, so that a shorter line overwrites a longer one
_NAME = 60  # maximum characters of a callback's name
_WARM = 3  # first steps, which compile, tune and connect
_WINDOW = 100  # steps, the longest of which is reported


def memory_folder() -> str | None:
    """Return a folder in memory; None: there is none, or it is not writable or full."""
    if not os.access(MEMORY, os.W_OK):
        return None
    return MEMORY if shutil.disk_usage(MEMORY).free >= _FREE else None


class Heartbeat:
    """Heartbeat of this process."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Start in the phase `start`, and write the stacks at the signal `STACKS`."""
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
        """Enter a phase of a step; arguments as in the function `beat`."""
        now = time.monotonic()
        self._saved = self._saved if saved is None else saved
        self._first = step if self._first is None and phase == "step" else self._first
        is_warm = self._first is not None and self._step >= self._first + _WARM
        if is_warm and self._phase in LEARNED:
            self._times[self._phase].append(now - self._since)
        self._step, self._phase, self._since = step, phase, now
        self._write(now, "")

    def enter(self, callback: str) -> None:
        """Enter a callback within the phase, or return from it (empty name)."""
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
        """Remove the heartbeat, so that a monitor does not wait for this process."""
        faulthandler.unregister(STACKS)
        self._stacks.close()
        os.close(self._file)
        self._path.unlink(missing_ok=True)


_own: Heartbeat | None = None  # the heartbeat of this process


def start_heartbeat(folder: Path, rank: int) -> None:
    """Let `beat` write to a folder from now on."""
    global _own
    stop_heartbeat()
    _own = Heartbeat(folder, rank)


def stop_heartbeat() -> None:
    """Let `beat` do nothing from now on."""
    global _own
    if _own is not None:
        _own.close()
    _own = None


def beat(phase: str, step: int, saved: int | None = None) -> None:
    """Record that this process enters a phase of a step; does nothing without `start_heartbeat`.

    Args:
        phase: one of PHASES.
        step: the current step (from 1).
        saved: batch of the run's newest checkpoint; -1: none, or not known; None: no change.
    """
    if _own is not None:
        _own.beat(phase, step, saved)


@contextmanager
def in_callback(name: str) -> Iterator[None]:
    """Record a callback during the block, so that a monitor can report one that hangs."""
    if _own is not None:
        _own.enter(name)
    yield
    if _own is not None:  # not after an error: the last heartbeat shows where this process ended
        _own.enter("")


def beat_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's heartbeat."""
    return folder / f"rank-{rank}.beat"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the file to which a rank writes its stacks."""
    return folder / f"rank-{rank}.stacks"


def read_heartbeats(folder: Path) -> list[dict[str, Any]]:
    """Return the newest heartbeat of each rank of this machine, sorted by rank."""
    beats = []
    for path in folder.glob("rank-*.beat"):
        with suppress(OSError, ValueError):
            beat = read_json(path)
            if _is_beat(beat):
                beats.append(beat)
    return sorted(beats, key=lambda beat: int(beat["rank"]))


def _is_beat(found: Any) -> bool:
    """Return whether a value is a valid heartbeat, because any user can write to /dev/shm."""
    kinds: dict[str, Any] = {"rank": int, "pid": int, "step": int, "longest": dict}
    kinds["since"] = (int, float)
    if not isinstance(found, dict) or found.get("phase") not in PHASES:
        return False
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items())


SPANS = ("data", "forward", "backward", "messages", "optimizer", "logging")
"""Spans of a step, in order. messages: communication, and packing for it; its time within another
span does not count for that span."""
PAUSES = ("evaluation", "saving", "pause")
"""Spans between steps; pause: samples or traces are written."""
OTHER = "other"
"""Time outside of spans: callbacks and other work of the host."""


class SpanObserver(Protocol):
    """Observer of spans. Spans nest, and are entered and left by one thread at a time."""

    def enter(self, name: str) -> None:
        """A span begins."""

    def leave(self) -> None:
        """The innermost span ends."""


_observers: tuple[SpanObserver, ...] = ()


class span:
    """Context of a span; `name` is one of SPANS or PAUSES."""

    __slots__ = ("_name", "_notified")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._notified = _observers  # observers may change during the span
        for observer in self._notified:
            observer.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for observer in reversed(self._notified):
            observer.leave()


def observe_spans(observer: SpanObserver) -> None:
    """From the next span on notify `observer` too."""
    global _observers
    _observers = (*_observers, observer)


def stop_observing(observer: SpanObserver) -> None:
    """Notify `observer` of no further spans, only of the ends of open ones."""
    global _observers
    _observers = tuple(other for other in _observers if other is not observer)


class TimedEvent(Protocol):
    """The part of torch.Event(device, enable_timing=True) that a clock uses."""

    def record(self) -> None:
        """Record the event in the current stream."""

    def query(self) -> bool:
        """Return whether the stream has reached the event."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds until a later event that the stream has reached."""


class SpanClock:
    """Clock that sums the time of each span, from one cut to the next.

    A mark is set where a span begins or ends. The time between two marks belongs to the innermost
    span, so the spans add up to the total time. On a CPU, marks are wall-clock times. On a GPU they
    are CUDA events of the compute stream, which are read later, so the host never waits. A span
    then includes the time in which the stream computes its work or is idle.
    """

    def __init__(self, new_event: Callable[[], TimedEvent] | None = None) -> None:
        """Start the clock; `new_event` creates events of a device, None: wall clock."""
        self._new_event = new_event
        self._spare: list[TimedEvent] = []  # events that can be reused
        self._open = [OTHER]
        self._marks: deque[tuple[str, Any, bool]] = deque()  # (span that ended, time, is a cut)
        self._seconds: dict[str, float] = {}
        self._ended: deque[dict[str, float]] = deque()  # sums between cuts that were not taken
        self._last = self._now()

    def enter(self, name: str) -> None:
        """A span begins."""
        self._mark()
        self._open.append(name)

    def leave(self) -> None:
        """The innermost span ends."""
        self._mark()
        self._open.pop()

    def turn(self, name: str) -> None:
        """Count the rest of the current span as the span `name`."""
        self._mark()
        self._open[-1] = name

    def cut(self) -> None:
        """End the interval that one call of `take` returns."""
        self._mark(is_cut=True)

    def take(self) -> dict[str, float]:
        """Return the seconds of each span in the oldest interval.

        The device must have completed the interval.
        """
        while not self._ended:
            self._read()
        return self._ended.popleft()

    def read_done(self) -> None:
        """Read the marks that the device has reached, so that their events can be reused."""
        while self._marks and (self._new_event is None or self._marks[0][1].query()):
            self._read()

    def _mark(self, *, is_cut: bool = False) -> None:
        self._marks.append((self._open[-1], self._now(), is_cut))

    def _now(self) -> Any:
        if self._new_event is None:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        return event

    def _read(self) -> None:
        name, mark, is_cut = self._marks.popleft()
        if self._new_event is None:
            passed = mark - self._last
        else:
            passed = self._last.elapsed_time(mark) / 1e3
            self._spare.append(self._last)
        self._seconds[name] = self._seconds.get(name, 0.0) + passed
        self._last = mark
        if is_cut:
            self._ended.append(self._seconds)
            self._seconds = {}
