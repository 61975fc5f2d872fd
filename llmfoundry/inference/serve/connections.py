"""HTTP connections of the server, with limits on incomplete requests.

uvicorn has no timeout for the head of a request, and its concurrency limit counts only complete
requests. A thousand half-sent heads could therefore use up all open files of the process. Here,
each state of a connection has a timeout, and a new connection replaces the oldest one without a
complete request if there are too many.
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
    """Return the maximal number of connections without a complete request: half of the open files.

    The other half is for replies and for connections that one step of the event loop accepts.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1024 if files == resource.RLIM_INFINITY else min(1024, files // 2)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit, because each client needs one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS takes less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass
class Bounds:
    """Limits and state that the connections of one server share.

    Attributes:
        head_seconds: timeout of a request's head, from the start of the connection or last reply.
        request_seconds: timeout from a request's head to the last byte of its reply.
        most: maximal number of connections without a complete request.
        count_closed: called with "late" or "crowded" when a connection is closed.
        pending: connections without a complete request, the oldest first.
    """

    head_seconds: float
    request_seconds: float
    most: int
    count_closed: Callable[[str], None]
    pending: dict[H11Protocol, None] = field(default_factory=dict)


class BoundedConnection(H11Protocol):
    """Connection of uvicorn that is closed after a timeout, or if there are too many."""

    bounds: Bounds
    _timer: asyncio.TimerHandle | None = None
    _timed: object = None  # the request that the timer belongs to; the connection between requests

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._note_state()

    def data_received(self, data: bytes) -> None:
        """Check whether a request has begun."""
        super().data_received(data)
        self._note_state()

    def on_response_complete(self) -> None:
        """Start the timer of the next head."""
        super().on_response_complete()
        self._note_state()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the pending ones."""
        super().connection_lost(exc)
        self.bounds.pending.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def _note_state(self) -> None:
        """Start the timer of a new state; if too many connections are pending, close the oldest."""
        # the state is a request that is being handled, or else the connection
        bounds = self.bounds
        request = cast(Any, self.cycle)  # None before the first request
        is_request = request is not None and not request.response_complete
        state = request if is_request else self
        if self._timed is not state:
            self._timed = state
            seconds = bounds.request_seconds if is_request else bounds.head_seconds
            self._call_later(seconds, self._is_late)

        # pending until the request is complete
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
        """Close the connection; while a reply is being sent, wait once more."""
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
    """Return the connection class for uvicorn with the limits of one server."""
    return type("Connection", (BoundedConnection,), {"bounds": bounds})
