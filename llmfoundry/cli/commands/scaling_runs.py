"""Execution of the runs of a scaling experiment.

Entry point: `run_all`, which `cli/commands/scaling.py` calls. Each point is an ordinary run in its
own folder, whose content shows whether the run is finished. The run is a child process. With
`launch` it is submitted to a target as by `scripts/launch.py` and polled as by `scripts/runs.py`;
it then continues after this command ends.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmfoundry.cli.commands.launch import submit
from llmfoundry.cli.commands.scaling_grid import GridPoint
from llmfoundry.command_text import command_line
from llmfoundry.errors import RunFailure, UserError, one_line
from llmfoundry.launch import runs as api
from llmfoundry.launch.job import make_job
from llmfoundry.launch.states import NOT_KNOWN, UNDER_WAY
from llmfoundry.loggers.console import Console, duration
from llmfoundry.loggers.pages.charts import EVAL_LOSS
from llmfoundry.loggers.pages.comparison import HOURS, ComparedRun, read_run
from llmfoundry.processes import cores, keep_children, start_module
from llmfoundry.recipe.before_training import LaunchRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.scaling import ScalingRecipe
from llmfoundry.recipe.train import NOT_LEARNT
from llmfoundry.redaction import public
from llmfoundry.scaling.points import Point

FINAL = ("model", "tokenizer", "eval")
"""Sections in NOT_LEARNT on which the loss of a point depends nevertheless."""
QUEUES = ("slurm", "kubernetes")  # targets that queue any number of jobs
_LOOK_S = 0.2  # seconds between two polls of all runs
_ASK_S = 5.0  # seconds between two queries of a run's target
_SILENT_S = 600.0  # seconds without an answer of the target, after which a run counts as failed


def read(folder: Path) -> ComparedRun | None:
    """Read the run in a point's folder; None if it was not started.

    Raises:
        UserError: a file in it cannot be read.
    """
    if not (folder / "recipe.yaml").exists():
        return None
    try:
        return read_run(folder, folder.name, is_held=False)
    except (UserError, OSError) as error:
        why = error.problems[0] if isinstance(error, UserError) else one_line(error)
        raise UserError(f"{why}; restore it, or delete {folder}, and it runs again") from error


def is_done(folder: Path) -> bool:
    """Return whether the run of a point is finished."""
    run = read(folder)
    return run is not None and run.status == "finished"


def with_result(grid_point: GridPoint) -> Point:
    """Return a point with the loss and time of its run, if the run is finished."""
    run = read(grid_point.folder)
    if run is None or run.status != "finished":
        return grid_point.point
    loss = run.last(EVAL_LOSS)
    seconds = 3600 * float(run.rows[-1][HOURS]) if run.rows else math.nan
    return replace(grid_point.point, loss=math.nan if loss is None else loss, seconds=seconds)


def refuse_changed(grid_points: Sequence[GridPoint]) -> None:
    """Reject points whose folder contains a run of another recipe.

    Raises:
        UserError: one line per point, with the first key that differs.
    """
    problems = []
    for grid_point in grid_points:
        run = read(grid_point.folder)
        if run is None:
            continue
        new = {key: public("" if v is None else str(v)) for key, v in grid_point.settings.items()}
        for key in sorted(new.keys() | run.settings.keys()):
            matters = not NOT_LEARNT.fullmatch(key) or key.partition(".")[0] in FINAL
            if matters and new.get(key) != run.settings.get(key):
                was, now = run.settings.get(key, "unset"), new.get(key, "unset")
                problems.append(
                    f"{key}: was {was} when {grid_point.point.name} was run, and is {now}; write"
                    f" another output, or delete {run.folder}"
                )
                break
    if problems:
        raise UserError(*problems)


@dataclass
class RunProcess:
    """Run in a child process, with its output in a file."""

    process: subprocess.Popen[Any]
    log: Path

    def ended(self) -> str | None:
        """Describe how the process ended; None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"exit status {status}: {last[:300]}; see {self.log}"


@dataclass
class LaunchedRun:
    """Run on a target, or in a process that another command started."""

    folder: Path
    queried_at: float = -math.inf
    answered_at: float = field(default_factory=time.monotonic)  # the last time of a known state

    def ended(self) -> str | None:
        """Describe how the run ended; None while it runs, or its state is briefly unknown."""
        now = time.monotonic()
        if now - self.queried_at < _ASK_S:
            return None
        self.queried_at = now
        run = api.state_of(self.folder)
        if run.state in UNDER_WAY:
            self.answered_at = now
            return None
        if run.state == NOT_KNOWN and now - self.answered_at < _SILENT_S:
            return None
        advice = ""
        if run.state == NOT_KNOWN:
            advice = f"; if it is gone, delete {self.folder / 'launch.json'}"
        logs = command_line("runs", "logs", str(self.folder))
        return f"{run.state}: {run.why}{advice}; see {logs}"


def run_all(recipe: ScalingRecipe, grid_points: Sequence[GridPoint], console: Console) -> None:
    """Run all points that are not finished, `workers` at a time, and wait for them.

    A signal terminates the child processes, which save a checkpoint. Launched runs continue.

    Raises:
        UserError: a target rejects a run.
        RunFailure: some runs failed; all others were run nevertheless.
    """
    # points to run; some may be running already
    unfinished = {point.point.name: point for point in grid_points if not is_done(point.folder)}
    running: dict[str, RunProcess | LaunchedRun] = {}
    for name, grid_point in unfinished.items():
        if _is_under_way(grid_point.folder):
            running[name] = LaunchedRun(grid_point.folder)
    waiting = [name for name in unfinished if name not in running]
    limit = recipe.workers or (len(unfinished) if recipe.target in QUEUES else 1)

    # start and poll
    failures: list[str] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                name = waiting.pop(0)
                running[name] = _start(recipe, unfinished[name])
            for name, run in list(running.items()):
                ending = run.ended()
                if ending is None:
                    continue
                del running[name]
                failures += _failure(unfinished[name], ending, console)
                n_done = len(unfinished) - len(waiting) - len(running)
                console.note(f"{n_done} of {len(unfinished)} runs")
            time.sleep(_LOOK_S)
    finally:
        _leave(running, console)
        signal.signal(signal.SIGTERM, previous_handler)
    if failures:
        raise RunFailure("\n".join([*failures, "the same command runs what is not done"]))


def _is_under_way(folder: Path) -> bool:
    """Return whether the run is running or queued, or its target has a job of unknown state."""
    run = api.state_of(folder)
    return run.state in UNDER_WAY or (run.state == NOT_KNOWN and bool(run.job))


def _start(recipe: ScalingRecipe, grid_point: GridPoint) -> RunProcess | LaunchedRun:
    """Start the run of a point, in a child process or on a target."""
    if recipe.launch is not None:
        return _launch(recipe, grid_point)
    log = grid_point.folder.with_name(f"{grid_point.point.name}.log")
    env = {"OMP_NUM_THREADS": str(max(1, cores() // (recipe.workers or 1))), **os.environ}
    keep_children(env)  # child processes end with this process; launched runs must not
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = start_module(
            "llmfoundry", "train", str(recipe.base), *grid_point.words,
            env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return RunProcess(process, log)


def _launch(recipe: ScalingRecipe, grid_point: GridPoint) -> LaunchedRun:
    """Submit a run to its target, on which the folder of the point has the same path.

    Raises:
        UserError: the recipe of the launch is not valid.
    """
    words = [*grid_point.words, f"save_folder={grid_point.folder.absolute()}"]
    launch_recipe = checked(LaunchRecipe, recipe.base, words)
    assert recipe.launch is not None
    launch_recipe.launch = copy.deepcopy(recipe.launch)
    problems = [*launch_recipe.check()]
    if problems:
        raise UserError(*problems)
    job = make_job(launch_recipe, given=str(recipe.base), overrides=grid_point.words)
    submit(replace(job, folder=grid_point.folder))
    return LaunchedRun(grid_point.folder)


def _failure(grid_point: GridPoint, ending: str, console: Console) -> list[str]:
    """Report the end of a run; return a line if it failed, else nothing."""
    point, folder = with_result(grid_point), grid_point.folder
    if is_done(folder):
        console.note(f"{point.name}: loss {point.loss:.4f}, {duration(point.seconds)}")
        return []
    missing = "" if (folder / "recipe.yaml").exists() else f"; nothing is in {folder}"
    line = f"{point.name}: {ending}{missing}"
    console.warn(line)
    return [line]


def _leave(runs: Mapping[str, RunProcess | LaunchedRun], console: Console) -> None:
    """Terminate child processes, which save a checkpoint; report how to find launched runs."""
    processes = [run.process for run in runs.values() if isinstance(run, RunProcess)]
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()
    n_launched = len(runs) - len(processes)
    if n_launched:
        points = next(run.folder for run in runs.values() if isinstance(run, LaunchedRun)).parent
        listing = command_line("runs", "list", f"folder={points}")
        console.note(f"launched runs that go on: {n_launched} ({listing}); the same command waits")
