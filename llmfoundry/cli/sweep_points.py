"""`-m`: combinations of the listed values as runs; which they are, and where each writes.

All points are checked before the first starts; `sweep_runs.py` runs them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from llmfoundry.cli.command_line import CommandLine
from llmfoundry.errors import UserError
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.overrides import key_and_text, parse_value
from llmfoundry.recipe.paths import find_recipe, group_options, search_folders
from llmfoundry.recipe.schema import Only, Range, Schema, check_fields, choice
from llmfoundry.recipe.typed import to_yaml
from llmfoundry.redaction import public_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import IntervalSweep

# Fields that name where a run writes: each point's gets its own last part.
_PLACES = ("run_name", "save_folder", "output")

MOST_POINTS = 10_000
"""Runs of a sweep."""


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


HOW = {
    "grid": "every combination",
    "random": "n combinations, drawn",
    "halving": "those of a grid, or n that are drawn; all are paused on the way, the best go on",
}
MOST_TRIES = 100  # draws for each point, where combinations are few


@dataclass
class SweepConfig:
    """Which points a sweep has, and how far each runs; no part of their recipes."""

    how: Annotated[str, choice(HOW)] = "grid"
    """grid: every combination. random: n that are drawn. halving: successive halving, of n that are
    drawn, or of the grid."""
    n: Annotated[int | None, Range(1, MOST_POINTS), Only("how", ("random", "halving"))] = None
    """Number of sampled points. A larger number continues the same sequence."""
    seed: Annotated[int, Range(0)] = 17
    """Of the draws."""
    factor: Annotated[int, Range(2), Only("how", "halving")] = 3
    """One in this many points continues, for this many times as long. 3: Li et al. (2018)."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields("sweep.", self)
        if self.how == "random" and self.n is None:
            yield "sweep.n: is missing; write how many points are drawn, such as sweep.n=8"

    def rungs(self, n: int) -> list[str]:
        """Where `n` points pause, as pause_at has it, and `null` for the last.

        Raises:
            UserError: they would never pause.
        """
        if self.how != "halving":
            return ["null"]
        n_rungs = 1
        while self.factor**n_rungs <= n:
            n_rungs += 1
        if n_rungs == 1:
            raise UserError(
                f"sweep.factor: one of {self.factor} would go on, but there are only {n} points;"
                " write more points, or a smaller factor"
            )
        shares = (self.factor ** (rung - n_rungs + 1) for rung in range(n_rungs - 1))
        return [*(f"{share:.10g}dur" for share in shares), "null"]


@dataclass
class SweepRecipe:
    """What of a command line is its sweep's."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Which points (sweep=random is sweep.how=random)."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from self.sweep.check()


def is_sweeps(word: str) -> bool:
    """Whether an override is the sweep's own, and of no recipe."""
    return word.startswith(("sweep=", "sweep."))


def sweep_config(command: CommandLine) -> SweepConfig:
    """The sweep's own words, taken out of a command line.

    Raises:
        UserError: they have problems.
    """
    words = [word for word in command.overrides if is_sweeps(word)]
    command.overrides = [word for word in command.overrides if not is_sweeps(word)]
    written = [re.sub("^sweep=", "sweep.how=", word) for word in words]
    return checked(SweepRecipe, None, written).sweep


def sweep_points(recipe_type: type, command: CommandLine, config: SweepConfig) -> list[SweepPoint]:
    """The combinations in order, each checked and given places to write.

    Raises:
        UserError: nothing is listed, or points' recipes have problems.
    """
    path = None if command.recipe is None else find_recipe(command.recipe)
    schema = Schema.of(recipe_type)
    if config.how == "halving" and "pause_at" not in schema.keys:
        raise UserError("sweep.how: halving is for training runs, which can pause; write random")
    groups = group_options(search_folders(path), schema)
    points: dict[str, SweepPoint] = {}
    problems: dict[str, None] = {}
    combinations, is_swept = _combinations(command.overrides, groups, config)
    for combination in combinations:
        own = [word for word, varies in zip(combination, is_swept, strict=True) if varies]
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
    config.rungs(len(points))
    if config.how == "halving" and any("://" in point.home for point in points.values()):
        raise UserError(
            "save_folder: halving keeps its record beside the runs; write a folder of this machine,"
            " or sweep=random"
        )
    return list(points.values())


def _combinations(
    words: Sequence[str], groups: dict[str, list[str]], config: SweepConfig
) -> tuple[list[tuple[str, ...]], list[bool]]:
    """The points' overrides, of a grid the last key fastest, and which of the words vary."""
    if config.n is None:
        lists = [list(dict.fromkeys(choices(word, groups))) for word in words]
        is_swept = [len(options) > 1 for options in lists]
        found = list(itertools.islice(itertools.product(*lists), MOST_POINTS + 1))
        if len(found) > MOST_POINTS:
            raise UserError(f"-m: more than {MOST_POINTS:,} points; write fewer values")
    else:
        is_swept = [is_interval(word) or len({*choices(word, groups)}) > 1 for word in words]
        found = _drawn(words, is_swept, groups, config) if any(is_swept) else []
    if not any(is_swept):
        raise UserError("-m: nothing to sweep; list values as in optimizer.lr=1e-3,3e-4 or drop -m")
    return found, is_swept


def _drawn(
    words: Sequence[str],
    is_swept: Sequence[bool],
    groups: dict[str, list[str]],
    config: SweepConfig,
) -> list[tuple[str, ...]]:
    """N different combinations: a draw depends on the seed, the key and its number alone.

    Raises:
        UserError: there are not as many.
    """
    n, found = config.n or 0, dict[tuple[str, ...], None]()
    for number in range(MOST_TRIES * n):
        point = tuple(
            draw(word, groups, _uniform(f"{config.seed}/{key_and_text(word)[0]}/{number}"))
            if varies
            else word
            for word, varies in zip(words, is_swept, strict=True)
        )
        found[point] = None
        if len(found) == n:
            return list(found)
    raise UserError(
        f"sweep.n: {n}, but no more than {len(found)} different points were found; write at most"
        " that, or sweep=grid for all"
    )


def _uniform(name: str) -> float:
    """From 0 to below 1, the same in every release of Python."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


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


def choices(override: str, groups: dict[str, list[str]]) -> list[str]:
    """The overrides that `key=a,b` or `key=range(1,4)` stands for in a sweep; itself, if only one.

    Raises:
        UserError: it is a kind of sweep that has no end.
    """
    from hydra.core.override_parser.types import Glob, RangeSweep
    from hydra.errors import HydraException

    key, text = key_and_text(override)
    parsed = None if override.startswith("~") else parse_value(text)
    if parsed is None or not parsed.is_sweep_override():
        return [override]
    swept = parsed._value
    if isinstance(swept, RangeSweep) and swept.step:
        start, stop = float(swept.start or 0), float(swept.stop or 0)
        if not abs(stop - start) <= MOST_POINTS * abs(swept.step):
            raise UserError(f"{override}: has more than {MOST_POINTS:,} points; write fewer")
    if isinstance(swept, Glob):
        return [f"{key}={option}" for option in parsed._value.filter(groups.get(key, []))]
    try:
        return [f"{key}={element}" for element in parsed.sweep_string_iterator()]
    except HydraException as error:
        raise UserError(
            f"{override}: cannot be listed; write {key}=a,b or a range(), or draw from it,"
            " sweep=random sweep.n=8"
        ) from error


def draw(override: str, groups: dict[str, list[str]], at: float) -> str:
    """One of what `override` stands for, of an interval too, at a share from 0 to below 1.

    `interval(a,b)` is even, `tag(log,interval(a,b))` even in the logarithm, `int(interval(a,b))` of
    whole numbers, both ends among them. Floats have four digits, as folders are named after them.

    Raises:
        UserError: an interval that is none.
    """
    key, swept = key_and_text(override)[0], _interval(override)
    if swept is None:
        options = list(dict.fromkeys(choices(override, groups)))
        return options[int(at * len(options))]
    low, high, is_log = swept.start, swept.end, "log" in swept.tags
    if low is None or high is None or not low < high or (is_log and low <= 0):
        ends = "0 < a < b" if is_log else "a < b"
        raise UserError(f"{override}: is no interval; write interval(a,b) with {ends}")
    if is_int := isinstance(low, int):
        low, high = low - 0.5 * (not is_log), high + (1 if is_log else 0.5)
    value = low * (high / low) ** at if is_log else low + (high - low) * at
    if is_int:
        return f"{key}={min(int(swept.end or 0), math.floor(value if is_log else value + 0.5))}"
    return f"{key}={min(max(float(f'{value:.4g}'), low), high):g}"


def is_interval(override: str) -> bool:
    """Whether it stands for values without end."""
    return _interval(override) is not None


def _interval(override: str) -> IntervalSweep | None:
    from hydra.core.override_parser.types import IntervalSweep

    parsed = None if override.startswith("~") else parse_value(key_and_text(override)[1])
    swept = None if parsed is None else parsed._value
    return swept if isinstance(swept, IntervalSweep) else None
