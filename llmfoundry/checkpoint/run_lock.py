"""One training at a time in a run's folder; `commands/train.py` holds it from first to last.

The main process locks `run.lock` in the folder, which says who it is, for those who are refused.
The lock is the kernel's: it goes when the process does, also by kill -9, and what is left of the
file then means nothing. Whether it reaches other machines is the shared file system's choice (NFS
and a Lustre mounted with `flock`: yes). Reading a run and evaluating it need no lock.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.files import LockedFile, remove_partials, try_lock

NAME = "run.lock"
_PATIENCE = 5.0  # seconds: a killed process frees its memory before its locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def only_run(folder: Path, world: World, *, note: Callable[[str], None]) -> Iterator[None]:
    """Hold a run's folder, which is made if need be; every process calls it.

    Args:
        folder: the run's.
        world: this process.
        note: reports a file system that has no locks.

    Raises:
        UserError: another process holds it, or it cannot be written; on every process.
    """
    held: list[LockedFile] = []  # of the main process
    made: list[Path] = []  # folders, the innermost first

    def take() -> None:
        made.extend(path for path in (folder, *folder.parents) if not path.exists())
        held.extend(_take(folder, note))
        for place in (folder, *folder.glob("*/"), *folder.glob("eval/*/")):
            remove_partials(place)

    on_rank0(world, take)
    try:
        yield
    finally:
        for locked in held:
            with suppress(OSError):
                locked.path.unlink()
                for path in dict.fromkeys([folder, *made]):
                    path.rmdir()  # of a run that was refused there is no trace
            locked.release()


def _take(folder: Path, note: Callable[[str], None]) -> list[LockedFile]:
    """The locked file; none where the file system has no locks."""
    path, deadline = folder / NAME, time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            locked = None
            with suppress(FileNotFoundError):  # another has just removed the folder it had made
                locked = try_lock(path, mode=0o644)
            if locked is not None:
                os.ftruncate(locked.descriptor, 0)
                os.pwrite(locked.descriptor, _this_process().encode(), 0)
                return [locked]
        except OSError as error:
            if error.errno in _NO_LOCKS:
                note(f"{path}: the file system has no locks, so a second start is not noticed")
                return []
            raise UserError(
                f"save_folder: {folder} cannot be written ({error.strerror}); make room, or write"
                " another folder"
            ) from error
        time.sleep(0.1)
    raise UserError(
        f"save_folder: {folder} is in use by {_owner(path)}; wait for its end, or write another"
        " run_name"
    )


def _this_process() -> str:
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}\n"


def _owner(path: Path) -> str:
    try:
        return path.read_text().strip() or "another process"
    except OSError:
        return "another process"
