"""Opens the folder or the URL of a run: to write it alone (`hold_run`), or to read it.

Commands that write a run call `run_storage` and `hold_run`; commands that read one call
`find_place`, which returns the run or the checkpoint that a recipe names. The lock itself is in
`run_lock.py`, uploading to a URL in `record_sync.py`.
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
    """Where a filled recipe's run is kept; whoever writes it opens it once.

    Raises:
        UserError: save_folder is an address of no store that is known here.
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
    """Hold a run's folder, and its URL if it has one; every process calls it.

    Args:
        run: its storage.
        world: this process.
        note: reports what the user should know.

    Raises:
        UserError: another process holds it, or it cannot be written; on every process.
    """
    synced = _synced(run, world, note) if isinstance(run, ObjectStorage) else nullcontext()
    with only_run(run.folder, world, note=note), synced:
        yield


@contextmanager
def _synced(run: ObjectStorage, world: World, note: Callable[[str], None]) -> Iterator[None]:
    """The store is kept as the main process writes the working copy."""
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
    """The run or the checkpoint that a recipe names; every process calls it.

    Args:
        path: a path, or a URL.
        key: the recipe's.
        world: this process.
        options: of requests to a store; None: from the environment.

    Raises:
        UserError: it is not there.
    """
    if is_url(path):
        return find_run(path, key, options=options)
    folder = on_rank0(world, lambda: find_file(path, key))
    return Checkpoint.at(folder) if is_checkpoint(folder) else Storage(folder)
