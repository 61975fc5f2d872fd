"""HTTP server for Prometheus scrapes of a run, of its supervisor or of a folder of runs.

Entry point: `serve`. prometheus_client formats the replies. Its server is not used, because it
starts a thread per connection and waits without a timeout, so that many incomplete requests
exhaust the process. This server limits the number and the duration of connections. On a loopback
address it rejects requests with a foreign Host header (protection against DNS rebinding).
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
"""Timeout in seconds for the head of a request."""
_REPLY_SECONDS = 300.0  # the first scrape of many long runs reads all their metrics
MOST_CONNECTIONS = 64
"""Maximal number of connections; a new one closes the oldest."""
_HOSTS = "llmfoundry.hosts"  # key in the WSGI environ: the Host headers as they were sent


def serve(
    host: str, port: int, registry: Any, *, key: str = "logger.prometheus_port"
) -> WSGIServer:
    """Answer scrapes in threads until `shutdown` and `server_close`.

    Args:
        host: address to listen on.
        port: port to listen on.
        registry: CollectorRegistry of prometheus_client.
        key: recipe key of the port, for error messages.

    Raises:
        OSError: the port is not available.
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
    """Call a WSGI app for requests to a loopback host; reply 403 to others."""
    hosts = environ[_HOSTS]
    if len(hosts) == 1 and names_loopback(hosts[0]):
        return app(environ, start_response)
    start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
    return [REFUSAL.encode()]


class _Handler(WSGIRequestHandler):
    """Handler of one connection with one request."""

    server: _MetricsServer

    def parse_request(self) -> bool:
        # the head of a closed connection looks complete to the base class
        return super().parse_request() and self.server.has_head(self.connection)

    def get_environ(self) -> dict[str, Any]:
        return {**super().get_environ(), _HOSTS: self.headers.get_all("Host", [])}

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """WSGIServer that limits the number and the duration of its connections."""

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
        self._close(too_many)
        super().process_request(request, client_address)

    def has_head(self, connection: socket.socket) -> bool:
        """Extend the deadline of a complete request; return False if its connection was closed."""
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
        """Close late connections; called twice a second, and after each connection."""
        super().service_actions()
        now = time.monotonic()
        with self._lock:
            late = [each for each, deadline in self._deadlines.items() if deadline < now]
        self._close(late)

    def _close(self, connections: Iterable[socket.socket]) -> None:
        """Shut connections down, so that reads and writes of their threads return."""
        for connection in connections:
            with self._lock:
                self._deadlines.pop(connection, None)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a client that disconnects."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
