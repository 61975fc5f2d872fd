"""Command of `scripts/track.py`: backfill trackers with the metrics.jsonl of a run."""

from __future__ import annotations

from llmfoundry.builders.registry import registration
from llmfoundry.checkpoint.open_run import find_place, hold_run
from llmfoundry.checkpoint.record_sync import read_record
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.tracker import send_record
from llmfoundry.recipe.after_training import TrackRecipe
from llmfoundry.recipe.finetune import load_run
from llmfoundry.recipe.typed import require


def track(recipe: TrackRecipe) -> None:
    """Send the metrics that a tracker lacks.

    Raises:
        UserError: the folder has no metrics of a run, the run is running, or a tracker did not
            accept everything.
    """
    run = run_with_record(recipe)
    folder = run.folder
    user_recipe = load_run(folder / "recipe.yaml")
    if recipe.logger is None:
        require(user_recipe, "logger")
    else:
        user_recipe.logger = recipe.logger
    console = Console()
    with hold_run(run, ALONE, note=console.note):  # a running run sends its metrics itself
        run_recipe = user_recipe.resolve()
        task = registration(run_recipe, run)
        send_record(run_recipe, folder, task, note=console.note, warn=console.warn)


def run_with_record(recipe: TrackRecipe) -> Storage:
    """Return the folder of the run, with its metrics downloaded.

    Raises:
        UserError: it has no metrics.
    """
    assert recipe.run is not None
    run = find_place(recipe.run, "run", ALONE)
    if isinstance(run, Storage):
        read_record(run, ALONE, print)
    files = (run.folder / "recipe.yaml", run.folder / "metrics.jsonl")
    if isinstance(run, Checkpoint) or not all(file.is_file() for file in files):
        raise UserError(f"run: {run} has no recipe.yaml or no metrics.jsonl; write a run's folder")
    return run
