"""Clients that send a Host of their own, or half of a request."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

LOCAL_HOSTS = ["localhost", "LocalHost:80", "127.0.0.1", "127.9.9.9:65535", "[::1]:8000"]
FOREIGN_HOSTS = [
    *("evil.test", "a`b.evil.test", "a b.evil.test", "a_b.evil.test", "a'b.evil.test:80"),
    *(
        "",
        ":80",
        "localhost:x",
        "localhost@evil.test",
        "evil.test#localhost",
        "localhost,evil.test",
    ),
    *(
        "127.0.0.1.evil.test",
        "[::1",
        "::1",
        "[::1].evil.test",
        "[evil.test]",
        "localhost/evil.test",
    ),
    *("localhost\tevil.test", "\xfclocalhost", "localhost\xa0", "%6cocalhost", "0x7f.1", "0.0.0.0"),
]
"""The first is what Chromium sends for http://a`b.evil.test, and others that no URL parses."""


def get(port: int, path: str, host: str | None) -> bytes:
    """The reply to a GET with this Host, byte for byte; None: without."""
    header = b"" if host is None else b"Host: " + host.encode("latin-1") + b"\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        version = b"1.0" if host is None else b"1.1"
        connection.sendall(b"GET " + path.encode() + b" HTTP/" + version + b"\r\n" + header)
        connection.sendall(b"Connection: close\r\n\r\n")
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


@contextmanager
def half_sent(
    port: int, n: int, sent: bytes = b"GET / HTTP/1.1\r\nX: "
) -> Iterator[list[socket.socket]]:
    """So many connections, each with half of a request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n + 200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(n + 200, hard), hard))
    with ExitStack() as stack:
        connections = []
        for _ in range(n):
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connections.append(stack.enter_context(connection))
            connection.sendall(sent)
        yield connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends it, within a minute."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True
