"""What watch, heartbeats, hang monitor and step times cost a step of the quickstart: off and on.

    python -m benchmarks.watch [--rounds 6] [--steps 240] [--processes 1 2]

Measured in two ways. Interleaved: full runs with everything off and with everything on, by the CPU
time of all their processes, monitors included; the ratio of a round is accurate to a percent or so.
Inside: in one run with everything on, the time spent in the functions that the loop calls for it,
over the time of its steps; this includes the test for finite losses, which every run makes.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Timed, interleaved, median_step, ratio, table, timed, write
from llmfoundry.recipe.paths import ROOT

LOG = 20  # steps between two lines
WARM_UP = 2  # lines
RUN = f"log_interval={LOG}ba eval_interval=0ba save_interval=0ba".split()
RUN += ["eval=off", "callbacks.generate.prompts=[]", "logger.mlflow=false"]
_KINDS = ("loss_spike", "gradient_spike", "slow_rank", "mfu_drop", "data_wait", "stall", "gpu")
OFF = ["hang.monitor=off", "callbacks.step_times=false"]
OFF += [*(f"callbacks.watch.{kind}=off" for kind in _KINDS)]
ON = ["hang.monitor=on"]
INSIDE = "inside: "
SHOWN = {"processes": "{}", "off, CPU ms a step": "{:.1f}", "of off, CPU": "{:.4f}"}
SHOWN |= {"inside, of a step": "{:.4%}"}


def main() -> None:
    """Run everything, print a table, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=240, help="of each run")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for processes in given.processes:
            contenders = partial(_contenders, Path(name), processes, given.steps)
            runs = interleaved(contenders, rounds=given.rounds)
            inside = [_share(run) for run in runs["inside"]]
            rows.append(
                {
                    "processes": processes,
                    "off, CPU ms a step": statistics.median(map(_step, runs["off"])) * 1e3,
                    "of off, CPU": ratio(runs["on"], runs["off"], _step),
                    "inside, of a step": [min(inside), statistics.median(inside), max(inside)],
                }
            )
    print("\n".join(table(rows, SHOWN)))
    print(f"\nwritten to {write('watch', rows, vars(given))}")


def _contenders(
    folder: Path, processes: int, steps: int, turn: int
) -> dict[str, Callable[[], Timed]]:
    """A run with all of it, one without, in alternating order, and one that times it inside."""
    python = [sys.executable]
    if processes > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    recipe = [str(ROOT / "yamls" / "quickstart.yaml"), f"max_duration={steps}ba", *RUN]
    train = [*python, str(ROOT / "scripts" / "train.py"), *recipe]
    commands = {"on": [*train, *ON], "off": [*train, *OFF]}
    if not turn % 2:
        commands = dict(reversed(commands.items()))
    commands["inside"] = [*python, str(Path(__file__)), *recipe, *ON]
    return {
        who: partial(
            timed, [*words, f"run_name={processes}-{turn}-{who}"], folder, least=steps // LOG
        )
        for who, words in commands.items()
    }


def _step(run: Timed) -> float:
    """CPU-seconds of the median step."""
    return median_step(run.cpu_ends[WARM_UP:]) / LOG


def _share(run: Timed) -> float:
    line = next(line for line in run.output.splitlines() if line.startswith(INSIDE))
    return float(line.removeprefix(INSIDE))


class Inside:
    """The time spent in some functions of a run, and in its steps."""

    def __init__(self) -> None:
        self.seconds = {"watch": 0.0, "steps": 0.0}
        self._depth = {"watch": 0, "steps": 0}

    def count(self, owner: Any, name: str, part: str) -> None:
        """Time every call of a function or method, in place; nested calls count once."""
        function: Callable[..., Any] = getattr(owner, name)

        def counted(*inputs: Any, **named: Any) -> Any:
            self._depth[part] += 1
            began = time.perf_counter()
            try:
                return function(*inputs, **named)
            finally:
                self._depth[part] -= 1
                if not self._depth[part]:
                    self.seconds[part] += time.perf_counter() - began

        setattr(owner, name, counted)


def inside() -> None:
    """Be scripts/train.py with these arguments, and print the share of rank 0's steps."""
    from llmfoundry.resilience.watch.watch import Watch
    from llmfoundry.telemetry import SpanClock
    from llmfoundry.train import trainer
    from llmfoundry.train.callbacks import StepTimes
    from llmfoundry.train.spikes import Guard, SpikeHandler

    measured = Inside()
    for owner, name in (
        (Guard, "observe"),
        (SpikeHandler, "check"),
        (SpikeHandler, "handle"),
        (Watch, "on_step"),
        (Watch, "on_log"),
        (trainer, "beat"),
        (SpanClock, "enter"),
        (SpanClock, "leave"),
        (StepTimes, "measure"),
        (StepTimes, "on_log"),
        (StepTimes, "on_step"),
    ):
        measured.count(owner, name, "watch")
    for name in ("_take", "_step"):
        measured.count(trainer.Trainer, name, "steps")
    script = str(ROOT / "scripts" / "train.py")
    sys.argv[0] = script
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            print(f"{INSIDE}{measured.seconds['watch'] / measured.seconds['steps']}", flush=True)


if __name__ == "__main__":
    inside() if len(sys.argv) > 1 and sys.argv[1].endswith(".yaml") else main()
