"""Downloads of remote files to the local shard cache.

`ShardFolder` has one `ShardFetcher` per process for each folder in the cache. The one idea: a file
is written under a temporary name by the process that holds the lock of that temporary file. A
complete file is checked, decompressed and renamed. Every file with its final name is therefore
valid, even after a kill. If several processes need a file, one downloads it and the others wait for
its lock.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import heapq
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from llmfoundry.data.file_spec import (
    PACKED,
    PART,
    CompressedFile,
    FetchOptions,
    FileSpec,
    in_words,
)
from llmfoundry.data.mds import codecs
from llmfoundry.data.mds.codecs import digest
from llmfoundry.data.shard_cache.limits import ShardCache, Shortage, reports_cache_folder
from llmfoundry.data.store import CancelledError, DamagedError, Store
from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, lock, try_lock

_CHUNK = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.2
_PAUSE_S = 30.0  # the longest that a download pauses between two attempts
N_THREADS = 4  # one connection rarely fills a link; more would take turns on one interpreter
_REMEMBERED = 1024  # files used before the queue came to them, which it then leaves out
_RETRY_S = 1.0  # how soon to look again for room in the cache


class _NoRoomError(Exception):
    """The cache's limit leaves no room for a file now."""

    def __init__(self, shortage: Shortage, n_bytes: int) -> None:
        super().__init__(shortage, n_bytes)
        self.shortage = shortage
        self.n_bytes = n_bytes


class ShardFetcher:
    """Access of one process to a folder of the local shard cache. Its methods are thread-safe."""

    def __init__(
        self, remote: Store, folder: Path, *, cache: ShardCache, options: FetchOptions
    ) -> None:
        self._remote = remote
        self._folder = folder
        self._cache = cache
        self._options = options
        self._checked: set[str] = set()

    def hold(self, spec: FileSpec, *, check: Callable[[str], None]) -> LockedFile:
        """Return the complete and verified file, pinned until it is released; wait for it.

        Args:
            spec: the file.
            check: called before each attempt; raises if a prefetch of the file failed.

        Raises:
            UserError: the file cannot be downloaded or written.
        """
        patience = _Patience((self._options.retry + 1) * (self._options.timeout + _PAUSE_S))
        shortage = None
        while True:
            check(spec.name)
            held = self._open(spec)
            if held is not None:
                self._cache.touch(held.path)
                return held
            try:
                held = self._fetch(spec, ahead=False)
                shortage = None
            except _NoRoomError as error:
                # Downloads in progress will end and can be evicted then. Files in use may never
                # be released.
                shortage = self._cache.no_room(spec.name, error.n_bytes, error.shortage)
                if not error.shortage.may_pass:
                    raise shortage from error
            if held is not None:
                return held
            if not patience.wait(self._path(spec, PART)):
                raise shortage or UserError(
                    f"{self._remote.url}/{spec.name}: another process has been fetching it for"
                    f" {patience.seconds:g} s without progress; end the one that has"
                    f" {self._path(spec, PART)} open"
                )

    def fetch_ahead(self, spec: FileSpec, cancelled: threading.Event) -> int | None:
        """Download a file for later use; return its size, or None if the cache is full now.

        It does not wait for other processes.

        Raises:
            UserError: the file cannot be downloaded or written.
            CancelledError: `cancelled` was set.
        """
        path = self._path(spec)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            self._cache.expect(path)
            return size  # `hold` verifies it
        try:
            held = self._fetch(spec, ahead=True, cancelled=cancelled)
        except _NoRoomError:
            return None
        if held is not None:
            held.release()
        return spec.n_bytes or 0

    def is_same(self, spec: FileSpec) -> bool:
        """Download a file again and return whether the copy in the cache is the same.

        Raises:
            UserError: the file cannot be downloaded.
        """
        path = self._path(spec)
        try:
            with lock(path.with_name(f".{path.name}{PART}"), mode=self._cache.file_mode) as part:
                try:
                    self._download(spec, part, None)
                    return filecmp.cmp(path, part.path, shallow=False)
                finally:
                    _remove(part)
        except OSError as error:
            raise self._cannot_write(spec, error) from error

    def _path(self, spec: FileSpec, suffix: str = "") -> Path:
        return self._folder / f"{spec.name}{suffix}"

    def _open(self, spec: FileSpec) -> LockedFile | None:
        """Return the file if it is in the cache and valid; delete an invalid one."""
        try:
            held = try_lock(self._path(spec), shared=True)
        except FileNotFoundError:
            return None
        if held is None or self._is_good(held, spec):
            return held
        with held, reports_cache_folder(self._folder):
            if held.is_current():
                held.path.unlink()
        return None

    def _is_good(self, held: LockedFile, spec: FileSpec) -> bool:
        with open(held.descriptor, "rb", closefd=False) as file:
            if spec.name in self._checked or not self._options.validate_hash:
                return damage(file, spec.n_bytes, ()) is None
            if damage(file, spec.n_bytes, spec.hashes) is None:
                self._checked.add(spec.name)
                return True
        return False

    def _fetch(
        self, spec: FileSpec, *, ahead: bool, cancelled: threading.Event | None = None
    ) -> LockedFile | None:
        """Download the file, unless another process has its lock or has just finished."""
        try:
            self._cache.make_folder(self._path(spec).parent)
            part = try_lock(self._path(spec, PART), mode=self._cache.file_mode)
            if part is None:
                return None
            try:
                return self._write(spec, part, ahead=ahead, cancelled=cancelled)
            finally:
                if part.path != self._path(spec):
                    _remove(part)
        except OSError as error:
            raise self._cannot_write(spec, error) from error

    def _write(
        self, spec: FileSpec, part: LockedFile, *, ahead: bool, cancelled: threading.Event | None
    ) -> LockedFile | None:
        if self._path(spec).exists():
            return None
        n_bytes = _room(spec)
        shortage = self._cache.reserve(part, n_bytes, ahead=ahead)
        if shortage is not None:
            raise _NoRoomError(shortage, n_bytes)
        try:
            self._download(spec, part, cancelled)
        except BaseException:
            with contextlib.suppress(OSError):
                self._cache.give_back(n_bytes)
            raise
        self._cache.publish(part, self._path(spec), reserved=n_bytes, ahead=ahead)
        self._checked.add(spec.name)
        return part if part.share() else None

    def _download(
        self, spec: FileSpec, part: LockedFile, cancelled: threading.Event | None
    ) -> None:
        """Write the file to `part`, complete and verified, at the second attempt if need be."""
        url = f"{self._remote.url}/{(spec.packed or spec).name}"
        hashes = spec.hashes if self._options.validate_hash else ()
        with open(part.descriptor, "r+b", closefd=False) as target:
            for last in (False, True):
                target.seek(0)
                try:
                    if spec.packed is None:
                        self._remote.fetch(
                            spec.name, target, n_bytes=spec.n_bytes, cancelled=cancelled
                        )
                    else:
                        self._unpack(spec.packed, spec.n_bytes, part, target, cancelled)
                    target.truncate()
                    wrong = damage(target, spec.n_bytes, hashes)
                    if wrong is not None:
                        raise DamagedError(wrong)
                    return
                except DamagedError as error:
                    if last:
                        raise UserError(
                            f"{url}: {error}, also when it was fetched again; the file there is"
                            " damaged: write it, or its index, again"
                        ) from error

    def _unpack(
        self,
        packed: CompressedFile,
        n_bytes: int | None,
        part: LockedFile,
        target: IO[bytes],
        cancelled: threading.Event | None,
    ) -> None:
        """Download the compressed form next to `part` and write what it holds to `target`."""
        path = Path(f"{part.path}{PACKED}")
        path.unlink(missing_ok=True)  # left by a killed process, maybe of another user
        with path.open("x+b") as file:
            self._remote.fetch(packed.name, file, n_bytes=packed.n_bytes, cancelled=cancelled)
            wrong = damage(file, None, packed.hashes if self._options.validate_hash else ())
        if wrong is not None:
            raise DamagedError(wrong)
        try:
            codecs.decompress(packed.compression, path, target, n_bytes=n_bytes)
        except codecs.PackedError as error:
            how = f"cannot be unpacked ({packed.compression})"
            raise DamagedError(f"{how}: {error}") from error
        except UserError as error:
            raise UserError(f"{self._remote.url}/{packed.name}: {error}") from error
        path.unlink()

    def _cannot_write(self, spec: FileSpec, error: OSError) -> UserError:
        where = f"{self._remote.url}/{spec.name}: cannot write it to {self._folder}"
        if error.errno not in _DISK_FULL:
            what = f"{error.filename}: " if isinstance(error.filename, str | Path) else ""
            return UserError(
                f"{where}: {what}{error.strerror}; get permission, remove what is in the way, or"
                " write another data.cache_folder"
            )
        needed, free = in_words(_room(spec)), in_words(shutil.disk_usage(self._folder).free)
        return UserError(
            f"{where}: {error.strerror}: it needs {needed}, {free} are free;"
            " free space there, write a data.cache_folder (or local) on a larger disk, or a"
            " data.cache_limit"
        )


class _Patience:
    """Wait for another process as long as the file that it writes changes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pause = _SHORTEST_WAIT_S
        self._last_state: tuple[int, int] | None = None  # inode and modification time
        self._since = time.monotonic()

    def wait(self, part: Path) -> bool:
        """Pause; return False if `part`, which the other process writes, is unchanged too long."""
        state = None
        with contextlib.suppress(OSError):
            status = part.stat()
            state = (status.st_ino, status.st_mtime_ns)
        if state != self._last_state:
            self._last_state, self._since = state, time.monotonic()
        time.sleep(self._pause)
        self._pause = min(_LONGEST_WAIT_S, 2 * self._pause)
        return time.monotonic() - self._since < self.seconds


def damage(file: IO[bytes], n_bytes: int | None, hashes: tuple[tuple[str, str], ...]) -> str | None:
    """Describe how a file differs from its index; None if it does not.

    Args:
        file: the file, at any position.
        n_bytes: expected size; None: unknown.
        hashes: expected (algorithm, hex digest) pairs.
    """
    size = file.seek(0, os.SEEK_END)
    if n_bytes is not None and size != n_bytes:
        return f"has {size} bytes, its index specifies {n_bytes}"
    for algorithm, expected in hashes:
        file.seek(0)
        actual = digest(algorithm, iter(lambda: file.read(_CHUNK), b""))
        if actual != expected:
            return f"its {algorithm} is {actual}, its index specifies {expected}"
    return None


def _room(spec: FileSpec) -> int:
    """Return the disk space that the download of a file needs, as far as sizes are known."""
    return (spec.n_bytes or 0) + ((spec.packed and spec.packed.n_bytes) or 0)


def _remove(part: LockedFile) -> None:
    with part, contextlib.suppress(OSError):
        Path(f"{part.path}{PACKED}").unlink(missing_ok=True)
        part.path.unlink()


class Prefetcher:
    """Threads that download the files of one folder ahead of use. `close` stops them.

    `ShardFolder.prefetch` sets the queue, an iterator that may be endless. `ShardFolder.pin`
    reports each file that is used. A file counts as ahead from the time it leaves the queue until
    it is used. Files are taken from the queue while the total size of files ahead is below the
    budget. An error is raised when the file is read: neither earlier nor never.
    """

    def __init__(
        self, fetch: Callable[[FileSpec, threading.Event], int | None], *, budget: int
    ) -> None:
        """Initialize; the first queue starts the threads.

        Args:
            fetch: downloads a file and returns its size, or None if the cache is full now.
            budget: maximal total size of files ahead, in bytes.
        """
        self._fetch = fetch
        self._budget = budget
        self._changed = threading.Condition()
        self._cancelled = threading.Event()
        self._threads: list[threading.Thread] = []
        self._queue: Iterator[FileSpec] | None = None
        self._next: FileSpec | None = None  # taken from the queue, not needed yet
        self._waiting: list[tuple[int, FileSpec]] = []  # files without room, a heap by position
        self._room = True  # the cache may have room
        self._n_used = 0
        self._n_taken = 0
        self._ahead: dict[str, int] = {}  # size by name
        self._used: dict[str, None] = {}  # used before the queue reached them; oldest first
        self._failures: dict[str, BaseException] = {}
        self._queue_error: BaseException | None = None

    def prefetch(self, specs: Iterator[FileSpec]) -> None:
        """Replace the queue.

        Raises:
            BaseException: error of a download of the previous queue that was not raised yet.
        """
        with self._changed:
            self._raise(next(iter(self._failures), None))
            self._queue, self._next = specs, None
            self._waiting.clear()
            self._ahead.clear()
            self._used.clear()
            self._changed.notify_all()
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name=f"prefetch-{n}", daemon=True)
                    for n in range(N_THREADS)
                ]
                for thread in self._threads:
                    thread.start()

    def ask(self, name: str) -> None:
        """Report that a file is requested, so that it need not be downloaded ahead any more.

        Raises:
            BaseException: error of its download.
        """
        self.check(name)
        with self._changed:
            if self._queue is not None and name not in self._ahead:
                self._used[name] = None
                if len(self._used) > _REMEMBERED:
                    del self._used[next(iter(self._used))]

    def check(self, name: str) -> None:
        """Raise the error of a file's download or of the queue, if there is one.

        Raises:
            BaseException: that error.
        """
        with self._changed:
            self._raise(name if name in self._failures else None)

    def use(self, name: str) -> None:
        """Report that a file is in use, which makes room in the budget for the next one.

        This is separate from `ask`, so that no other file takes the room that this file needs.
        """
        with self._changed:
            self._ahead.pop(name, None)
            self._room = True
            self._n_used += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the threads without waiting for requests in progress."""
        with self._changed:
            self._cancelled.set()
            self._changed.notify_all()

    def _raise(self, name: str | None) -> None:
        """Raise the error of a file's download, or of the queue if `name` is None."""
        error = self._failures.pop(name) if name is not None else self._queue_error
        if name is None:
            self._queue_error = None
        if error is not None:
            raise error

    def _run(self) -> None:
        """Download files until `close`, in a thread."""
        while True:
            with self._changed:
                while (next_file := self._take()) is None and not self._cancelled.is_set():
                    if not self._changed.wait(None if self._room else _RETRY_S):
                        self._room = True  # another process may have made room
            if next_file is None or not self._get(*next_file):
                return

    def _take(self) -> tuple[int, FileSpec] | None:
        """Return position and file of the next download; None if nothing is to do now."""
        if not self._room:
            return None
        # files without room come first, so that no later file takes the room that they need
        while self._waiting:
            position, spec = heapq.heappop(self._waiting)
            if spec.name in self._ahead:
                return position, spec
        # the next file of the queue that is neither used nor ahead
        while self._queue is not None and sum(self._ahead.values()) < self._budget:
            try:
                spec = self._next or next(self._queue)
            except StopIteration:
                self._queue = None
                break
            except BaseException as error:
                self._queue, self._queue_error = None, error
                break
            self._next = None
            if spec.name in self._used:
                del self._used[spec.name]
            elif spec.name in self._ahead:  # the queue repeats a file that is not used yet
                self._next = spec
                break
            else:
                self._ahead[spec.name] = spec.n_bytes or 0
                self._n_taken += 1
                return self._n_taken, spec
        return None

    def _get(self, position: int, spec: FileSpec) -> bool:
        """Download a file; return False if the threads are to stop."""
        n_used = self._n_used
        try:
            size = self._fetch(spec, self._cancelled)
        except CancelledError:
            return False
        except BaseException as error:
            with self._changed:
                self._failures[spec.name] = error
                self._queue = None  # the file will be used soon, which raises the error
                self._changed.notify_all()
            return True
        with self._changed:
            if size is None:
                heapq.heappush(self._waiting, (position, spec))
                self._room = self._n_used > n_used  # a file used meanwhile may have made room
            elif spec.name in self._ahead:
                self._ahead[spec.name] = size
        return True
