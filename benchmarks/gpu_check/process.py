"""One item's process: started in a group of its own, ended as a whole, what came of it in a word.

`runner` calls `run`. Whatever an item does (crash, hang, run out of memory, leave children behind),
this returns within its time and a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.plan import CUDA, Item
from benchmarks.gpu_check.results import FAILED, MEMORY, NO_TIME, NOT_HERE, OK, TOO_LONG
from llmfoundry.errors import one_line
from llmfoundry.recipe.front.paths import ROOT
from llmfoundry.recipe.front.script import allocator_settings

GRACE = 3.0  # seconds for a process to end by itself once it was told to
REAPED = 10.0  # seconds for the system to end one that was killed; a stuck driver may take longer
TAIL = 12_000  # bytes of a log that are looked at
LINES = 30  # of it that are shown
PLUGIN = "benchmarks.gpu_check.items.watch"
ENDS_WITH = "LLMFOUNDRY_END_WITH"  # what llmfoundry.processes reads in every script
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED|ran out of memory")
_DOES_NOT_FIT = re.compile(r"GiB are free")
_LAUNCHED = re.compile(
    r"(SLURM_|TORCHELASTIC_|GROUP_|ROLE_|PMI).*|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


@dataclass(frozen=True)
class Ended:
    """What came of a process.

    Attributes:
        state: a word of `results`.
        reason: why it is not `ok`.
        log: its last lines, where something is wrong.
    """

    state: str
    reason: str = ""
    log: str = ""


def environment(paths: Sequence[Path], device: str, *, all_gpus: bool = False) -> dict[str, str]:
    """Of an item: this package and the wheels, its GPUs or none, no launcher's variables.

    Args:
        paths: of the wheels.
        device: `cuda`: the first that is visible; `cpu`: none is.
        all_gpus: `cuda`: all that are visible.
    """
    found = {key: value for key, value in os.environ.items() if not _LAUNCHED.fullmatch(key)}
    given = filter(None, [found.get("PYTHONPATH")])
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, paths), *given])
    first = found.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if device != CUDA or not all_gpus:
        found["CUDA_VISIBLE_DEVICES"] = first if device == CUDA else ""
    quiet = {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    return {**found, **allocator_settings(found), **quiet, ENDS_WITH: str(os.getpid())}


def command(item: Item, file: Path, device: str, seconds: float, run: Path) -> list[str]:
    """What an item starts.

    Args:
        item: which.
        file: of its rows.
        device: where it computes.
        seconds: that it has.
        run: the folder of a training run; the corpus is beside its parent.
    """
    if item.measure:
        module = [sys.executable, "-m", "benchmarks.gpu_check.items.measure"]
        settings = json.dumps(dict(item.settings))
        return [*module, item.measure, str(file), device, f"{0.9 * seconds:.1f}", settings]
    watch = {"file": str(file), **item.watch}
    overrides = [
        f"run_name={run.name}",
        f"save_folder={run}",
        "data=mds",
        "data.remote=null",
        f"data.local={run.parent.parent / 'corpus'}",
        "data.split=null",
        "data.validation=null",
        "tokenizer=bytes",
        "logger=none",
        "eval=off",
        f"plugins=[{PLUGIN}]",
        *(f"callbacks.plugins.gpu_check.{k}={_written(v)}" for k, v in watch.items()),
        *item.overrides,
    ]
    if not any(override.startswith("save_interval=") for override in overrides):
        overrides.append("save_interval=0ba")
    return [sys.executable, str(ROOT / "scripts" / "train.py"), item.recipe, *overrides]


def _written(value: object) -> str:
    """A value as the command line of a recipe takes it."""
    return json.dumps(value) if not isinstance(value, str) else f"'{value}'"


def run(
    words: Sequence[str],
    log: Path,
    *,
    folder: Path,
    env: Mapping[str, str],
    limit: float,
    own_limit: bool,
) -> Ended:
    """Run a command to its end, or to that of its time.

    Args:
        words: the command.
        log: where its output goes.
        folder: where it runs.
        env: its environment.
        limit: seconds.
        own_limit: whether that is the item's own limit; else the budget's.
    """
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        return Ended(FAILED, f"did not start: {one_line(error)}")
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        end(process)
        if own_limit:
            return Ended(TOO_LONG, f"ended after {limit:.0f} s", _tail(log))
        return Ended(NO_TIME, f"the time was up after {limit:.0f} s of it")
    except BaseException:
        end(process)
        raise
    _kill_group(process.pid, signal.SIGKILL)  # what it left behind
    return ending(status, _tail(log))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group, at once where it does not follow."""
    _kill_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill_group(process.pid, signal.SIGKILL)
    try:
        process.wait(REAPED)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} was killed and does not end", file=sys.stderr)


def ending(status: int, log: str) -> Ended:
    """What an exit status and the last lines say."""
    if status == 0:
        return Ended(OK)
    lines = [line for line in log.splitlines() if line.strip()]
    last = lines[-1].strip()[:300] if lines else f"exit status {status}"
    if _DOES_NOT_FIT.search(log) and status == 2:
        return Ended(NOT_HERE, last)
    if _OUT_OF_MEMORY.search(log):
        found = next(line for line in lines if _OUT_OF_MEMORY.search(line))
        return Ended(MEMORY, found.strip()[:300], log)
    if status < 0:
        name = signal.Signals(-status).name
        hint = "; the system may have been out of memory" if name == "SIGKILL" else ""
        return Ended(FAILED, f"killed by {name}{hint}", log)
    return Ended(FAILED, last, log)


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _tail(log: Path) -> str:
    """The last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return one_line(error)
    return "\n".join(text.splitlines()[-LINES:])
