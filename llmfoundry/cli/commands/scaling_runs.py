"""The runs of a scaling experiment: which are done, and how the others come to their end.

`cli/commands/scaling.py` calls it. The idea: a point is an ordinary run in a folder of its own,
which says whether it is done. It is a process of this machine; or, with `launch`, it is given to a
target as `scripts/launch.py` does, asked for as `scripts/runs.py` does, and outlives this command.
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
"""Sections that NOT_LEARNT has, and that a point's loss depends on all the same."""
QUEUES = ("slurm", "kubernetes")  # targets that hold any number of jobs
_LOOK_S, _ASK_S = 0.2, 5.0  # between two looks at all runs; questions to a run's target
_SILENT_S = 600.0  # without an answer of a target, after which its run is given up here


def read(folder: Path) -> ComparedRun | None:
    """A point's folder; None where nothing was begun.

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
    """Whether a point's run came to its end."""
    run = read(folder)
    return run is not None and run.status == "finished"


def with_result(one: GridPoint) -> Point:
    """A point with what its run measured, where that is done."""
    run = read(one.folder)
    if run is None or run.status != "finished":
        return one.point
    loss = run.last(EVAL_LOSS)
    seconds = 3600 * float(run.rows[-1][HOURS]) if run.rows else math.nan
    return replace(one.point, loss=math.nan if loss is None else loss, seconds=seconds)


def refuse_changed(made: Sequence[GridPoint]) -> None:
    """Refuse points whose folder holds a run of another recipe.

    Raises:
        UserError: names the first key that differs in each.
    """
    problems = []
    for one in made:
        run = read(one.folder)
        if run is None:
            continue
        new = {key: public("" if v is None else str(v)) for key, v in one.settings.items()}
        for key in sorted(new.keys() | run.settings.keys()):
            matters = not NOT_LEARNT.fullmatch(key) or key.partition(".")[0] in FINAL
            if matters and new.get(key) != run.settings.get(key):
                was, now = run.settings.get(key, "unset"), new.get(key, "unset")
                problems.append(
                    f"{key}: was {was} when {one.point.name} was run, and is {now}; write another"
                    f" output, or delete {run.folder}"
                )
                break
    if problems:
        raise UserError(*problems)


@dataclass
class RunProcess:
    """A run in a process of this one; its output goes into a file."""

    process: subprocess.Popen[Any]
    log: Path

    def ended(self) -> str | None:
        """How it ended, in words; None: it has not."""
        status = self.process.poll()
        if status is None:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"exit status {status}: {last[:300]}; see {self.log}"


@dataclass
class LaunchedRun:
    """A run that its target, or another process, brings to its end."""

    folder: Path
    asked: float = -math.inf
    heard: float = field(default_factory=time.monotonic)

    def ended(self) -> str | None:
        """How it ended, in words; None: it has not, or its target gives no answer yet."""
        now = time.monotonic()
        if now - self.asked < _ASK_S:
            return None
        self.asked = now
        run = api.state_of(self.folder)
        if run.state in UNDER_WAY:
            self.heard = now
            return None
        if run.state == NOT_KNOWN and now - self.heard < _SILENT_S:
            return None
        more = f"; if it is gone, delete {self.folder / 'launch.json'}"
        logs = command_line("runs", "logs", str(self.folder))
        return f"{run.state}: {run.why}{more * (run.state == NOT_KNOWN)}; see {logs}"


def run_all(recipe: ScalingRecipe, made: Sequence[GridPoint], console: Console) -> None:
    """Run what is not done, as many at a time as the recipe says, and wait for all.

    A signal ends the processes, each saved; what was launched goes on.

    Raises:
        UserError: a target refuses a run.
        RunFailure: some failed; the others were run all the same.
    """
    left = {one.point.name: one for one in made if not is_done(one.folder)}
    runs: dict[str, RunProcess | LaunchedRun] = {
        name: LaunchedRun(one.folder) for name, one in left.items() if _is_under_way(one.folder)
    }
    waiting, failed = [name for name in left if name not in runs], list[str]()
    most = recipe.workers or (len(left) if recipe.target in QUEUES else 1)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while waiting or runs:
            while waiting and len(runs) < most:
                name = waiting.pop(0)
                runs[name] = _start(recipe, left[name])
            for name, run in list(runs.items()):
                if (how := run.ended()) is not None:
                    del runs[name]
                    failed += _failure(left[name], how, console)
                    console.note(f"{len(left) - len(waiting) - len(runs)} of {len(left)} runs")
            time.sleep(_LOOK_S)
    finally:
        _leave(runs, console)
        signal.signal(signal.SIGTERM, before)
    if failed:
        raise RunFailure("\n".join([*failed, "the same command runs what is not done"]))


def _is_under_way(folder: Path) -> bool:
    """Whether a target, or a process that no command waits for, has the run; unless it is gone."""
    run = api.state_of(folder)
    return run.state in UNDER_WAY or (run.state == NOT_KNOWN and bool(run.job))


def _start(recipe: ScalingRecipe, one: GridPoint) -> RunProcess | LaunchedRun:
    """A run as its command line has it."""
    if recipe.launch is not None:
        return _launch(recipe, one)
    log = one.folder.with_name(f"{one.point.name}.log")
    env = {"OMP_NUM_THREADS": str(max(1, cores() // (recipe.workers or 1))), **os.environ}
    keep_children(env)  # but for those that are launched: they would end with this process, too
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = start_module(
            "llmfoundry", "train", str(recipe.base), *one.words,
            env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return RunProcess(process, log)


def _launch(recipe: ScalingRecipe, one: GridPoint) -> LaunchedRun:
    """A run given to its target, which has the point's folder by the same path."""
    words = [*one.words, f"save_folder={one.folder.absolute()}"]
    made = checked(LaunchRecipe, recipe.base, words)
    assert recipe.launch is not None
    made.launch = copy.deepcopy(recipe.launch)
    if problems := [*made.check()]:
        raise UserError(*problems)
    job = make_job(made, given=str(recipe.base), overrides=one.words)
    submit(replace(job, folder=one.folder))
    return LaunchedRun(one.folder)


def _failure(one: GridPoint, how: str, console: Console) -> list[str]:
    """Report the end of a run; a line where it failed."""
    point = with_result(one)
    if is_done(one.folder):
        console.note(f"{point.name}: loss {point.loss:.4f}, {duration(point.seconds)}")
        return []
    unseen = "" if (one.folder / "recipe.yaml").exists() else f"; nothing is in {one.folder}"
    line = f"{point.name}: {how}{unseen}"
    console.warn(line)
    return [line]


def _leave(runs: Mapping[str, RunProcess | LaunchedRun], console: Console) -> None:
    """End this process's runs, each saved; say how those that others have are found again."""
    own = [run.process for run in runs.values() if isinstance(run, RunProcess)]
    for process in own:
        process.terminate()
    for process in own:
        process.wait()
    if len(own) < len(runs):
        points = next(run.folder for run in runs.values() if isinstance(run, LaunchedRun)).parent
        listed = command_line("runs", "list", f"folder={points}")
        count = len(runs) - len(own)
        console.note(f"launched runs that go on: {count} ({listed}); the same command waits")
