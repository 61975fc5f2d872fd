"""Small runs of four processes under the supervisor, and what is read from their files.

`processes.py` and `machines.py` strike them. A run is started as users start one, by a process of
its own that has torchrun's processes below it, each with a replica of the model.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import yaml

from benchmarks.faults.inside import STEPS, STRUCK
from benchmarks.faults.outcome import ENDED, EQUAL, NONE, Seen
from benchmarks.harness import child_environment
from llmfoundry.events import read_events
from llmfoundry.recipe.front.paths import ROOT

RANKS, LENGTH, SAVE = 4, 60, 5  # processes, steps, and steps between two checkpoints
STOPPED = 15  # seconds after which a process that is stopped, or dead and not buried, hangs
_PATIENCE = 240.0  # seconds, on a busy machine
_INSIDE = Path(__file__).with_name("inside.py")
_QUIET = ("start", "returned")  # kinds of events that tell no fault

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
    "plugins": [str(_INSIDE)],
    "callbacks": {"plugins": {"pace": {}}},
}


class Step(NamedTuple):
    """A step that was done: by which process of rank 0, its number (from 1), and when (Unix)."""

    pid: int
    number: int
    time: float


class Place:
    """A working folder with a corpus, recipe.yaml, and the runs of both."""

    def __init__(self, folder: Path) -> None:
        """Write corpus and recipe."""
        self.folder = folder
        self._whole: dict[tuple[str, ...], dict[int, float]] = {}
        corpus = folder / "corpus"
        corpus.mkdir(parents=True)
        for n in range(48):
            lines = [f"line {i} of document {n}: {i * n} is {i} times {n}\n" for i in range(1 + n)]
            (corpus / f"{n:02d}.txt").write_text("".join(lines))
        data = {**RECIPE["data"], "paths": [str(corpus)], "cache_folder": str(folder / "cache")}
        (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}))

    def undisturbed(self, *overrides: str) -> dict[int, float]:
        """The losses by step of a run that nothing happens to; made once for the same overrides.

        Raises:
            RuntimeError: something has happened to it.
        """
        if overrides not in self._whole:
            name = f"undisturbed-{len(self._whole)}"
            words = [
                "recipe.yaml",
                f"run_name={name}",
                *overrides,
                "callbacks.plugins.pace.seconds=0",
            ]
            done = subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "train.py"), *words],
                cwd=self.folder,
                env=_environment(),
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise RuntimeError(done.stdout[-3000:] + done.stderr[-3000:])
            self._whole[overrides] = losses(self.folder / "runs" / name)
        return self._whole[overrides]

    def start(
        self,
        name: str,
        *overrides: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> Run:
        """Start a supervised run, or one of that name again; a context that ends it.

        Args:
            name: of the run.
            overrides: of the recipe, as on the command line.
            env: more of the environment.
            log: where it writes; None: to a file of its own.
        """
        return Run(self.folder, name, overrides, env or {}, log or self.folder / f"{name}.log")


class Run:
    """A supervised run and its processes; ends with the context, if it has not ended before."""

    def __init__(
        self, place: Path, name: str, overrides: tuple[str, ...], env: Mapping[str, str], log: Path
    ) -> None:
        """Start it."""
        self.folder, self.log = place / "runs" / name, log
        self.struck = time.time()
        words = ["recipe.yaml", f"run_name={name}", *overrides]
        with log.open("a") as file:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            RuntimeError: the run has ended before, or does not come so far.
        """
        deadline = time.monotonic() + _PATIENCE
        while max((step.number for step in self.steps()), default=0) < number:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"step {number} was not done:\n{self.said()[-3000:]}")
            time.sleep(0.02)

    def wait_for_event(self) -> None:
        """Wait until anybody has told anything, or the run has ended."""
        while not self.events() and self.process.poll() is None:
            time.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        """All processes below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def launcher(self) -> psutil.Process:
        """The agent: torchrun's own process."""
        found = (p for p in self.children() if "torch.distributed.run" in _words(p))
        return next(found)

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

    def strike(self, process: psutil.Process, number: int = signal.SIGKILL) -> None:
        """Send a signal; the fault is from now on."""
        self.struck = time.time()
        process.send_signal(number)

    def end(self) -> int:
        """Wait for the supervisor's end; its exit status."""
        return self.process.wait(_PATIENCE)

    def said(self) -> str:
        """What the run and its supervisor have written."""
        return self.log.read_text(errors="replace") if self.log.is_file() else ""

    def events(self) -> list[dict[str, Any]]:
        """What was told after the fault, but for starts, returns and the end of a complete run."""
        found = (e for e in read_events(self.folder) if e["time"] >= self.struck - 0.002)
        return [e for e in found if e["kind"] not in _QUIET and e.get("cause") != "done"]

    def seen(
        self,
        whole: Mapping[int, float],
        *,
        losses_are: str = "",
        but: Collection[str] = (),
        notes: str = "",
    ) -> Seen:
        """What became of the fault.

        Args:
            whole: the losses by step of the undisturbed run.
            losses_are: why they cannot be compared with these; empty: they are.
            but: kinds of events that may come or not.
            notes: what else is worth a line; by default what the first event says.
        """
        self.struck = self._struck_inside() or self.struck
        told = [event for event in self.events() if event["kind"] not in but]
        steps = self.steps()
        known = {step.pid for step in steps if step.time < self.struck}
        back = [step for step in steps if step.pid not in known and step.time > self.struck]
        first = told[0] if told else None
        lost = len(steps) - len({step.number for step in steps})
        actions = [e["action"] for e in told if e["action"] not in ("none", None)]
        return Seen(
            detected_by=_teller(first) if first else "",
            action=", ".join(action for action, _ in groupby(actions)),
            detect_seconds=first["time"] - self.struck if first else None,
            back_seconds=back[0].time - self.struck if back else None,
            lost_steps=lost if back or lost else None,
            losses=losses_are or compared(losses(self.folder), whole),
            status=self.process.poll(),
            notes=notes or (str(first["what"]) if first else ""),
        )

    def _struck_inside(self) -> float | None:
        """When a fault of the plugin happened; None: none has."""
        path = self.folder / STRUCK
        return float(path.read_text()) if path.exists() else None


def losses(folder: Path) -> dict[int, float]:
    """A run's training losses by step."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {r["time/batch"]: r["loss/train/total"] for r in rows if "loss/train/total" in r}


def compared(found: Mapping[int, float], whole: Mapping[int, float]) -> str:
    """Losses by step beside those of the undisturbed run, in words."""
    if not found:
        return NONE
    off = {n: abs(loss - whole[n]) for n, loss in found.items() if loss != whole.get(n)}
    if off:
        return f"differ from step {min(off)} on, by {max(off.values()):.1g} at most"
    is_whole = found.keys() == whole.keys()
    is_first = sorted(found) == list(range(1, len(found) + 1))
    return EQUAL if is_whole else ENDED if is_first else "equal, but steps are missing"


def _teller(event: Mapping[str, Any]) -> str:
    if event["kind"] == "decision":
        return f"supervisor: {event['cause']}"
    return str(event["kind"]) + (f", rank {event['rank']}" if event["rank"] is not None else "")


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _environment() -> dict[str, str]:
    return child_environment() | {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",
    }
