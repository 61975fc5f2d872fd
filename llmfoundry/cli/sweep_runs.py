"""`-m` of every script: the points run one after the other, and stand side by side on a page.

A process each, because memory, compiled code and process groups of one run would leak into the
next. In the folder that the points share, `sweep.json` keeps which of them are done, so that the
same command, or one with more values, runs only what is missing; what was cut off in the middle
resumes as any run does. Whose recipe has changed since, or whose folder is gone, runs again.

Halving: all points run to the first pause, the better of them from there to the next, and so on
(Jamieson and Talwalkar, 2016). Every run keeps the schedule of its whole max_duration, and a pause
is exact (`pause_at`), so points are compared after equal shares of the same schedule, and the
winner is the run that it would have been alone. With a learning rate that is still high a loss is
above what its decay would make of it: what is compared is the order of such losses.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.cli.commands.compare import (
    INDEX,
    SECONDS,
    is_held,
    print_runs,
    refuse_page,
    run_names,
)
from llmfoundry.cli.sweep_points import SweepConfig, SweepPoint
from llmfoundry.command_text import command_line
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import SWEEP_LOCK, one_at_a_time, read_json_if_there, write_json
from llmfoundry.loggers.pages.comparison import DECIDING, ComparedRun, read_run, write_comparison
from llmfoundry.processes import keep_children
from llmfoundry.redaction import public

RECORD = "sweep.json"
END = "null"  # of pause_at: a run goes to its end


@dataclass
class PointExit:
    """How a point's process ended."""

    status: int
    seconds: float
    pause: str = END
    """Where it was paused, as pause_at has it."""

    @property
    def words(self) -> str:
        """For a table."""
        if self.status:
            return f"exit {self.status}"
        return "finished" if self.pause == END else f"paused at {self.pause}"


def sweep(points: Sequence[SweepPoint], command: Sequence[str], config: SweepConfig) -> int:
    """Run all points, and print and draw what became of them; how many failed.

    Args:
        points: each with its overrides.
        command: what they follow: the interpreter, the script, and the recipe.
        config: how far each of them runs.

    Raises:
        UserError: another sweep is at work in the same folder, or it cannot be written.
    """
    keep_children()
    home = _home(points)
    if home is None and config.how == "halving":
        raise UserError("sweep.how: halving keeps its record beside the runs; write a save_folder")
    with _held(home):
        going = Sweep(points, command, home)
        try:
            going.run_all(config)
        finally:  # after Ctrl-C too
            going.write_page(is_over=True)
    print_runs(going.read())
    if going.page is not None:
        print(f"page: {going.page}")
        print(f"the same page again: {command_line('compare', str(home))}")
    return sum(end.status != 0 for end in going.ends.values())


class Sweep:
    """A sweep under way."""

    def __init__(
        self, points: Sequence[SweepPoint], command: Sequence[str], home: Path | None
    ) -> None:
        self.points, self.command, self.home = points, command, home
        self.ends: dict[str, PointExit] = {}
        self.record = _read_record(home)
        self.page = _free_page(home)

    def run_all(self, config: SweepConfig) -> None:
        """Run every point to its end, or all to a pause and those that are better on."""
        kept = list(range(len(self.points)))
        for pause in config.rungs(len(self.points)):
            if len(kept) < len(self.points):
                names = ", ".join(public(self.points[number].place) for number in kept)
                print(f"{len(kept)} of {len(self.points)} go on: {names}", flush=True)
            for number in kept:
                self.run(number, pause)
            if pause != END:
                kept = self.better(kept, pause, max(1, len(kept) // config.factor))

    def run(self, number: int, pause: str) -> None:
        """Run a point to a pause or its end, unless it has come as far before."""
        point = self.points[number]
        head = f"[{number + 1}/{len(self.points)}] {public(point.place)}"
        if (end := self._done(point, pause)) is not None:
            print(f"{head}: done before", flush=True)
            self.ends[point.place] = end
            return
        is_training = pause != END or any(end.pause != END for end in self.ends.values())
        more = [f"pause_at={pause}"] if is_training else []
        if point.place in self.ends:  # or it would begin again
            more += ["autoresume=true", "save_overwrite=false"]
        print(head + (f" until {pause}" if pause != END else ""), flush=True)
        started = time.monotonic()
        status = _execute([*self.command, *point.overrides, *more], self.write_page)
        self.ends[point.place] = PointExit(status, time.monotonic() - started, pause)
        self._keep(point, pause)

    def _done(self, point: SweepPoint, pause: str) -> PointExit | None:
        kept = self._kept(point)
        passed = [name for name in kept["at"] if _share(name) >= _share(pause)]
        if kept["status"] != 0 or not passed:
            return None
        return PointExit(0, float(kept["seconds"]), pause)

    def _kept(self, point: SweepPoint) -> dict[str, Any]:
        """What the record has of a point as it is now."""
        kept = self.record.get(public(point.place), {})
        is_same = kept.get("recipe") == point.digest and Path(point.place).exists()
        nothing = {"status": 1, "seconds": 0.0, "at": {}}
        return nothing | kept if is_same else nothing

    def _keep(self, point: SweepPoint, pause: str) -> None:
        """Record how far a point has come, and its losses there."""
        if self.home is None:
            return
        end, kept = self.ends[point.place], self._kept(point)
        if end.status == 0:
            run = self._read(Path(point.place), point.place, end)
            losses = {name: run.last(name) for name in DECIDING}
            kept["at"][pause] = {
                name: str(value) for name, value in losses.items() if value is not None
            }
        self.record[public(point.place)] = {
            **kept,
            "recipe": point.digest,
            "status": end.status,
            "seconds": round(kept["seconds"] + end.seconds, 1),
        }
        try:
            write_json(self.home / RECORD, {"points": self.record})
        except OSError as error:  # the next may have room again
            print(f"{RECORD}: {one_line(error)}; this point will run again", file=sys.stderr)

    def better(self, numbers: Sequence[int], pause: str, count: int) -> list[int]:
        """Of points that were paused, the `count` with the least of what all have, in order.

        One that an earlier sweep has taken further goes on in any case. One that failed, or whose
        loss is not finite, does not.
        """
        ended = [n for n in numbers if self.ends[self.points[n].place].status == 0]
        kept = {n: self._kept(self.points[n])["at"] for n in ended}
        here = _share(pause)
        further = {n for n, at in kept.items() if max(map(_share, at), default=0.0) > here}
        losses = {n: at[pause] for n, at in kept.items() if pause in at}
        common = [name for name in DECIDING if all(name in one for one in losses.values())]
        values = {n: float(one[common[0]]) for n, one in losses.items() if common}
        finite = [n for n, value in values.items() if math.isfinite(value)]
        best = sorted(finite, key=lambda n: values[n])[:count]
        return sorted({*further, *best})

    def read(self) -> list[ComparedRun]:
        """What is known of each point, those that failed or have not begun too."""
        folders = [Path(point.place) for point in self.points]
        ends = [self.ends.get(point.place) for point in self.points]
        known = zip(folders, run_names(folders), ends, strict=True)
        return [self._read(*one) for one in known]

    def _read(self, folder: Path, name: str, end: PointExit | None) -> ComparedRun:
        is_there = self.home is not None and folder.is_dir()
        status = "not begun" if end is None else end.words
        found = ComparedRun(folder, public(name), status, [], {})
        if is_there:
            try:
                read = read_run(folder, public(name), is_held=is_held(folder))
            except UserError as error:
                found.status += f", cannot be read: {error.problems[0]}"
            else:
                found = read
                found.status = status if end is not None else read.status
        return found

    def write_page(self, *, is_over: bool = False) -> None:
        """Lay over one another what there is; without a page to write nothing happens."""
        if self.page is None:
            return
        runs = self.read()
        try:
            write_comparison(self.page, runs, follows=not is_over)
        except OSError as error:
            print(f"{self.page}: {one_line(error)}; the sweep continues", file=sys.stderr)


def _share(pause: str) -> float:
    """Of the run, where it pauses."""
    return 1.0 if pause == END else float(pause.removesuffix("dur"))


def _home(points: Sequence[SweepPoint]) -> Path | None:
    """The folder on this machine that all points share; None: there is none."""
    homes = {point.home for point in points}
    if "" in homes or any("://" in home for home in homes):
        return None
    if len(homes) == 1:
        return Path(*homes)
    together = os.path.commonpath([os.path.abspath(home) for home in homes])
    return None if together in ("/", os.getcwd()) else Path(together)


def _held(home: Path | None) -> AbstractContextManager[None]:
    """One sweep at a time in a folder; who follows its page sees that it goes on."""
    if home is None:
        return nullcontext()
    return one_at_a_time(
        home / SWEEP_LOCK,
        key="-m",
        busy="another sweep is at work there; wait, or write a run_name",
        instead="write another save_folder",
    )


def _read_record(home: Path | None) -> dict[str, dict[str, Any]]:
    """The points that were run before, by place."""
    if home is None:
        return {}
    try:
        found = read_json_if_there(home / RECORD)
        points = found.get("points", {})
        return {str(place): _checked_point(point) for place, point in points.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(
            f"{home / RECORD}: cannot be read: {one_line(error)}; restore it, or delete it, and"
            " every point runs again"
        ) from error


def _checked_point(point: dict[str, Any]) -> dict[str, Any]:
    """What `Sweep._keep` writes of a point, and nothing else."""
    at = {pause: dict(losses) for pause, losses in point["at"].items()}
    for pause, losses in at.items():
        _share(pause)
        for value in losses.values():
            float(value)
    seconds = float(point["seconds"])
    return {"recipe": point["recipe"], "status": int(point["status"]), "seconds": seconds, "at": at}


def _free_page(home: Path | None) -> Path | None:
    """Where the page goes; None, and a line, where a file of somebody else's is."""
    if home is None:
        return None
    try:
        refuse_page(home / INDEX)
    except UserError as error:
        print(f"no page is written: {error.problems[0]}", file=sys.stderr)
        return None
    return home / INDEX


def _execute(arguments: list[str], meanwhile: Callable[[], None]) -> int:
    """Run a process to its end; after Ctrl-C or SIGTERM, which it gets too, it may still save.

    `meanwhile` is called every SECONDS.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def terminate(number: int, _: object) -> None:
        asked.append(number)
        if process is not None:  # or it is notified as soon as it is there
            process.terminate()
            sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)  # first: the point may be stopped at once
    try:
        process = subprocess.Popen(arguments)
        if asked:
            terminate(asked[0], None)
        while True:
            try:
                return process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                meanwhile()
    finally:
        if process is not None:
            process.wait()
        signal.signal(signal.SIGTERM, before)
