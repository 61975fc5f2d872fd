"""Interleaved benchmarks: contenders alternate, each round gives its own ratio, JSON keeps them.

Every benchmark of this folder runs its contenders by `interleaved`, prints its rows by `table` and
ends with `write`. Absolute times do not carry over to another machine, nor to another minute on a
shared one: so contenders alternate, and what counts is the median over the rounds of each round's
ratio. `write` keeps one file for each benchmark and machine in `results/`; a later run on the same
machine replaces it. `python -m benchmarks.harness` prints each ratio's range over the machines.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from benchmarks.contenders import ROWS, SEQ, VOCAB
from llmfoundry.files import atomic_write
from llmfoundry.loggers.environment import environment
from llmfoundry.recipe.paths import ROOT
from llmfoundry.terminal import columns

RESULTS = Path(__file__).parent / "results"
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
LIBRARIES = ("accelerate", "datasets", "lm-eval", "peft", "trl")  # beside those of every run
PRECISIONS = ("fp32", "amp_bf16")
STEP = re.compile(r"^\s*(?:step\s+)?(\d+)(?:/\d+)?\s")
SIZE = re.compile(r"([\d,]+) parameters")
RECIPE = f"""
max_seq_len: {SEQ}
global_train_batch_size: {ROWS}
eval_interval: 0ba
save_interval: 0ba
tokenizer: {{name: train, vocab_size: {VOCAB}}}
data: {{validation_fraction: 0}}
eval: {{validation: false}}
callbacks: {{speed_window: 1}}
"""  # all but the model; rows are packed, without attention across documents: a run's defaults

Run = TypeVar("Run")
Row = Mapping[str, Any]
"""Texts name what was measured; numbers, or `over_rounds`, are results; `of …` is a ratio."""


def interleaved(
    contenders: Callable[[int], Mapping[str, Callable[[], Run]]], *, rounds: int
) -> dict[str, list[Run]]:
    """Call each contender once a round, in the order that `contenders` gives for the round."""
    results: dict[str, list[Run]] = {}
    for number in range(rounds):
        for name, run in contenders(number).items():
            results.setdefault(name, []).append(run())
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return results


def ratio(mine: Sequence[Run], theirs: Sequence[Run], value: Callable[[Run], float]) -> list[float]:
    """Mine over theirs in each round."""
    return over_rounds(value(a) / value(b) for a, b in zip(mine, theirs, strict=True))


def over_rounds(values: Iterable[float]) -> list[float]:
    """The smallest of some rounds' values, their median, the largest."""
    found = list(values)
    return [min(found), statistics.median(found), max(found)]


def middle(value: Any) -> Any:
    """A number, of rounds their median."""
    return value[1] if isinstance(value, list) else value


def table(rows: Sequence[Row], shown: Mapping[str, str]) -> list[str]:
    """The rows, a line each below the columns' names.

    Args:
        rows: one that lacks a column has n/a there.
        shown: format of each column, such as `{:.2f}`.
    """
    cells = [[_cell(row.get(key), form) for key, form in shown.items()] for row in rows]
    return columns([*shown], cells)


def _cell(value: Any, form: str) -> str:
    return "n/a" if value is None else form.format(middle(value))


def machine() -> dict[str, Any]:
    """Processor, its instruction sets that count here, cores, and the GPU where there is one."""
    facts = environment()
    flags, numbers = set[str](), []
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    if line := re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE):
        flags = set(line[1].split())
    for key in ("cpu family", "model"):  # what distinguishes processors that have no proper name
        if line := re.search(rf"^{key}\s*: (\d+)$", text, re.MULTILINE):
            numbers.append(f"{key.removeprefix('cpu ')} {line[1]}")
    name = ", ".join([facts["processor"], *numbers])
    found: dict[str, Any] = {"processor": name, "cores": int(facts["cores"])}
    found["threads"] = torch.get_num_threads()
    found["instruction_sets"] = [flag for flag in INSTRUCTIONS if flag in flags]
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return {**found, "system": platform.system()}


def libraries() -> dict[str, str]:
    """Versions of Python and of the libraries measured."""
    there = {d.name for d in metadata.distributions()}
    facts = environment()
    kept = {k: v for k, v in facts.items() if k not in ("processor", "cores", "system")}
    return {**kept, **{name: metadata.version(name) for name in LIBRARIES if name in there}}


def write(
    bench: str, rows: Sequence[Row], settings: Mapping[str, Any], *, folder: Path = RESULTS
) -> Path:
    """Write `<bench>-<machine>.json`: settings (sizes, rounds, ...), machine, libraries, rows."""
    here = machine()
    label = f"{here['processor']} {here['cores']} cores {here.get('gpu', '')}".lower()
    path = folder / f"{bench}-{re.sub('[^a-z0-9]+', '-', label).strip('-')}.json"
    head: dict[str, Any] = {"bench": bench, "date": datetime.date.today().isoformat()}
    head |= {"machine": here, "load": os.getloadavg()[0], "libraries": libraries()}
    opened = json.dumps(_short({**head, "settings": dict(settings)}), indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(_short(dict(row))) for row in rows)
    folder.mkdir(exist_ok=True)
    atomic_write(path, f'{opened},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path


def _short(value: Any) -> Any:
    """Numbers of four digits; the measurements carry no more."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def ranges(folder: Path = RESULTS) -> Iterator[str]:
    """A line for each row of each bench: its ratios, from the smallest to the largest machine's."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        for row in content["rows"]:
            label = (content["bench"], *(v for v in row.values() if isinstance(v, str)))
            for key, value in row.items():
                if key.startswith("of "):
                    found.setdefault(label, {}).setdefault(key, []).append(middle(value))
    for label, ratios in found.items():
        parts = (
            f"{key} {min(values):.2f} to {max(values):.2f} ({len(values)} machines)"
            if len(values) > 1
            else f"{key} {values[0]:.2f} (1 machine)"
            for key, values in ratios.items()
        )
        yield f"{', '.join(label)}: {'; '.join(parts)}"


# Contenders that are processes, and print a line a step.


def contender(function: str, **settings: Any) -> list[str]:
    """The command that runs a function of `contenders.py` in a process of its own."""
    return [sys.executable, "-m", "benchmarks.contenders", function, json.dumps(settings)]


def prepare(model: str, recipe: Path) -> Path:
    """Write `recipe` with that model section, and its tokens next to it; returns `recipe`."""
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
    """A process that prints a line a step.

    Attributes:
        ends: seconds from the command to the end of each step.
        cpu_ends: CPU-seconds of all its threads and processes until then.
        memory: peak resident set, bytes.
        output: all that it printed.
    """

    ends: list[float]
    cpu_ends: list[float]
    memory: int
    output: str


def timed(command: Sequence[str], folder: Path, *, least: int) -> Timed:
    """Run a command in `folder`, and time the lines that it prints for its steps.

    Raises:
        RuntimeError: the process failed, or printed fewer than `least`.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=child_environment() | {"CUDA_VISIBLE_DEVICES": ""},  # all on the CPU, ours too
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    watched = psutil.Process(process.pid)
    times, cpu_times, lines = [], [], []
    for line in process.stdout:
        lines.append(line)
        if STEP.match(line):
            times.append(time.perf_counter() - started)
            cpu_times.append(_cpu_seconds(watched))
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0 or len(times) < least:
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(lines[-30:])}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Timed(times, cpu_times, usage.ru_maxrss * unit, "".join(lines))


def _cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process and of its children that still run."""
    seconds = 0.0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            seconds += sum(one.cpu_times()[:2])
    return seconds


def child_environment() -> dict[str, str]:
    """Environment of a process in another folder: it finds this package, installed or not."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class Measured:
    """A training process's speed.

    Attributes:
        tokens_per_second: of the median step after the warm-up.
        tokens_per_cpu_second: the same by CPU time, which other work on the machine disturbs less.
        first_step: seconds from the command to the end of the first step.
        memory: peak resident set, bytes.
        parameters: as the process printed; None: it did not.
    """

    tokens_per_second: float
    tokens_per_cpu_second: float
    first_step: float
    memory: int
    parameters: int | None


def measure(command: Sequence[str], folder: Path, *, warm_up: int) -> Measured:
    """The speed of a process that trains on full rows; the first `warm_up` steps do not count.

    Raises:
        RuntimeError: the process failed, or took too few steps.
    """
    run = timed(command, folder, least=warm_up + 2)
    size = SIZE.search(run.output)
    return Measured(
        tokens_per_second=ROWS * SEQ / median_step(run.ends[warm_up:]),
        tokens_per_cpu_second=ROWS * SEQ / median_step(run.cpu_ends[warm_up:]),
        first_step=run.ends[0],
        memory=run.memory,
        parameters=int(size[1].replace(",", "")) if size else None,
    )


def median_step(ends: Sequence[float]) -> float:
    """Seconds of the median step, by the times at which steps ended."""
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def speeds(
    results: Mapping[str, Sequence[Measured]], yardstick: Callable[[str], str], of: str
) -> list[dict[str, Any]]:
    """A row for each contender: speed by both clocks, ratios to its yardstick, memory.

    Args:
        results: rounds of each contender.
        yardstick: name of the contender to compare with.
        of: name of the ratios.
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


if __name__ == "__main__":
    for text in ranges():
        print(text)
