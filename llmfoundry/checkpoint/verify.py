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
from typing import NamedTuple

from llmfoundry.checkpoint.commit import checksum, writer_of
from llmfoundry.checkpoint.dcp import holds_optimizer, holds_tensors
from llmfoundry.checkpoint.storage import Checkpoint, Storage, batch_of, local_size
from llmfoundry.distributed.collectives import (
    all_gather_object,
    all_reduce_min,
    on_rank0,
    with_keepalive,
)
from llmfoundry.distributed.process_group import ALONE, World
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
    place: Storage | Checkpoint,
    *,
    note: Callable[[str], None],
    sums: Sums = Sums.ALL,
    world: World = ALONE,
    until: int | None = None,
) -> Checkpoint | None:
    """The newest complete checkpoint of a run, or the one that is given.

    It is not pruned before `unpin`, nor while this process lives.

    Args:
        place: where to look.
        note: reports, on rank 0, every checkpoint that is passed over, and why.
        sums: what is read of them.
        world: this process; all of its processes call, and get the same.
        until: of a run, the most steps after which it may be saved; None: any.

    Returns:
        The checkpoint; None where a run has none.

    Raises:
        UserError: `place` is one checkpoint, and it is torn or damaged.
        RunFailure: a process reads nothing more.
    """
    if isinstance(place, Checkpoint):
        problem = _pinned_damage(place, sums, world)
        if problem is not None:
            raise UserError(f"{place}: {problem}; choose another checkpoint")
        return place
    refused: set[str] = set()  # though they have a COMMIT
    noted: dict[str, str] = {}

    def candidates() -> list[str]:
        there = [f.name for f in place.checkpoints() if until is None or batch_of(f) <= until]
        return [name for name in there if name not in refused]

    def has_more() -> bool:
        """A run that trains saves and prunes: what was listed may be gone, for a newer one."""
        return any(_counts(place.checkpoint(name)) for name in candidates())

    while True:
        for name in on_rank0(world, candidates):
            # of a run in a store each machine's working copy has a path of its own
            checkpoint = place.checkpoint(name)
            problem = _pinned_damage(checkpoint, sums, world)
            if problem is None:
                return checkpoint
            if world.is_main and noted.get(name) != problem:
                note(f"checkpoint {checkpoint} is refused: {problem}")
            noted[name] = problem
            refused |= {name} if on_rank0(world, partial(_counts, checkpoint)) else set()
        if not on_rank0(world, has_more):
            return None


def _counts(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was committed, and is still there."""
    try:
        return checkpoint.has_commit()
    except OSError:  # it cannot be read, which is another problem
        return True


def _pinned_damage(checkpoint: Checkpoint, sums: Sums, world: World) -> str | None:
    """What is wrong with a checkpoint; None: it is complete, and stays while it is read."""
    is_there = bool(all_reduce_min(world, int(checkpoint.pin())))
    try:
        problem = find_damage(checkpoint, sums=sums, world=world)
    except UserError as error:  # the store does not give a file
        if on_rank0(world, partial(_counts, checkpoint)):
            raise
        problem = str(error)
    if not is_there:
        problem = problem or "it is being removed"
    if problem is not None:
        checkpoint.unpin()
    return problem


def find_damage(
    checkpoint: Checkpoint, *, sums: Sums = Sums.ALL, world: World = ALONE
) -> str | None:
    """What is wrong with a checkpoint; None if its files are as they were committed.

    Args:
        checkpoint: to compare.
        sums: what is read of it.
        world: this process; all of its processes call, and get the same.

    Raises:
        RunFailure: a process reads nothing more.
    """
    storage, folder = checkpoint.storage, checkpoint.folder
    files = on_rank0(world, lambda: storage.committed_files(folder, sums.files))
    if isinstance(files, str):
        return files
    if sums is Sums.NONE:
        return None
    for _ in range(2):
        storage.fetch(folder, {name: size for name, (size, _) in files.items()}, world)
        found = _compare(checkpoint, {name: crc for name, (_, crc) in files.items()}, world)
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


def _compare(checkpoint: Checkpoint, crcs: Mapping[str, int], world: World) -> list[str] | str:
    """Files that are damaged, read by all processes; or why one cannot be read."""
    own = {n: crc for n, crc in crcs.items() if max(0, writer_of(n)) % world.size == world.rank}
    n_threads = min(_THREADS, checkpoint.storage.reading_threads(cores() // local_size()))
    reading = _Reading(checkpoint, own, n_threads)

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

    def __init__(self, checkpoint: Checkpoint, crcs: Mapping[str, int], n_threads: int) -> None:
        self._checkpoint, self._left = checkpoint, deque(crcs.items())
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
                    problem = f"has read nothing of {self._checkpoint.folder} for {idle:.0f} s"
                    return _Found([], problem, True)
        return _Found(self._damaged, self._problem, False)

    def _read(self) -> None:
        try:
            while self._left and self._problem is None:
                name, crc = self._left.popleft()
                with self._checkpoint.open(name) as file:
                    if checksum(file, self._move) != crc:
                        self._damaged.append(name)
        except IndexError:
            return  # another thread took the last
        except Exception as error:
            self._problem = f"it cannot be read: {one_line(error)}"

    def _move(self) -> None:
        self._moved = time.monotonic()
