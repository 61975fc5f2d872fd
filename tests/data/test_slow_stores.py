"""What `data.download_timeout` means: 256 kB have to come within it, or the file's end."""

from __future__ import annotations

import http.server
import io
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import DamagedError, Store
from llmfoundry.data.store_clients import client_of
from llmfoundry.errors import UserError

TIMEOUT = 0.4
STEP = 1 << 14  # in place of 256 kB
DATA = os.urandom(20 * STEP + 7)


@dataclass
class Line:
    """A server on loopback.

    Attributes:
        pace: bytes a second; sent a hundred times a second.
        ranges: whether it knows them.
        cut: after so many bytes the connection ends, once.
        sent: bytes of all answers.
    """

    pace: float = 1e9
    ranges: bool = True
    cut: int | None = None
    endless: bool = False
    sent: int = 0
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            asked = self.headers["Range"]
            line.asked.append(asked)
            first, last = 0, len(DATA) - 1
            if line.ranges:
                first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            body = DATA[first : last + 1]
            self.send_response(206 if line.ranges else 200)
            if line.ranges:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(DATA)}")
            if not line.endless:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            piece = max(1, int(line.pace / 100))
            try:
                for start in range(0, len(body), piece):
                    if line.cut is not None and start >= line.cut:
                        line.cut = None
                        return
                    self.wfile.write(body[start : start + piece])
                    line.sent += len(body[start : start + piece])
                    if line.pace < 1e9:
                        time.sleep(0.01)
                while line.endless:
                    self.wfile.write(bytes(1 << 16))
            except OSError:
                pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        line.url = f"http://127.0.0.1:{server.server_port}"
        yield line
        server.shutdown()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmfoundry.data.store.STEP", STEP)
    monkeypatch.setattr("llmfoundry.data.store_clients.STEP", STEP)
    monkeypatch.setattr("llmfoundry.data.store._BACKOFF_S", 0.001)


def fetch(line: Line, *, retry: int = 0, n_bytes: int | None = len(DATA), **how: Any) -> bytes:
    target = io.BytesIO()
    folder = Store(line.url, FetchOptions(retry=retry, timeout=TIMEOUT))
    folder.fetch("a", target, n_bytes=n_bytes, **how)
    return target.getvalue()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_slow_download_that_lasts_is_not_ended(line: Line, ranges: bool) -> None:
    """Four times the timeout, at five times the pace that it asks for; at the first attempt."""
    line.pace, line.ranges = 5 * STEP / TIMEOUT, ranges
    began = time.monotonic()
    assert fetch(line) == DATA
    assert time.monotonic() - began > 3 * TIMEOUT and len(line.asked) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_trickle_is_ended(line: Line, ranges: bool) -> None:
    line.pace, line.ranges = 100, ranges  # a byte each hundredth of a second
    began = time.monotonic()
    with pytest.raises(UserError, match=r"/a: no answer, or less than 256 kB of it, within 0\.4"):
        fetch(line)
    assert TIMEOUT < time.monotonic() - began < 20


def test_a_server_without_ranges_sends_a_file_once(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmfoundry.data.store._PART", STEP)
    line.ranges = False
    assert fetch(line) == DATA and len(line.asked) == 1
    assert fetch(line, n_bytes=None) == DATA and len(line.asked) == 2
    line.cut, line.pace = len(DATA) // 2, 5e6
    assert fetch(line, retry=1) == DATA and len(line.asked) == 4


def test_an_endless_answer_is_left(line: Line) -> None:
    line.ranges, line.endless = False, True
    with pytest.raises(DamagedError, match="is longer than the"):
        fetch(line)


class Slow:
    """As a store behind fsspec, which gives parts only: so many bytes a second."""

    def __init__(self, pace: float) -> None:
        self.pace, self.sizes = pace, []

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        size = len(DATA[start:end])
        time.sleep(min(size / self.pace, 3 * TIMEOUT))
        self.sizes.append(size)
        return DATA[start:end]


@pytest.mark.parametrize(("steps", "passes"), [(6, True), (0.1, False)])
def test_parts_shrink_until_a_slow_store_passes(
    steps: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(steps * STEP / TIMEOUT)
    folder = Store("memory://x", FetchOptions(retry=0, timeout=TIMEOUT))
    monkeypatch.setattr(client_of(folder._address), "_files", slow)
    target = io.BytesIO()
    if passes:
        folder.fetch("a", target, n_bytes=len(DATA))
        assert target.getvalue() == DATA
    else:
        began = time.monotonic()
        with pytest.raises(UserError, match="at the first attempt"):
            folder.fetch("a", target, n_bytes=len(DATA))
        assert time.monotonic() - began < 20
