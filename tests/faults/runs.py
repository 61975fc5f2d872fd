"""Small runs of four processes under the supervisor, and what is read back from their files.

`test_faults.py` injects a fault into each. A run is started as users start one, by a process of its
own with torchrun's processes below it, each with a replica of the model. The idea: a row states in
advance who has to detect the fault, in how many seconds, what has to be done and what it may cost
(`Expected`); the code that reads a run's files (`Run.observed`) does not know of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from benchmarks.harness import child_environment
from llmfoundry.events import read_events
from llmfoundry.processes import cores
from llmfoundry.recipe.paths import ROOT
from tests.faults.plugin import INJECTED, STEPS

RANKS, LENGTH, SAVE = 4, 60, 5  # processes, steps, steps between two checkpoints
STOPPED = 15  # seconds after which a stopped process, or a dead one not yet reaped, counts as hung
PATIENCE = 240.0  # seconds, on a loaded machine
PLUGIN = Path(__file__).with_name("plugin.py")
_NO_FAULT = ("start", "returned")  # kinds of events that report none

EQUAL = "equal"
"""Every step's loss is, bit for bit, that of the undisturbed run."""
ENDED = "equal until its end"
"""The fault ended the run; until then every step's loss is the undisturbed run's."""
NONE = "no step was done"
SKIPPED = "not comparable: batches were skipped"
CONSOLE = "console"
"""Reports what is in no event."""

RECIPE: dict[str, Any] = {
    "max_seq_len": 64,
    "max_duration": f"{LENGTH}ba",
    "global_train_batch_size": RANKS,
    "device_train_microbatch_size": 1,
    "precision": "fp32",
    "eval_interval": "0ba",
    "save_interval": f"{SAVE}ba",
    "model": {"d_model": 32, "n_layers": 2, "n_heads": 2, "attn_config": {"rope": True}},
    "tokenizer": {"name": "bytes"},
    "data": {"name": "files", "validation_fraction": 0},
    "optimizer": {"lr": 3e-3},
    "eval": {"validation": False},
    "logger": {"mlflow": False},
    "parallel": {"nproc_per_node": RANKS},
    "hang": {"stopped_seconds": STOPPED},
    "supervise": {"wait_seconds": 0, "confirm": "off"},
    "plugins": [str(PLUGIN)],
    "callbacks": {"plugins": {"pace": {}}},
}


@dataclass(frozen=True)
class Expected:
    """How a run has to end after a fault.

    Attributes:
        detected_by: as in `Observed`.
        action: as in `Observed`.
        detect_seconds: from the fault until it is reported, at most, on an otherwise idle machine;
            multiplied by `Observed.busy`.
        lost_steps: steps that are repeated, at most; None: no process is started again.
        losses: EQUAL, or ENDED, NONE or SKIPPED where they cannot be.
        status: exit status of the supervisor.
    """

    detected_by: str
    action: str
    detect_seconds: float
    lost_steps: int | None = None
    losses: str = EQUAL
    status: int = 0


@dataclass(frozen=True)
class Observed:
    """How a run ended after a fault.

    Attributes:
        detected_by: the first report: hang, a kind of watch or another event, with the rank that it
            names; or `supervisor: ` and the cause of its decision; empty: none.
        action: all actions in order, separated by commas, without `none` and repetitions.
        detect_seconds: from the fault to the first event that reports it; None: none does.
        back_seconds: from the fault to the end of the first step by processes that were started
            after it; None: none were.
        lost_steps: steps done more than once; None: none, and no process was started after it.
        losses: compared with the undisturbed run's.
        status: exit status of the supervisor; None: there was none.
        notes: text of the first event.
        busy: runnable processes for each core, at least 1.
    """

    detected_by: str
    action: str
    detect_seconds: float | None
    back_seconds: float | None
    lost_steps: int | None
    losses: str
    status: int | None
    notes: str = ""
    busy: float = field(default_factory=lambda: max(1.0, os.getloadavg()[0] / cores()))

    def wrong(self, expected: Expected) -> list[str]:
        """What is not as expected, a line each."""
        names = ("detected_by", "action", "losses", "status")
        pairs = ((name, getattr(self, name), getattr(expected, name)) for name in names)
        lines = [f"{name}: {one!r}, expected {two!r}" for name, one, two in pairs if one != two]
        most = expected.detect_seconds * self.busy
        for name, limit in (("detect_seconds", most), ("lost_steps", expected.lost_steps)):
            value = getattr(self, name)
            if (value is None) != (limit is None) or (value or 0) > (limit or 0):
                lines.append(f"{name}: {value}, expected at most {limit}")
        return lines

    def on_console(self, line: str | None, seconds: float) -> Observed:
        """The same, reported by a line of the console after so many seconds; None: no such line."""
        found = {"detected_by": CONSOLE, "detect_seconds": seconds, "notes": line}
        return self if line is None else replace(self, **found)  # type: ignore[arg-type]


def as_table(rows: Mapping[str, tuple[Expected, Observed]]) -> str:
    """Markdown: a line for each fault, and below them what is not as expected."""
    head = ("fault", "detected by", "after, s", "action", "back, s", "lost steps", "losses")
    lines = [f"| {' | '.join(head)} | as expected |", "|---" * 8 + "|"]
    for name, (expected, seen) in rows.items():
        after, back = (_number(s) for s in (seen.detect_seconds, seen.back_seconds))
        cells = [name, seen.detected_by or "none", after, seen.action or "none", back]
        cells += ["" if seen.lost_steps is None else str(seen.lost_steps), seen.losses]
        lines.append(f"| {' | '.join([*cells, 'NO' if seen.wrong(expected) else 'yes'])} |")
    for name, (expected, seen) in rows.items():
        if wrong := seen.wrong(expected):
            lines.append(f"\n{name}: {'; '.join(wrong)}")
    return "\n".join(lines)


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def as_row(name: str, expected: Expected, seen: Observed) -> dict[str, Any]:
    """A fault for `benchmarks.harness.write`."""
    found = {"fault": name, "detected by": seen.detected_by, "action": seen.action}
    numbers = {"detected, s": seen.detect_seconds, "back, s": seen.back_seconds}
    numbers |= {"lost steps": seen.lost_steps}
    kept = {name: value for name, value in numbers.items() if value is not None}
    verdict = {"losses": seen.losses, "as expected": not seen.wrong(expected), "notes": seen.notes}
    return {**found, **kept, **verdict}


class Place:
    """A working folder with a corpus, recipe.yaml, and the runs of both.

    Attributes:
        name: of the runs that `start` starts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, "run"
        self._undisturbed: dict[tuple[str, ...], dict[int, float]] = {}
        corpus = folder / "corpus"
        corpus.mkdir(parents=True)
        for n in range(48):
            lines = [f"line {i} of document {n}: {i * n} is {i} times {n}\n" for i in range(1 + n)]
            (corpus / f"{n:02d}.txt").write_text("".join(lines))
        data = {**RECIPE["data"], "paths": [str(corpus)], "cache_folder": str(folder / "cache")}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}))

    def undisturbed(self, *overrides: str) -> dict[int, float]:
        """The losses by step of a run without a fault; made once for the same overrides."""
        if overrides not in self._undisturbed:
            name = f"undisturbed-{len(self._undisturbed)}"
            words = [f"run_name={name}", *overrides, "callbacks.plugins.pace.seconds=0"]
            done = subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "train.py"), "recipe.yaml", *words],
                cwd=self.folder,
                env=_environment(),
                capture_output=True,
                text=True,
            )
            assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
            self._undisturbed[overrides] = losses(self.folder / "runs" / name)
        return self._undisturbed[overrides]

    def start(
        self, *overrides: str, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> Run:
        """Start a supervised run, or the same again; its context ends it. It prints to `log`."""
        return Run(self.folder, self.name, overrides, env or {}, log)

    def inject(
        self,
        fault: Callable[[Run], object],
        *overrides: str,
        after: int = 12,
        like: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        ignored: Collection[str] = (),
    ) -> Observed:
        """Start a run, call `fault` after a step, wait for the end; what was observed.

        Args:
            fault: what to do to the run.
            overrides: of the run.
            after: the step (from 1) after which the fault is injected; 0: at once.
            like: overrides of the undisturbed run that losses are compared with.
            env: more of the run's environment.
            log: where it prints.
            ignored: as `Run.observed` has it.
        """
        expected = self.undisturbed(*like)
        with self.start(*overrides, env=env, log=log) as run:
            if after:
                run.wait_for(after)
            run.injected = time.time()
            fault(run)
            run.end()
            return run.observed(expected, ignored=ignored)


class Step(NamedTuple):
    """A step that was done: by which process of rank 0, its number (from 1), and when (Unix)."""

    pid: int
    number: int
    time: float


class Run:
    """A supervised run and its processes.

    Attributes:
        folder: of the run.
        injected: when the fault was (Unix).
    """

    def __init__(
        self,
        place: Path,
        name: str,
        overrides: tuple[str, ...],
        env: Mapping[str, str],
        log: Path | None,
    ) -> None:
        self.folder, self.log = place / "runs" / name, log or place / f"{name}.log"
        self.injected = time.time()
        words = ["recipe.yaml", f"run_name={name}", *overrides]
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "scripts" / "supervise.py"), *words],
                cwd=place,
                env={**_environment(), **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            below = self.children()
            self.process.kill()
            for process in below:
                with suppress(psutil.Error):
                    process.kill()
            self.process.wait()

    def steps(self) -> list[Step]:
        """All steps that were done, of all attempts."""
        path = self.folder / STEPS
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [Step(int(row[0]), int(row[1]), float(row[2])) for row in rows if len(row) == 3]

    def wait_for(self, number: int) -> None:
        """Wait until a step is done.

        Raises:
            RuntimeError: the run ended before, or did not get there in time.
        """
        deadline = time.monotonic() + PATIENCE
        while max((step.number for step in self.steps()), default=0) < number:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"step {number} was not done:\n{self.output()[-3000:]}")
            time.sleep(0.02)

    def wait_for_event(self) -> None:
        """Wait until there is a report, or the run has ended."""
        while not self.events() and self.process.poll() is None:
            time.sleep(0.05)

    def wait_for_text(self, text: str) -> tuple[str | None, float]:
        """Wait for a text on the console, or the end; its line, and seconds since the fault."""
        ended = False
        while text not in (output := self.output()):
            if ended:
                return None, 0.0
            ended = self.process.poll() is not None
            time.sleep(0.1)
        line = next(line for line in output.splitlines() if text in line)
        return line.strip(), time.time() - self.injected

    def children(self) -> list[psutil.Process]:
        """All processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def launcher(self) -> psutil.Process:
        """The agent: torchrun's own process."""
        return next(p for p in self.children() if "torch.distributed.run" in _words(p))

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        found = dict[int, psutil.Process]()
        for process in self.children():
            with suppress(psutil.Error):
                if any(word.endswith("scripts/train.py") for word in _words(process)):
                    rank = process.environ().get("RANK")
                    if rank is not None:
                        found.setdefault(int(rank), process)
        return found

    def signal(self, process: psutil.Process, number: int = signal.SIGKILL) -> None:
        """Send a signal; the fault starts now."""
        self.injected = time.time()
        process.send_signal(number)

    def end(self) -> int:
        """Wait for the supervisor's end; its exit status."""
        return self.process.wait(PATIENCE)

    def output(self) -> str:
        """What the run and its supervisor have printed."""
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    def events(self) -> list[dict[str, Any]]:
        """Reports after the fault: all but starts, returns and the end of a complete run."""
        found = (e for e in read_events(self.folder) if e["time"] >= self.injected - 0.002)
        return [e for e in found if e["kind"] not in _NO_FAULT and e.get("cause") != "done"]

    def observed(
        self,
        expected: Mapping[int, float],
        *,
        losses_are: str = "",
        ignored: Collection[str] = (),
    ) -> Observed:
        """How the run ended.

        Args:
            expected: losses by step of the undisturbed run.
            losses_are: why they cannot be compared with these; empty: they are.
            ignored: kinds of events that may occur or not.
        """
        if (path := self.folder / INJECTED).exists():  # a fault of the plugin's
            self.injected = float(path.read_text())
        events = [event for event in self.events() if event["kind"] not in ignored]
        steps = self.steps()
        known = {step.pid for step in steps if step.time < self.injected}
        back = [step for step in steps if step.pid not in known and step.time > self.injected]
        first = events[0] if events else None
        lost = len(steps) - len({step.number for step in steps})
        actions = [e["action"] for e in events if e["action"] not in ("none", None)]
        return Observed(
            detected_by=_reporter(first) if first else "",
            action=", ".join(action for action, _ in groupby(actions)),
            detect_seconds=first["time"] - self.injected if first else None,
            back_seconds=back[0].time - self.injected if back else None,
            lost_steps=lost if back or lost else None,
            losses=losses_are or compared(losses(self.folder), expected),
            status=self.process.poll(),
            notes=str(first["what"]) if first else "",
        )


def losses(folder: Path) -> dict[int, float]:
    """A run's training losses by step."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {r["time/batch"]: r["loss/train/total"] for r in rows if "loss/train/total" in r}


def compared(found: Mapping[int, float], expected: Mapping[int, float]) -> str:
    """Losses by step compared with those of the undisturbed run, in words."""
    if not found:
        return NONE
    off = {n: abs(loss - expected[n]) for n, loss in found.items() if loss != expected.get(n)}
    if off:
        return f"differ from step {min(off)} on, by {max(off.values()):.1g} at most"
    if found.keys() == expected.keys():
        return EQUAL
    is_start = sorted(found) == list(range(1, len(found) + 1))
    return ENDED if is_start else "equal, but steps are missing"


def _reporter(event: Mapping[str, Any]) -> str:
    if event["kind"] == "decision":
        return f"supervisor: {event['cause']}"
    return str(event["kind"]) + (f", rank {event['rank']}" if event["rank"] is not None else "")


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1"}
    return child_environment() | quiet
