"""A real S3 server on loopback, and a proxy before it that makes a network's faults.

The server is moto's, in threads of this process. The proxy passes requests on, counts them by key
and, as a test says, answers 503, 403, 404 …, cuts a body short, damages it, or trickles it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest

BUCKET = "shards"


class FaultyS3:
    """The proxy: `url`, `requests` by key, and `fault` by key."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.requests: Counter[str] = Counter()
        self.methods: Counter[str] = Counter()
        self.gets: Counter[str] = Counter()
        self.faults: dict[str, tuple[str, int]] = {}  # key: (kind, how often; -1: for good)
        self.killed: Callable[[], None] = lambda: None  # by the fault "kill"
        self.started = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"faulty": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def reset(self) -> None:
        with self.lock:
            self.requests.clear()
            self.methods.clear()
            self.gets.clear()
            self.faults.clear()
            self.started.clear()

    def next_fault(self, key: str, method: str) -> str | None:
        """The fault of the next request: by its key, by method and key's end, of any."""
        with self.lock:
            self.requests[key] += 1
            self.methods[method] += 1
            self.gets[key] += method == "GET"
            end = f"{method} {key.rpartition('/')[2]}"
            name = next((n for n in (key, end, f"{method} *", "*") if n in self.faults), "")
            kind, left = self.faults.get(name, ("", 0))
            if left == 0:
                return None
            self.faults[name] = (kind, left - 1)
            return kind

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Passes requests on to the store, but for faults; a subclass for each server."""

    faulty: FaultyS3
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.pass_on("HEAD")

    def do_GET(self) -> None:
        self.pass_on("GET")

    def do_PUT(self) -> None:
        self.pass_on("PUT")

    def do_POST(self) -> None:
        self.pass_on("POST")

    def do_DELETE(self) -> None:
        self.pass_on("DELETE")

    def pass_on(self, method: str) -> None:
        sent = self.received()
        path = unquote(self.path.partition("?")[0])
        key = path.partition(f"/{BUCKET}/")[2].removeprefix("o/")  # o/: Google's
        fault = self.faulty.next_fault(key, method)
        if fault == "reset":
            self.close_connection = True
            self.connection.close()
            return
        if fault == "slow":
            time.sleep(0.3)
        if fault in ANSWERS:
            self.answer(*ANSWERS[fault])
            return
        upstream = HTTPConnection("127.0.0.1", self.faulty.upstream_port)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
        if fault == "half sent":  # what a broken proxy makes of it
            sent = sent[: len(sent) // 2]
            headers = {k: v for k, v in headers.items() if k.lower() not in _OF_BODY}
            headers["Content-Length"] = str(len(sent))
        upstream.request(method, self.path, body=sent or None, headers=headers)
        response = upstream.getresponse()
        body = response.read()
        upstream.close()
        if fault == "kill":
            self.faulty.killed()
        if fault in ("kill", "unanswered"):
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(response.status)
        for name, value in response.getheaders():
            # Without checksums, as older objects and other stores have none.
            if name.lower() in _HEADERS or (fault == "spoiled" and "checksum" in name.lower()):
                self.send_header(name, value)
        length = response.getheader("Content-Length") if method == "HEAD" else None
        self.send_body(body, fault, length)

    def received(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            raise AssertionError("chunked bodies are not passed on")
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_body(b"" if self.command == "HEAD" else body, None)

    def send_body(self, body: bytes, fault: str | None, length: str | None = None) -> None:
        if fault == "truncated":  # a whole answer, of half the bytes
            body = body[: len(body) // 2]
        if fault in ("damaged", "spoiled"):
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        self.faulty.started.set()
        with contextlib.suppress(OSError):
            if fault == "cut":
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
            elif fault == "trickle":
                for n in range(len(body)):
                    self.wfile.write(body[n : n + 1])
                    self.wfile.flush()
                    time.sleep(0.05)
            else:
                self.wfile.write(body)


_OF_BODY = ("content-length", "content-md5", "x-amz-checksum-crc32", "x-amz-sdk-checksum-algorithm")
_HEADERS = ("content-type", "content-range", "etag", "last-modified", "accept-ranges")
ANSWERS = {
    "slow down": (503, "SlowDown"),
    "internal": (500, "InternalError"),
    "too many": (429, "TooManyRequests"),
    "forbidden": (403, "AccessDenied"),
    "late clock": (403, "RequestTimeTooSkewed"),
    "archived": (403, "InvalidObjectState"),
    "expired": (400, "ExpiredToken"),
    "key off": (400, "KMS.DisabledException"),
    "no such key": (403, "InvalidAccessKeyId"),
    "silent sender": (400, "RequestTimeout"),
    "missing": (404, "NoSuchKey"),
    "moved": (301, "PermanentRedirect"),
    "other region": (400, "AuthorizationHeaderMalformed"),
}


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[FaultyS3, Any]]:
    """The proxy, and a function `put(key, bytes)`; skips the test if moto or obstore is missing."""
    pytest.importorskip("obstore", reason="reads S3")
    server_module = pytest.importorskip(
        "moto.server", reason="the S3 server: pip install moto[server]"
    )
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        aws_access_key_id="id",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    faulty = FaultyS3(port)

    def put(key: str, data: bytes) -> None:
        client.put_object(Bucket=BUCKET, Key=key, Body=data)

    try:
        yield faulty, put
    finally:
        faulty.stop()
        server.stop()
