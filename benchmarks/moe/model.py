"""Whole mixtures of experts beside transformers' DBRX under its Trainer, by turns, as ratios.

python -m benchmarks.moe.model [--rounds 3] [--steps 24] [--sizes large small]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.moe.mixtures import SIZES
from benchmarks.record import table, write
from benchmarks.turns import Measured, by_turns, measure, ours, prepare, shown, speeds

WARM_UP = 12  # steps until memory that is freed fits what comes next, and hardly any of it is new
DBRX = "transformers' DBRX"
PRECISIONS = {"fp32": ["fp32"], "bf16": ["amp_bf16", "bf16"]}  # theirs -> ours; see hf_dbrx.py


def model() -> None:
    """Run everything, print a table of each size and precision as it comes, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="of each contender")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            recipe = prepare(SIZES[size].recipe, Path(folder) / "bench.yaml")
            for precision in PRECISIONS:
                results = by_turns(
                    partial(_commands, recipe, size, precision, given.steps),
                    partial(_measure, recipe.parent),
                    rounds=given.rounds,
                )
                found = speeds(results, lambda _: DBRX, "DBRX")
                print("\n".join(["", f"{SIZES[size]}; {precision}", *table(found, COLUMNS)]))
                rows += [{"size": size, "theirs": precision} | row for row in found]
    sizes = {size: str(SIZES[size]) for size in given.sizes}
    print(f"\nwritten to {write('moe-model', rows, vars(given) | {'sizes': sizes})}")


COLUMNS = shown("DBRX") | {"parameters": "{:,}"}


def _commands(
    recipe: Path, size: str, precision: str, steps: int, turn: int
) -> dict[str, list[str]]:
    options = ["--size", size, "--precision", precision, "--steps", str(steps)]
    mine = {f"ours, {p}": ours(recipe, p, steps, f"{p}-{turn}") for p in PRECISIONS[precision]}
    return {**mine, DBRX: [sys.executable, "-m", "benchmarks.moe.hf_dbrx", *options]}


def _measure(folder: Path, command: Sequence[str]) -> Measured:
    found = measure(command, folder, warm_up=WARM_UP)
    shutil.rmtree(folder / "runs", ignore_errors=True)  # a checkpoint of 1 GiB
    assert found.parameters is not None, f"{command} did not say its size"
    return found


if __name__ == "__main__":
    model()
