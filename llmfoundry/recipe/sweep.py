"""`-m`: every combination of the listed values as a run, in a process and a folder of its own.

Points run one after the other; a process each, because memory, compiled code and process groups of
one run would leak into the next. All points are checked before the first starts.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.processes import keep_children
from llmfoundry.recipe.command_line import CommandLine, choices, command_line, key_and_text
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import find_recipe, group_options, search_folders
from llmfoundry.recipe.schema import Schema
from llmfoundry.redaction import public_override

# Fields that name where a run writes: each point's gets its own last part.
_PLACES = ("run_name", "save_folder", "output")
_METRICS = {
    "loss/train/total": "loss",
    "metrics/train/bits_per_byte": "bits/byte",
    "metrics/eval/bits_per_byte": "held-out bits/byte",
}
"""Of metrics.jsonl, those that the table shows, and how it calls them."""


@dataclass
class SweepPoint:
    """One run of a sweep."""

    place: str
    """The folder that it writes to; only its own values where the recipe names none."""
    overrides: list[str]
    status: int = 0
    seconds: float = 0


def sweep(recipe_type: type, command: CommandLine) -> int:
    """Run all points of `command` and print a table of what became of them; how many failed.

    Raises:
        UserError: nothing is listed, a point's recipe has problems, or torchrun is in charge.
    """
    if "RANK" in os.environ:
        raise UserError("-m: starts processes of its own; run it without torchrun")
    keep_children()
    points = sweep_points(recipe_type, command)
    recipe = [] if command.recipe is None else [command.recipe]
    if "--dry-run" in command.flags:
        print(*(point.place for point in points), sep="\n")
        print(f"dry run: {len(points)} runs were checked; nothing was written or started")
        return 0
    for number, point in enumerate(points, 1):
        print(f"[{number}/{len(points)}] {point.place}", flush=True)
        started = time.monotonic()
        point.status = _execute([sys.executable, sys.argv[0], *recipe, *point.overrides])
        point.seconds = time.monotonic() - started
    print(_table(points))
    together = os.path.commonpath([point.place for point in points])
    if len(points) > 1 and os.path.isdir(together):
        print(f"side by side: {command_line('compare', together)}")
    return sum(point.status != 0 for point in points)


def sweep_points(recipe_type: type, command: CommandLine) -> list[SweepPoint]:
    """The combinations in order, the last key fastest, each checked and given places to write.

    Raises:
        UserError: nothing is listed, or points' recipes have problems.
    """
    path = None if command.recipe is None else find_recipe(command.recipe)
    groups = group_options(search_folders(path), Schema.of(recipe_type))
    lists = [dict.fromkeys(choices(word, groups)) for word in command.overrides]
    if all(len(options) < 2 for options in lists):
        raise UserError("-m: nothing to sweep; list values as in optimizer.lr=1e-3,3e-4 or drop -m")
    points: dict[str, SweepPoint] = {}
    problems: dict[str, None] = {}
    for combination in itertools.product(*lists):
        own = [word for word, options in zip(combination, lists, strict=True) if len(options) > 1]
        try:
            recipe: Any = checked(recipe_type, command.recipe, combination)
        except UserError as error:
            problems |= dict.fromkeys(
                f"{','.join(map(public_override, own))}: {line}" for line in error.problems
            )
            continue
        point = _placed(recipe, combination, own, points)
        points[point.place] = point
    if problems:
        raise UserError(*problems)
    return list(points.values())


def _placed(
    recipe: Any, combination: tuple[str, ...], own: list[str], taken: dict[str, SweepPoint]
) -> SweepPoint:
    """The point of `combination`, its `own` words made the last part of the places it writes to."""
    words = [word for word in own if key_and_text(word)[0] not in _PLACES]
    homes = {key: getattr(recipe, key) for key in _PLACES if getattr(recipe, key, None)}
    base = list(homes.values())[-1:]
    for number in itertools.count(1):
        # Values that differ only in characters no folder can have get a number.
        ending = _folder_name(words) + (f".{number}" if number > 1 else "")
        place = "/".join([*base, *([ending] if ending else [])])
        if place not in taken:
            break
    moved = [f"{key}={home}/{ending}" for key, home in homes.items() if ending]
    return SweepPoint(place, [*combination, *moved])


def _folder_name(words: list[str]) -> str:
    """`optimizer.lr=1e-3,seed=1`, without characters that a path cannot hold."""
    return re.sub(r"[^\w.,=+-]+", "-", ",".join(map(public_override, words)))[:150]


def _execute(arguments: list[str]) -> int:
    """Run a process to its end; after Ctrl-C or SIGTERM, which it gets too, it may still save."""
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
        return process.wait()
    finally:
        if process is not None:
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _table(points: list[SweepPoint]) -> str:
    """A line for each point: how it ended, its last metrics, and `best` at the least of them.

    The least held-out bits per byte decide; where a point has none those of training, else the
    loss, which compares only where the tokenizer is the same.
    """
    found = [_last_metrics(Path(point.place) / "metrics.jsonl") for point in points]
    shown = [name for name in _METRICS if any(name in metrics for metrics in found)]
    ended = [n for n, point in enumerate(points) if point.status == 0 and found[n]]
    common = [name for name in shown if ended and all(name in found[n] for n in ended)]
    decides = common[-1] if common else ""
    best = min(ended, key=lambda n: found[n][decides]) if decides and len(ended) > 1 else None
    heads = [f"{_METRICS[name]:>{_width(name)}}" for name in shown]
    lines = ["  ".join([f"{'status':>8}", f"{'time':>8}", *heads, "point"])]
    for n, point in enumerate(points):
        status = "ok" if point.status == 0 else f"exit {point.status}"
        minutes, seconds = divmod(round(point.seconds), 60)
        numbers = [f"{_number(found[n].get(name)):>{_width(name)}}" for name in shown]
        place = f"{point.place}  best" if n == best else point.place
        lines.append("  ".join([f"{status:>8}", f"{minutes:>5}:{seconds:02}", *numbers, place]))
    if best is not None:
        lines.append(f"best: the least {_METRICS[decides]}, at the end of each run")
    return "\n".join(lines)


def _width(name: str) -> int:
    return max(len(_METRICS[name]), 8)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _last_metrics(path: Path) -> dict[str, float]:
    """Each metric of `_METRICS` at the end of a run's record, but for those that are not finite."""
    found: dict[str, float] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if isinstance(row, dict):
            for name in _METRICS:
                if isinstance(value := row.get(name), int | float):
                    found[name] = float(value)
    return {name: value for name, value in found.items() if math.isfinite(value)}
