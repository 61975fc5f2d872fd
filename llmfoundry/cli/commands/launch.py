"""`scripts/launch.py`: a run is given to a target, and its record kept.

The order: the composed recipe and a record without a job are written, the target's client is asked,
and the record is written again with the job. So a run that was cut off in between is seen.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from llmfoundry.cli.command_line import parse
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write, one_at_a_time
from llmfoundry.launch import record as records
from llmfoundry.launch import skypilot
from llmfoundry.launch.git import DIFF
from llmfoundry.launch.job import LOGS, RECIPE, Job, make_job
from llmfoundry.launch.runs import is_held
from llmfoundry.launch.targets import TARGETS
from llmfoundry.loggers.console import Console
from llmfoundry.recipe.before_training import LaunchRecipe
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.redaction import public

LOCK = "launch.lock"


def launch(recipe: ResolvedTrainRecipe) -> None:
    """Render a checked recipe for its target, and submit it unless `dry_run`.

    Raises:
        UserError: it runs there already, or the target's client is missing or refuses.
    """
    user_recipe, job = recipe.user_recipe, job_of(recipe)
    assert isinstance(user_recipe, LaunchRecipe)
    if user_recipe.dry_run:
        name = job.config.target
        render = skypilot.render if name == "skypilot" else TARGETS[name].render
        print(public(render(job)), end="")
        return
    record = submit(job)
    rows = [("launched", f"{record.target} {record.job}"), ("run", show(job.folder))]
    rows += [("its folder", place)] if (place := record.where.get(records.RUN)) else []
    Console().banner([*rows, ("recipe", show(job.folder / RECIPE))])


def submit(job: Job) -> records.LaunchRecord:
    """Give a job to its target; its record, which is kept before and after.

    Raises:
        UserError: it runs there already, or the target's client is missing or refuses.
    """
    target = TARGETS[job.config.target]
    with one_at_a_time(
        job.folder / LOCK,
        key="save_folder",
        busy="another process is launching it; wait for it",
        instead="write another",
    ):
        _refuse_running(job)
        before = records.read(job.folder)
        try:
            (job.folder / LOGS).mkdir(exist_ok=True)
            records.write(job.folder, job.record)
            atomic_write(job.folder / RECIPE, job.text)
            if job.changes:
                atomic_write(job.folder / DIFF, job.changes)
            else:
                (job.folder / DIFF).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(job.folder, error) from error
        try:
            record = target.submit(job)
        except UserError:
            _forget(job.folder, before)
            raise
        try:
            records.write(job.folder, record)
        except OSError as error:
            raise UserError(
                f"{show(job.folder)}: runs as {record.target} {record.job}; note that, for its"
                f" record cannot be written: {one_line(error)}"
            ) from error
    return record


def _forget(folder: Path, before: records.LaunchRecord | None) -> None:
    """A launch that was refused leaves no run that failed; an earlier one's record comes back."""
    with suppress(OSError):
        if before is None:
            (folder / records.RECORD).unlink(missing_ok=True)
        else:
            records.write(folder, before)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"save_folder: {show(folder)} cannot be written: {one_line(error)}")


def job_of(recipe: ResolvedTrainRecipe) -> Job:
    """What this command launches: the recipe as the user wrote it."""
    command = parse(sys.argv[1:])
    given = command.recipe or "a command line"
    return make_job(recipe.user_recipe, given=given, overrides=command.overrides)


def _refuse_running(job: Job) -> None:
    """Two jobs of one run would fight for its folder, and the second start over or wait."""
    folder = job.folder
    record, what = records.read(folder), ""
    if record is not None and record.job:
        found = TARGETS[record.target].state(record)
        if found.state in (records.WAITING, records.RUNNING):
            what = f"is {found.state} as {record.target} {record.job} ({found.reason})"
    places = [folder]
    if job.config.target in ("local", "slurm"):  # whose paths are this machine's
        places.append(records.run_folder(folder, job.record))
    if not what and any(map(is_held, places)):
        what = "is trained by another process"
    if what:
        raise UserError(
            f"{show(folder)}: {what}; stop it (llmfoundry runs stop {folder.name}), or write"
            " another run_name"
        )
