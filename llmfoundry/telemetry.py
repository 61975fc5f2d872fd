"""Telemetry of a process: the phase it is in (heartbeats), the part of a step it is in (spans).

The training loop calls `beat` when it enters a phase. A heartbeat is one write of a short line to a
file in memory (/dev/shm), a few microseconds. `resilience/hang` and the supervisor read the files,
whatever blocks this process. Times are CLOCK_MONOTONIC's, which is the same in all processes of a
machine and is never set.

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


SPANS = ("data", "forward", "backward", "messages", "optimizer", "logging")
"""Of a step, in their order. messages: this process waits for what others send, or packs what it
sends; within another span they do not count as that one's."""
PAUSES = ("evaluation", "saving", "pause")
"""Between steps; pause: samples are written, and traces."""
OTHER = "other"
"""What is in no span: callbacks, and the host's own work."""


class SpanObserver(Protocol):
    """Who is notified of spans; spans nest, and are entered and left by one thread at a time."""

    def enter(self, name: str) -> None:
        """A span begins."""

    def leave(self) -> None:
        """The span that began last ends."""


_observers: tuple[SpanObserver, ...] = ()  # of this process


class span:
    """A context that is the span `name`, one of SPANS or PAUSES."""

    __slots__ = ("_name", "_notified")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._notified = _observers  # they may change within
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
    """Notify it of no further span, only of the ends of those that it knows."""
    global _observers
    _observers = tuple(other for other in _observers if other is not observer)


class TimedEvent(Protocol):
    """What a clock needs of torch.Event(device, enable_timing=True)."""

    def record(self) -> None:
        """Be done when the stream comes to here."""

    def query(self) -> bool:
        """Whether it is done."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds until a later one that is done."""


class SpanClock:
    """Adds up the time of each span, from one cut to the next.

    A mark is set wherever a span begins or ends. The time between two marks belongs to the
    innermost span, so the parts add up to the whole. On a CPU, marks are wall-clock times. On a
    GPU, they are CUDA events of the computing stream, which are read later, so the host never
    waits: a span then lasts as long as the stream computes what was launched in it, or is idle.
    """

    def __init__(self, new_event: Callable[[], TimedEvent] | None = None) -> None:
        """Begin to count, in no span; `new_event` makes events of a device, None: wall clock."""
        self._new_event = new_event
        self._spare: list[TimedEvent] = []  # those that were read
        self._open = [OTHER]
        self._marks: deque[tuple[str, Any, bool]] = deque()  # what ended where; whether it is a cut
        self._seconds: dict[str, float] = {}
        self._ended: deque[dict[str, float]] = deque()  # between cuts, not yet taken
        self._last = self._now()

    def enter(self, name: str) -> None:
        """A span begins."""
        self._mark()
        self._open.append(name)

    def leave(self) -> None:
        """The span that began last ends."""
        self._mark()
        self._open.pop()

    def turn(self, name: str) -> None:
        """The rest of the span that is under way is another's."""
        self._mark()
        self._open[-1] = name

    def cut(self) -> None:
        """End what `take` returns in one piece."""
        self._mark(is_cut=True)

    def take(self) -> dict[str, float]:
        """Seconds of each span from one cut to the next; the device has computed up to there."""
        while not self._ended:
            self._read()
        return self._ended.popleft()

    def read_done(self) -> None:
        """Read the marks that the device has come to: their events are used again."""
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
