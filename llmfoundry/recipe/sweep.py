"""`-m`: every combination of the listed values as a run; which they are, and where each writes.

All points are checked before the first starts; `commands/sweep.py` runs them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.command_line import CommandLine, choices, key_and_text
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import find_recipe, group_options, search_folders
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.typed import to_yaml
from llmfoundry.redaction import public_override

# Fields that name where a run writes: each point's gets its own last part.
_PLACES = ("run_name", "save_folder", "output")


@dataclass
class SweepPoint:
    """One run of a sweep."""

    place: str
    """The folder that it writes to; only its own values where the recipe names none."""
    overrides: list[str]
    home: str = ""
    """The folder in which `place` is a part; empty: the recipe names none."""
    digest: str = ""
    """Of the whole recipe: the same point of a later sweep has the same."""


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
    digest = hashlib.sha256(to_yaml(recipe, resolve=True).encode()).hexdigest()[:16]
    return SweepPoint(place, [*combination, *moved], "".join(base), digest)


def _folder_name(words: list[str]) -> str:
    """`optimizer.lr=1e-3,seed=1`, without characters that a path cannot hold."""
    return re.sub(r"[^\w.,=+-]+", "-", ",".join(map(public_override, words)))[:150]
