"""`scripts/check.py`: whether machines are sound; and the same before a run begins.

Alone it starts one process for each GPU and stays their parent, so that a process that hangs in a
broken GPU is ended and named. Under torchrun, srun or in a run it is one of the processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.distributed.process_group import World, join, slurm_environment, wanted_processes
from llmfoundry.errors import RunFailure, UserError, one_line
from llmfoundry.files import read_json
from llmfoundry.processes import keep_children, kill_all
from llmfoundry.recipe.before_training import Checked, CheckRecipe
from llmfoundry.recipe.resilience import HealthCheckConfig
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.resilience.check.check_report import JSON, check_lines, write_check
from llmfoundry.resilience.check.findings import BAD, STATUS_BAD, Report
from llmfoundry.resilience.check.host import NamedPath, recipe_paths, write_and_read
from llmfoundry.resilience.check.run_check import run_check

_OURS = "LLMFOUNDRY_CHECK_STARTED"  # in the environment of processes that `check` has started
_GRACE = 5.0  # seconds from the report until a process that has not ended hangs


def check(recipe: CheckRecipe | ResolvedTrainRecipe) -> None:
    """Check, print, write check.json and check.html.

    Raises:
        SystemExit: 3 where anything is bad.
        UserError: a file that the recipe names is not there.
    """
    asked = recipe if isinstance(recipe, CheckRecipe) else recipe.user_recipe
    assert isinstance(asked, Checked)
    is_started = "RANK" in os.environ or bool(slurm_environment())
    wanted = 1 if is_started else wanted_processes(recipe.parallel)
    folder = Path(asked.output).expanduser()

    def check_files() -> None:
        _check_log(recipe.health_check)
        _check_output(folder)

    if wanted > 1:
        check_files()
        _leave(_start(folder, wanted))
    if isinstance(recipe, CheckRecipe):
        paths = [NamedPath("output", recipe.output, is_written=True)]
    else:
        paths = recipe_paths(recipe)
    with join(recipe.parallel) as world:
        on_rank0(world, check_files)
        status = _check(recipe.health_check, paths, world, folder, is_full=asked.level == "full")
        if status and _OURS not in os.environ:  # who started this reads check.json
            _leave(status)


def before_run(recipe: ResolvedTrainRecipe, world: World, folder: Path) -> None:
    """The check that a recipe asks for, its report in the run's folder of this machine.

    Ends every process where anything is bad.

    Raises:
        SystemExit: 3.
    """
    settings = recipe.health_check
    if settings.before_run == "none":
        return
    on_rank0(world, partial(_check_log, settings))
    is_full = settings.before_run == "full"
    status = _check(settings, recipe_paths(recipe), world, folder, is_full=is_full)
    if status:
        _leave(status)


def _check(
    settings: HealthCheckConfig,
    paths: list[NamedPath],
    world: World,
    folder: Path,
    *,
    is_full: bool,
) -> int:
    """The exit status, the same on every process; rank 0 prints and writes."""

    def publish(report: Report) -> None:
        page = write_check(report, folder)
        print(*check_lines(report, page), sep="\n", flush=True)

    level = run_check(settings, paths, world, is_full=is_full, publish=publish)
    return STATUS_BAD if level == BAD else 0


def _check_log(settings: HealthCheckConfig) -> None:
    """Refuse a kernel log that is nowhere; a machine that lacks it is in the report."""
    path = settings.kernel_log
    if path is not None and not Path(path).expanduser().is_file():
        raise UserError(
            f"health_check.kernel_log: no file at {path}; write a file with the kernel's"
            " messages, or remove it: /dev/kmsg and dmesg are read then"
        )


def _check_output(folder: Path) -> None:
    """Refuse a folder that cannot take the report, before minutes are spent on it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_and_read(folder)
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written: {one_line(error)}; write another folder"
        ) from error


def _start(folder: Path, processes: int) -> int:
    """Check with so many processes of this machine; the exit status.

    They are torchrun's. Once the report is there, those that do not end are killed: torchrun itself
    would wait for a process that hangs.
    """
    keep_children()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={processes}", *sys.argv]
    report, before = folder / JSON, _written(folder / JSON)
    started = subprocess.Popen(command, env={**os.environ, _OURS: "1"})
    reported_at: float | None = None
    try:
        while started.poll() is None:
            time.sleep(0.1)
            if reported_at is None and _written(report) != before:
                reported_at = time.monotonic()
            if reported_at is not None and time.monotonic() - reported_at > _GRACE:
                break
    finally:
        if started.poll() is None:
            kill_all(started.pid)
        started.wait()
    if _written(report) == before:
        status = started.returncode
        raise RunFailure(f"the check itself ended with status {status} and without a report")
    return STATUS_BAD if read_json(report)["level"] == BAD else 0


def _written(path: Path) -> tuple[int, int] | None:
    """What distinguishes one writing of a file from the next."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _leave(status: int) -> NoReturn:
    """End this process at once: other processes, and threads of its own, may hang for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
