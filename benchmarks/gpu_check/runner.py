"""All steps in order, within the budget; JSON and page are written anew after every item.

`command.check` calls `run_all`. The time that is left is shared among the steps that are left by
their shares, so that what one does not use the next ones have; inside a step items run in order
until its time is up. What did not run is in the results with the reason.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import process
from benchmarks.gpu_check.items.rows import read
from benchmarks.gpu_check.page import write_page
from benchmarks.gpu_check.plan import (
    COMPILED,
    CORPUS,
    CUDA,
    DEVICE,
    PATIENCE,
    SEVERAL,
    Item,
    Step,
)
from benchmarks.gpu_check.results import (
    DONE,
    JSON_NAME,
    NO_TIME,
    NOT_CHOSEN,
    NOT_HERE,
    OK,
    WRONG,
    ItemResult,
    Results,
    StepResult,
)
from benchmarks.gpu_check.verdict import headline, judge
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import atomic_write
from llmfoundry.loggers.console import duration

LEAST = {CUDA: 12.0, "cpu": 3.0}  # seconds below which no item is begun
OF_LIMIT = 4  # times that an item's limit is longer than what it takes at least, as we guess
FACTS = "facts"  # the item that all others need


@dataclass
class Runner:
    """A check under way.

    Attributes:
        results: what it fills.
        steps: what it does.
        folder: of results, logs and work.
        paths: of wheels.
        chosen: names of steps; the others are not run. None: all.
        kept: an earlier check, of which what was finished is not measured again.
    """

    results: Results
    steps: Sequence[Step]
    folder: Path
    paths: Sequence[Path] = ()
    chosen: Sequence[str] | None = None
    kept: Results | None = None

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._ends = self._began + 60 * self.results.minutes
        self._work = self.folder / "work"
        self._unwritten = ""
        self.results.steps = [
            StepResult(step.name, step.title, [ItemResult(item.name) for item in step.items])
            for step in self.steps
        ]

    def run_all(self) -> None:
        """Run every step that was chosen; results are whole on the disk after each item.

        Raises:
            UserError: the device that was asked for is not there, or packages are missing.
        """
        shutil.rmtree(self._work, ignore_errors=True)
        (self._work / "runs").mkdir(parents=True)
        (self.folder / "logs").mkdir(exist_ok=True)
        try:
            for number, (step, result) in enumerate(
                zip(self.steps, self.results.steps, strict=True)
            ):
                now, runs = time.monotonic(), [s for s in self.steps[number:] if self._runs(s)]
                share = time_of(runs, self._ends - now) if step in runs else 0.0
                # what all others need has all of the time
                self._step(step, result, self._ends if step.name == DEVICE else now + share)
            for step, result in zip(self.steps, self.results.steps, strict=True):
                self._step(step, result, self._ends, again=True)  # in what time others left
            self.results.status = "finished"
        except KeyboardInterrupt:
            self.results.status = "stopped"
            raise
        finally:
            if self.results.facts:  # else nothing began, and what is in the folder stays
                self.write()
            shutil.rmtree(self._work, ignore_errors=True)

    def _runs(self, step: Step) -> bool:
        return self.chosen is None or step.name in self.chosen or step.name == DEVICE

    def _step(self, step: Step, result: StepResult, ends: float, *, again: bool = False) -> None:
        """Run its items; `again`: those that had no time, while there is some."""
        for item, found in zip(step.items, result.items, strict=True):
            if again and (found.state != NO_TIME or self._needs(item) > ends - time.monotonic()):
                continue
            self._item(step, item, found, ends)
            if item.name == FACTS:
                self._take_facts(found)
            judge(self.results, step.name, found)
            self.write()
            if found.seconds or found.state == NO_TIME:
                at = duration(time.monotonic() - self._began)
                print(f"{at:>7}  {step.name} · {headline(self.results, found)}", flush=True)

    def _item(self, step: Step, item: Item, found: ItemResult, ends: float) -> None:
        """Run one item, or say why not."""
        kept = self._kept(step, item)
        if kept is not None:
            vars(found).update(vars(kept))
            return
        if not self._runs(step):
            found.state, found.reason = NOT_CHOSEN, "steps= leaves it out"
            return
        if lacking := self._lacking(item):
            found.state, found.reason = NOT_HERE, lacking
            return
        left, needs = ends - time.monotonic(), self._needs(item)
        if item.name != FACTS and left < needs:
            reason = f"{max(left, 0):.0f} s were left of its step's time"
            found.state, found.reason = NO_TIME, f"{reason}; it takes {needs:.0f} s or more"
            return
        limit = item.limit if item.name == FACTS else min(item.limit, left)
        name = re.sub(r"[^\w.-]+", "-", f"{step.name}-{item.name}").strip("-")
        file, run = self._work / f"{name}.rows", self._work / "runs" / name
        file.unlink(missing_ok=True)  # of its first try
        device = item.on or self.results.device
        started = time.monotonic()
        ended = process.run(
            process.command(item, file, device, limit, run),
            self.folder / "logs" / f"{name}.txt",
            folder=self._work,
            env=process.environment(self.paths, device, all_gpus=item.all_gpus),
            limit=limit,
            own_limit=limit == item.limit,
        )
        found.seconds = time.monotonic() - started
        found.state, found.reason, found.log = ended.state, ended.reason, ended.log
        found.rows = read(file)
        if found.state == OK and any("wrong" in row for row in found.rows):
            found.state, found.reason = WRONG, _first_wrong(found)
        shutil.rmtree(run, ignore_errors=True)

    def _needs(self, item: Item) -> float:
        """Seconds that an item takes at least: as those like it took, or by its limit."""
        took = [
            found.seconds
            for step, result in zip(self.steps, self.results.steps, strict=True)
            for one, found in zip(step.items, result.items, strict=True)
            if found.state == OK and _kind(one) == _kind(item)
        ]
        patience = 1 if self.results.device == CUDA else PATIENCE
        return max(LEAST[self.results.device], min(took, default=item.limit / OF_LIMIT / patience))

    def _kept(self, step: Step, item: Item) -> ItemResult | None:
        """What an earlier check found, where it is not to be measured again."""
        if self.kept is None or step.name == DEVICE or step.name in (self.chosen or ()):
            return None
        items = self.kept.step(step.name).items
        return next((one for one in items if one.name == item.name and one.state in DONE), None)

    def _lacking(self, item: Item) -> str:
        """What an item needs that is not here."""
        there = self.results.facts.get("modules", [])
        corpus = [item.state for item in self.results.step(DEVICE).items if item.name == CORPUS]
        if item.recipe and corpus not in ([], [OK]):
            return "needs the corpus, which was not written"
        for need in item.needs:
            if need == CUDA and self.results.device != CUDA:
                return "needs CUDA"
            if need == SEVERAL:
                if (gpus := self.results.facts.get("gpus", 0)) < 2:
                    return f"needs 2 GPUs, {gpus} here"
            elif need != CUDA and need not in there:
                return f"needs the package {need}, which is not installed"
        return ""

    def _take_facts(self, found: ItemResult) -> None:
        """The first item's row; without it nothing else can run."""
        if found.state != OK or not found.rows:
            raise UserError(f"device: {self.results.device} does not work here: {found.reason}")
        facts = found.rows[0]
        if self.kept is not None and (other := differs(self.kept.facts, facts)):
            print(f"resume: the earlier check was of another {other}; nothing of it is kept")
            self.kept = None
        if lacking := facts.get("lacking"):
            raise UserError(
                f"wheels: {', '.join(lacking)} cannot be imported; put their wheels into a folder"
                " and write wheels=FOLDER (--help says how)"
            )
        self.results.facts = facts

    def write(self) -> None:
        """JSON and page, each whole; a disk that is full is said once and tried again."""
        self.results.seconds = time.monotonic() - self._began
        try:
            atomic_write(self.folder / JSON_NAME, self.results.to_json())
            write_page(self.results, self.folder)
            self._unwritten = ""
        except OSError as error:
            if not self._unwritten:
                room = "; make room there" * (error.errno == errno.ENOSPC)
                print(f"output: {one_line(error)}{room}", file=sys.stderr)
            self._unwritten = one_line(error)

    @property
    def unwritten(self) -> str:
        """Why the last results are not on the disk; empty: they are."""
        return self._unwritten


def _kind(item: Item) -> tuple[str, str, bool]:
    """What items of about the same length have in common."""
    return item.measure, item.recipe, {*COMPILED} <= {*item.overrides}


def time_of(steps: Sequence[Step], left: float) -> float:
    """Seconds for the first of the steps that are left, of so many in all."""
    shares = sum(step.share for step in steps)
    return steps[0].share / shares * max(0.0, left) if shares else 0.0


def _first_wrong(found: ItemResult) -> str:
    wrong = [row for row in found.rows if "wrong" in row]
    name = wrong[0].get("case") or wrong[0].get("test") or wrong[0].get("contender") or ""
    return f"{len(wrong)} of {len(found.rows)} rows: {name}: {wrong[0]['wrong']}"[:300]


def differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What two checks differ in that makes their numbers no longer one check's; empty: nothing."""
    for name in ("gpu", "processor"):
        if before.get(name) != now.get(name):
            return name
    libraries = [facts.get("libraries", {}) for facts in (before, now)]
    for name in ("torch", "git commit"):
        if libraries[0].get(name) != libraries[1].get(name):
            return name
    return ""
