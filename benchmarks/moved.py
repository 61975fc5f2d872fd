"""Bytes moved by memory-bound operations, and kernels launched, per sequence: on fake tensors.

    python -m benchmarks.moved [mpt-125m=1 dbrx-mini=1 llama-8b=64 dbrx=512] [--set KEY=VALUE ...]

A forward and a backward pass of a microbatch of one sequence, on one of the ranks behind the equals
sign, by the meter of `plan/count.py`: blocks and ends (embedding, final norm, head and loss), eager
and compiled. Matmuls, attention, recomputation, communication and the optimizer are not in it. Run
it at two commits to see what a change of a kernel saves; no GPU is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from benchmarks.harness import Row, table
from benchmarks.memory import read
from llmfoundry.plan.count import ModelCount, count

CUDA = torch.device("cuda")
RECIPES = ("mpt-125m=1", "dbrx-mini=1", "llama-8b=64", "dbrx=512")
PLAIN = (
    "parallel.activation_checkpointing=none",
    "parallel.activation_compression=none",
    "device_train_microbatch_size=1",
)
COLUMNS = {
    "recipe": "{}",
    "part": "{}",
    "GB": "{:.2f}",
    "launches": "{:.0f}",
    "GB compiled": "{:.2f}",
    "launches compiled": "{:.0f}",
}


def rows_of(name: str, ranks: int, words: Sequence[str] = ()) -> list[Row]:
    """The rows of a recipe: its blocks and its ends."""
    recipe = read(name, ranks, [*PLAIN, *words])
    counted = count(recipe, recipe.parallel.degrees(ranks), device=CUDA)
    return [_row(name, part, counted) for part in ("blocks", "ends")]


def _row(name: str, part: str, counted: ModelCount) -> Row:
    ends = counted.ends.forward.plus(counted.ends.backward).of(1)
    work = ends
    if part == "blocks":
        every = counted.forward.plus(counted.backward).of(1)
        work = every.plus(ends.times(-1))
    return {
        "recipe": name,
        "part": part,
        "GB": work.moved / 1e9,
        "launches": work.launches,
        "GB compiled": work.fused / 1e9,
        "launches compiled": work.fused_launches,
    }


def main() -> None:
    """Count each recipe and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--set", nargs="*", default=(), metavar="KEY=VALUE")
    arguments = parser.parse_args()
    rows = []
    for text in arguments.recipes:
        name, _, ranks = text.partition("=")
        rows += rows_of(name, int(ranks or 1), arguments.set)
    print("\n".join(table(rows, COLUMNS)))


if __name__ == "__main__":
    main()
