"""`-m` of every script: the points run one after the other, and stand side by side on a page.

A process each, because memory, compiled code and process groups of one run would leak into the
next. In the folder that the points share, `sweep.json` keeps which of them are done, so that the
same command, or one with more values, runs only what is missing; what was cut off in the middle
resumes as any run does. Whose recipe has changed since, or whose folder is gone, runs again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.commands.compare import (
    INDEX,
    SECONDS,
    is_held,
    print_runs,
    refuse_page,
    run_names,
)
from llmfoundry.errors import UserError, one_line
from llmfoundry.files import SWEEP_LOCK, read_json_if_there, try_lock, write_json
from llmfoundry.loggers.pages.comparison import ComparedRun, read_run, write_comparison
from llmfoundry.processes import keep_children
from llmfoundry.recipe.command_line import command_line
from llmfoundry.recipe.sweep import SweepPoint
from llmfoundry.redaction import public

RECORD = "sweep.json"


@dataclass
class PointEnd:
    """How a point's process ended."""

    status: int
    seconds: float


def sweep(points: Sequence[SweepPoint], command: Sequence[str]) -> int:
    """Run all points, and print and draw what became of them; how many failed.

    Args:
        points: each with its overrides.
        command: what they follow: the interpreter, the script, and the recipe.

    Raises:
        UserError: another sweep is at work in the same folder, or it cannot be written.
    """
    keep_children()
    home = _home(points)
    with _held(home):
        going = Sweep(points, command, home)
        for number in range(len(points)):
            going.run(number)
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
        self.ends: dict[str, PointEnd] = {}
        self.record = _read_record(home)
        self.page = _free_page(home)

    def run(self, number: int) -> None:
        """Run a point to its end, unless it is done."""
        point = self.points[number]
        head = f"[{number + 1}/{len(self.points)}] {public(point.place)}"
        if (end := self._done(point)) is not None:
            print(f"{head}: done before", flush=True)
            self.ends[point.place] = end
            return
        print(head, flush=True)
        started = time.monotonic()
        status = _execute([*self.command, *point.overrides], self.write_page)
        self.ends[point.place] = PointEnd(status, time.monotonic() - started)
        self._keep(point)

    def _done(self, point: SweepPoint) -> PointEnd | None:
        kept = self.record.get(public(point.place), {})
        if kept.get("status") != 0 or kept.get("recipe") != point.digest:
            return None
        return PointEnd(0, float(kept.get("seconds", 0))) if Path(point.place).exists() else None

    def _keep(self, point: SweepPoint) -> None:
        if self.home is None:
            return
        end = self.ends[point.place]
        self.record[public(point.place)] = {
            "recipe": point.digest,
            "status": end.status,
            "seconds": round(end.seconds, 1),
        }
        try:
            write_json(self.home / RECORD, {"points": self.record})
        except OSError as error:  # the next may have room again
            print(f"{RECORD}: {one_line(error)}; this point will run again", file=sys.stderr)

    def read(self) -> list[ComparedRun]:
        """What is known of each point, those that failed or have not begun too."""
        folders = [Path(point.place) for point in self.points]
        ends = [self.ends.get(point.place) for point in self.points]
        known = zip(folders, run_names(folders), ends, strict=True)
        return [self._read(*one) for one in known]

    def _read(self, folder: Path, name: str, end: PointEnd | None) -> ComparedRun:
        is_there = self.home is not None and folder.is_dir()
        status = "not begun" if end is None else f"exit {end.status}" if end.status else "finished"
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
            print(f"{self.page}: {one_line(error)}; the sweep goes on", file=sys.stderr)


def _home(points: Sequence[SweepPoint]) -> Path | None:
    """The folder on this machine that all points share; None: there is none."""
    homes = {point.home for point in points}
    if "" in homes or any("://" in home for home in homes):
        return None
    if len(homes) == 1:
        return Path(*homes)
    together = os.path.commonpath([os.path.abspath(home) for home in homes])
    return None if together in ("/", os.getcwd()) else Path(together)


@contextmanager
def _held(home: Path | None) -> Iterator[None]:
    """One sweep at a time in a folder; who follows its page sees that it goes on."""
    if home is None:
        yield
        return
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = try_lock(home / SWEEP_LOCK, mode=0o644)
    except OSError as error:
        raise UserError(f"-m: {home}: {one_line(error)}; write another save_folder") from error
    if lock is None:
        raise UserError(f"-m: {home}: another sweep is at work there; wait, or write a run_name")
    with lock:
        yield


def _read_record(home: Path | None) -> dict[str, dict[str, Any]]:
    """The points that were run before, by place."""
    if home is None:
        return {}
    try:
        found = read_json_if_there(home / RECORD)
        points = found.get("points", {})
        return {str(place): dict(point) for place, point in points.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"{home / RECORD}: cannot be read: {one_line(error)}; restore it, or delete it, and"
            " every point runs again"
        ) from error


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
