"""Entry points that open a run, a folder or a URL, for writing or for reading.

Commands that write a run call `run_storage` and `hold_run`. Commands that read call `find_place`,
which returns the run or the checkpoint that a recipe names. `run_lock.py` implements the lock and
`record_sync.py` the upload to a URL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from llmfoundry.checkpoint.object_storage import ObjectStorage, find_run, is_url, open_run
from llmfoundry.checkpoint.record_sync import RecordSync
from llmfoundry.checkpoint.run_lock import Lease, only_run
from llmfoundry.checkpoint.storage import Checkpoint, Storage, is_checkpoint
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.train import TrainRecipe


def run_storage(recipe: TrainRecipe) -> Storage:
    """Return the storage of a resolved recipe's run; a process that writes it opens it once.

    Raises:
        UserError: save_folder is a URL of an unknown protocol.
    """
    if not is_url(recipe.save_folder):
        return Storage(Path(recipe.save_folder))
    below = recipe.save_local_folder or f"{recipe.data.cache_folder}/runs"
    options = FetchOptions.from_config(recipe.data)
    run = open_run(recipe.save_folder, options, below=Path(below), key="save_folder")
    run.local_copies = recipe.save_local_copies
    return run


@contextmanager
def hold_run(run: Storage, world: World, *, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run's folder, and of its URL if it has one; collective.

    Args:
        run: storage of the run.
        world: process group.
        note: reports waits and problems to the user.

    Raises:
        UserError: another process holds the lock, or the run is not writable; on every rank.
    """
    synced = _synced(run, world, note) if isinstance(run, ObjectStorage) else nullcontext()
    with only_run(run.folder, world, note=note), synced:
        yield


@contextmanager
def _synced(run: ObjectStorage, world: World, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lease of a run at a URL, and upload changes of the main process's working copy."""
    lease = Lease(run, note)
    sync = RecordSync(run, lease, note)

    def begin() -> None:
        run.store.check_writable()
        lease.take()
        try:
            sync.begin()
        except BaseException:
            lease.release()
            raise

    on_rank0(world, begin)

    def allow() -> None:
        lease.check()
        sync.push()

    run.before_commit = allow
    try:
        yield
    finally:
        if world.is_main:
            sync.close()
            lease.release()


def find_place(
    path: str, key: str, world: World, *, options: FetchOptions | None = None
) -> Storage | Checkpoint:
    """Return the run or the checkpoint that a recipe names; collective.

    Args:
        path: a path or a URL.
        key: recipe key, for error messages.
        world: process group.
        options: options of requests to a store; None: from the environment.

    Raises:
        UserError: the path does not exist.
    """
    if is_url(path):
        return find_run(path, key, options=options)
    folder = on_rank0(world, lambda: find_file(path, key))
    return Checkpoint.at(folder) if is_checkpoint(folder) else Storage(folder)
