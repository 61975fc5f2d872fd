"""Contenders by turns: each a process of its own that prints a line a step, timed as they come.

The benches of training, mixtures and fine-tuning run theirs here. Absolute times do not travel
between machines, nor between minutes on a shared one: contenders alternate, each round gives its
own ratio, and medians of these are taken.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.record import over_rounds
from benchmarks.training.bare import ROWS, SEQ, VOCAB
from llmfoundry.recipe.front.paths import ROOT

PRECISIONS = ("fp32", "amp_bf16")
STEP = re.compile(r"^\s*(?:step\s+)?(\d+)(?:/\d+)?\s")
SIZE = re.compile(r"([\d,]+) parameters")
Run = TypeVar("Run")

RECIPE = f"""
max_seq_len: {SEQ}
global_train_batch_size: {ROWS}
eval_interval: 0ba
save_interval: 0ba
tokenizer: {{name: train, vocab_size: {VOCAB}}}
data: {{validation_fraction: 0}}
eval: {{validation: false}}
callbacks: {{speed_window: 1}}
"""  # all but the model; rows are packed and documents kept apart, as a run has it by itself


@dataclass(frozen=True)
class Measured:
    """One process's run.

    Attributes:
        tokens_per_second: of the median step after the warm-up.
        tokens_per_cpu_second: the same by the time of all threads, which neighbours disturb less.
        first_step: seconds from the command to the end of the first step.
        memory: peak resident set, bytes.
        parameters: as the process said; None where it did not.
    """

    tokens_per_second: float
    tokens_per_cpu_second: float
    first_step: float
    memory: int
    parameters: int | None


def prepare(model: str, recipe: Path) -> Path:
    """Write `recipe` with that model section, and its tokens beside it; returns `recipe`."""
    recipe.write_text(RECIPE + model)
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), str(recipe)]
    subprocess.run(command, check=True, capture_output=True, cwd=recipe.parent)
    return recipe


def ours(recipe: Path, precision: str, steps: int, run_name: str) -> list[str]:
    """The command of a run of our trainer."""
    train = [sys.executable, str(ROOT / "scripts" / "train.py"), str(recipe)]
    return [*train, f"max_duration={steps}ba", f"precision={precision}", f"run_name={run_name}"]


@dataclass(frozen=True)
class Timed:
    """What was seen of a process that prints a line a step.

    Attributes:
        ends: seconds from the command to the end of each step.
        cpu_ends: CPU-seconds of all its threads and processes until then.
        memory: peak resident set, bytes.
        said: all that it printed.
    """

    ends: list[float]
    cpu_ends: list[float]
    memory: int
    said: str


def measure(command: Sequence[str], folder: Path, *, warm_up: int) -> Measured:
    """The speed of the median step of a process that trains on whole rows.

    Args:
        command: what to run.
        folder: where.
        warm_up: first steps, not counted.

    Raises:
        RuntimeError: the process failed, or took too few steps to count any.
    """
    run = timed(command, folder, least=warm_up + 2)
    size = SIZE.search(run.said)
    return Measured(
        tokens_per_second=ROWS * SEQ / _median_step(run.ends[warm_up:]),
        tokens_per_cpu_second=ROWS * SEQ / _median_step(run.cpu_ends[warm_up:]),
        first_step=run.ends[0],
        memory=run.memory,
        parameters=int(size[1].replace(",", "")) if size else None,
    )


def timed(command: Sequence[str], folder: Path, *, least: int) -> Timed:
    """Time the lines that a process prints, one a step, as they come.

    Raises:
        RuntimeError: the process failed, or printed fewer than `least`.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment() | {"CUDA_VISIBLE_DEVICES": ""},  # all on the CPU, ours too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watched = psutil.Process(process.pid)
    times, cpu_times, said = [], [], []
    for line in process.stdout:
        said.append(line)
        if STEP.match(line):
            times.append(time.perf_counter() - started)
            cpu_times.append(_cpu_seconds(watched))
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0 or len(times) < least:
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(said[-30:])}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Timed(times, cpu_times, usage.ru_maxrss * unit, "".join(said))


def _cpu_seconds(process: psutil.Process) -> float:
    """User's and system's, of it and of all that it has started and that still runs."""
    seconds = 0.0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            seconds += sum(one.cpu_times()[:2])
    return seconds


def environment() -> dict[str, str]:
    """Of a contender, which runs in another folder: with this package, which is not installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def _median_step(ends: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def by_turns(
    commands: Callable[[int], Mapping[str, Sequence[str]]],
    run: Callable[[Sequence[str]], Run],
    *,
    rounds: int,
) -> dict[str, list[Run]]:
    """What `run` found of each contender's command, round by round; `commands` makes a round's."""
    results: dict[str, list[Run]] = {}
    for turn in range(rounds):
        for contender, command in commands(turn).items():
            results.setdefault(contender, []).append(run(command))
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return results


def ratio(mine: Sequence[Run], theirs: Sequence[Run], value: Callable[[Run], float]) -> list[float]:
    """Of mine over theirs in each round."""
    return over_rounds(value(a) / value(b) for a, b in zip(mine, theirs, strict=True))


def speeds(
    results: Mapping[str, Sequence[Measured]], yardstick: Callable[[str], str], of: str
) -> list[dict[str, Any]]:
    """A row for each contender: its speed by both clocks, also of its yardstick's; memory.

    Args:
        results: its rounds by contender.
        yardstick: whom a contender is compared with.
        of: the ratios' name.
    """
    clocks: dict[str, Callable[[Measured], float]] = {
        "tok/s": lambda run: run.tokens_per_second,
        "tok/CPU-s": lambda run: run.tokens_per_cpu_second,
    }
    rows = []
    for contender, runs in results.items():
        row: dict[str, Any] = {"contender": contender}
        for clock, value in clocks.items():
            row[clock] = over_rounds(map(value, runs))
            row[f"of {of}, {clock}"] = ratio(runs, results[yardstick(contender)], value)
        row["first step, s"] = over_rounds(run.first_step for run in runs)
        row["GiB"] = over_rounds(run.memory / 2**30 for run in runs)
        rows.append(row | ({"parameters": runs[0].parameters} if runs[0].parameters else {}))
    return rows


def shown(of: str) -> dict[str, str]:
    """How `speeds` of such ratios are printed."""
    columns = {"contender": "{}"}
    for clock in ("tok/s", "tok/CPU-s"):
        columns |= {clock: "{:.0f}", f"of {of}, {clock}": "{:.2f}"}
    return {**columns, "first step, s": "{:.1f}", "GiB": "{:.2f}"}
