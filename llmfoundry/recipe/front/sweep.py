"""`-m`: every combination of the listed values as a run, in a process and a folder of its own.

Points run one after the other; a process each, because memory, compiled code and process groups of
one run would leak into the next. All points are checked before the first starts.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.masking import public_override
from llmfoundry.processes import keep_children
from llmfoundry.recipe.front.argv import CommandLine
from llmfoundry.recipe.front.grammar import choices, key_and_text
from llmfoundry.recipe.front.load import checked
from llmfoundry.recipe.front.paths import find_recipe, group_options, search_folders
from llmfoundry.recipe.schema import Schema

# Fields that name where a run writes: each point's gets its own last part.
_PLACES = ("run_name", "save_folder", "output")


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
    points = _points(recipe_type, command)
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
    return sum(point.status != 0 for point in points)


def _points(recipe_type: type, command: CommandLine) -> list[SweepPoint]:
    """The combinations in order, the last key fastest, each checked and given places to write."""
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
        if process is not None:  # or it is told as soon as it is there
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
    lines = [f"{'status':>8}  {'time':>8}  point"]
    for point in points:
        status = "ok" if point.status == 0 else f"exit {point.status}"
        minutes, seconds = divmod(round(point.seconds), 60)
        lines.append(f"{status:>8}  {minutes:>5}:{seconds:02}  {point.place}")
    return "\n".join(lines)
