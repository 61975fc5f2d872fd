"""Mixtures of experts: the layer beside a dense one, the whole model beside transformers' DBRX."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bare import ROWS, SEQ, VOCAB
from benchmarks.measure import (
    Measured,
    measure,
    median,
    median_ratio,
    ours,
    prepare,
)
from benchmarks.mixtures import SIZES

WARM_UP = 12  # steps until memory that is freed fits what comes next, and hardly any of it is new
DBRX = "transformers' DBRX"
PRECISIONS = {"fp32": ["fp32"], "bf16": ["amp_bf16", "bf16"]}  # theirs -> ours; see hf_dbrx.py


def compare_moe(*, rounds: int, steps: int) -> Iterator[str]:
    """Run everything; the layer's tables, then one of each size and precision, as they come."""
    layer = [sys.executable, "-m", "benchmarks.moe", "--device", "cpu"]
    yield subprocess.run(layer, check=True, stdout=subprocess.PIPE, text=True).stdout
    for size, shape in SIZES.items():
        yield f"{shape}; {VOCAB=} {SEQ=} {ROWS=}; {rounds} rounds of {steps} steps"
        with tempfile.TemporaryDirectory() as folder:
            recipe = prepare(shape.recipe, Path(folder) / "bench.yaml")
            for precision in PRECISIONS:
                results = _by_turns(recipe, size, precision, rounds, steps)
                yield _table(precision, results)


def _by_turns(
    recipe: Path, size: str, precision: str, rounds: int, steps: int
) -> dict[str, list[Measured]]:
    options = ["--size", size, "--precision", precision, "--steps", str(steps)]
    commands = {f"ours, {p}": ours(recipe, p, steps, f"bench-{p}") for p in PRECISIONS[precision]}
    commands[DBRX] = [sys.executable, "-m", "benchmarks.hf_dbrx", *options]
    results: dict[str, list[Measured]] = {contender: [] for contender in commands}
    for _ in range(rounds):
        for contender, command in commands.items():
            results[contender].append(measure(command, recipe.parent, warm_up=WARM_UP))
            shutil.rmtree(recipe.parent / "runs", ignore_errors=True)  # a checkpoint of 1 GiB
            print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return results


def _table(precision: str, results: dict[str, list[Measured]]) -> str:
    """Medians of each contender, and of the rounds' ratios to transformers' DBRX."""
    speeds = f"{'tok/s':>9}{'x DBRX':>8}{'tok/CPU s':>11}{'x DBRX':>8}"
    lines = [f"{precision:20}{speeds}{'first step':>12}{'memory':>12}{'parameters':>13}"]
    theirs = results[DBRX]
    for contender, runs in results.items():
        assert runs[0].parameters is not None, f"{contender} did not say its size"
        line = f"{contender:20}{median(runs, lambda r: r.tokens_per_second):9.0f}"
        line += f"{median_ratio(runs, theirs, lambda r: r.tokens_per_second):8.2f}"
        line += f"{median(runs, lambda r: r.tokens_per_cpu_second):11.0f}"
        line += f"{median_ratio(runs, theirs, lambda r: r.tokens_per_cpu_second):8.2f}"
        line += f"{median(runs, lambda r: r.first_step):10.1f} s"
        line += f"{median(runs, lambda r: r.memory) / 2**30:8.2f} GiB"
        lines.append(f"{line}{runs[0].parameters:13,}")
    return "\n".join([*lines, ""])
