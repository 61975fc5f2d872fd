"""Command of `scripts/launch.py`: submit a run to a target and record the launch.

Entry points: `launch`, and `submit` for other commands. First the composed recipe and a record
without a job are written. Then the job is submitted, and the record is written again with the job.
A launch that is interrupted in between is therefore visible.
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
from llmfoundry.launch.job import LOGS, RECIPE, Job, make_eval_job, make_job
from llmfoundry.launch.runs import is_held
from llmfoundry.launch.targets import TARGETS
from llmfoundry.loggers.console import Console
from llmfoundry.recipe.after_training import EvalRecipe
from llmfoundry.recipe.before_training import LaunchRecipe
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.redaction import public

LOCK = "launch.lock"


def launch(recipe: ResolvedTrainRecipe) -> None:
    """Render a checked recipe for its target, and submit it unless `dry_run`.

    Raises:
        UserError: the run is running already, or the target's client is missing or rejects it.
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
    run_folder = record.where.get(records.RUN)
    if run_folder:
        rows.append(("its folder", run_folder))
    Console().banner([*rows, ("recipe", show(job.folder / RECIPE))])


def launch_evaluation(recipe: EvalRecipe) -> None:
    """Submit a checked recipe of scripts/eval.py to the target of its `launch` section.

    Raises:
        UserError: it runs there already, or the target's client is missing or refuses.
    """
    command = parse(sys.argv[1:])
    given = ", ".join(recipe.all_models())
    job = make_eval_job(recipe, given=given, overrides=command.overrides)
    job.folder.mkdir(parents=True, exist_ok=True)
    record = submit(job)
    rows = [("launched", f"{record.target} {record.job}"), ("logs", show(job.folder / LOGS))]
    Console().banner([*rows, ("recipe", show(job.folder / RECIPE))])


def submit(job: Job) -> records.LaunchRecord:
    """Submit a job to its target; write and return the record of the launch.

    Raises:
        UserError: the run is running already, or the target's client is missing or rejects it.
    """
    target = TARGETS[job.config.target]
    with one_at_a_time(
        job.folder / LOCK,
        key="save_folder",
        busy="another process is launching it; wait for it",
        instead="write another",
    ):
        _refuse_running(job)

        # the record without a job, the recipe and the changes of the code
        earlier_record = records.read(job.folder)
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

        # submit, and complete the record
        try:
            record = target.submit(job)
        except UserError:
            _restore_record(job.folder, earlier_record)
            raise
        try:
            records.write(job.folder, record)
        except OSError as error:
            raise UserError(
                f"{show(job.folder)}: runs as {record.target} {record.job}; note that, for its"
                f" record cannot be written: {one_line(error)}"
            ) from error
    return record


def _restore_record(folder: Path, earlier: records.LaunchRecord | None) -> None:
    """Restore the record before a rejected launch, which is not a failed run."""
    with suppress(OSError):
        if earlier is None:
            (folder / records.RECORD).unlink(missing_ok=True)
        else:
            records.write(folder, earlier)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"save_folder: {show(folder)} cannot be written: {one_line(error)}")


def job_of(recipe: ResolvedTrainRecipe) -> Job:
    """Return the job of the user's recipe and command line."""
    command = parse(sys.argv[1:])
    given = command.recipe or "a command line"
    return make_job(recipe.user_recipe, given=given, overrides=command.overrides)


def _refuse_running(job: Job) -> None:
    """Check that no other job or process trains the run, because both would write its folder.

    Raises:
        UserError: one does.
    """
    folder = job.folder
    # a queued or running job of an earlier launch
    record, reason = records.read(folder), ""
    if record is not None and record.job:
        status = TARGETS[record.target].state(record)
        if status.state in (records.WAITING, records.RUNNING):
            reason = f"is {status.state} as {record.target} {record.job} ({status.reason})"

    # a process that holds the lock of the folder
    folders = [folder]
    if job.config.target in ("local", "slurm"):  # targets that share paths with this machine
        folders.append(records.run_folder(folder, job.record))
    if not reason and any(map(is_held, folders)):
        reason = "is trained by another process"
    if reason:
        raise UserError(
            f"{show(folder)}: {reason}; stop it (llmfoundry runs stop {folder.name}), or write"
            " another run_name"
        )
