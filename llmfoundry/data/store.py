"""A folder at a URL: read, listed and written; S3, Google, Azure, the web, the hub, this machine.

Shards, corpora, benchmark rows and the runs of `checkpoint` all go through it; `store_clients` has
whom it asks and `store_errors` what an error means. The ideas: what is asked is asked again as long
as it may pass. A file is read part by part, so that each request is short and what fails is one
part. "No progress" is that 256 kB take longer than the timeout: so a slow line passes and a trickle
does not. A large file goes up in parts, and counts as written once the store says that it has as
many bytes. No store renames atomically but all of them put one object atomically, so a marker that
is written last is a commit.
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
from llmfoundry.data.store_clients import STEP, Client, Entry, LocalFileError, client_of
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_path
from llmfoundry.retry import backoff, retry, within

T = TypeVar("T")

_PART = 16 << 20  # bytes of a request: at 100 MB/s its overhead is below a tenth
_GROWTH = 4  # of the parts, once they come in less than half of that part of the timeout
_MOST_PARTS = 10_000  # of an upload; S3's
_THREADS = 8  # requests at a time of a download
_ENDLESS = 1 << 62
_BACKOFF_S = 0.5
_CREATE_REFUSED = (409, 412)  # what stores answer where an object is there already
_READ_ONLY = ("https", "hf")
_MAGIC = re.compile(r"[*?\[]")
_WEB_MAGIC = re.compile(r"[*\[]")  # what follows a ? is the web's own


class DamagedError(Exception):
    """A file that is not what its index specifies."""


class MissingError(UserError):
    """There is no such file, folder or bucket."""


class CancelledError(Exception):
    """The download is not wanted any more."""


class ExistsError(Exception):
    """An object that was to be made is there already."""


class Store:
    """A folder at a URL; names are paths within it. Nothing is asked of it until it is used."""

    def __init__(
        self,
        url: str,
        options: FetchOptions,
        *,
        key: str = store_errors.DATA_KEY,
        before_request: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """At `url`.

        Args:
            url: the folder.
            options: how it is asked: rights, attempts after a failure that may pass, patience.
            key: the recipe's, which names the folder; for messages.
            before_request: called before each part; returns how many seconds to wait.

        Raises:
            UserError: the protocol is not known, or its package or a setting is missing.
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
        """What distinguishes this folder from any other, also of another endpoint; no secrets."""
        return f"{self.url} {without_secrets(self._address.endpoint)}".rstrip()

    def check_writable(self) -> None:
        """Refuse what only can be read.

        Raises:
            UserError: it is a web server or a hub.
        """
        if self._address.kind in _READ_ONLY:
            raise UserError(
                f"{self._key}: {self.url} cannot be written; write an object store's address"
                " (s3, gs, az, oci), or a folder of this machine"
            )

    # ------------------------------------------------------------ reading

    def read(self, name: str, *, once: bool = False) -> bytes:
        """A complete file of unknown size; `once`: what fails is not retried.

        Raises:
            UserError: it is not there, or cannot be had.
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
        """Write a file to `target`, from its present position on.

        Args:
            name: path within the folder.
            target: it may hold a part of the file after an error.
            n_bytes: the size that it must have; None: unknown.
            cancelled: set by another thread to end this early.
            once: what fails is not tried again.

        Raises:
            UserError: it cannot be had.
            DamagedError: it is shorter or longer than `n_bytes`.
            CancelledError: as asked for.
        """
        offset = 0
        ended = False
        while not ended and (n_bytes is None or offset <= n_bytes):
            # A known size is reached by asking for a byte more: it shows a file that is too long.
            left = _ENDLESS if n_bytes is None else n_bytes - offset + 1
            part, asked = self._request(
                name, offset, left, cancelled or self._never, once=once, whole=True
            )
            target.write(part)
            offset += len(part)
            ended = not part or len(part) > asked  # a server without ranges sends all
            ended |= len(part) < asked and (n_bytes is None or offset == n_bytes)
        if n_bytes is not None and offset != n_bytes:
            raise DamagedError(
                f"ends after {offset} bytes, its index specifies {n_bytes}"
                if offset < n_bytes
                else f"is longer than the {n_bytes} bytes that its index specifies"
            )

    def part(self, name: str, start: int, n_bytes: int) -> bytes:
        """At most `n_bytes` from `start` on; none after the end.

        Raises:
            UserError: it cannot be had.
        """
        return self._request(name, start, n_bytes, self._never)[0]

    def open(self, name: str, size: int) -> io.BufferedReader:
        """A file of known size, to read at any place: each request is for what is read next."""
        return io.BufferedReader(_SeekableFile(self, name, size), _PART // 2)

    def download(self, name: str, path: Path, n_bytes: int) -> None:
        """Fetch a file, atomically, in several requests at a time.

        Raises:
            UserError: it cannot be had.
            DamagedError: it is shorter than `n_bytes`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, partial.open("wb") as file:

            def fetch(start: int) -> None:
                place, end = start, min(start + _PART, n_bytes)
                while place < end:
                    part = self.part(name, place, end - place)
                    if not part:
                        raise DamagedError(f"ends after {place} bytes of {n_bytes}")
                    os.pwrite(file.fileno(), part, place)
                    place += len(part)

            _all_at_once(fetch, range(0, n_bytes, _PART))

    # ------------------------------------------------------------ listing

    def folders(self, name: str) -> list[str]:
        """The names of the folders in a folder; none where it is not there."""
        return sorted(n for n, entry in self._listed(name).items() if entry.is_folder)

    def names(self, name: str = "") -> list[str]:
        """The names of all that is in a folder, sorted; none where it is not there."""
        return sorted(self._listed(name))

    def files(self, name: str = "", *, skip: Sequence[str] = ()) -> dict[str, int]:
        """Bytes of every file below a folder, by its name in this one; `skip` folders at its top.

        Raises:
            UserError: the store cannot be asked.
        """
        found = self._listed(name, deep=not skip)
        self._check_names(found)
        prefix = f"{name}/" if name else ""
        sizes: dict[str, int] = {}
        for entry, facts in found.items():
            if not facts.is_folder and entry and not entry.endswith("/"):
                sizes[f"{prefix}{entry}"] = facts.size or 0
            elif facts.is_folder and skip and entry.strip("/") not in skip:
                sizes |= self.files(entry.strip("/"))
        return sizes

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where it is not there.

        Raises:
            UserError: the store cannot be asked.
        """

        def ask(client: Client) -> int | None:
            try:
                found = client.info(self._path(name))
            except Exception as error:
                if store_errors.is_missing(error):
                    return None
                raise
            return None if found.is_folder else found.size or 0

        return self._persist(name, ask)

    def find(self) -> tuple[bool, dict[str, Entry]]:
        """Where the folder's URL is that of a file or a glob, too: whether it is one file; files.

        Raises:
            MissingError: there is nothing.
            UserError: it cannot be reached.
        """
        root = self._address.root
        is_web = self._address.protocol == "https"
        magic = (_WEB_MAGIC if is_web else _MAGIC).search(root)

        def find(client: Client) -> list[Entry]:
            if magic is None:
                return _below(client, root)
            start = root[: magic.start()].rpartition("/")[0]
            rest = root[len(start) :]
            pattern = re.compile(glob_translate(root))
            deep = "**" in rest or "/" in rest.strip("/")
            return [e for e in client.entries(start, deep=deep) if pattern.fullmatch(e.name)]

        found = [entry for entry in self._persist("", find) if not entry.is_folder]
        if is_web and magic:  # what a page names has no size yet
            found = [self._persist("", methodcaller("info", entry.name)) for entry in found]
        by_name = {entry.name: entry for entry in sorted(found, key=lambda entry: entry.name)}
        return list(by_name) == [root], by_name

    @property
    def root(self) -> str:
        """The folder, as the entries of `find` name it."""
        return self._address.root

    # ------------------------------------------------------------ writing

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a small file.

        Args:
            name: its path.
            data: its content.
            new: it must not be there yet; not every store looks and writes in one.

        Raises:
            ExistsError: it is there.
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
        """Write a file of this machine; it may be of any size, and may only grow meanwhile.

        Raises:
            UserError: it cannot be written.
            OSError: it cannot be read.
        """
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
                if self.size(name) != size:  # the answer to the last call may be what was lost
                    raise
        found = self.size(name)
        if found != size:
            raise UserError(
                f"{self._where(name)}: has {found} bytes after {size} were sent; the store or what"
                " is before it loses data"
            )

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no error.

        Raises:
            UserError: the store refuses.
        """
        paths = [self._path(name) for name in names]
        if paths:
            self._persist(_names_of(paths), lambda client: client.delete(paths))

    # ------------------------------------------------------------ how it is asked

    def _request(
        self,
        name: str,
        offset: int,
        left: int,
        cancelled: threading.Event,
        *,
        once: bool = False,
        whole: bool = False,
    ) -> tuple[bytes, int]:
        """Bytes from `offset` on, at most `left`; and how many were asked for.

        More than those come with `whole` only, of a server that sends whole files.
        """

        def ask(client: Client) -> tuple[bytes, int]:
            if cancelled.wait(self._before_request()):
                raise CancelledError
            # With the byte more, so that a file of just this size is one request.
            size = min(left, self._part + 1)
            began = time.monotonic()
            try:
                most = left if whole else size
                part = b"".join(client.read(self._path(name), offset, offset + size, most))
            except Exception as error:
                if store_errors.is_past_end(error):
                    return b"", size
                if store_errors.is_timeout(error) and not client.steady and size > STEP + 1:
                    self._part = STEP
                    return ask(client)
                raise
            if (time.monotonic() - began) * _GROWTH < self._timeout / 2:
                self._part = min(_PART, _GROWTH * self._part)
            return part, size

        return self._persist(name, ask, most=0 if once else None, wait=cancelled.wait)

    def _persist(
        self,
        name: str,
        call: Callable[[Client], T],
        *,
        most: int | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> T:
        """What `call` gives, tried again where that may help; `most`: attempts more than one."""
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

        def ask() -> T:
            return _with_signals(lambda: call(client_of(self._address)))

        return retry(ask, again=again, wait=wait)

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

    def _listed(self, name: str, *, deep: bool = False) -> dict[str, Entry]:
        """What is in a folder, or all files below it, by the names within it."""
        path = self._path(name)

        def find(client: Client) -> dict[str, Entry]:
            try:
                found = client.entries(path, deep=deep)
            except Exception as error:
                if not store_errors.is_missing(error) or store_errors.is_no_bucket(error):
                    raise
                return {}
            prefix = path.strip("/") + "/"
            return {
                entry.name.strip("/").removeprefix(prefix): entry
                for entry in found
                if entry.name.strip("/").startswith(prefix)
            }

        return self._persist(name, find)

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse what would lead out of the folder into which it is fetched."""
        for name in names:
            if ".." in name.split("/") or name.startswith("/") or not name.isprintable():
                raise UserError(f"{self._where('')}: {name!r} cannot be the name of a run's file")

    def _where(self, name: str) -> str:
        """A file, as messages call it."""
        key = "" if self._key == store_errors.DATA_KEY else f"{self._key}: "
        return f"{key}{without_signature(f'{self.url}/{name}')}" if name else f"{key}{self.url}"

    def _path(self, name: str) -> str:
        return f"{self._address.root}/{name}" if name else self._address.root


class _SeekableFile(io.RawIOBase):
    def __init__(self, folder: Store, name: str, size: int) -> None:
        self._folder, self._name, self._size = folder, name, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        left = min(len(buffer), self._size - self._place)
        if left <= 0:
            return 0
        data = self._folder.part(self._name, self._place, left)
        if not data:
            raise UserError(
                f"{self._folder.url}/{self._name}: ends after {self._place} bytes of"
                f" {self._size}; it changed while it was read: start again"
            )
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def _with_signals(call: Callable[[], T]) -> T:
    """What `call` gives; signals are handled meanwhile, for which obstore itself does not wake."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    return within(threading.TIMEOUT_MAX, call)


def _below(client: Client, root: str) -> list[Entry]:
    """The file at `root`, or all files below it."""
    try:
        found = client.info(root)
        if not found.is_folder:
            return [found]
    except Exception as error:
        if not store_errors.is_missing(error):
            raise
        # In an object store a folder is nothing but what is below it.
        below = client.entries(root, deep=True)
        if not below:
            raise
        return below
    return client.entries(root, deep=True)


def _names_of(paths: Sequence[str]) -> str:
    """A few paths for a message."""
    last = paths[0].rpartition("/")[2]
    return last if len(paths) == 1 else f"{last} and {len(paths) - 1} others"


def _says_exists(error: BaseException) -> bool:
    return isinstance(error, FileExistsError) or store_errors.status(error) in _CREATE_REFUSED


def _all_at_once(work: Callable[[int], T], starts: Iterable[int]) -> list[T]:
    """The results of all, in order; the first error once those that run have ended."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as pool:
        futures = [pool.submit(work, start) for start in starts]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
