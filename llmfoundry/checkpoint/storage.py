"""Storage of a run's checkpoints: a folder that all ranks share, or an object store.

Entry point: `open_run.py` opens the `Storage` of a run. `Storage` is a shared folder; its subclass
`ObjectStorage` (`object_storage.py`) is a URL. Saving, listing, reading and removing checkpoints
are methods, so that callers need not distinguish the two. The rest of the code base sees folders
only: a run at a URL has a working copy in a folder of each machine. A `Checkpoint` is one
checkpoint folder in a storage.

A process that reads a checkpoint holds a shared lock on its COMMIT (`Checkpoint.pin`). Pruning
skips locked checkpoints; the next pruning removes them.
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
_LATE_S = 60.0  # NFS caches the absence of a file name for up to this long
NO_COMMIT = "it has no COMMIT (it is being written, or its save was interrupted)"


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has the name of a checkpoint folder, unlike a run's folder."""
    return _NAME.fullmatch(path.name) is not None


def batch_of(folder: Path) -> int:
    """Return the number of steps after which a checkpoint was saved, from its folder's name."""
    return int(folder.name[2:])


class Storage:
    """Checkpoints of a run in a folder on a file system that all ranks share.

    Attributes:
        folder: folder of the run; of a run at a URL, the working copy on this machine.
        place: path or URL of the run, as shown to the user.
        began: time when this run could first save; older folders without COMMIT are the remains of
            interrupted saves.
    """

    def __init__(self, folder: Path) -> None:
        """Store the path; nothing is created yet."""
        self.folder, self.place = folder, show(folder)
        self.began = time.time()

    # Reading.

    def __str__(self) -> str:
        return self.place

    def shown(self, path: Path) -> str:
        """Return the path, or in a run at a URL the URL, of a file or folder for messages."""
        if not path.is_relative_to(self.folder):
            return show(path)
        return os.path.join(self.place, path.relative_to(self.folder)).removesuffix("/.")

    def checkpoint_folder(self, batch: int) -> Path:
        """Return the folder of the checkpoint that is saved after `batch` steps."""
        return self.folder / CHECKPOINTS / f"ba{batch:07d}"

    def checkpoints(self) -> list[Path]:
        """Return all checkpoint folders, complete or not, newest first."""
        parent = self.folder / CHECKPOINTS
        folders = [parent / name for name in self._folder_names(parent) if _NAME.fullmatch(name)]
        return sorted(folders, key=batch_of, reverse=True)

    def checkpoint(self, name: str) -> Checkpoint:
        """Return the checkpoint with this folder name, which need not exist."""
        return Checkpoint(self, self.folder / CHECKPOINTS / name)

    def _folder_names(self, above: Path) -> list[str]:
        """Return the names of the folders directly below `above`."""
        return [folder.name for folder in above.glob("*") if folder.is_dir()]

    def has_commit(self, folder: Path) -> bool:
        """Return whether a checkpoint folder contains COMMIT, without reading the file."""
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
        """Compare the files of a checkpoint with COMMIT, by name and size.

        Args:
            folder: folder of the checkpoint.
            needed: selects the files that must exist from the sizes of all files by name.

        Returns:
            Bytes and CRC-32 of each needed file, or what is wrong with the checkpoint.
        """
        try:
            size_of = self._look_up(folder)
            if isinstance(size_of, str):
                return size_of
            files = read_commit(folder)
            wanted = needed({name: size for name, (size, _) in files.items()})
            for name, size in wanted.items():
                actual_size = size_of(name)
                if actual_size is None:
                    return f"its file {name} is missing"
                if actual_size != size:
                    return f"its file {name} has {actual_size} bytes, not {size}"
        except OSError as error:
            return f"it cannot be read: {one_line(error)}"
        except ValueError as error:
            return f"its COMMIT cannot be read: {error}"
        return {name: files[name] for name in wanted}

    def _look_up(self, folder: Path) -> Callable[[str], int | None] | str:
        """Return a function from a file's name to its size (None: the file is missing).

        If the folder is not a checkpoint, return the reason instead.
        """

        def size_of(name: str) -> int | None:
            path = folder / name
            return path.stat().st_size if path.is_file() else None

        if self.has_commit(folder):
            return size_of
        return NO_COMMIT if folder.exists() else "it is not there"

    def fetch(self, folder: Path, sizes: Mapping[str, int], world: World) -> None:
        """Download the needed files of a checkpoint to this machine, if remote; collective."""

    def drop_copies(self, folder: Path, names: Iterable[str]) -> bool:
        """Delete this machine's copies of remote files; return whether any existed."""
        return False

    def open(self, path: Path) -> IO[bytes]:
        """Open a file of a checkpoint for random access, on this disk or in the store.

        Raises:
            UserError: the store cannot deliver the file.
            OSError: the file cannot be read from this disk.
        """
        return path.open("rb")

    def reading_threads(self, cores: int) -> int:
        """Return the number of reader threads for a process with this number of cores."""
        return max(1, cores)

    def lock(self, folder: Path) -> LockedFile | bool:
        """Lock a checkpoint against removal.

        Object stores and some file systems have no locks. There a reader chooses another checkpoint
        if this one vanishes while it reads.

        Returns:
            The lock; False if the checkpoint is missing or being removed; True if it exists but
            cannot be locked.
        """
        try:
            return try_lock(folder / COMMIT, shared=True) or False
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    # Saving: every rank calls these methods, in this order.

    def prepare(self, folder: Path, mailbox: Mailbox) -> None:
        """Create an empty checkpoint folder, before any file is written to it."""
        mailbox.run(partial(make_empty, folder), only_main=True)

    def commit(self, folder: Path, written: FileSums, mailbox: Mailbox) -> int:
        """Write COMMIT, which makes the checkpoint count.

        Args:
            folder: folder of the checkpoint.
            written: tensor files that this rank has written.
            mailbox: communication channel of the save.

        Returns:
            The number of bytes of all files, on the main process; 0 on the others.
        """
        files_by_rank = mailbox.gather(written)

        def mark() -> int:
            _await_files(folder, files_by_rank)
            return write_commit(folder, [*files_by_rank, sums_of_small_files(folder)])

        return mailbox.run(mark, only_main=True) or 0

    def discard(self, folder: Path, world: World) -> None:
        """Remove the files of a failed save, to free the space; never raises."""
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)

    # Removing.

    def is_complete(self, folder: Path) -> bool:
        """Return whether a checkpoint has COMMIT and all files in it, by name and size."""
        return isinstance(self.committed_files(folder), dict)

    def was_interrupted(self, folder: Path) -> bool:
        """Return whether a checkpoint folder remains from a save interrupted before this run."""
        return not self.has_commit(folder) and _last_change(folder) < self.began

    def remove(self, folder: Path) -> None:
        """Remove a checkpoint, unless a process is reading it."""
        remove_unpinned(folder)

    def forget_after(self, batch: int, world: World) -> None:
        """Remove checkpoints saved after more than `batch` steps, to which the run goes back."""
        for folder in self.checkpoints() if world.is_main else ():
            if batch_of(folder) > batch:
                _remove_folder(folder)

    def remove_all(self) -> None:
        """Remove all checkpoints of a run that restarts from scratch; on the main process."""
        shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)

    def newest(self) -> str | None:
        """Return the name of the newest complete checkpoint, if any; on the main process."""
        newest = next(filter(self.is_complete, self.checkpoints()), None)
        return None if newest is None else newest.name


@dataclass
class Checkpoint:
    """One checkpoint of a run, complete or not.

    Attributes:
        storage: storage of the run.
        folder: folder on this machine; for an object store it holds the downloaded files.
        averaged: readers get the averaged weights (`ema.decay`) under the names of the weights.
    """

    storage: Storage = field(compare=False)
    folder: Path
    averaged: bool = False
    _lock: LockedFile | bool = field(default=False, init=False, repr=False, compare=False)

    @classmethod
    def at(cls, folder: Path) -> Checkpoint:
        """Return the checkpoint in a folder on this machine's file system."""
        return cls(Storage(folder), folder)

    def __str__(self) -> str:
        return self.storage.shown(self.folder)

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return self.folder.name

    def has_commit(self) -> bool:
        """Return whether the folder contains COMMIT; see `Storage.has_commit`."""
        return self.storage.has_commit(self.folder)

    def open(self, name: str) -> IO[bytes]:
        """Open one of the checkpoint's files; see `Storage.open`."""
        return self.storage.open(self.folder / name)

    def pin(self) -> bool:
        """Protect the checkpoint from removal until `unpin`, or until this process exits.

        Returns:
            Whether the checkpoint still exists.
        """
        self._lock = self._lock or self.storage.lock(self.folder)
        return bool(self._lock)

    def unpin(self) -> None:
        """Allow removal again: all needed files are read."""
        if isinstance(self._lock, LockedFile):
            self._lock.release()
        self._lock = False


def remove_unpinned(folder: Path) -> bool:
    """Remove a checkpoint folder unless a process is reading it; return whether it was removed."""
    try:
        locked = try_lock(folder / COMMIT)
    except OSError:  # COMMIT is missing, or the file system has no locks
        locked = None
    else:
        if locked is None:
            return False
    with locked or nullcontext():
        _remove_folder(folder)
    return True


def _remove_folder(folder: Path) -> None:
    """Remove a checkpoint, COMMIT first: a partly deleted folder is then not a checkpoint."""
    (folder / COMMIT).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _await_files(folder: Path, files_by_rank: Sequence[FileSums]) -> None:
    """Wait until this machine sees the files of all ranks; NFS may show new files late.

    Raises:
        OSError: a file does not appear, usually because each machine writes to its own disk.
    """
    deadline = time.monotonic() + _LATE_S
    while True:
        visible = set(os.listdir(folder))
        missing = []
        for rank, files in enumerate(files_by_rank):
            missing += [(rank, name) for name in files.keys() - visible]
        if not missing:
            return
        if time.monotonic() > deadline:
            rank, name = min(missing)
            raise OSError(
                f"{name}, which rank {rank} wrote, is not in {folder} on the machine of rank 0;"
                " write a folder that all machines share, or an object store"
            )
        time.sleep(0.2)


def make_empty(folder: Path) -> None:
    """Create an empty folder, and delete the content of an existing one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def local_size() -> int:
    """Return the number of ranks on this machine, as set by the launcher; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
