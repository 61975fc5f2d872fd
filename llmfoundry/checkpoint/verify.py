"""Search for the newest complete checkpoint, and comparison of its files with COMMIT.

Entry point: `find_checkpoint`, called before a run resumes and before a command opens a checkpoint.
Rank 0 compares names and sizes. Each rank reads the files that it wrote, which on the same layout
are the files that it will load, and compares their checksums. Meanwhile the ranks run a short
collective every few seconds (`with_keepalive`), so that long reads do not exceed
`parallel.dist_timeout`.
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
from llmfoundry.checkpoint.dcp import holds_average, holds_optimizer, holds_tensors
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
from llmfoundry.recipe.eval import WEIGHTS

_THREADS = 8  # maximum per process: more threads only wait for the disk or network


class ChecksumSelection(Enum):
    """Selection of the files whose checksums are compared; other files may be missing."""

    ALL = "all"
    WEIGHTS = "all but the optimizer's and averages"
    AVERAGE = "all but the optimizer's"
    RECORD = "all but tensors"
    NONE = "none, but all must be there and have their sizes"

    @classmethod
    def of(cls, weights: str | None) -> ChecksumSelection:
        """Return the selection that loads these weights: trained, ema, or None for either."""
        return cls.WEIGHTS if weights == WEIGHTS[0] else cls.AVERAGE

    def files(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the files of a checkpoint that must exist."""
        if self in (ChecksumSelection.WEIGHTS, ChecksumSelection.AVERAGE):
            wanted = {name: n for name, n in sizes.items() if not holds_optimizer(name)}
            if self is ChecksumSelection.AVERAGE:
                return wanted
            return {name: n for name, n in wanted.items() if not holds_average(name)}
        if self is ChecksumSelection.RECORD:
            return {name: n for name, n in sizes.items() if not holds_tensors(name)}
        return dict(sizes)


def find_checkpoint(
    place: Storage | Checkpoint,
    *,
    note: Callable[[str], None],
    sums: ChecksumSelection = ChecksumSelection.ALL,
    world: World = ALONE,
    until: int | None = None,
) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or check a given checkpoint; collective.

    The checkpoint is pinned: it is not pruned before `unpin` or the end of this process.

    Args:
        place: a run or one checkpoint.
        note: reports each rejected checkpoint and the reason, on rank 0.
        sums: files whose checksums are compared.
        world: process group; all ranks get the same result.
        until: maximal batch of the checkpoint, if `place` is a run; None: no limit.

    Returns:
        The checkpoint; None if the run has no complete checkpoint.

    Raises:
        UserError: `place` is one checkpoint, and it is incomplete or damaged.
        RunFailure: a rank makes no progress in reading.
    """
    if isinstance(place, Checkpoint):
        problem = _pinned_damage(place, sums, world)
        if problem is not None:
            raise UserError(f"{place}: {problem}; choose another checkpoint")
        return place
    refused: set[str] = set()  # damaged checkpoints that have a COMMIT
    noted: dict[str, str] = {}

    def candidates() -> list[str]:
        there = [f.name for f in place.checkpoints() if until is None or batch_of(f) <= until]
        return [name for name in there if name not in refused]

    def has_more() -> bool:
        """Return whether a candidate exists: a running job may have pruned those listed before."""
        return any(_counts(place.checkpoint(name)) for name in candidates())

    while True:
        for name in on_rank0(world, candidates):
            # paths differ between machines for a run at a URL, so ranks exchange names
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
    """Return whether a checkpoint exists and has a COMMIT."""
    try:
        return checkpoint.has_commit()
    except OSError:  # an unreadable checkpoint exists
        return True


def _pinned_damage(checkpoint: Checkpoint, sums: ChecksumSelection, world: World) -> str | None:
    """Pin a checkpoint and return what is wrong with it; a damaged checkpoint is unpinned."""
    is_there = bool(all_reduce_min(world, int(checkpoint.pin())))
    try:
        problem = find_damage(checkpoint, sums=sums, world=world)
    except UserError as error:  # the store cannot deliver a file
        if on_rank0(world, partial(_counts, checkpoint)):
            raise
        problem = str(error)
    if not is_there:
        problem = problem or "it is being removed"
    if problem is not None:
        checkpoint.unpin()
    return problem


def find_damage(
    checkpoint: Checkpoint, *, sums: ChecksumSelection = ChecksumSelection.ALL, world: World = ALONE
) -> str | None:
    """Return what is wrong with a checkpoint; None if its files match COMMIT; collective.

    Args:
        checkpoint: to compare.
        sums: files whose checksums are compared.
        world: process group; all ranks get the same result.

    Raises:
        RunFailure: a rank makes no progress in reading.
    """
    storage, folder = checkpoint.storage, checkpoint.folder
    files = on_rank0(world, lambda: storage.committed_files(folder, sums.files))
    if isinstance(files, str):
        return files
    if sums is ChecksumSelection.NONE:
        return None
    for _ in range(2):
        storage.fetch(folder, {name: size for name, (size, _) in files.items()}, world)
        damaged = _compare(checkpoint, {name: crc for name, (_, crc) in files.items()}, world)
        if not damaged:
            return None
        if isinstance(damaged, str):
            return damaged
        # A local copy may be damaged rather than the file in the store: download it once more.
        if not any(all_gather_object(world, storage.drop_copies(folder, damaged))):
            break
    return f"its file {damaged[0]} is damaged (checksum)"


class _Found(NamedTuple):
    """Result of one rank.

    Attributes:
        damaged: files with another checksum.
        problem: why a file could not be read; None: all files were read.
        hangs: reading makes no progress.
    """

    damaged: list[str]
    problem: str | None
    hangs: bool


def _compare(checkpoint: Checkpoint, crcs: Mapping[str, int], world: World) -> list[str] | str:
    """Return the damaged files, or why a file cannot be read; every rank reads its own files."""
    local_crcs = {
        n: crc for n, crc in crcs.items() if max(0, writer_of(n)) % world.size == world.rank
    }
    n_threads = min(_THREADS, checkpoint.storage.reading_threads(cores() // local_size()))
    reading = _Reading(checkpoint, local_crcs, n_threads)

    def all_done(done: bool) -> bool:
        return bool(all_reduce_min(world, int(done)))

    limit = world.timeout.total_seconds() if world.size > 1 else float("inf")
    result = with_keepalive(partial(reading.result, limit), all_done, world.timeout)()
    every = all_gather_object(world, result)
    for rank, result in enumerate(every):
        if result.hangs:
            raise RunFailure(
                f"parallel.dist_timeout: rank {rank} {result.problem}: its disk or network hangs or"
                " is slow; look at that machine, or write a larger parallel.dist_timeout"
            )
        if result.problem is not None:
            return result.problem
    damaged = {name for result in every for name in result.damaged}
    return [name for name in crcs if name in damaged]


class _Reading:
    """Checksums of files, computed in daemon threads: a hanging read does not block the exit."""

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
        """Wait until all files are read, or no byte was read for `limit` seconds."""
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
