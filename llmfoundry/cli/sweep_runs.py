"""Execution of a sweep (`-m`): its points run one after the other and are compared on a page.

Entry point: `sweep`. Each point runs in its own process, because memory, compiled code and process
groups of a run would leak into the next one. `sweep.json` in the common folder records the finished
points, so that the same command, or one with more values, runs only the missing ones. An
interrupted point resumes like any run. A point runs again if its recipe has changed or its folder
is missing.

Successive halving (Jamieson and Talwalkar, 2016): all points run to the first pause, the better
ones to the next, and so on. Every run has the schedule of its full max_duration, and a pause is
exact (`pause_at`). Points are therefore compared after equal fractions of the same schedule, and
the best run is identical to a run without pauses. Losses at a pause are higher than after a decay
of the learning rate. Only their order matters.
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
from llmfoundry.cli.sweep_advice import advice
from llmfoundry.cli.sweep_points import SweepConfig, SweepPoint
from llmfoundry.command_text import command_line
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import SWEEP_LOCK, one_at_a_time, read_json_if_there, write_json
from llmfoundry.loggers.pages.comparison import DECIDING, ComparedRun, read_run, write_comparison
from llmfoundry.processes import keep_children
from llmfoundry.redaction import public

RECORD = "sweep.json"
END = "null"  # value of pause_at for a run without a pause


@dataclass
class PointExit:
    """Exit status and duration of a point's process."""

    status: int
    seconds: float
    pause: str = END
    """The pause that it reached, as in pause_at."""

    @property
    def words(self) -> str:
        """Return the end in words, for a table."""
        if self.status:
            return f"exit {self.status}"
        return "finished" if self.pause == END else f"paused at {self.pause}"


def sweep(
    points: Sequence[SweepPoint], command: Sequence[str], config: SweepConfig, recipe_type: type
) -> int:
    """Run all points, print a comparison and write its page.

    Args:
        points: points with their overrides.
        command: command before the overrides: interpreter, script and recipe.
        config: how far each point runs.
        recipe_type: dataclass of the points' recipes.

    Returns:
        The number of failed points.

    Raises:
        UserError: another sweep runs in the same folder, or the folder cannot be written.
    """
    keep_children()
    home = _home(points)
    if home is None and config.how == "halving":
        raise UserError("sweep.how: halving keeps its record beside the runs; write a save_folder")
    with _locked(home):
        running = Sweep(points, command, home)
        try:
            running.run_all(config)
        finally:  # also after Ctrl-C
            running.write_page(is_over=True)
    runs = running.read()
    print_runs(runs)
    for line in advice(points, runs, recipe_type, command):
        print(line)
    if running.page is not None:
        print(f"page: {running.page}")
        print(f"the same page again: {command_line('compare', str(home))}")
    return sum(end.status != 0 for end in running.ends.values())


class Sweep:
    """Running sweep.

    Attributes:
        points: the points.
        command: command before the overrides.
        home: common folder of the points; None: there is none.
        ends: end of each point's process, by folder.
        record: content of sweep.json, by folder.
        page: file of the comparison; None: none is written.
    """

    def __init__(
        self, points: Sequence[SweepPoint], command: Sequence[str], home: Path | None
    ) -> None:
        self.points, self.command, self.home = points, command, home
        self.ends: dict[str, PointExit] = {}
        self.record = _read_record(home)
        self.page = _free_page(home)

    def run_all(self, config: SweepConfig) -> None:
        """Run all points to each pause in turn, and select the better ones there."""
        remaining = list(range(len(self.points)))
        for pause in config.rungs(len(self.points)):
            if len(remaining) < len(self.points):
                names = ", ".join(public(self.points[number].place) for number in remaining)
                print(f"{len(remaining)} of {len(self.points)} go on: {names}", flush=True)
            for number in remaining:
                self.run(number, pause)
            if pause != END:
                n_best = max(1, len(remaining) // config.factor)
                remaining = self.better(remaining, pause, n_best)

    def run(self, number: int, pause: str) -> None:
        """Run a point to a pause or to its end, unless an earlier sweep did so."""
        point = self.points[number]
        head = f"[{number + 1}/{len(self.points)}] {public(point.place)}"
        if (end := self._done(point, pause)) is not None:
            print(f"{head}: done before", flush=True)
            self.ends[point.place] = end
            return
        is_training = pause != END or any(end.pause != END for end in self.ends.values())
        more_overrides = [f"pause_at={pause}"] if is_training else []
        if point.place in self.ends:  # resume, in any case
            more_overrides += ["autoresume=true", "save_overwrite=false"]
        print(head + (f" until {pause}" if pause != END else ""), flush=True)
        started = time.monotonic()
        command = [*self.command, *point.overrides, *more_overrides]
        status = _execute(command, self.write_page)
        self.ends[point.place] = PointExit(status, time.monotonic() - started, pause)
        self._record_end(point, pause)

    def _done(self, point: SweepPoint, pause: str) -> PointExit | None:
        """Return the recorded end of a point that has reached the pause before; else None."""
        entry = self._entry(point)
        reached = [name for name in entry["at"] if _share(name) >= _share(pause)]
        if entry["status"] != 0 or not reached:
            return None
        return PointExit(0, float(entry["seconds"]), pause)

    def _entry(self, point: SweepPoint) -> dict[str, Any]:
        """Return the entry of a point in sweep.json; an empty one if its recipe has changed."""
        entry = self.record.get(public(point.place), {})
        is_same = entry.get("recipe") == point.digest and Path(point.place).exists()
        empty = {"status": 1, "seconds": 0.0, "at": {}}
        return empty | entry if is_same else empty

    def _record_end(self, point: SweepPoint, pause: str) -> None:
        """Write the end of a point and its losses at the pause to sweep.json."""
        if self.home is None:
            return
        end, entry = self.ends[point.place], self._entry(point)
        if end.status == 0:
            run = self._read(Path(point.place), point.place, end)
            losses = {name: run.last(name) for name in DECIDING}
            entry["at"][pause] = {
                name: str(value) for name, value in losses.items() if value is not None
            }
        self.record[public(point.place)] = {
            **entry,
            "recipe": point.digest,
            "status": end.status,
            "seconds": round(entry["seconds"] + end.seconds, 1),
        }
        try:
            write_json(self.home / RECORD, {"points": self.record})
        except OSError as error:  # the sweep continues; a later write may succeed
            print(f"{RECORD}: {one_line(error)}; this point will run again", file=sys.stderr)

    def better(self, numbers: Sequence[int], pause: str, count: int) -> list[int]:
        """Select the points that continue after a pause.

        These are the `count` points with the lowest loss, and points that an earlier sweep has
        continued. Points that failed or have a loss that is not finite are left out.

        Args:
            numbers: numbers of the paused points.
            pause: the pause.
            count: number of best points.

        Returns:
            The numbers of the selected points, in order.
        """
        # points that an earlier sweep has continued
        succeeded = [n for n in numbers if self.ends[self.points[n].place].status == 0]
        entries = {n: self._entry(self.points[n])["at"] for n in succeeded}
        here = _share(pause)
        continued = {n for n, at in entries.items() if max(map(_share, at), default=0.0) > here}

        # the best by the first metric that all have
        losses = {n: at[pause] for n, at in entries.items() if pause in at}
        common = [name for name in DECIDING if all(name in of_n for of_n in losses.values())]
        values = {n: float(of_n[common[0]]) for n, of_n in losses.items() if common}
        finite = [n for n, value in values.items() if math.isfinite(value)]
        best = sorted(finite, key=lambda n: values[n])[:count]
        return sorted({*continued, *best})

    def read(self) -> list[ComparedRun]:
        """Read the results of all points, including failed and unstarted ones."""
        folders = [Path(point.place) for point in self.points]
        runs = []
        for folder, name, point in zip(folders, run_names(folders), self.points, strict=True):
            runs.append(self._read(folder, name, self.ends.get(point.place)))
        return runs

    def _read(self, folder: Path, name: str, end: PointExit | None) -> ComparedRun:
        """Read the result of a point; without a readable run it has no metrics."""
        exists = self.home is not None and folder.is_dir()
        status = "not begun" if end is None else end.words
        result = ComparedRun(folder, public(name), status, [], {})
        if exists:
            try:
                run = read_run(folder, public(name), is_held=is_held(folder))
            except UserError as error:
                result.status += f", cannot be read: {error.problems[0]}"
            else:
                result = run
                result.status = status if end is not None else run.status
        return result

    def write_page(self, *, is_over: bool = False) -> None:
        """Write the comparison page of the results so far, if there is a page."""
        if self.page is None:
            return
        runs = self.read()
        try:
            write_comparison(self.page, runs, follows=not is_over)
        except OSError as error:
            print(f"{self.page}: {one_line(error)}; the sweep continues", file=sys.stderr)


def _share(pause: str) -> float:
    """Return the fraction of the run at a pause."""
    return 1.0 if pause == END else float(pause.removesuffix("dur"))


def _home(points: Sequence[SweepPoint]) -> Path | None:
    """Return the local folder that all points have in common; None if there is none."""
    homes = {point.home for point in points}
    if "" in homes or any("://" in home for home in homes):
        return None
    if len(homes) == 1:
        return Path(*homes)
    common = os.path.commonpath([os.path.abspath(home) for home in homes])
    return None if common in ("/", os.getcwd()) else Path(common)


def _locked(home: Path | None) -> AbstractContextManager[None]:
    """Lock the folder of a sweep; the lock also tells readers of the page that the sweep runs."""
    if home is None:
        return nullcontext()
    return one_at_a_time(
        home / SWEEP_LOCK,
        key="-m",
        busy="another sweep is at work there; wait, or write a run_name",
        instead="write another save_folder",
    )


def _read_record(home: Path | None) -> dict[str, dict[str, Any]]:
    """Read sweep.json: entries of points that ran before, by folder.

    Raises:
        UserError: the file cannot be read.
    """
    if home is None:
        return {}
    try:
        record = read_json_if_there(home / RECORD)
        points = record.get("points", {})
        return {str(place): _checked_point(point) for place, point in points.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UserError(
            f"{home / RECORD}: cannot be read: {one_line(error)}; restore it, or delete it, and"
            " every point runs again"
        ) from error


def _checked_point(point: dict[str, Any]) -> dict[str, Any]:
    """Check an entry of sweep.json, as `Sweep._record_end` writes it; drop other keys."""
    at = {pause: dict(losses) for pause, losses in point["at"].items()}
    for pause, losses in at.items():
        _share(pause)
        for value in losses.values():
            float(value)
    seconds = float(point["seconds"])
    return {"recipe": point["recipe"], "status": int(point["status"]), "seconds": seconds, "at": at}


def _free_page(home: Path | None) -> Path | None:
    """Return the file of the page; None, with a warning, if another program's file is there."""
    if home is None:
        return None
    try:
        refuse_page(home / INDEX)
    except UserError as error:
        print(f"no page is written: {error.problems[0]}", file=sys.stderr)
        return None
    return home / INDEX


def _execute(arguments: list[str], meanwhile: Callable[[], None]) -> int:
    """Run a process to its end and return its exit status.

    Ctrl-C and SIGTERM are forwarded to the process. It is waited for, so that it can save a
    checkpoint.

    Args:
        arguments: command line.
        meanwhile: called every SECONDS.
    """
    signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def terminate(number: int, _: object) -> None:
        signals.append(number)
        if process is not None:  # else the process is terminated as soon as it has started
            process.terminate()
            sys.exit(128 + number)

    # install the handler before the process starts, so that no signal is lost
    previous_handler = signal.signal(signal.SIGTERM, terminate)
    try:
        process = subprocess.Popen(arguments)
        if signals:
            terminate(signals[0], None)
        while True:
            try:
                return process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                meanwhile()
    finally:
        if process is not None:
            process.wait()
        signal.signal(signal.SIGTERM, previous_handler)
