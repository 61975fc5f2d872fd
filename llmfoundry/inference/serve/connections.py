"""Connections of the server, with bounds on those that have not sent a whole request.

uvicorn waits for ever for the rest of a request's head, and its limit of concurrency only refuses
requests that are complete: a thousand half-sent heads take all of a process's open files. Here a
connection has so many seconds for each state, and a new one takes the place of the oldest that is
not a request yet.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol


def most_pending() -> int:
    """Connections without a whole request at most: half of the files that may be open.

    The rest is for answers, and for what is accepted in one step of the event loop.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if files == resource.RLIM_INFINITY else min(1024, files // 2)


def raise_open_files() -> None:
    """Let this process open as many files as it may: each client is one, and the default is low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS takes less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass
class Bounds:
    """What the connections of one server share.

    Attributes:
        head_seconds: for a request's head, from the connection's beginning or the reply before.
        request_seconds: from a request's head to the last byte of its reply.
        most: connections without a whole request.
        count_closed: called with the reason, late or crowded, when one is closed.
        pending: the connections without a whole request, the oldest first.
    """

    head_seconds: float
    request_seconds: float
    most: int
    count_closed: Callable[[str], None]
    pending: dict[H11Protocol, None] = field(default_factory=dict)


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed when it is late or when too many wait for a request."""

    bounds: Bounds
    _timer: asyncio.TimerHandle | None = None
    _timed: object = None  # the request that the timer is of, or the connection between two

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._note_state()

    def data_received(self, data: bytes) -> None:
        """Look whether a request has begun."""
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Start the timer of the next head."""
        super().on_response_complete()
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self.bounds.pending.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _note_state(self) -> None:
        """Start the timer of a new state, and make room for a connection without a request."""
        bounds = self.bounds
        request = cast(Any, self.cycle)  # None before the first
        is_request = request is not None and not request.response_complete
        state = request if is_request else self
        if self._timed is not state:
            self._timed = state
            seconds = bounds.request_seconds if is_request else bounds.head_seconds
            self._call_later(seconds, self._is_late)
        if is_request and not request.more_body:
            bounds.pending.pop(self, None)
        elif self not in bounds.pending:
            bounds.pending[self] = None
            if len(bounds.pending) > bounds.most:
                oldest = next(iter(bounds.pending))
                del bounds.pending[oldest]
                bounds.count_closed("crowded")
                oldest.transport.abort()

    def _is_late(self) -> None:
        if self._timed is self and self.transport.get_write_buffer_size():
            self._call_later(self.bounds.request_seconds, self._is_late)  # the reply is being sent
            self._timed = None
            return
        self.bounds.count_closed("late")
        self.transport.abort()

    def _call_later(self, seconds: float, function: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, function)


def bounded_connections(bounds: Bounds) -> type[H11Protocol]:
    """Return uvicorn's class of connections of one server, with bounds."""
    return type("Connection", (BoundedConnection,), {"bounds": bounds})
