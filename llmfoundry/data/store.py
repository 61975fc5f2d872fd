"""Access to a folder at a URL: S3, Google, Azure, web servers, the Hugging Face hub, local paths.

Entry point: `Store`, which reads shards, corpora and benchmark rows, and reads and writes remote
runs of `checkpoint`. `store_clients` sends the requests; `store_errors` classifies errors.

- Transient errors are retried.
- A file is read in parts, so that each request is short and an error affects one part.
- A request fails if 256 kB take longer than the timeout: a slow connection passes, a stall fails.
- A large file is uploaded in parts. It counts as written once the store reports its full size.
- No store renames atomically, but every store writes a single object atomically. A marker that is
  written last is therefore a commit.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller
from pathlib import Path
from typing import IO, Any, TypeVar

from fsspec.utils import glob_translate

from llmfoundry.data import store_errors
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store_address import address_of, without_secrets, without_signature
from llmfoundry.data.store_clients import STEP, Client, ListedObject, LocalFileError, client_of
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_path
from llmfoundry.retry import backoff, retry, within

T = TypeVar("T")

_PART = 16 << 20  # bytes per request: at 100 MB/s the overhead is below a tenth
_GROWTH = 4  # factor of the part size, if a part of the larger size takes under half the timeout
_MOST_PARTS = 10_000  # S3's limit of an upload
_THREADS = 8  # concurrent requests of a download
_ENDLESS = 1 << 62
_BACKOFF_S = 0.5
_CREATE_REFUSED = (409, 412)  # statuses if the object exists
_READ_ONLY = ("https", "hf")
_MAGIC = re.compile(r"[*?\[]")
_WEB_MAGIC = re.compile(r"[*\[]")  # in a web address, ? begins the query


class DamagedError(Exception):
    """The content of a file does not match its index."""


class MissingError(UserError):
    """A file, folder or bucket does not exist."""


class CancelledError(Exception):
    """The download was cancelled."""


class ExistsError(Exception):
    """The object to create exists."""


class Store:
    """Folder at a URL. Names are paths within it. Creating a Store sends no request."""

    def __init__(
        self,
        url: str,
        options: FetchOptions,
        *,
        key: str = store_errors.DATA_KEY,
        before_request: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Resolve the URL.

        Args:
            url: URL of the folder.
            options: credentials, number of retries and timeout.
            key: recipe key that names the folder, for errors.
            before_request: called before each part; returns the seconds to wait.

        Raises:
            UserError: the protocol is unknown, or its package or a setting is missing.
        """
        self.url = without_secrets(url).rstrip("/")
        self._key = key
        try:
            self._address = address_of(url.rstrip("/"), options)
        except UserError as error:
            if key == store_errors.DATA_KEY:
                raise
            lines = (f"{key}: {line.replace('data.remote', key)}" for line in error.problems)
            raise UserError(*lines) from error
        self._retry, self._timeout = options.retry, options.timeout
        self._before_request = before_request
        self._part = _PART
        self._never = threading.Event()

    @property
    def identity(self) -> str:
        """Return a text that identifies the folder and its endpoint, without secrets."""
        return f"{self.url} {without_secrets(self._address.endpoint)}".rstrip()

    def check_writable(self) -> None:
        """Check that the protocol supports writing.

        Raises:
            UserError: the URL is that of a web server or hub.
        """
        if self._address.kind in _READ_ONLY:
            raise UserError(
                f"{self._key}: {self.url} cannot be written; write an object store's address"
                " (s3, gs, az, oci), or a folder of this machine"
            )

    # ------------------------------------------------------------ reading

    def read(self, name: str, *, once: bool = False) -> bytes:
        """Return the content of a file of unknown size; with `once`, without retries.

        Raises:
            UserError: the file is missing or cannot be read.
        """
        target = io.BytesIO()
        self.fetch(name, target, n_bytes=None, once=once)
        return target.getvalue()

    def fetch(
        self,
        name: str,
        target: IO[bytes],
        *,
        n_bytes: int | None,
        cancelled: threading.Event | None = None,
        once: bool = False,
    ) -> None:
        """Copy a file to the current position of `target`.

        Args:
            name: path within the folder.
            target: contains a part of the file after an error.
            n_bytes: expected size; None: unknown.
            cancelled: event that another thread sets to cancel the download.
            once: do not retry.

        Raises:
            UserError: the file cannot be read.
            DamagedError: the file is shorter or longer than `n_bytes`.
            CancelledError: `cancelled` was set.
        """
        offset = 0
        at_end = False
        while not at_end and (n_bytes is None or offset <= n_bytes):
            # one byte more than the expected size detects a file that is too long
            remaining = _ENDLESS if n_bytes is None else n_bytes - offset + 1
            part, requested = self._request(
                name, offset, remaining, cancelled or self._never, once=once, whole=True
            )
            target.write(part)
            offset += len(part)
            at_end = not part or len(part) > requested  # a server without ranges sends everything
            at_end |= len(part) < requested and (n_bytes is None or offset == n_bytes)
        if n_bytes is not None and offset != n_bytes:
            raise DamagedError(
                f"ends after {offset} bytes, its index specifies {n_bytes}"
                if offset < n_bytes
                else f"is longer than the {n_bytes} bytes that its index specifies"
            )

    def part(self, name: str, start: int, n_bytes: int) -> bytes:
        """Return at most `n_bytes` from offset `start`; b"" after the end of the file.

        Raises:
            UserError: the file cannot be read.
        """
        return self._request(name, start, n_bytes, self._never)[0]

    def open(self, name: str, size: int) -> io.BufferedReader:
        """Return a seekable file of known size that requests the parts that are read."""
        return io.BufferedReader(_SeekableFile(self, name, size), _PART // 2)

    def download(self, name: str, path: Path, n_bytes: int) -> None:
        """Download a file atomically with concurrent requests.

        Raises:
            UserError: the file cannot be read.
            DamagedError: the file is shorter than `n_bytes`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, partial.open("wb") as file:

            def fetch(start: int) -> None:
                offset, end = start, min(start + _PART, n_bytes)
                while offset < end:
                    part = self.part(name, offset, end - offset)
                    if not part:
                        raise DamagedError(f"ends after {offset} bytes of {n_bytes}")
                    os.pwrite(file.fileno(), part, offset)
                    offset += len(part)

            _all_at_once(fetch, range(0, n_bytes, _PART))

    # ------------------------------------------------------------ listing

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders in a folder, sorted; none if it does not exist."""
        return sorted(n for n, entry in self._listed(name).items() if entry.is_folder)

    def names(self, name: str = "") -> list[str]:
        """Return the names of all files and folders in a folder, sorted; none if it is missing."""
        return sorted(self._listed(name))

    def files(self, name: str = "", *, skip: Sequence[str] = ()) -> dict[str, int]:
        """Return the size of every file below a folder, by its path within the Store.

        Args:
            name: the folder.
            skip: names of its direct subfolders to leave out.

        Raises:
            UserError: the store cannot be reached.
        """
        entries = self._listed(name, deep=not skip)
        self._check_names(entries)
        prefix = f"{name}/" if name else ""
        sizes: dict[str, int] = {}
        for path, entry in entries.items():
            if not entry.is_folder and path and not path.endswith("/"):
                sizes[f"{prefix}{path}"] = entry.size or 0
            elif entry.is_folder and skip and path.strip("/") not in skip:
                sizes |= self.files(path.strip("/"))
        return sizes

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist.

        Raises:
            UserError: the store cannot be reached.
        """

        def size_of(client: Client) -> int | None:
            try:
                entry = client.info(self._path(name))
            except Exception as error:
                if store_errors.is_missing(error):
                    return None
                raise
            return None if entry.is_folder else entry.size or 0

        return self._persist(name, size_of)

    def find(self) -> tuple[bool, dict[str, ListedObject]]:
        """Find the files of a URL that may be a folder, a file or a glob.

        Returns:
            Whether the URL is that of a single file, and the files by their path in the store.

        Raises:
            MissingError: nothing matches the URL.
            UserError: the store cannot be reached.
        """
        root = self._address.root
        is_web = self._address.protocol == "https"
        magic = (_WEB_MAGIC if is_web else _MAGIC).search(root)

        def find(client: Client) -> list[ListedObject]:
            if magic is None:
                return _below(client, root)
            # list the folder before the first wildcard, and filter
            start = root[: magic.start()].rpartition("/")[0]
            rest = root[len(start) :]
            pattern = re.compile(glob_translate(root))
            deep = "**" in rest or "/" in rest.strip("/")
            return [e for e in client.entries(start, deep=deep) if pattern.fullmatch(e.name)]

        files = [entry for entry in self._persist("", find) if not entry.is_folder]
        if is_web and magic:  # links of a page have no size
            files = [self._persist("", methodcaller("info", entry.name)) for entry in files]
        by_name = {entry.name: entry for entry in sorted(files, key=lambda entry: entry.name)}
        return list(by_name) == [root], by_name

    @property
    def root(self) -> str:
        """Return the path of the folder in the store, with which the names of `find` begin."""
        return self._address.root

    # ------------------------------------------------------------ writing

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a small file.

        Args:
            name: path within the folder.
            data: content.
            new: fail if the file exists. Not every store checks and writes atomically.

        Raises:
            ExistsError: the file exists, with `new`.
            UserError: it cannot be written.
        """

        def put(client: Client) -> None:
            try:
                client.put(self._path(name), data, new=new)
            except Exception as error:
                if new and _says_exists(error):
                    raise ExistsError(name) from error
                raise

        self._persist(name, put)

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file of any size. The file may grow meanwhile, but not change otherwise.

        Raises:
            UserError: the file cannot be written to the store.
            OSError: the local file cannot be read.
        """
        # in one request, or in parts
        size = path.stat().st_size
        if size <= _PART:
            data = path.read_bytes()
            size = len(data)
            self.write(name, data)
        else:
            part = max(_PART, -(-size // _MOST_PARTS))
            try:
                self._persist(
                    name, lambda client: client.upload(self._path(name), path, size, part)
                )
            except UserError:
                if self.size(name) != size:  # else only the response to the last request was lost
                    raise

        # check the size that the store reports
        stored_size = self.size(name)
        if stored_size != size:
            raise UserError(
                f"{self._where(name)}: has {stored_size} bytes after {size} were sent; the store or"
                " what is before it loses data"
            )

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing files are ignored.

        Raises:
            UserError: the store refuses.
        """
        paths = [self._path(name) for name in names]
        if paths:
            self._persist(_names_of(paths), lambda client: client.delete(paths))

    # ------------------------------------------------------------ requests and retries

    def _request(
        self,
        name: str,
        offset: int,
        remaining: int,
        cancelled: threading.Event,
        *,
        once: bool = False,
        whole: bool = False,
    ) -> tuple[bytes, int]:
        """Request one part of a file.

        Args:
            name: path within the folder.
            offset: first byte.
            remaining: maximal number of bytes.
            cancelled: event that cancels the request.
            once: do not retry.
            whole: accept more than a part from a server that ignores ranges.

        Returns:
            The bytes, and the number of bytes requested.
        """

        def request(client: Client) -> tuple[bytes, int]:
            if cancelled.wait(self._before_request()):
                raise CancelledError
            # one byte more, so that a file of exactly one part needs one request
            size = min(remaining, self._part + 1)
            began = time.monotonic()
            try:
                most = remaining if whole else size
                part = b"".join(client.read(self._path(name), offset, offset + size, most))
            except Exception as error:
                if store_errors.is_past_end(error):
                    return b"", size
                # without progress checks of the client, a slow connection needs smaller parts
                if store_errors.is_timeout(error) and not client.steady and size > STEP + 1:
                    self._part = STEP
                    return request(client)
                raise
            # larger parts again if the next size takes under half the timeout
            if (time.monotonic() - began) * _GROWTH < self._timeout / 2:
                self._part = min(_PART, _GROWTH * self._part)
            return part, size

        return self._persist(name, request, most=0 if once else None, wait=cancelled.wait)

    def _persist(
        self,
        name: str,
        call: Callable[[Client], T],
        *,
        most: int | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> T:
        """Return the result of `call`, retried after transient errors.

        Args:
            name: file, for errors.
            call: sends the request.
            most: maximal number of retries; None: that of the options.
            wait: waits the given number of seconds.

        Raises:
            UserError: a permanent error, or the last transient one.
        """
        attempts = 0

        def again(error: Exception, failures: int) -> float:
            nonlocal attempts
            if isinstance(error, CancelledError | DamagedError | ExistsError | UserError):
                raise error
            if isinstance(error, LocalFileError):
                raise error.__cause__ or error
            attempts += getattr(error, "attempts", 1)
            allowed = self._retry if most is None else most
            if attempts > allowed or not store_errors.is_passing(error):
                raise self._failed(name, error, attempts) from error
            return backoff(failures, first=_BACKOFF_S)

        def attempt() -> T:
            return _with_signals(lambda: call(client_of(self._address)))

        return retry(attempt, again=again, wait=wait)

    def _failed(self, name: str, error: Exception, attempts: int) -> UserError:
        line = store_errors.remote_problem(
            error,
            kind=self._address.kind,
            attempts=attempts,
            timeout=self._timeout,
            bucket=self._address.bucket,
            key=self._key,
        )
        kind = MissingError if store_errors.is_missing(error) else UserError
        return kind(f"{self._where(name)}: {line}")

    def _listed(self, name: str, *, deep: bool = False) -> dict[str, ListedObject]:
        """List a folder, or all files below it, by path within the folder."""
        path = self._path(name)

        def find(client: Client) -> dict[str, ListedObject]:
            try:
                entries = client.entries(path, deep=deep)
            except Exception as error:
                if not store_errors.is_missing(error) or store_errors.is_no_bucket(error):
                    raise
                return {}
            prefix = path.strip("/") + "/"
            by_name = {}
            for entry in entries:
                full_name = entry.name.strip("/")
                if full_name.startswith(prefix):
                    by_name[full_name.removeprefix(prefix)] = entry
            return by_name

        return self._persist(name, find)

    def _check_names(self, names: Iterable[str]) -> None:
        """Reject names that would lead out of the local folder that they are copied to."""
        for name in names:
            if ".." in name.split("/") or name.startswith("/") or not name.isprintable():
                raise UserError(f"{self._where('')}: {name!r} cannot be the name of a run's file")

    def _where(self, name: str) -> str:
        """Return the location of a file, for errors."""
        key = "" if self._key == store_errors.DATA_KEY else f"{self._key}: "
        return f"{key}{without_signature(f'{self.url}/{name}')}" if name else f"{key}{self.url}"

    def _path(self, name: str) -> str:
        return f"{self._address.root}/{name}" if name else self._address.root


class _SeekableFile(io.RawIOBase):
    """Remote file that requests what is read."""

    def __init__(self, folder: Store, name: str, size: int) -> None:
        self._folder, self._name, self._size = folder, name, size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        n_bytes = min(len(buffer), self._size - self._position)
        if n_bytes <= 0:
            return 0
        data = self._folder.part(self._name, self._position, n_bytes)
        if not data:
            raise UserError(
                f"{self._folder.url}/{self._name}: ends after {self._position} bytes of"
                f" {self._size}; it changed while it was read: start again"
            )
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _with_signals(call: Callable[[], T]) -> T:
    """Return the result of `call`, and handle signals meanwhile, which obstore's wait blocks."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return within(threading.TIMEOUT_MAX, call)


def _below(client: Client, root: str) -> list[ListedObject]:
    """Return the file at `root`, or all files below it."""
    try:
        entry = client.info(root)
        if not entry.is_folder:
            return [entry]
    except Exception as error:
        if not store_errors.is_missing(error):
            raise
        # an object store has no folder objects; the folder exists if files are below it
        below = client.entries(root, deep=True)
        if not below:
            raise
        return below
    return client.entries(root, deep=True)


def _names_of(paths: Sequence[str]) -> str:
    """Return the names of files, shortened for an error."""
    last = paths[0].rpartition("/")[2]
    return last if len(paths) == 1 else f"{last} and {len(paths) - 1} others"


def _says_exists(error: BaseException) -> bool:
    return isinstance(error, FileExistsError) or store_errors.status(error) in _CREATE_REFUSED


def _all_at_once(work: Callable[[int], T], starts: Iterable[int]) -> list[T]:
    """Return the results of all calls in order; raise the first error once running calls end."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as pool:
        futures = [pool.submit(work, start) for start in starts]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
