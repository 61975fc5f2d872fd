"""Finds the newest complete checkpoint: fetched where need be, and compared with COMMIT.

Called before a run resumes, and before anything opens a checkpoint. Rank 0 looks at names and
sizes, each process reads its part of the bytes in threads, and meanwhile all exchange every few
seconds how far they are, so no message waits for a process that reads, however long that takes.

From an object store the main process asks once for a list of the checkpoint's files and reads the
small ones, which all machines get from it. Where one machine has all of a run's processes, they
fetch the tensors together, each other files; where there are more, every process reads from the
store the part that it verifies and the tensors that it loads, and no machine has to hold all of it,
but for what it has kept by `save_local_copies`.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from llmfoundry.checkpoint.commit import (
    COMMIT,
    Piece,
    blocks,
    has_commit,
    joined,
    pin,
    read_commit,
    share,
    share_files,
    unpin,
    writer_of,
)
from llmfoundry.checkpoint.dcp import holds_optimizer, holds_tensors
from llmfoundry.checkpoint.load import batch_of, is_checkpoint, list_checkpoints
from llmfoundry.checkpoint.peer_copies import CopyDoor, Told, exchange, parts_given_back
from llmfoundry.checkpoint.remote_run import StoredRun, local_size, named, stored_run
from llmfoundry.data.fetch.download import DamagedError
from llmfoundry.distributed.collectives import (
    all_gather_object,
    all_reduce_min,
    on_all_ranks,
    on_rank0,
    with_keepalive,
)
from llmfoundry.distributed.launch import ALONE, World
from llmfoundry.errors import RunFailure, UserError, one_line
from llmfoundry.files import atomic_write
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


_FORGOTTEN_S = 86_400.0  # a checkpoint that was only read is kept for a day after its last use


def fetch_record(run: StoredRun, folder: Path) -> dict[str, int]:
    """Fetch all but the tensors; the sizes of all files that the store has. The main process.

    Raises:
        UserError: the store cannot be asked.
        ValueError: the checkpoint's marker cannot be read.
    """
    prefix = run.name(folder) + "/"
    sizes = {name.removeprefix(prefix): n for name, n in run.store.files(run.name(folder)).items()}
    if COMMIT not in sizes:
        return sizes
    marker = run.store.read(prefix + COMMIT)
    _begin(folder, marker)
    for name in read_commit(folder):
        if name in sizes and not holds_tensors(name):
            run.store.download(prefix + name, folder / name, sizes[name])
    return sizes


def bring(run: StoredRun, folder: Path, sizes: Mapping[str, int], world: World) -> None:
    """Put what is needed of a checkpoint on this machine's disk; every process calls it.

    Args:
        run: whose checkpoint.
        folder: the checkpoint's, with its record on the main process.
        sizes: bytes of the files that are needed.
        world: this process.

    Raises:
        UserError: the store does not give it.
    """
    run.learn(folder, sizes)
    _share_record(folder, sizes, world)
    tensors = sorted(name for name in sizes if holds_tensors(name))
    lacking = [name for name in tensors if not _is_here(folder / name, sizes[name])]
    if world.size != local_size():
        if run.local_copies:
            _get_back(run, folder, {name: sizes[name] for name in tensors}, lacking, world)
        return
    on_all_ranks(world, lambda: None)  # all have looked before one of them fetches

    def fetch() -> None:
        with _reported(folder):
            for name in lacking[world.local_rank :: world.size]:
                run.store.download(run.name(folder / name), folder / name, sizes[name])

    def all_done(done: bool) -> bool:
        return bool(all_reduce_min(world, int(done)))

    on_all_ranks(world, with_keepalive(fetch, all_done, world.timeout))


def _get_back(
    run: StoredRun, folder: Path, sizes: Mapping[str, int], lacking: list[str], world: World
) -> None:
    """Get files that this machine has lost from another that keeps a copy.

    What does not come is read from the store.
    """
    door = CopyDoor()
    here = {name: size for name, size in sizes.items() if name not in lacking}
    told = all_gather_object(world, Told(door.address, run.identity(), here))
    part = parts_given_back(told, {name: writer_of(name) for name in sizes})[world.rank]

    def get() -> None:
        with suppress(OSError):
            exchange(door, folder, part)

    with_keepalive(get, lambda done: bool(all_reduce_min(world, int(done))), world.timeout)()
    door.close()


def forget(folder: Path, names: list[str]) -> bool:
    """Remove this machine's copies of files; whether there was one."""
    found = False
    for name in names:
        with suppress(FileNotFoundError):
            (folder / name).unlink()
            found = True
    return found


def _begin(folder: Path, marker: bytes) -> None:
    """Make a folder that holds files of this very checkpoint, and none of an earlier one."""
    with suppress(OSError):
        if (folder / COMMIT).read_bytes() == marker:
            os.utime(folder)
            return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for other in folder.parent.iterdir():
        if other.is_dir() and other.stat().st_mtime < time.time() - _FORGOTTEN_S:
            shutil.rmtree(other, ignore_errors=True)
    atomic_write(folder / COMMIT, marker)


def _share_record(folder: Path, sizes: Mapping[str, int], world: World) -> None:
    """Give the small files that the main process has to every other machine."""
    if world.size == local_size():
        return
    names = [COMMIT, *(name for name in sizes if not holds_tensors(name))]
    files = on_rank0(world, lambda: {name: (folder / name).read_bytes() for name in names})

    def write() -> None:
        if world.local_rank or world.is_main:
            return
        with _reported(folder):
            _begin(folder, files.pop(COMMIT))
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                atomic_write(folder / name, content)

    on_all_ranks(world, write)


@contextmanager
def _reported(folder: Path) -> Iterator[None]:
    """What goes wrong on one machine, as a line that all get."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written: {one_line(error)}; make room there"
        ) from error
    except DamagedError as error:
        raise UserError(f"{named(folder)}: a file {error}; choose another checkpoint") from error


def _is_here(path: Path, size: int) -> bool:
    """Whether a file lies on this disk whole; one of another size is of no use, and goes."""
    try:
        if path.stat().st_size == size:
            return True
        path.unlink()
    except FileNotFoundError:
        pass
    return False
