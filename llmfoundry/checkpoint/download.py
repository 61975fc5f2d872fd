"""What of a stored checkpoint has to be on this machine's disk before it is used.

`verify.py` calls it. The main process asks the store once, for a list of the checkpoint's files,
and reads the small ones, which all machines get from it. Where one machine has all of a run's
processes, they fetch the tensors together, each other files; where there are more, every process
reads from the store the part that it verifies and the tensors that it loads, and no machine has to
hold it all, but for what it has kept by `save_local_copies`, or gets back from its neighbour.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from llmfoundry.checkpoint.commit import COMMIT, read_commit
from llmfoundry.checkpoint.crc import writer_of
from llmfoundry.checkpoint.dcp import holds_tensors
from llmfoundry.checkpoint.peer_copies import CopyDoor, Told, exchange, parts_given_back
from llmfoundry.checkpoint.remote_run import StoredRun, local_size, named
from llmfoundry.data.fetch.download import DamagedError
from llmfoundry.distributed.collectives import (
    all_gather_object,
    all_reduce_min,
    on_all_ranks,
    on_rank0,
    with_keepalive,
)
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write

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
