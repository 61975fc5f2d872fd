"""Runs the contenders by turns, each a process of its own, and prints ratios.

Absolute times do not travel between machines, nor between minutes on a shared one: contenders
alternate, medians are taken, and each round gives its own ratio.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmfoundry.bench.bare import HEADS, LAYERS, ROWS, SEQ, VOCAB, D
from llmfoundry.bench.matmul import flops_per_token
from llmfoundry.recipe.paths import ROOT

WARM_UP = 5  # first steps, not counted
STEP = re.compile(r"^\s*(?:step\s+)?(\d+)(?:/\d+)?\s")

RECIPE = f"""
max_seq_len: {SEQ}
global_train_batch_size: {ROWS}
eval_interval: 0ba
save_interval: 0ba
model: {{d_model: {D}, n_heads: {HEADS}, n_layers: {LAYERS}, no_bias: true}}
tokenizer: {{name: train, vocab_size: {VOCAB}}}
data: {{attend_across_documents: true, validation_fraction: 0}} # whole rows, as the others have
eval: {{validation: false}}
callbacks: {{speed_window: 1}}
"""


@dataclass(frozen=True)
class Measured:
    """One process's run.

    Attributes:
        tokens_per_second: of the median step after the warm-up.
        first_step: seconds from the command to the end of the first step.
        memory: peak resident set, bytes.
    """

    tokens_per_second: float
    first_step: float
    memory: int


YARDSTICK = {"ours compiled": "bare compiled"}  # whom a contender is measured by; the bare loop


def compare(*, rounds: int, steps: int) -> str:
    """Run everything; the table of medians and ratios."""
    lines = [f"{D=} {LAYERS=} {HEADS=} {VOCAB=} {SEQ=} {ROWS=}; {rounds} rounds of {steps} steps"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "bench.yaml"
        recipe.write_text(RECIPE)
        prepare = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), str(recipe)]
        subprocess.run(prepare, check=True, capture_output=True)
        for precision in ("fp32", "amp_bf16"):
            results: dict[str, list[Measured]] = {}
            rates = []
            for turn in range(rounds):
                rates.append(_matmul_rate(precision))
                for contender, command in _commands(recipe, precision, steps, turn).items():
                    results.setdefault(contender, []).append(_measure(command, folder))
                    print(".", end="", flush=True, file=sys.stderr)
            lines += _table(precision, results, statistics.median(rates))
    print(file=sys.stderr)
    return "\n".join(lines)


def _commands(recipe: Path, precision: str, steps: int, turn: int) -> dict[str, list[str]]:
    options = ["--precision", precision, "--steps", str(steps)]
    train = [sys.executable, str(ROOT / "scripts" / "train.py"), str(recipe)]
    length = [f"max_duration={steps}ba", f"precision={precision}"]
    bare, run = [sys.executable, "-m", "llmfoundry.bench.bare", *options], f"{precision}-{turn}"
    return {
        "ours": [*train, *length, f"run_name={run}"],
        "bare loop": bare,
        "ours compiled": [*train, *length, f"run_name={run}-compiled", "compile=true"],
        "bare compiled": [*bare, "--compile"],
        "HF Trainer": [sys.executable, "-m", "llmfoundry.bench.hf_trainer", *options],
    }


def _measure(command: Sequence[str], folder: Path) -> Measured:
    """Time the lines that the process prints, one a step, as they come."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    times, said = [], []
    for line in process.stdout:
        said.append(line)
        if STEP.match(line):
            times.append(time.perf_counter() - started)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0 or len(times) <= WARM_UP + 1:
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(said[-30:])}")
    between = [b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    unit = 1 if sys.platform == "darwin" else 1024
    return Measured(ROWS * SEQ / statistics.median(between), times[0], usage.ru_maxrss * unit)


def _matmul_rate(precision: str) -> float:
    """FLOP/s of the model's matrix products alone."""
    command = [sys.executable, "-m", "llmfoundry.bench.matmul", "--precision", precision]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _table(precision: str, results: dict[str, list[Measured]], rate: float) -> list[str]:
    """Medians of each contender, of the rounds' ratios to its yardstick, and share of `rate`."""
    head = f"{'tok/s':>9}{'of bare':>9}{'of matmul':>11}{'first step':>12}{'memory':>11}"
    lines = ["", f"{precision:14}{head}   (matrix products alone: {rate / 1e9:.0f} GFLOP/s)"]
    for contender, runs in results.items():
        yardstick = results[YARDSTICK.get(contender, "bare loop")]
        ratios = [
            mine.tokens_per_second / bare.tokens_per_second
            for mine, bare in zip(runs, yardstick, strict=True)
        ]
        speed = statistics.median(r.tokens_per_second for r in runs)
        first = statistics.median(r.first_step for r in runs)
        memory = statistics.median(r.memory for r in runs) / 2**30
        lines.append(
            f"{contender:14}{speed:9.0f}{statistics.median(ratios):9.2f}"
            f"{speed * flops_per_token() / rate:10.0%} {first:10.1f} s{memory:7.2f} GiB"
        )
    return lines
