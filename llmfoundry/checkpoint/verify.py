"""Finds the newest whole checkpoint, its files read by all processes and compared with COMMIT.

Called before a run resumes, and before anything opens a checkpoint. The idea: rank 0 looks at
names and sizes, each process reads its part of the bytes in threads, and meanwhile all of them tell
each other every few seconds how far they are. So no message waits for a process that reads, however
long that takes; what one has found all know at the same time, and decide alike.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from llmfoundry.checkpoint.commit import COMMIT, has_commit, pin, read_commit, unpin
from llmfoundry.checkpoint.crc import Piece, blocks, joined, share, share_files
from llmfoundry.checkpoint.dcp import holds_optimizer, holds_tensors
from llmfoundry.checkpoint.download import bring, fetch_record, forget
from llmfoundry.checkpoint.load import batch_of, is_checkpoint, list_checkpoints
from llmfoundry.checkpoint.remote_run import local_size, named, stored_run
from llmfoundry.distributed.collectives import all_gather_object, all_reduce_min, on_rank0
from llmfoundry.distributed.launch import ALONE, World
from llmfoundry.errors import RunFailure, UserError, one_line
from llmfoundry.processes import cores

_CUT = 1 << 26  # bytes that a thread takes at a time
_THREADS = 8  # of a process at most: beyond, disks and networks are what waits
_SECONDS = 10.0  # between two messages at most; and a quarter of parallel.dist_timeout


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
    """The newest whole checkpoint at `path`: one checkpoint's folder, or a run's folder.

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
    """What is wrong with a checkpoint; None: it is whole, and stays while this process reads it."""
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
    listed = on_rank0(world, lambda: _list_files(folder, sums))
    if isinstance(listed, str):
        return listed
    if sums is Sums.NONE:
        return None
    sizes, run = {name: size for name, (size, _) in listed.items()}, stored_run(folder)
    for is_last in (run is None, True):
        if run is not None:
            bring(run, folder, sizes, world)
        found = _sum_together(folder, sizes, world)
        if isinstance(found, str):
            return found
        damaged = [name for name, (_, crc) in listed.items() if found.get(name, 0) != crc]
        # A copy on some machine's disk may be what is damaged.
        if is_last or not any(all_gather_object(world, forget(folder, damaged))):
            break
    return f"its file {damaged[0]} is damaged (checksum)" if damaged else None


def _list_files(folder: Path, sums: Sums) -> dict[str, tuple[int, int]] | str:
    """Bytes and checksum of the files that are to be there; or what is wrong with one."""
    try:
        run = stored_run(folder)
        there = None if run is None else fetch_record(run, folder)
        if COMMIT not in there if there is not None else not has_commit(folder):
            is_gone = run is None and not folder.exists()
            return (
                "it is not there"
                if is_gone
                else "it has no COMMIT (it is being written, or its save was interrupted)"
            )
        files = read_commit(folder)
        needed = sums.files({name: size for name, (size, _) in files.items()})
        for name, size in needed.items():
            found = _size_of(folder / name) if there is None else there.get(name)
            if found is None:
                return f"its file {name} is missing"
            if found != size:
                return f"its file {name} has {found} bytes, not {size}"
    except OSError as error:
        return f"it cannot be read: {one_line(error)}"
    except ValueError as error:
        return f"its COMMIT cannot be read: {error}"
    return {name: files[name] for name in needed}


def _size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _sum_together(folder: Path, sizes: Mapping[str, int], world: World) -> dict[str, int] | str:
    """CRC-32 of the files, read by all processes; or why one of them could not read."""
    limit = world.timeout.total_seconds()
    run = stored_run(folder)
    deal = share if run is None or not run.local_copies else share_files
    reading = _Reading(folder, deal(sizes, world.rank, world.size))
    while True:
        reading.wait(min(_SECONDS, limit / 4))
        told = all_gather_object(world, reading.progress())
        problem = next((one.problem for one in told if one.problem), None)
        still = next((rank for rank, one in enumerate(told) if one.idle > limit), None)
        if problem is None and still is not None and world.size > 1:
            problem = f"rank {still} has read nothing of {folder} for {told[still].idle:.0f} s"
            reading.stop()
            raise RunFailure(
                f"parallel.dist_timeout: {problem}: its disk or network hangs or is slow; look at"
                " that machine, or write a larger parallel.dist_timeout"
            )
        if problem is not None:
            reading.stop()
            return problem
        if all(one.sums is not None for one in told):
            return joined(chain.from_iterable(one.sums or () for one in told))


class _Progress(NamedTuple):
    """How far a process is: its checksums once it has all, a problem, seconds without a byte."""

    sums: list[tuple[Piece, int]] | None
    problem: str | None
    idle: float


class _Reading:
    """Reads pieces of files in threads, which keep no process from ending where a read hangs."""

    def __init__(self, folder: Path, pieces: list[Piece]) -> None:
        self._folder, self._pieces = folder, pieces
        self._left = deque(part for piece in pieces for part in piece.cut(_CUT))
        self._sums: list[tuple[Piece, int]] = []
        self._problem: str | None = None
        self._moved = time.monotonic()
        self._threads = [
            threading.Thread(target=self._read, name="checksums", daemon=True)
            for _ in range(min(_threads(folder), len(self._left)))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float) -> None:
        """Until all is read, or for so long."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def progress(self) -> _Progress:
        """What the other processes are told."""
        if any(thread.is_alive() for thread in self._threads):
            return _Progress(None, self._problem, time.monotonic() - self._moved)
        crcs = joined(self._sums)
        sums = [(piece, crcs.get(piece.name, 0)) for piece in self._pieces]
        return _Progress(sums, self._problem, 0.0)

    def stop(self) -> None:
        """Read nothing after the blocks that are being read."""
        self._problem = self._problem or "stopped"

    def _read(self) -> None:
        try:
            while self._left and self._problem is None:
                piece, crc = self._left.popleft(), 0
                for block in blocks(self._folder, piece):
                    crc = zlib.crc32(block, crc)
                    self._moved = time.monotonic()
                    if self._problem is not None:
                        return
                self._sums.append((piece, crc))
        except IndexError:
            return  # another thread took the last
        except Exception as error:
            self._problem = f"it cannot be read: {one_line(error)}"


def _threads(folder: Path) -> int:
    """Threads of a process: the cores that are its own; a store is waited for by more."""
    return _THREADS if stored_run(folder) else max(1, min(_THREADS, cores() // local_size()))
