"""Spans: named parts of a step, which whoever measures or traces a run is notified of.

The loop, the step and what waits for other processes write `with span("forward"):`;
`train/step_time.py` adds up their times and `train/profiler.py` shows them in traces. The idea: the
code that is measured knows nothing of those who measure, and without one a span is two tests of an
empty tuple, a quarter of a microsecond.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

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
