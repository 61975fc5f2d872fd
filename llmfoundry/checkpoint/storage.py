"""Where a run's checkpoints are kept: a folder that all processes share, or an object store.

`checkpointer.py` saves in the same steps into both. In a store no process sees what another has
written: each writes its files on its own machine's disk, sends them itself, and the main process
writes the marker once all have said that theirs are there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from llmfoundry.checkpoint.commit import (
    COMMIT,
    Written,
    has_commit,
    listing,
    record_of,
    remove_folder,
    remove_unpinned,
    write_commit,
)
from llmfoundry.checkpoint.load import batch_of, list_checkpoints
from llmfoundry.checkpoint.peer_copies import CopyDoor, Told, copies_on_next, exchange
from llmfoundry.checkpoint.remote_run import CHECKPOINTS, StoredRun, local_size, stored_run
from llmfoundry.checkpoint.verify import Sums, find_damage
from llmfoundry.distributed.launch import World
from llmfoundry.distributed.mailbox import CollectiveError, Mailbox
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, write_json

_LATE_S = 60.0  # as long as NFS may remember that a name was not there
_FILES = 4  # of a process that are sent at a time; each in several requests


class Home(Protocol):
    """What a save asks for; every process calls these but for `prune` and `newest`."""

    def prepare(self, folder: Path) -> None:
        """Make a checkpoint's folder, empty, before anything is written into it."""

    def commit(self, folder: Path, written: Written) -> int:
        """Make what was written count; its bytes, on the main process.

        `written` are the files of tensors of this process, summed up.
        """

    def discard(self, folder: Path) -> None:
        """Remove what there is of a save that failed; never raises."""

    def prune(self, batch: int, keep: int) -> None:
        """Remove what the checkpoint of `batch`, now whole, makes needless; the main process.

        That is all before the newest `keep` (-1: none), and what interrupted saves have left; what
        a process reads at the time goes at a later call. Later batches than this one are of a run
        that was refused at the start; they stay until there is a newer checkpoint.
        """

    def forget_after(self, batch: int) -> None:
        """Remove what was saved after more steps than `batch`, as the run goes back there."""

    def newest(self) -> str | None:
        """The name of the newest checkpoint that seems whole; the main process."""


def home_of(run_folder: Path, world: World, mailbox: Mailbox, warn: Callable[[str], None]) -> Home:
    """Where the checkpoints of the run of a folder are kept; `warn` tells what is not vital."""
    run = stored_run(run_folder)
    if run is None:
        return FolderHome(run_folder, world, mailbox)
    return StoreHome(run, world, mailbox, warn)


class FolderHome:
    """A folder on a file system of all processes."""

    def __init__(self, run_folder: Path, world: World, mailbox: Mailbox) -> None:
        """Nothing is made yet."""
        self._folder, self._world, self._mailbox = run_folder, world, mailbox
        self._began = time.time()

    def prepare(self, folder: Path) -> None:  # noqa: D102
        self._mailbox.run(lambda: _make_anew(folder), only_main=True)

    def commit(self, folder: Path, written: Written) -> int:  # noqa: D102
        told = self._mailbox.gather(written)

        def mark() -> Written:
            _await_files(folder, told)
            files = _joined([*told, record_of(folder)])
            write_commit(folder, files)
            return files

        return _bytes(self._mailbox.run(mark, only_main=True) or {})

    def discard(self, folder: Path) -> None:  # noqa: D102
        if self._world.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # the room that is left is needed

    def prune(self, batch: int, keep: int) -> None:  # noqa: D102
        older = [f for f in list_checkpoints(self._folder) if batch_of(f) < batch]
        whole = [f for f in older if _seems_whole(f)]
        needless = [f for f in older if not has_commit(f) and _last_change(f) < self._began]
        if keep > 0 and len(whole) >= keep:
            last = whole[keep - 1]
            needless += [f for f in older if batch_of(f) <= batch_of(last) and has_commit(f)]
        for folder in needless:
            remove_unpinned(folder)

    def forget_after(self, batch: int) -> None:  # noqa: D102
        for folder in list_checkpoints(self._folder) if self._world.is_main else ():
            if batch_of(folder) > batch:
                remove_folder(folder)

    def newest(self) -> str | None:  # noqa: D102
        found = next(filter(_seems_whole, list_checkpoints(self._folder)), None)
        return None if found is None else found.name


class StoreHome:
    """An object store, and a folder of each machine in which files are written before they go."""

    def __init__(
        self, run: StoredRun, world: World, mailbox: Mailbox, warn: Callable[[str], None]
    ) -> None:
        """Nothing is asked of the store yet."""
        self._run, self._world, self._mailbox, self._warn = run, world, mailbox, warn
        self._door: CopyDoor | None = None
        self._leads = world.local_rank == 0  # of its machine's processes
        self._whole: dict[str, bool] = {}  # by name: whether it has a marker

    def prepare(self, folder: Path) -> None:  # noqa: D102
        def make() -> None:
            if self._leads:
                _make_anew(folder)
            if self._world.is_main:
                self._remove(folder.name)

        self._mailbox.run(make)

    def commit(self, folder: Path, written: Written) -> int:  # noqa: D102
        own = self._mailbox.run(lambda: written | self._record(folder))
        files = _joined(self._mailbox.gather(own))
        self._mailbox.run_long(lambda: self._send(folder, own))
        self._mailbox.run(lambda: self._mark(folder, files), only_main=True)
        if self._run.local_copies and self._world.size > local_size():
            self._copy(folder, written)
        self._settle(folder)
        return _bytes(files)

    def discard(self, folder: Path) -> None:  # noqa: D102
        if self._leads:
            shutil.rmtree(folder, ignore_errors=True)
        if self._world.is_main and not self._whole.get(folder.name):  # else it does count
            with suppress(UserError):  # the next save, or the next start, removes it
                self._remove(folder.name)

    def prune(self, batch: int, keep: int) -> None:  # noqa: D102
        older = [f.name for f in list_checkpoints(self._run.folder) if batch_of(f) < batch]
        for name in older:
            if name not in self._whole:
                self._whole[name] = has_commit(self._run.folder / CHECKPOINTS / name)
        whole = [name for name in older if self._whole[name]]
        kept = whole[: keep - 1] if keep > 0 else whole
        for name in [name for name in older if name not in kept]:
            self._remove(name)
            self._whole.pop(name, None)

    def forget_after(self, batch: int) -> None:  # noqa: D102
        newer = [f for f in list_checkpoints(self._run.folder) if batch_of(f) > batch]
        for folder in newer if self._leads else ():
            shutil.rmtree(folder, ignore_errors=True)
        for folder in newer if self._world.is_main else ():
            self._remove(folder.name)
            self._whole.pop(folder.name, None)

    def newest(self) -> str | None:  # noqa: D102
        try:
            found = next(filter(has_commit, list_checkpoints(self._run.folder)), None)
        except UserError:  # the store is what failed; what this process has saved, it knows
            return max((name for name, whole in self._whole.items() if whole), default=None)
        return None if found is None else found.name

    def _record(self, folder: Path) -> Written:
        return record_of(folder) if self._world.is_main else {}

    def _send(self, folder: Path, own: Iterable[str]) -> None:
        """This process's own files, several at a time."""
        with ThreadPoolExecutor(_FILES, thread_name_prefix="send") as pool:
            files = [folder / name for name in own]
            sent = [pool.submit(self._run.store.upload, self._run.name(f), f) for f in files]
            for future in sent:
                future.result()

    def _mark(self, folder: Path, files: Written) -> None:
        """Write the marker, last of all, if the run is still this process's."""
        self._run.before_commit()
        write_json(folder / COMMIT, listing(files))
        self._run.store.upload(self._run.name(folder / COMMIT), folder / COMMIT)
        self._whole[folder.name] = True

    def _copy(self, folder: Path, written: Written) -> None:
        """Keep this machine's files on the next one's disk, too; a failure costs the copy alone."""
        marker = (folder / COMMIT).read_bytes() if self._world.is_main else b""
        marker = self._mailbox.scatter([marker] * self._world.size)
        sizes = {name: file["bytes"] for name, file in written.items()}
        try:
            door = self._door = self._mailbox.run(lambda: self._door or CopyDoor())
            told = self._mailbox.gather(Told(door.address, self._run.identity(), sizes))
            part = self._mailbox.scatter(copies_on_next(told))

            def hand_over() -> None:
                exchange(door, folder, part)
                if self._leads:
                    atomic_write(folder / COMMIT, marker)

            self._mailbox.run_long(hand_over)
        except CollectiveError as error:
            if self._world.is_main:
                self._warn(f"save_local_copies: not every machine's files were copied: {error}")

    def _settle(self, folder: Path) -> None:
        """Leave on this machine's disk what is to stay there: the newest few checkpoints."""
        if not self._leads:
            return
        with suppress(OSError):
            here = sorted((f for f in folder.parent.iterdir() if f.is_dir()), reverse=True)
            for old in here[self._run.local_copies :]:
                shutil.rmtree(old, ignore_errors=True)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, or what there is of one: its marker first."""
        files = self._run.store.files(f"{CHECKPOINTS}/{name}")
        marker = f"{CHECKPOINTS}/{name}/{COMMIT}"
        if marker in files:
            self._run.store.delete([marker])
        self._run.store.delete([file for file in files if file != marker])


def remove_checkpoints(run_folder: Path) -> None:
    """Remove all checkpoints of a run that begins anew; the main process."""
    run = stored_run(run_folder)
    if run is not None:
        files = sorted(run.store.files(CHECKPOINTS), key=lambda name: not name.endswith(COMMIT))
        markers = [name for name in files if name.endswith(f"/{COMMIT}")]
        run.store.delete(markers)
        run.store.delete([name for name in files if name not in markers])
    shutil.rmtree(run_folder / CHECKPOINTS, ignore_errors=True)


def _joined(told: Iterable[Written]) -> Written:
    return {name: file for files in told for name, file in files.items()}


def _await_files(folder: Path, told: Sequence[Written]) -> None:
    """Until this machine sees the files of all processes: a shared folder's names come late.

    Raises:
        OSError: it does not; each machine writes to a disk of its own.
    """
    deadline = time.monotonic() + _LATE_S
    while True:
        here = set(os.listdir(folder))
        lacking = [(rank, name) for rank, files in enumerate(told) for name in files.keys() - here]
        if not lacking:
            return
        if time.monotonic() > deadline:
            rank, name = min(lacking)
            raise OSError(
                f"{name}, which rank {rank} wrote, is not in {folder} on the machine of rank 0;"
                " write a folder that all machines share, or an object store"
            )
        time.sleep(0.2)


def _bytes(files: Written) -> int:
    return sum(file["bytes"] for file in files.values())


def _seems_whole(folder: Path) -> bool:
    return find_damage(folder, sums=Sums.NONE) is None


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
