"""Copies of remote files: locked, downloaded, checked, unpacked, named, pinned.

`ShardFolder` has one of these per process for a folder that is kept here. One idea: a file is
written under a temporary name, and that file's lock is the right to write it. Once complete and
checked it is renamed, so a path names either a good file or nothing, even after a kill; and of
many processes that need one, the first downloads it while the others wait for its lock.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from llmfoundry.data.fetch.shard_cache import ShardCache, Shortage, reports_cache_folder
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
from llmfoundry.data.store import DamagedError, Store
from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, lock, try_lock

_CHUNK = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.2
_PAUSE_S = 30.0  # the longest that a download pauses between two attempts


class _NoRoomError(Exception):
    """The cache's limit leaves no room for a file now."""

    def __init__(self, shortage: Shortage, n_bytes: int) -> None:
        super().__init__(shortage, n_bytes)
        self.shortage = shortage
        self.n_bytes = n_bytes


class ShardFetcher:
    """One process' hands on a folder of copies. Its methods may be called by several threads."""

    def __init__(
        self, remote: Store, folder: Path, *, cache: ShardCache, options: FetchOptions
    ) -> None:
        self._remote = remote
        self._folder = folder
        self._cache = cache
        self._options = options
        self._checked: set[str] = set()

    def hold(self, spec: FileSpec, *, check: Callable[[str], None]) -> LockedFile:
        """The complete and verified file, open and pinned until it is released; waits for it.

        Args:
            spec: the file.
            check: called before each attempt; raises if a thread of ours has failed to fetch it.

        Raises:
            UserError: it cannot be had.
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
                # Files that are being fetched will be done, and then may go; those that are read
                # may stay for good.
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
        """Fetch a file that is needed later, without waiting; its bytes, or None: no room now.

        Raises:
            UserError: it cannot be had.
            CancelledError: `cancelled` was set.
        """
        path = self._path(spec)
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            self._cache.expect(path)
            return size  # checked when it is opened
        try:
            held = self._fetch(spec, ahead=True, cancelled=cancelled)
        except _NoRoomError:
            return None
        if held is not None:
            held.release()
        return spec.n_bytes or 0

    def is_same(self, spec: FileSpec) -> bool:
        """Whether the copy that is here is what the remote has: it is fetched once more.

        Raises:
            UserError: it cannot be had.
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
        """The file, if it is here and good; one that is not is deleted."""
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
        path.unlink(missing_ok=True)  # of a killed process, maybe another user's
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
    """Waiting for another process, as long as it makes progress."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pause = _SHORTEST_WAIT_S
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def wait(self, part: Path) -> bool:
        """Pause; False: the file that the other process writes has not changed for too long."""
        seen = None
        with contextlib.suppress(OSError):
            status = part.stat()
            seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        time.sleep(self._pause)
        self._pause = min(_LONGEST_WAIT_S, 2 * self._pause)
        return time.monotonic() - self._since < self.seconds


def damage(file: IO[bytes], n_bytes: int | None, hashes: tuple[tuple[str, str], ...]) -> str | None:
    """How a file differs from what its index specifies.

    Args:
        file: any position.
        n_bytes: its size; None: unknown.
        hashes: (algorithm, hex digest) pairs.
    """
    size = file.seek(0, os.SEEK_END)
    if n_bytes is not None and size != n_bytes:
        return f"has {size} bytes, its index specifies {n_bytes}"
    for algorithm, expected in hashes:
        file.seek(0)
        found = digest(algorithm, iter(lambda: file.read(_CHUNK), b""))
        if found != expected:
            return f"its {algorithm} is {found}, its index specifies {expected}"
    return None


def _room(spec: FileSpec) -> int:
    """Bytes that a file takes while it is fetched, as far as they are known."""
    return (spec.n_bytes or 0) + ((spec.packed and spec.packed.n_bytes) or 0)


def _remove(part: LockedFile) -> None:
    with part, contextlib.suppress(OSError):
        Path(f"{part.path}{PACKED}").unlink(missing_ok=True)
        part.path.unlink()
