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

_IS_CHILD = "LLMFOUNDRY_CHECK_STARTED"  # environment variable of processes that `check` starts
_GRACE = 5.0  # seconds after the report, after which a running process counts as hung


def check(recipe: CheckRecipe | ResolvedTrainRecipe) -> None:
    """Check the machines; print the result and write check.json and check.html.

    Raises:
        SystemExit: status 3 if any check failed.
        UserError: a file of the recipe does not exist.
    """
    settings = recipe if isinstance(recipe, CheckRecipe) else recipe.user_recipe
    assert isinstance(settings, Checked)
    is_launched = "RANK" in os.environ or bool(slurm_environment())
    n_processes = 1 if is_launched else wanted_processes(recipe.parallel)
    folder = Path(settings.output).expanduser()

    def check_files() -> None:
        _check_log(recipe.health_check)
        _check_output(folder)

    # several processes, which no launcher has started: start them, and end with their status
    if n_processes > 1:
        check_files()
        _leave(_start(folder, n_processes))

    # check as one of the processes
    if isinstance(recipe, CheckRecipe):
        paths = [NamedPath("output", recipe.output, is_written=True)]
    else:
        paths = recipe_paths(recipe)
    with join(recipe.parallel) as world:
        on_rank0(world, check_files)
        is_full = settings.level == "full"
        status = _check(recipe.health_check, paths, world, folder, is_full=is_full)
        if status and _IS_CHILD not in os.environ:  # a parent process reads check.json instead
            _leave(status)


def before_run(recipe: ResolvedTrainRecipe, world: World, folder: Path) -> None:
    """Check the machines before a run, if `health_check.before_run` is set.

    If any check failed, every process ends with status 3, without Python's cleanup.

    Args:
        recipe: resolved recipe.
        world: this process.
        folder: the run's folder on this machine, for the report.
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
    """Run the checks and return the exit status; rank 0 prints and writes the report."""

    def publish(report: Report) -> None:
        page = write_check(report, folder)
        print(*check_lines(report, page), sep="\n", flush=True)

    level = run_check(settings, paths, world, is_full=is_full, publish=publish)
    return STATUS_BAD if level == BAD else 0


def _check_log(settings: HealthCheckConfig) -> None:
    """Check that the kernel log exists on rank 0; the report lists other machines without it."""
    path = settings.kernel_log
    if path is not None and not Path(path).expanduser().is_file():
        raise UserError(
            f"health_check.kernel_log: no file at {path}; write a file with the kernel's"
            " messages, or remove it: /dev/kmsg and dmesg are read then"
        )


def _check_output(folder: Path) -> None:
    """Check that the report can be written, before the checks, which may take minutes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_and_read(folder)
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written: {one_line(error)}; write another folder"
        ) from error


def _start(folder: Path, processes: int) -> int:
    """Run this command with torchrun on this machine; return the exit status.

    Processes that do not end after the report was written are killed, because torchrun would wait
    for a hung process.

    Args:
        folder: folder of the report.
        processes: number of processes.

    Raises:
        RunFailure: the processes ended without a report.
    """
    # start
    keep_children()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={processes}", *sys.argv]
    report, before = folder / JSON, _written(folder / JSON)
    launcher = subprocess.Popen(command, env={**os.environ, _IS_CHILD: "1"})

    # wait for the report, then at most _GRACE seconds for the end of all processes
    reported_at: float | None = None
    try:
        while launcher.poll() is None:
            time.sleep(0.1)
            if reported_at is None and _written(report) != before:
                reported_at = time.monotonic()
            if reported_at is not None and time.monotonic() - reported_at > _GRACE:
                break
    finally:
        if launcher.poll() is None:
            kill_all(launcher.pid)
        launcher.wait()

    # the result is in the report
    if _written(report) == before:
        status = launcher.returncode
        raise RunFailure(f"the check itself ended with status {status} and without a report")
    return STATUS_BAD if read_json(report)["level"] == BAD else 0


def _written(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time, which change when a file is written; None: no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _leave(status: int) -> NoReturn:
    """End this process without Python's cleanup, which could wait for a hung thread or process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
