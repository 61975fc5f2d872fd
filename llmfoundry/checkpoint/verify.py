"""Finds the newest complete checkpoint, its files compared with COMMIT.

Called before a run resumes, and before anything opens a checkpoint. Rank 0 looks at names and
sizes; each process reads the files that it wrote (on the same layout those that it is about to
load) and compares their checksums. Meanwhile all exchange a message every few seconds
(`with_keepalive`), so none waits longer than `parallel.dist_timeout` for a process that reads,
however long that takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llmfoundry.checkpoint.commit import checksum, writer_of
from llmfoundry.checkpoint.dcp import holds_optimizer, holds_tensors
from llmfoundry.checkpoint.storage import (
    Storage,
    batch_of,
    has_commit,
    is_checkpoint,
    list_checkpoints,
    local_size,
    named,
    open_file,
    pin,
    storage_of,
    unpin,
)
from llmfoundry.distributed.collectives import (
    all_gather_object,
    all_reduce_min,
    on_rank0,
    with_keepalive,
)
from llmfoundry.distributed.launch import ALONE, World
from llmfoundry.errors import RunFailure, UserError, one_line
from llmfoundry.processes import cores

_THREADS = 8  # of a process at most: beyond, disks and networks are what waits


class Sums(Enum):
    """The files whose bytes are read and compared; those of all the others need not be there."""

    ALL = "all"
    WEIGHTS = "all but the optimizer's"
    RECORD = "all but tensors"
    NONE = "none, but all must be there and have their sizes"

    def files(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Those of a checkpoint's files that have to be there."""
        if self is Sums.WEIGHTS:
            return {name: n for name, n in sizes.items() if not holds_optimizer(name)}
        if self is Sums.RECORD:
            return {name: n for name, n in sizes.items() if not holds_tensors(name)}
        return dict(sizes)


def find_checkpoint(
    path: Path,
    *,
    note: Callable[[str], None],
    sums: Sums = Sums.ALL,
    world: World = ALONE,
    until: int | None = None,
) -> Path | None:
    """The newest complete checkpoint at `path`: one checkpoint's folder, or a run's folder.

    It is not pruned before `unpin`, nor while this process lives.

    Args:
        path: where to look.
        note: reports, on rank 0, every checkpoint that is passed over, and why.
        sums: what is read of them.
        world: this process; all of its processes call, and get the same.
        until: of a run's folder, the most steps after which it may be saved; None: any.

    Returns:
        The checkpoint's folder; None where a run's folder has none.

    Raises:
        UserError: `path` is one checkpoint's folder, and it is torn or damaged.
        RunFailure: a process reads nothing more.
    """
    if is_checkpoint(path):
        problem = _pinned_damage(path, sums, world)
        if problem is not None:
            raise UserError(f"{named(path)}: {problem}; choose another checkpoint")
        return path

    def listed() -> list[Path]:
        there = list_checkpoints(path)
        return [f.relative_to(path) for f in there if until is None or batch_of(f) <= until]

    refused: set[Path] = set()  # though they have a COMMIT
    noted: dict[Path, str] = {}

    def candidates() -> list[Path]:
        return [name for name in listed() if name not in refused]

    def has_more() -> bool:
        """A run that trains saves and prunes: what was listed may be gone, for a newer one."""
        return any(_counts(path / name) for name in candidates())

    while True:
        for name in on_rank0(world, candidates):
            # of a run in a store each machine's working copy has a path of its own
            folder = path / name
            problem = _pinned_damage(folder, sums, world)
            if problem is None:
                return folder
            if world.is_main and noted.get(name) != problem:
                note(f"checkpoint {named(folder)} is refused: {problem}")
            noted[name] = problem
            refused |= {name} if on_rank0(world, partial(_counts, folder)) else set()
        if not on_rank0(world, has_more):
            return None


def _counts(folder: Path) -> bool:
    """Whether a checkpoint was committed, and is still there."""
    try:
        return has_commit(folder)
    except OSError:  # it cannot be read, which is another problem
        return True


def _pinned_damage(folder: Path, sums: Sums, world: World) -> str | None:
    """What is wrong with a checkpoint; None: it is complete, and stays while it is read."""
    is_there = bool(all_reduce_min(world, int(pin(folder))))
    try:
        problem = find_damage(folder, sums=sums, world=world)
    except UserError as error:  # the store does not give a file
        if on_rank0(world, partial(_counts, folder)):
            raise
        problem = str(error)
    if not is_there:
        problem = problem or "it is being removed"
    if problem is not None:
        unpin(folder)
    return problem


def find_damage(folder: Path, *, sums: Sums = Sums.ALL, world: World = ALONE) -> str | None:
    """What is wrong with a checkpoint; None if its files are as they were committed.

    Args:
        folder: the checkpoint's.
        sums: what is read of it.
        world: this process; all of its processes call, and get the same.

    Raises:
        RunFailure: a process reads nothing more.
    """
    storage = storage_of(folder)
    files = on_rank0(world, lambda: storage.committed_files(folder, sums.files))
    if isinstance(files, str):
        return files
    if sums is Sums.NONE:
        return None
    for _ in range(2):
        storage.fetch(folder, {name: size for name, (size, _) in files.items()}, world)
        found = _compare(folder, storage, {name: crc for name, (_, crc) in files.items()}, world)
        if not found:
            return None
        if isinstance(found, str):
            return found
        # A copy on some machine's disk may be what is damaged: once more, from the store.
        if not any(all_gather_object(world, storage.drop_copies(folder, found))):
            break
    return f"its file {found[0]} is damaged (checksum)"


class _Found(NamedTuple):
    """What a process found in its files: those that are damaged; why it could not read one."""

    damaged: list[str]
    problem: str | None
    hangs: bool


def _compare(
    folder: Path, storage: Storage, crcs: Mapping[str, int], world: World
) -> list[str] | str:
    """Files that are damaged, read by all processes; or why one cannot be read."""
    own = {n: crc for n, crc in crcs.items() if max(0, writer_of(n)) % world.size == world.rank}
    n_threads = min(_THREADS, storage.reading_threads(cores() // local_size()))
    reading = _Reading(folder, own, n_threads)

    def all_done(done: bool) -> bool:
        return bool(all_reduce_min(world, int(done)))

    limit = world.timeout.total_seconds() if world.size > 1 else float("inf")
    result = with_keepalive(partial(reading.result, limit), all_done, world.timeout)()
    every = all_gather_object(world, result)
    for rank, found in enumerate(every):
        if found.hangs:
            raise RunFailure(
                f"parallel.dist_timeout: rank {rank} {found.problem}: its disk or network hangs or"
                " is slow; look at that machine, or write a larger parallel.dist_timeout"
            )
        if found.problem is not None:
            return found.problem
    damaged = {name for found in every for name in found.damaged}
    return [name for name in crcs if name in damaged]


class _Reading:
    """Reads files in threads, which keep no process from ending where a read hangs."""

    def __init__(self, folder: Path, crcs: Mapping[str, int], n_threads: int) -> None:
        self._folder, self._left = folder, deque(crcs.items())
        self._damaged: list[str] = []
        self._problem: str | None = None
        self._moved = time.monotonic()
        self._threads = [
            threading.Thread(target=self._read, name="checksums", daemon=True)
            for _ in range(min(n_threads, len(crcs)))
        ]
        for thread in self._threads:
            thread.start()

    def result(self, limit: float) -> _Found:
        """What was found, once all is read, or nothing was for `limit` seconds."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.1)
                idle = time.monotonic() - self._moved
                if thread.is_alive() and idle > limit:
                    problem = f"has read nothing of {self._folder} for {idle:.0f} s"
                    return _Found([], problem, True)
        return _Found(self._damaged, self._problem, False)

    def _read(self) -> None:
        try:
            while self._left and self._problem is None:
                name, crc = self._left.popleft()
                with open_file(self._folder / name) as file:
                    if checksum(file, self._move) != crc:
                        self._damaged.append(name)
        except IndexError:
            return  # another thread took the last
        except Exception as error:
            self._problem = f"it cannot be read: {one_line(error)}"

    def _move(self) -> None:
        self._moved = time.monotonic()
