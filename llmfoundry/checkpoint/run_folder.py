"""Where a run's files are: a folder, or a URL with a folder of this machine that stands for it.

`commands` hold a run that they write (`hold_run`), and find one that they read (`find_place`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmfoundry.checkpoint.locks import Lease, only_run
from llmfoundry.checkpoint.mirror import READ, Mirror, pull
from llmfoundry.checkpoint.remote_run import StoredRun, find_run, is_url, open_run, stored_run
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError, one_line
from llmfoundry.recipe.front.paths import find_file
from llmfoundry.recipe.scripts.train import TrainRecipe


def run_folder(recipe: TrainRecipe) -> Path:
    """The folder in which this process works for a recipe's run.

    Raises:
        UserError: save_folder is an address of no store that is known here.
    """
    if not is_url(recipe.save_folder):
        return Path(recipe.save_folder)
    below = recipe.save_local_folder or f"{recipe.data.cache_folder}/runs"
    options = FetchOptions.from_config(recipe.data)
    run = open_run(recipe.save_folder, options, below=Path(below), key="save_folder")
    run.local_copies = recipe.save_local_copies
    return run.folder


@contextmanager
def hold_run(folder: Path, world: World, *, note: Callable[[str], None]) -> Iterator[None]:
    """Hold a run's folder, and its URL if it has one; every process calls it.

    Args:
        folder: the run's.
        world: this process.
        note: reports what the user should know.

    Raises:
        UserError: another process holds it, or it cannot be written; on every process.
    """
    with only_run(folder, world, note=note):
        run = stored_run(folder)
        if run is None:
            yield
            return
        with _followed(run, world, note):
            yield


@contextmanager
def _followed(run: StoredRun, world: World, note: Callable[[str], None]) -> Iterator[None]:
    """The store follows what the main process writes into the working copy."""
    lease = Lease(run, note)
    mirror = Mirror(run, lease, note)

    def begin() -> None:
        run.store.check_writable()
        lease.take()
        try:
            mirror.begin()
        except BaseException:
            lease.release()
            raise

    on_rank0(world, begin)

    def allow() -> None:
        lease.check()
        mirror.push()

    run.before_commit = allow
    try:
        yield
    finally:
        if world.is_main:
            mirror.close()
            lease.release()


def find_place(path: str, key: str, world: World, *, options: FetchOptions | None = None) -> Path:
    """The folder of a run or of a checkpoint that a recipe names; every process calls it.

    Args:
        path: a path, or a URL.
        key: the recipe's.
        world: this process.
        options: how a store is asked; None: as the environment says.

    Raises:
        UserError: it is not there.
    """
    if is_url(path):
        return find_run(path, key, options=options)
    return on_rank0(world, lambda: find_file(path, key))


def read_record(folder: Path, world: World, note: Callable[[str], None]) -> None:
    """Fetch what was recorded of the run that a checkpoint belongs to, where it is at a URL."""
    run = stored_run(folder)

    def fetch() -> None:
        assert run is not None
        try:
            pull(run, only=READ)
        except UserError as error:  # a folder of checkpoints alone, perhaps
            note(f"going on without the run's record: {one_line(error)}")

    if run is not None:
        on_rank0(world, fetch)


def send_files(folder: Path, warn: Callable[[str], None]) -> None:
    """Send what was written into a run's folder by a script that only read it, if it has a URL."""
    run = stored_run(folder)
    if run is None:
        return
    try:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            run.store.upload(run.name(path), path)
    except (UserError, OSError) as error:
        warn(f"{folder} was not sent to {run.url}: {one_line(error)}")
