"""Where a run's checkpoints are kept: `Storage`, a folder that all processes share, or a URL's.

`open_run.py` opens the storage of a run, once; `ObjectStorage` in `object_storage.py` is the
other kind. Saving (`save.py`), listing, reading and removing are methods of it, so no caller asks
which kind it is. The idea: the rest of the codebase knows folders alone; a run at a URL works in a
folder of this machine that stands for it. A `Checkpoint` is one of the folders in a storage.

While a process reads a checkpoint it holds a shared lock on COMMIT (`Checkpoint.pin`); a run that
removes old checkpoints leaves locked ones for the next time.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from llmfoundry.checkpoint.commit import (
    COMMIT,
    FileSums,
    read_commit,
    sums_of_small_files,
    write_commit,
)
from llmfoundry.distributed.mailbox import Mailbox
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import one_line
from llmfoundry.events import CHECKPOINTS
from llmfoundry.files import LockedFile, try_lock
from llmfoundry.recipe.paths import show

_NAME = re.compile(r"ba\d{7,}")
_LATE_S = 60.0  # as long as NFS may remember that a name was not there
NO_COMMIT = "it has no COMMIT (it is being written, or its save was interrupted)"


def is_checkpoint(path: Path) -> bool:
    """Whether this is the folder of one checkpoint, rather than of a run, by its name."""
    return _NAME.fullmatch(path.name) is not None


def batch_of(folder: Path) -> int:
    """The steps after which a checkpoint was saved."""
    return int(folder.name[2:])


class Storage:
    """A folder on a file system that all processes of a run share."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made yet."""
        self.folder, self.place = folder, show(folder)
        self.began = time.time()  # a run's saves; earlier ones without COMMIT were interrupted

    # Reading.

    def __str__(self) -> str:
        return self.place

    def shown(self, path: Path) -> str:
        """What a user calls a file or a folder: its URL where the run has one, or its path."""
        if not path.is_relative_to(self.folder):
            return show(path)
        return os.path.join(self.place, path.relative_to(self.folder)).removesuffix("/.")

    def checkpoint_folder(self, batch: int) -> Path:
        """Of the checkpoint that is saved after so many steps."""
        return self.folder / CHECKPOINTS / f"ba{batch:07d}"

    def checkpoints(self) -> list[Path]:
        """All checkpoint folders, complete or not, newest first."""
        above = self.folder / CHECKPOINTS
        found = [above / name for name in self._folder_names(above) if _NAME.fullmatch(name)]
        return sorted(found, key=batch_of, reverse=True)

    def checkpoint(self, name: str) -> Checkpoint:
        """The one of that name, which may not be there."""
        return Checkpoint(self, self.folder / CHECKPOINTS / name)

    def _folder_names(self, above: Path) -> list[str]:
        """Folders directly below another."""
        return [folder.name for folder in above.glob("*") if folder.is_dir()]

    def has_commit(self, folder: Path) -> bool:
        """Whether something is called COMMIT in a checkpoint's folder."""
        try:
            (folder / COMMIT).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def committed_files(
        self,
        folder: Path,
        needed: Callable[[Mapping[str, int]], Mapping[str, int]] = dict,
    ) -> dict[str, tuple[int, int]] | str:
        """Bytes and checksum of a checkpoint's files; or what is wrong with one.

        Args:
            folder: the checkpoint's.
            needed: of the sizes of all files by name, those that have to be there.
        """
        try:
            size_of = self._look_up(folder)
            if isinstance(size_of, str):
                return size_of
            files = read_commit(folder)
            wanted = needed({name: size for name, (size, _) in files.items()})
            for name, size in wanted.items():
                found = size_of(name)
                if found is None:
                    return f"its file {name} is missing"
                if found != size:
                    return f"its file {name} has {found} bytes, not {size}"
        except OSError as error:
            return f"it cannot be read: {one_line(error)}"
        except ValueError as error:
            return f"its COMMIT cannot be read: {error}"
        return {name: files[name] for name in wanted}

    def _look_up(self, folder: Path) -> Callable[[str], int | None] | str:
        """The size of each file by name, None: it is not there; or why it is no checkpoint."""

        def size_of(name: str) -> int | None:
            path = folder / name
            return path.stat().st_size if path.is_file() else None

        if self.has_commit(folder):
            return size_of
        return NO_COMMIT if folder.exists() else "it is not there"

    def fetch(self, folder: Path, sizes: Mapping[str, int], world: World) -> None:
        """Put what is needed of a checkpoint on this machine's disk; every process calls it."""

    def drop_copies(self, folder: Path, names: Iterable[str]) -> bool:
        """Remove this machine's copies of files of the store; whether there was one."""
        return False

    def open(self, path: Path) -> IO[bytes]:
        """A file of a checkpoint, to read at any place: on this disk, or in the store.

        Raises:
            UserError: the store does not give it.
            OSError: it cannot be read on this disk.
        """
        return path.open("rb")

    def reading_threads(self, cores: int) -> int:
        """How many threads of a process that has so many cores read files."""
        return max(1, cores)

    def lock(self, folder: Path) -> LockedFile | bool:
        """Lock a checkpoint against removal; where nothing can be locked, whether it is there.

        In an object store, and on a file system without locks, a reader chooses again where a
        checkpoint has vanished.
        """
        try:
            return try_lock(folder / COMMIT, shared=True) or False  # False: it is being removed
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    # One save; every process calls these, in this order.

    def prepare(self, folder: Path, mailbox: Mailbox) -> None:
        """Make a checkpoint's folder, empty, before anything is written into it."""
        mailbox.run(partial(make_empty, folder), only_main=True)

    def commit(self, folder: Path, written: FileSums, mailbox: Mailbox) -> int:
        """Make what was written count; its bytes, on the main process.

        `written` are the files of tensors of this process.
        """
        every = mailbox.gather(written)

        def mark() -> int:
            _await_files(folder, every)
            return write_commit(folder, [*every, sums_of_small_files(folder)])

        return mailbox.run(mark, only_main=True) or 0

    def discard(self, folder: Path, world: World) -> None:
        """Remove what there is of a save that failed; never raises."""
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # the space is needed

    # Removing.

    def is_complete(self, folder: Path) -> bool:
        """Whether a checkpoint has a marker and all files that it lists, by name and size."""
        return isinstance(self.committed_files(folder), dict)

    def was_interrupted(self, folder: Path) -> bool:
        """Whether a checkpoint without a marker is left from before this run began to save."""
        return not self.has_commit(folder) and _last_change(folder) < self.began

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint; one that a process is reading stays."""
        remove_unpinned(folder)

    def forget_after(self, batch: int, world: World) -> None:
        """Remove what was saved after more steps than `batch`, as the run goes back there."""
        for folder in self.checkpoints() if world.is_main else ():
            if batch_of(folder) > batch:
                _remove_folder(folder)

    def remove_all(self) -> None:
        """Remove all checkpoints of a run that begins anew; the main process."""
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)

    def newest(self) -> str | None:
        """The name of the newest checkpoint that seems complete; the main process."""
        found = next(filter(self.is_complete, self.checkpoints()), None)
        return None if found is None else found.name


@dataclass
class Checkpoint:
    """One checkpoint of a run, complete or not.

    Attributes:
        storage: the run's.
        folder: on this machine; of one in an object store it has what was fetched.
    """

    storage: Storage = field(compare=False)
    folder: Path
    _lock: LockedFile | bool = field(default=False, init=False, repr=False, compare=False)

    @classmethod
    def at(cls, folder: Path) -> Checkpoint:
        """One on this machine's file system."""
        return cls(Storage(folder), folder)

    def __str__(self) -> str:
        return self.storage.shown(self.folder)

    @property
    def name(self) -> str:
        """Its folder's."""
        return self.folder.name

    def has_commit(self) -> bool:
        """Whether something is called COMMIT there; without it this never was a checkpoint."""
        return self.storage.has_commit(self.folder)

    def open(self, name: str) -> IO[bytes]:
        """One of its files, as `Storage.open`."""
        return self.storage.open(self.folder / name)

    def pin(self) -> bool:
        """Keep it from being removed until `unpin`, or until this process ends.

        Returns:
            Whether it is still there.
        """
        self._lock = self._lock or self.storage.lock(self.folder)
        return bool(self._lock)

    def unpin(self) -> None:
        """All is read that is needed of it."""
        if isinstance(self._lock, LockedFile):
            self._lock.release()
        self._lock = False


def remove_unpinned(folder: Path) -> bool:
    """Remove a checkpoint, or what there is of one, unless a process reads it; whether it went."""
    try:
        locked = try_lock(folder / COMMIT)
    except OSError:  # there is none, or the file system has no locks
        locked = None
    else:
        if locked is None:
            return False
    with locked or nullcontext():
        _remove_folder(folder)
    return True


def _remove_folder(folder: Path) -> None:
    """Remove a checkpoint: its marker first, so that a half-deleted folder never counts."""
    (folder / COMMIT).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _await_files(folder: Path, every: Sequence[FileSums]) -> None:
    """Until this machine sees the files of all processes: a shared folder's names come late.

    Raises:
        OSError: it does not; each machine writes to a disk of its own.
    """
    deadline = time.monotonic() + _LATE_S
    while True:
        here = set(os.listdir(folder))
        lacking = [(rank, name) for rank, files in enumerate(every) for name in files.keys() - here]
        if not lacking:
            return
        if time.monotonic() > deadline:
            rank, name = min(lacking)
            raise OSError(
                f"{name}, which rank {rank} wrote, is not in {folder} on the machine of rank 0;"
                " write a folder that all machines share, or an object store"
            )
        time.sleep(0.2)


def make_empty(folder: Path) -> None:
    """Make a folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def local_size() -> int:
    """Processes of this machine, where a launcher sets it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
