"""Limits of a machine's shard cache: bytes on the disk, requests per second, and eviction.

`download.py` reserves space here before it downloads a file, and pins files that are read. Any
number of processes, runs and users share one cache. They share three small files in its folder,
read and written under one lock: `.files` (one path per line, relative to the folder, so that the
folder may be moved), `.used` (bytes) and `.rate` (`take_turn`).

Nothing is recorded about single files. A file's lock shows that it is in use (the lock ends with
its process), and its modification time shows when it was last used. A modification time in the
future marks a file that was prefetched and not used yet: another prefetch never evicts such files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llmfoundry.data.file_spec import PACKED, PART, in_words
from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, lock, publish, try_lock

_AHEAD_S = 3600.0  # after this long a file that was fetched ahead counts as used
_DIGITS = 20  # of the number in .used
_SPARE = 0.05  # of the limit, freed beyond what is needed, so that few files in a row cost a scan
_MOMENT = struct.Struct("<d")
_BURST_S = 1.0  # what a second allows may be made at once after a pause
_STALE_S = 600.0  # a moment further off was written before the clock was set back


@dataclass(frozen=True)
class Shortage:
    """Why there is no room: bytes of files that are read, and of files that are being fetched."""

    pinned: int
    in_flight: int
    may_pass: bool  # there is room once those that are being fetched are done


@dataclass(frozen=True)
class _File:
    path: Path  # as it is, with PART if it is being written
    n_bytes: int
    used_at: float

    @property
    def is_part(self) -> bool:
        return self.path.name.endswith(PART)


class ShardCache:
    """The accounts of one cache folder."""

    def __init__(self, folder: Path, *, limit: int | None) -> None:
        """Initialize, and create the folder if it does not exist.

        Args:
            folder: folder of the cache.
            limit: limit of its size in bytes; None: no limit.

        Raises:
            UserError: the folder cannot be written.
        """
        self.folder = folder
        self._limit = limit
        with reports_cache_folder(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._permissions = stat.S_IMODE(folder.stat().st_mode)
        self.file_mode = self._permissions & 0o666

    def make_folder(self, folder: Path) -> None:
        """Make a folder for copies, with the cache's permissions, so that its users share it.

        Raises:
            OSError: it cannot be made.
        """
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        for path in reversed(missing):
            # Another user may be about to write there: it has its permissions before its name.
            fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
            fresh.chmod(self._permissions)
            try:
                fresh.rename(path)
            except OSError:
                fresh.rmdir()
                if not path.is_dir():
                    raise

    def reserve(self, part: LockedFile, n_bytes: int, *, ahead: bool) -> Shortage | None:
        """Make room for a file that is going to be written; the shortage if there is none.

        Args:
            part: temporary file of the download. It gets the reserved size as a sparse file.
            n_bytes: most bytes that the download needs, including its compressed form.
            ahead: whether the file is fetched ahead; other files fetched ahead are then retained.

        Raises:
            OSError: the accounts cannot be written.
        """
        path = part.path.with_name(part.path.name.removesuffix(PART))
        with self._locked():
            used = self._used() + n_bytes
            if self._limit is not None and used > self._limit:
                shortage = self._evict(n_bytes, ahead=ahead)
                used = self._used() + n_bytes
                if used > self._limit:
                    return shortage
            os.truncate(part.descriptor, n_bytes)
            with self._journal("a") as journal:
                journal.write(f"{self._line(path)}\n")
            self._set_used(used)
        return None

    def publish(self, part: LockedFile, path: Path, *, reserved: int, ahead: bool) -> None:
        """Give a complete and verified file its name.

        Raises:
            OSError: it, or the accounts, cannot be written.
        """
        if ahead:
            later = time.time() + _AHEAD_S
            os.utime(part.descriptor, (later, later))
        self.give_back(reserved - os.fstat(part.descriptor).st_size)
        publish(part.path, path)
        part.path = path

    def give_back(self, n_bytes: int) -> None:
        """A reservation, or a part of one, that was not used.

        Raises:
            OSError: the accounts cannot be written.
        """
        with self._locked():
            self._set_used(max(0, self._used() - n_bytes))

    def touch(self, path: Path) -> None:
        """Note that a file was used now."""
        with contextlib.suppress(OSError):  # another user's, or gone: its age does not matter here
            os.utime(path)

    def expect(self, path: Path) -> None:
        """Note that a file that is here will be used soon."""
        later = time.time() + _AHEAD_S
        with contextlib.suppress(OSError):
            os.utime(path, (later, later))

    def no_room(self, name: str, n_bytes: int, shortage: Shortage) -> UserError:
        """The line that says what to write."""
        assert self._limit is not None, "only a limit runs short"
        return UserError(
            f"data.cache_limit: {in_words(self._limit)} is less than what is in use at once:"
            f" {in_words(shortage.pinned)} that are read, {in_words(shortage.in_flight)} that are"
            f" being fetched and {in_words(n_bytes)} for {name};"
            f" write {in_words(shortage.pinned + shortage.in_flight + n_bytes)} or more"
        )

    def _evict(self, n_bytes: int, *, ahead: bool) -> Shortage:
        """Delete files, least recently used first, until `n_bytes` fit; count all that stays."""
        assert self._limit is not None, "nothing goes without a limit"
        files = list(self._scan())
        used = sum(file.n_bytes for file in files)
        too_many = used + n_bytes > self._limit
        pinned = in_flight = 0
        gone = set()
        now = time.time()
        for file in _in_order(files, now, ahead=ahead):
            # What was fetched ahead goes for need alone, not to spare the next scan.
            spare = 0.0 if file.used_at > now else self._limit * _SPARE
            if not too_many or used + n_bytes + spare <= self._limit:
                break
            if _delete(file):
                used -= file.n_bytes
                gone.add(file.path)
            elif file.is_part:
                in_flight += file.n_bytes
            else:
                pinned += file.n_bytes
        lines = (self._line(file.path) for file in files if file.path not in gone)
        with self._journal("w") as journal:
            journal.writelines(f"{line.removesuffix(PART)}\n" for line in lines)
        self._set_used(used)
        return Shortage(pinned, in_flight, may_pass=pinned + n_bytes <= self._limit)

    def _scan(self) -> Iterator[_File]:
        try:
            text = (self.folder / ".files").read_bytes()
        except FileNotFoundError:
            return
        # Paths have a slash and no NUL: what else may stand there is garbage.
        lines = (line for line in text.split(b"\n") if b"/" in line and b"\0" not in line)
        lines = (line for line in lines if b".." not in line.split(b"/"))
        paths = (self._path(os.fsdecode(line)) for line in lines)
        for path in dict.fromkeys(paths):
            for name in (path + PART, path):  # as it is renamed: seen twice at worst, never missed
                with contextlib.suppress(OSError):
                    status = os.stat(name)
                    if stat.S_ISREG(status.st_mode):
                        yield _File(Path(name), status.st_size, status.st_mtime)

    def _line(self, path: Path) -> str:
        """A file's path as it is written down."""
        below = path.is_relative_to(self.folder)
        return str(path.relative_to(self.folder)) if below else str(path)

    def _path(self, line: str) -> str:
        """The path that a line means; old ones name the folder's place at that time."""
        if not line.startswith("/"):
            return os.path.join(self.folder, line)
        rest = line.rpartition(f"/{self.folder.name}/")[2]
        moved = os.path.join(self.folder, rest)
        return moved if os.path.exists(moved) or os.path.exists(moved + PART) else line

    def _used(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / ".used").read_bytes()
            # Of another length it is garbage, or was emptied by a full disk.
            if len(text) == _DIGITS and text.isdigit():
                return int(text)
        return sum(file.n_bytes for file in self._scan())

    def _set_used(self, n_bytes: int) -> None:
        # In place and always as long, since on a full disk a shorter file would end up empty.
        with lock(self.folder / ".used", mode=self.file_mode) as file:
            os.pwrite(file.descriptor, b"%0*d" % (_DIGITS, n_bytes), 0)
            os.truncate(file.descriptor, _DIGITS)

    @contextlib.contextmanager
    def _journal(self, mode: str) -> Iterator[IO[str]]:
        path = self.folder / ".files"
        is_new = not path.exists()
        with path.open(mode) as file:
            if is_new:
                os.fchmod(file.fileno(), self.file_mode)
            yield file

    def _locked(self) -> LockedFile:
        return lock(self.folder / ".lock", mode=self.file_mode)


@contextlib.contextmanager
def reports_cache_folder(folder: Path) -> Iterator[None]:
    """Turn an OSError into the line that names the key.

    Raises:
        UserError: in its place.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.cache_folder: cannot write {error.filename or folder}: {error.strerror};"
            " free space there, get permission, or choose another folder"
        ) from error


def _in_order(files: Iterable[_File], now: float, *, ahead: bool) -> Iterator[_File]:
    """Yield the files that may be deleted, in the order of deletion.

    Incomplete files of terminated processes come first, then files by their last use. Files that
    were fetched ahead and are not used yet come last, or not at all if `ahead`.
    """
    parts = [file for file in files if file.is_part]
    used = [file for file in files if not file.is_part and file.used_at <= now]
    waiting = [file for file in files if not file.is_part and file.used_at > now]
    yield from parts
    yield from sorted(used, key=lambda file: file.used_at)
    if not ahead:  # the file fetched last is needed last, so it is deleted first
        yield from sorted(waiting, key=lambda file: -file.used_at)


def _delete(file: _File) -> bool:
    """Delete a file that no process reads or writes; return whether it is deleted."""
    try:
        locked = try_lock(file.path)
        if locked is None:
            return False
        with locked:
            file.path.unlink()
            Path(f"{file.path}{PACKED}").unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    return True


def take_turn(path: Path, *, per_second: float, mode: int) -> float:
    """Take the next turn of a machine's requests; returns the seconds to wait for it.

    The file holds the moment at which the next request may begin. Under its lock each request takes
    that moment and moves it on by a share of a second, then waits for it unlocked.

    Args:
        path: the file that all share.
        per_second: requests.
        mode: the file's permissions, if it is made.

    Raises:
        OSError: the file cannot be written.
    """
    with lock(path, mode=mode) as locked:
        now = time.time()
        stored = os.pread(locked.descriptor, _MOMENT.size, 0)
        turn = _MOMENT.unpack(stored)[0] if len(stored) == _MOMENT.size else now
        if not turn <= now + _STALE_S:  # written this way to catch NaN too
            turn = now
        turn = max(turn, now - _BURST_S)
        os.pwrite(locked.descriptor, _MOMENT.pack(turn + 1 / per_second), 0)
    return float(max(0.0, turn - now))
