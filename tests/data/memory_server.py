"""Azure's blob service and Google's XML interface over a dictionary, on loopback.

As much of each as a store is asked for, by their documents: whole and partial reads, single and
multipart writes, creation that must not replace, listing by prefix and delimiter, deletion.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as xml
from xml.sax.saxutils import escape

ACCOUNT = "devstoreaccount1"
DATE = "Thu, 27 Nov 2025 12:00:00 GMT"


class MemoryStore(ThreadingHTTPServer):
    """One bucket's objects by name, and what came with each request."""

    daemon_threads = True

    def __init__(self, bucket: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, bytes] = {}
        self.logins: set[str] = set()

    def listed(self, prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
        """Names below a prefix, and what they have in common up to the delimiter after it."""
        names = sorted(name for name in self.objects if name.startswith(prefix))
        deeper = {n for n in names if delimiter and delimiter in n.removeprefix(prefix)}
        above = {prefix + n.removeprefix(prefix).partition(delimiter)[0] + "/" for n in deeper}
        return [name for name in names if name not in deeper], sorted(above)


class _Handler(BaseHTTPRequestHandler):
    server: MemoryStore
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def read_request(self) -> tuple[str, dict[str, str], bytes, bool]:
        """The object's name, the query, the body, and whether Azure is meant; checks the bucket."""
        self.server.logins.add(self.headers.get("Authorization", ""))
        url = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        path = unquote(url.path).lstrip("/")
        is_azure = path.startswith(f"{ACCOUNT}/")
        bucket, _, name = path.removeprefix(f"{ACCOUNT}/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if bucket != self.server.bucket:
            name = "\0"
        return name, query, body, is_azure

    def do_GET(self) -> None:
        name, query, _, is_azure = self.read_request()
        if name == "\0":
            self.refuse(404, "ContainerNotFound" if is_azure else "NoSuchBucket")
            return
        if not name:
            self.list_names(query, is_azure)
            return
        data = self.server.objects.get(name)
        if data is None:
            self.refuse(404, "BlobNotFound" if is_azure else "NoSuchKey")
            return
        asked = self.headers.get("x-ms-range") or self.headers.get("Range")
        if asked is None:
            self.answer(200, data, name)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last), len(data) - 1)
        if start >= len(data):
            self.refuse(416, "InvalidRange")
            return
        self.answer(206, data[start : end + 1], name, f"bytes {start}-{end}/{len(data)}")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        name, query, body, is_azure = self.read_request()
        if "blockid" in query or "partNumber" in query:
            self.server.parts[query.get("blockid") or query["partNumber"]] = body
            self.answer(201 if is_azure else 200, b"", hashlib.md5(body).hexdigest())
            return
        new = self.headers.get("If-None-Match") == "*"
        new |= self.headers.get("x-goog-if-generation-match") == "0"
        if new and name in self.server.objects:
            self.refuse(409 if is_azure else 412, "BlobAlreadyExists" if is_azure else "Exists")
            return
        if query.get("comp") == "blocklist":
            blocks = [part.text or "" for part in xml.fromstring(body)]
            body = b"".join(self.server.parts.pop(block) for block in blocks)
        self.server.objects[name] = body
        self.answer(201 if is_azure else 200, b"", name)

    def do_POST(self) -> None:
        """Google's multipart: its beginning and its end; Azure's deletion of many."""
        name, query, body, _ = self.read_request()
        if query.get("comp") == "batch":
            self.delete_many(body.decode())
            return
        if "uploads" in query:
            of = f"<Bucket>{self.server.bucket}</Bucket><Key>{escape(name)}</Key>"
            text = f"<InitiateMultipartUploadResult>{of}<UploadId>u</UploadId>"
            self.answer(200, f"{text}</InitiateMultipartUploadResult>".encode(), name)
            return
        numbers = [
            e.text or "" for e in xml.fromstring(body).iter() if e.tag.endswith("PartNumber")
        ]
        self.server.objects[name] = b"".join(self.server.parts.pop(n) for n in numbers)
        tags = '<ETag>"1"</ETag>'
        done = f"<CompleteMultipartUploadResult>{tags}</CompleteMultipartUploadResult>"
        self.answer(200, done.encode(), name)

    def do_DELETE(self) -> None:
        name, _, _, is_azure = self.read_request()
        if self.server.objects.pop(name, None) is None:
            self.refuse(404, "BlobNotFound" if is_azure else "NoSuchKey")
        else:
            self.answer(202 if is_azure else 204, b"", name)

    def delete_many(self, body: str) -> None:
        """Each line `DELETE /container/blob` is a request; each has a part of the answer."""
        parts = []
        for n, line in enumerate(x for x in body.splitlines() if x.startswith("DELETE ")):
            path = unquote(urlsplit(line.split()[1]).path).lstrip("/").removeprefix(f"{ACCOUNT}/")
            gone = self.server.objects.pop(path.partition("/")[2], None) is not None
            status = "202 Accepted" if gone else "404 The specified blob does not exist."
            head = f"--b\r\nContent-Type: application/http\r\nContent-ID: {n}\r\n\r\n"
            parts.append(f"{head}HTTP/1.1 {status}\r\nx-ms-version: 1\r\n\r\n\r\n")
        self.answer(
            202, f"{''.join(parts)}--b--\r\n".encode(), "", kind="multipart/mixed; boundary=b"
        )

    def list_names(self, query: dict[str, str], is_azure: bool) -> None:
        names, above = self.server.listed(query.get("prefix", ""), query.get("delimiter", ""))
        sizes = {name: len(self.server.objects[name]) for name in names}
        if is_azure:
            blobs = "".join(
                f"<Blob><Name>{escape(n)}</Name><Properties><Last-Modified>{DATE}</Last-Modified>"
                f"<Content-Length>{size}</Content-Length><Content-Type>x/y</Content-Type>"
                f"<Etag>{_tag(n)}</Etag></Properties></Blob>"
                for n, size in sizes.items()
            )
            deeper = "".join(f"<BlobPrefix><Name>{escape(n)}</Name></BlobPrefix>" for n in above)
            text = f"<EnumerationResults><Blobs>{blobs}{deeper}</Blobs></EnumerationResults>"
        else:
            blobs = "".join(
                f"<Contents><Key>{escape(n)}</Key><Size>{size}</Size><ETag>{_tag(n)}</ETag>"
                "<LastModified>2025-11-27T12:00:00.000Z</LastModified></Contents>"
                for n, size in sizes.items()
            )
            deeper = "".join(
                f"<CommonPrefixes><Prefix>{escape(n)}</Prefix></CommonPrefixes>" for n in above
            )
            text = f"<ListBucketResult>{blobs}{deeper}</ListBucketResult>"
        self.answer(200, text.encode(), "list")

    def refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
        self.answer(status, text.encode(), code)

    def answer(
        self, status: int, body: bytes, name: str, span: str = "", kind: str = "application/xml"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", kind)
        self.send_header("Last-Modified", DATE)
        self.send_header("ETag", _tag(name))
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tag(name: str) -> str:
    return f'"{base64.b32encode(name.encode()).decode().strip("=")}"'


@contextlib.contextmanager
def memory_server(bucket: str) -> Iterator[MemoryStore]:
    """A server of one bucket."""
    with MemoryStore(bucket) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()
