"""Locks on files that die with their owner: of runs, preparations, caches and shards.

The cache of shards locks the very file it means: exclusively while it is written or deleted, shared
while it is read; the others lock a file made for it. These are flock's locks, which the kernel
releases however a process ends, so nothing is ever left locked. One idea: a lock counts only if
the path still names the locked file, since another process may have renamed or deleted it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_held: set[int] = set()


def _close_inherited() -> None:
    # A forked child shares its parent's locks and would keep them alive after the parent's end.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


class LockedFile:
    """An open and locked file, until `release`.

    Attributes:
        path: its name; set by the code that renames it.
        descriptor: the open file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._process = os.getpid()
        _held.add(descriptor)

    def share(self) -> bool:
        """Turn an exclusive lock into a shared one; False: another process was faster, it is lost.

        The kernel releases the one before it grants the other.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        return True

    def is_current(self) -> bool:
        """Whether the path still names this file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Unlock and close; a second time, or in a forked child, it does nothing."""
        if self._process == os.getpid() and self.descriptor in _held:
            _held.discard(self.descriptor)
            # Said, not only closed: a child that is being forked may still have the file open.
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)

    def __enter__(self) -> LockedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def try_lock(path: Path, *, shared: bool = False, mode: int | None = None) -> LockedFile | None:
    """Lock a file, or None if another has it or it is no longer what `path` names.

    Args:
        path: the file.
        shared: together with other readers.
        mode: make the file with these permissions if it is not there, and open it for writing.

    Raises:
        FileNotFoundError: it is not there, and no mode was given.
    """
    return _lock(path, shared, mode, fcntl.LOCK_NB)


def lock(path: Path, *, mode: int) -> LockedFile:
    """Wait for the exclusive lock of a file that is made if need be and held for moments only."""
    while True:
        locked = _lock(path, False, mode, 0)
        if locked is not None:
            return locked


def _lock(path: Path, shared: bool, mode: int | None, wait: int) -> LockedFile | None:
    descriptor = _open(path, mode)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | wait)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    locked = LockedFile(path, descriptor)
    if not locked.is_current():
        locked.release()
        return None
    return locked


def _open(path: Path, mode: int | None) -> int:
    if mode is None:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would be waited for
    while True:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(descriptor, mode)  # open() has taken the umask away from it
            return descriptor
        with contextlib.suppress(FileNotFoundError):  # deleted just now: make it after all
            return os.open(path, os.O_RDWR)
