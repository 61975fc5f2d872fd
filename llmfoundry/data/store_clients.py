"""Clients of remote stores: obstore for buckets, the standard library for HTTP, fsspec otherwise.

`store.Store` calls the client of its address. A client tries each request once, and the store
retries it. obstore has Rust threads that do not survive a fork, so a process that was forked after
a bucket request raises an error.
"""

from __future__ import annotations

import base64
import errno
import http.client
import json
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

import fsspec

from llmfoundry.data.bucket_settings import BUCKET_SETTINGS
from llmfoundry.data.store_address import EXTRAS, Address
from llmfoundry.data.store_errors import RequestError, answer_of, answer_of_web
from llmfoundry.errors import import_optional
from llmfoundry.retry import within

STEP = 1 << 18  # bytes that must arrive within the timeout
_FIRST_PAUSE = timedelta(seconds=0.5)  # between two attempts to upload a part
_LONGEST_PAUSE = timedelta(seconds=30)
_LONGEST_ATTEMPT = timedelta(minutes=10)  # a signature is valid for 15
_PARTS = 8  # concurrent requests of an upload

_made: dict[tuple[int, str], Client] = {}
_first_pid = 0  # process that started obstore's threads


@dataclass(frozen=True)
class ListedObject:
    """File or folder of a listing.

    Attributes:
        name: path in the store, including the bucket.
        size: bytes; None: unknown.
        version: differs after each change of the file.
    """

    name: str
    size: int | None = None
    version: str = ""
    is_folder: bool = False


class LocalFileError(Exception):
    """A local file cannot be read during its upload. `__cause__` is the reason."""


class Client(Protocol):
    """Requests to a store. Paths begin with the bucket.

    Attributes:
        steady: `read` raises TimeoutError if it makes no progress, so parts may have any size.
    """

    steady: bool

    def read(self, path: str, start: int, end: int, most: int) -> Iterable[bytes]:
        """Yield bytes `start` to `end - 1`; at most `most` if the server ignores ranges."""

    def info(self, path: str) -> ListedObject:
        """Return a file or folder; raise an error with status 404 if it does not exist."""

    def entries(self, path: str, *, deep: bool) -> list[ListedObject]:
        """List a folder; with `deep` all files below it.

        A missing folder is an empty list, or an error with status 404.
        """

    def put(self, path: str, data: bytes, *, new: bool) -> None:
        """Write a file; with `new`, raise an error if it exists."""

    def upload(self, path: str, file: Path, size: int, part: int) -> None:
        """Upload the first `size` bytes of a large local file, `part` bytes per request."""

    def delete(self, paths: list[str]) -> None:
        """Delete files; missing files are ignored."""


def client_of(address: Address) -> Client:
    """Return the client of this process for an address, shared by folders with equal settings."""
    # A forked child cannot use its parent's threads and sockets, so each process has its own.
    bucket = address.bucket if address.protocol in BUCKET_SETTINGS else ""
    settings = [address.protocol, bucket, address.options, address.timeout, address.retry]
    key = (os.getpid(), json.dumps(settings, sort_keys=True, default=str))
    if key not in _made:
        # If two threads race, the first client is used. The other one has no connection yet.
        kind = Bucket if bucket else WebClient if address.protocol == "https" else FileSystem
        _made.setdefault(key, kind(address))
    return _made[key]


def steady(chunks: Iterable[bytes], timeout: float) -> Iterator[bytes]:
    """Yield the chunks of a response, each `STEP` bytes within the timeout.

    Raises:
        TimeoutError: fewer bytes arrived within the timeout, and the response has not ended.
    """
    began, size = time.monotonic(), 0
    for chunk in chunks:
        size += len(chunk)
        if time.monotonic() - began > timeout:
            raise TimeoutError
        if size >= STEP:
            began, size = time.monotonic(), 0
        yield chunk


# ---------------------------------------------------------------- S3, Google and Azure: obstore


class Bucket:
    """Bucket or container of an object store."""

    steady = True

    def __init__(self, address: Address) -> None:
        global _first_pid
        _first_pid = _first_pid or os.getpid()
        if _first_pid != os.getpid():
            raise RuntimeError(
                "a forked process cannot use its parent's stores; start it by spawn or forkserver"
            )
        self._obstore: Any = import_optional("obstore", address.kind, extra=EXTRAS[address.kind])
        self._stores: Any = import_optional("obstore.store", address.kind)
        self._address = address
        self._settings = BUCKET_SETTINGS[address.protocol](address)
        self._made: dict[tuple[int, float], Any] = {}
        # Google's S3 interface cannot delete several objects in one request.
        self._deletes_many = address.kind in ("s3", "oci")

    def read(self, path: str, start: int, end: int, most: int) -> Iterator[bytes]:  # noqa: D102
        with self._translated_errors("GetObject"):
            # A slow connection gets time for the complete part. `steady` detects a stall.
            store = self._store(0, self._address.timeout * (end - start + STEP) / STEP)
            answer = self._obstore.get(store, self._key(path), options={"range": (start, end)})
            chunks = map(bytes, answer.stream(min_chunk_size=1))
            yield from steady(chunks, self._address.timeout)

    def info(self, path: str) -> ListedObject:  # noqa: D102
        try:
            with self._translated_errors("HeadObject"):
                metadata = self._obstore.head(self._without_retries(), self._key(path))
        except RequestError as error:
            if error.status in (400, 403) and not error.error_code:
                self._raise_reason(path, error)
            raise
        return self._entry(metadata)

    def _raise_reason(self, path: str, error: RequestError) -> None:
        """Raise the reason of a refused HEAD request, whose response has no body.

        A GET request is refused for the same reason and has a body. AccessDenied is not raised,
        because HEAD and GET may need different permissions.
        """
        try:
            list(self.read(path, 0, 1, 1))
        except RequestError as get_error:
            if get_error.error_code not in ("", "AccessDenied"):
                raise get_error from error

    def entries(self, path: str, *, deep: bool) -> list[ListedObject]:  # noqa: D102
        prefix = self._key(path) or None
        with self._translated_errors("ListObjectsV2"):
            if deep:
                pages = self._obstore.list(self._without_retries(), prefix)
                return [self._entry(metadata) for page in pages for metadata in page]
            listing = self._obstore.list_with_delimiter(self._without_retries(), prefix)
        bucket = self._address.bucket
        folders = [
            ListedObject(f"{bucket}/{n}", is_folder=True) for n in listing["common_prefixes"]
        ]
        return folders + [self._entry(metadata) for metadata in listing["objects"]]

    def put(self, path: str, data: bytes, *, new: bool) -> None:  # noqa: D102
        with self._translated_errors("PutObject"):
            mode = "create" if new else "overwrite"
            key, store = self._key(path), self._without_retries()
            self._obstore.put(store, key, data, mode=mode, use_multipart=False)

    def upload(self, path: str, file: Path, size: int, part: int) -> None:
        """Upload a file in parts; obstore retries each failed part on its own."""
        # a large part gets proportionally more time
        store = self._store(self._address.retry, self._address.timeout * max(1, part / (16 << 20)))
        read_errors: list[OSError] = []

        def parts() -> Iterator[bytes]:
            try:
                with file.open("rb") as source:
                    for start in range(0, size, part):
                        yield source.read(min(part, size - start))
            except OSError as error:
                read_errors.append(error)
                raise

        # an error of the local file is distinguished from an error of the store
        with self._translated_errors("PutObject"):
            try:
                self._obstore.put(
                    store,
                    self._key(path),
                    parts(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS,
                )
            except Exception:
                if read_errors:
                    raise LocalFileError from read_errors[0]
                raise

    def delete(self, paths: list[str]) -> None:  # noqa: D102
        keys = [self._key(path) for path in paths]
        with self._translated_errors("DeleteObjects"):
            if self._deletes_many:
                self._obstore.delete(self._without_retries(), keys)
                return
            for key in keys:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._without_retries(), key)

    def _key(self, path: str) -> str:
        return path.partition("/")[2]

    def _entry(self, metadata: Mapping[str, Any]) -> ListedObject:
        version = metadata["e_tag"] or str(metadata["last_modified"])
        return ListedObject(
            f"{self._address.bucket}/{metadata['path']}", int(metadata["size"]), version
        )

    @contextmanager
    def _translated_errors(self, operation: str) -> Iterator[None]:
        """Raise errors of obstore as a RequestError with an HTTP status.

        Args:
            operation: name of the request in S3's permissions.
        """
        try:
            yield
        except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
            s3_operation = operation if self._address.protocol == "s3" else ""
            raise answer_of(error, operation=s3_operation) from error
        except BaseException as error:
            # a panic of Rust code: derives from BaseException, and no public module exports it
            if type(error).__name__ != "PanicException":
                raise
            text = f"obstore cannot ask this address: {error}"
            raise RequestError(text, status=None, operation="", attempts=1, kind="") from error

    def _without_retries(self) -> Any:
        """Return an obstore store for short requests. `data.store.Store` retries them."""
        return self._store(0, self._address.timeout)

    def _store(self, retries: int, seconds: float) -> Any:
        """Return an obstore store.

        Args:
            retries: attempts after the first one, made by obstore.
            seconds: timeout of a complete request.
        """
        if (retries, seconds) not in self._made:
            kinds = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
            patience = timedelta(seconds=self._address.timeout)
            backoff = {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2}
            provider = self._settings.provider
            login = {} if provider is None else {"credential_provider": provider}
            store = getattr(self._stores, kinds[self._address.protocol])(
                self._address.bucket,
                config=self._settings.config,
                client_options={
                    "allow_http": True,
                    "connect_timeout": patience,
                    "read_timeout": patience,
                    "timeout": timedelta(seconds=seconds),
                    **self._settings.client,
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": _LONGEST_ATTEMPT,
                    "backoff": backoff,
                },
                **login,
            )
            self._made.setdefault((retries, seconds), store)
        return self._made[retries, seconds]


# ---------------------------------------------------------------- web servers


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirect handler that sends no credentials to another host."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            for name in ("Authorization", "Cookie"):
                new.remove_header(name)
        return new


_opener = urllib.request.build_opener(_Redirects)


class WebClient:
    """Web server. Files are read in ranges if the server supports them; folders are HTML pages."""

    steady = True

    def __init__(self, address: Address) -> None:
        self._timeout = address.timeout
        client = address.options.get("client_kwargs") or {}
        self._headers = {**(client.get("headers") or {}), **(address.options.get("headers") or {})}

    def read(self, path: str, start: int, end: int, most: int) -> Iterator[bytes]:
        """Yield a range of bytes; `most` bytes if the server ignores ranges."""
        with self._open(path, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            is_partial = answer.status == 206
            skip = 0 if is_partial else start
            remaining = end - start if is_partial else most
            for chunk in steady(_chunks(answer), self._timeout):
                part = chunk[skip : skip + remaining]
                skip = max(0, skip - len(chunk))
                remaining -= len(part)
                yield part
                if not remaining:
                    return  # even if the server keeps sending

    def info(self, path: str) -> ListedObject:
        """Return size and version from the headers of a GET, since many servers reject HEAD."""
        try:
            with self._open(path, {"Range": "bytes=0-0"}) as answer:
                headers = cast("Message", answer.headers)
                size = answer.getheader("Content-Length")
                if answer.status == 206:
                    size = headers.get("Content-Range", "").rpartition("/")[2]
        except urllib.error.HTTPError as error:
            if error.code != 416:  # an empty file has no byte 0
                raise
            headers = error.headers
            size = headers.get("Content-Range", "").rpartition("/")[2]
        version = headers.get("ETag") or headers.get("Last-Modified") or ""
        is_page = headers.get_content_type() == "text/html" and not _is_page_name(path)
        return ListedObject(path, int(size) if size and size.isdigit() else None, version, is_page)

    def entries(self, path: str, *, deep: bool) -> list[ListedObject]:
        """Return the links of a page that lead below it."""
        base = path.rstrip("/") + "/"
        with self._open(base, {}) as answer:
            page = b"".join(steady(_chunks(answer), self._timeout)).decode(errors="replace")
        links = _Links()
        links.feed(page)
        urls = {urljoin(base, link).partition("#")[0] for link in links.found}
        entries: list[ListedObject] = []
        for url in sorted(url for url in urls if url.startswith(base) and url != base):
            if not url.endswith("/"):
                entries.append(self.info(url) if deep else ListedObject(url))
            elif deep:
                entries += self.entries(url, deep=True)
            else:
                entries.append(ListedObject(url.rstrip("/"), is_folder=True))
        return entries

    def put(self, path: str, data: bytes, *, new: bool) -> None:  # noqa: D102
        raise PermissionError("a web server cannot be written")

    def upload(self, path: str, file: Path, size: int, part: int) -> None:  # noqa: D102
        raise PermissionError("a web server cannot be written")

    def delete(self, paths: list[str]) -> None:  # noqa: D102
        raise PermissionError("a web server cannot be written")

    @contextmanager
    def _open(self, url: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        url, login = _without_login(url)
        headers = {"Accept-Encoding": "identity", **login, **self._headers, **headers}
        request = urllib.request.Request(_quoted(url), headers=headers)
        try:
            answer = _opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            raise answer_of_web(error) from None
        with answer:
            yield answer


class _Links(HTMLParser):
    """Parser that collects the targets of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the chunks of a response as they arrive.

    Raises:
        IncompleteRead: the connection closed before the response was complete.
    """
    while chunk := answer.read1(STEP):
        yield chunk
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def _is_page_name(url: str) -> bool:
    return urlsplit(url).path.lower().endswith((".html", ".htm"))


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without user and password, and the header with them."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    login = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {login}"}


def _quoted(url: str) -> str:
    """Percent-encode characters that a request line must not contain; keep existing %XX."""
    return quote(url, safe="%/:=&?~#+!$,;'@()*[]")


# ---------------------------------------------------------------- all others: fsspec


class FileSystem:
    """File system of fsspec: `hf://` of huggingface_hub, local paths and other protocols."""

    steady = False

    def __init__(self, address: Address) -> None:
        self._files = fsspec.filesystem(
            address.protocol, skip_instance_cache=True, **address.options
        )
        self._timeout = address.timeout
        self._is_here = address.kind == "file"

    def read(self, path: str, start: int, end: int, most: int) -> list[bytes]:  # noqa: D102
        if self._is_here and stat.S_ISFIFO(os.stat(path).st_mode):  # reading it would block
            raise OSError(errno.EINVAL, "is a pipe, not a file", path)
        call = self._files.cat_file
        return [bytes(within(self._timeout, lambda: call(path, start=start, end=end)))]

    def info(self, path: str) -> ListedObject:  # noqa: D102
        self._files.invalidate_cache()
        return _row(self._files.info(path))

    def entries(self, path: str, *, deep: bool) -> list[ListedObject]:  # noqa: D102
        self._files.invalidate_cache()
        if deep:
            return list(map(_row, self._files.find(path, detail=True).values()))
        return list(map(_row, self._files.ls(path, detail=True)))

    def put(self, path: str, data: bytes, *, new: bool) -> None:  # noqa: D102
        self._files.pipe_file(path, data, **({"mode": "create"} if new else {}))

    def upload(self, path: str, file: Path, size: int, part: int) -> None:  # noqa: D102
        self._files.put_file(str(file), path)

    def delete(self, paths: list[str]) -> None:
        """Delete files, and local folders that become empty, as in an object store."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._files.rm_file(path)
            with suppress(OSError):
                for above in Path(path).parents if self._is_here else ():
                    above.rmdir()


def _row(facts: Mapping[str, Any]) -> ListedObject:
    """Convert fsspec's metadata of a file; its version has another name in each file system."""
    keys = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated")
    version = str(next((facts[key] for key in keys if facts.get(key)), ""))
    size = facts.get("size")
    is_folder = facts["type"] != "file"
    return ListedObject(facts["name"], None if size is None else int(size), version, is_folder)
