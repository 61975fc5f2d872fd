"""The server that Prometheus scrapes: of a run, its supervisor, or a folder of runs.

prometheus_client writes the replies. Its own server starts a thread for each connection and waits
for ever for the rest of a request, so that a thousand half-sent ones end it; here connections are
bounded in number and time. At an address of this machine alone it answers to no other Host.
"""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from llmfoundry.loopback import REFUSAL, is_loopback, names_loopback

HEAD_SECONDS = 10.0
"""For a request's head."""
_REPLY_SECONDS = 300.0  # a first scrape of many long runs reads all their metrics
MOST_CONNECTIONS = 64
"""The oldest makes room for a new one."""
_HOSTS = "llmfoundry.hosts"  # in a request's environ: its Host headers as they were sent


def serve(
    host: str, port: int, registry: Any, *, key: str = "logger.prometheus_port"
) -> WSGIServer:
    """Answer scrapes in threads until `shutdown` and `server_close`.

    Args:
        host: the address to listen at.
        port: the port.
        registry: prometheus_client's.
        key: the recipe's, of the port.

    Raises:
        OSError: the port is not to be had.
    """
    from prometheus_client import make_wsgi_app

    try:
        server = _MetricsServer(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConnectionError(
            f"port {port} of {host} is taken, perhaps by another run; write another {key}"
        ) from error
    app = make_wsgi_app(registry)
    server.set_app(partial(_only_local, app) if is_loopback(host) else app)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _only_local(
    app: Callable[..., Any], environ: dict[str, Any], start_response: Callable[..., Any]
) -> Iterable[bytes]:
    hosts = environ[_HOSTS]
    if len(hosts) == 1 and names_loopback(hosts[0]):
        return app(environ, start_response)
    start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
    return [REFUSAL.encode()]


class _Handler(WSGIRequestHandler):
    """One connection, which has one request."""

    server: _MetricsServer

    def parse_request(self) -> bool:
        # A head whose connection was ended looks complete.
        return super().parse_request() and self.server.has_head(self.connection)

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), _HOSTS: self.headers.get_all("Host", [])}

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """WSGIServer with bounds on its connections."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        self._deadlines: dict[socket.socket, float] = {}  # the oldest connection first
        self._lock = threading.Lock()
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = infos[0]
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._deadlines[request] = time.monotonic() + HEAD_SECONDS
            too_many = [*self._deadlines][:-MOST_CONNECTIONS]
        self._end(too_many)
        super().process_request(request, client_address)

    def has_head(self, connection: socket.socket) -> bool:
        """Give a request that is complete time for its reply; False: its connection was ended."""
        with self._lock:
            if connection not in self._deadlines:
                return False
            self._deadlines[connection] = time.monotonic() + _REPLY_SECONDS
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what is late; called twice a second, and after each connection."""
        super().service_actions()
        now = time.monotonic()
        with self._lock:
            late = [each for each, deadline in self._deadlines.items() if deadline < now]
        self._end(late)

    def _end(self, connections: Iterable[socket.socket]) -> None:
        """Have the threads of some connections read and write no more, so that they end."""
        for connection in connections:
            with self._lock:
                self._deadlines.pop(connection, None)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
