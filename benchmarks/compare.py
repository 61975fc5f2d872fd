"""The dense model: our trainer, a bare loop and the Hugging Face Trainer by turns, as ratios."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.bare import HEADS, LAYERS, ROWS, SEQ, VOCAB, D
from benchmarks.matmul import flops_per_token
from benchmarks.measure import (
    PRECISIONS,
    Measured,
    measure,
    median,
    median_ratio,
    ours,
    prepare,
)

WARM_UP = 5
MODEL = f"model: {{d_model: {D}, n_heads: {HEADS}, n_layers: {LAYERS}, no_bias: true}}\n"
YARDSTICK = {"ours compiled": "bare compiled"}  # whom a contender is measured by; the bare loop


def compare(*, rounds: int, steps: int) -> str:
    """Run everything; the table of medians and ratios."""
    lines = [f"{D=} {LAYERS=} {HEADS=} {VOCAB=} {SEQ=} {ROWS=}; {rounds} rounds of {steps} steps"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = prepare(MODEL, folder / "bench.yaml")
        for precision in PRECISIONS:
            results: dict[str, list[Measured]] = {}
            rates = []
            for turn in range(rounds):
                rates.append(_matmul_rate(precision))
                for contender, command in _commands(recipe, precision, steps, turn).items():
                    run = measure(command, folder, warm_up=WARM_UP)
                    results.setdefault(contender, []).append(run)
                    print(".", end="", flush=True, file=sys.stderr)
            lines += _table(precision, results, statistics.median(rates))
    print(file=sys.stderr)
    return "\n".join(lines)


def _commands(recipe: Path, precision: str, steps: int, turn: int) -> dict[str, list[str]]:
    options = ["--precision", precision, "--steps", str(steps)]
    bare, run = [sys.executable, "-m", "benchmarks.bare", *options], f"{precision}-{turn}"
    return {
        "ours": ours(recipe, precision, steps, run),
        "bare loop": bare,
        "ours compiled": [*ours(recipe, precision, steps, f"{run}-compiled"), "compile=true"],
        "bare compiled": [*bare, "--compile"],
        "HF Trainer": [sys.executable, "-m", "benchmarks.hf_trainer", *options],
    }


def _matmul_rate(precision: str) -> float:
    """FLOP/s of the model's matrix products alone."""
    command = [sys.executable, "-m", "benchmarks.matmul", "--precision", precision]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _table(precision: str, results: dict[str, list[Measured]], rate: float) -> list[str]:
    """Medians of each contender, of the rounds' ratios to its yardstick, and share of `rate`."""
    head = f"{'tok/s':>9}{'of bare':>9}{'of matmul':>11}{'first step':>12}{'memory':>11}"
    lines = ["", f"{precision:14}{head}   (matrix products alone: {rate / 1e9:.0f} GFLOP/s)"]
    for contender, runs in results.items():
        yardstick = results[YARDSTICK.get(contender, "bare loop")]
        ratio = median_ratio(runs, yardstick, lambda r: r.tokens_per_second)
        speed = median(runs, lambda r: r.tokens_per_second)
        first = median(runs, lambda r: r.first_step)
        memory = median(runs, lambda r: r.memory) / 2**30
        lines.append(
            f"{contender:14}{speed:9.0f}{ratio:9.2f}"
            f"{speed * flops_per_token() / rate:10.0%} {first:10.1f} s{memory:7.2f} GiB"
        )
    return lines
