"""Points of a sweep (`-m`): combinations of the listed values, and the folder of each.

Entry point: `sweep_points`. All points are checked before the first one starts. `sweep_runs.py`
runs them.
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

# Recipe keys of the folder of a run. Each point gets its own subfolder.
PLACES = ("run_name", "save_folder", "output")

MOST_POINTS = 10_000
"""Maximal number of points of a sweep."""


@dataclass
class SweepPoint:
    """One run of a sweep."""

    place: str
    """Folder of the run; its swept values alone if the recipe has no folder."""
    overrides: list[str]
    home: str = ""
    """Parent folder of `place`; "" if the recipe has no folder."""
    digest: str = ""
    """Hash of the resolved recipe, by which a later sweep recognizes the same point."""
    swept: dict[str, str] = field(default_factory=dict)
    """Values that vary between the points, by key."""
    run_name: str = ""
    """Name of the run without the swept values; "" if the recipe has none."""


HOW = {
    "grid": "every combination",
    "random": "n combinations, drawn",
    "halving": "those of a grid, or n that are drawn; all are paused on the way, the best go on",
}
MOST_TRIES = 100  # samples per point, if there are few combinations


@dataclass
class SweepConfig:
    """Choice of a sweep's points and of how far each runs; not part of their recipes."""

    how: Annotated[str, choice(HOW)] = "grid"
    """grid: every combination. random: n that are drawn. halving: successive halving, of n that are
    drawn, or of the grid."""
    n: Annotated[int | None, Range(1, MOST_POINTS), Only("how", ("random", "halving"))] = None
    """Number of sampled points. A larger number continues the same sequence."""
    seed: Annotated[int, Range(0)] = 17
    """Seed of the random sampling."""
    factor: Annotated[int, Range(2), Only("how", "halving")] = 3
    """One in this many points continues, for this many times as long. 3: Li et al. (2018)."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields("sweep.", self)
        if self.how == "random" and self.n is None:
            yield "sweep.n: is missing; write how many points are drawn, such as sweep.n=8"

    def rungs(self, n: int) -> list[str]:
        """Return the pauses of `n` points as values of pause_at; the last one is `null`.

        Raises:
            UserError: there are too few points for a pause.
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
    """Overrides of a command line that configure its sweep."""

    sweep: SweepConfig = field(default_factory=SweepConfig)
    """Which points (sweep=random is sweep.how=random)."""

    def check(self) -> Iterator[str]:
        """Yield an error line for each problem."""
        yield from self.sweep.check()


def is_sweeps(word: str) -> bool:
    """Return whether an override configures the sweep and not the recipe."""
    return word.startswith(("sweep=", "sweep."))


def sweep_config(command: CommandLine) -> SweepConfig:
    """Remove the overrides of the sweep from a command line and return its configuration.

    Raises:
        UserError: an override is not valid.
    """
    words = [word for word in command.overrides if is_sweeps(word)]
    command.overrides = [word for word in command.overrides if not is_sweeps(word)]
    overrides = [re.sub("^sweep=", "sweep.how=", word) for word in words]
    return checked(SweepRecipe, None, overrides).sweep


def sweep_points(recipe_type: type, command: CommandLine, config: SweepConfig) -> list[SweepPoint]:
    """Return the points of a sweep in order, each with a checked recipe and its own folder.

    Raises:
        UserError: no key has several values, or the recipe of a point is not valid.
    """
    path = None if command.recipe is None else find_recipe(command.recipe)
    schema = Schema.of(recipe_type)
    if config.how == "halving" and "pause_at" not in schema.keys:
        raise UserError("sweep.how: halving is for training runs, which can pause; write random")
    groups = group_options(search_folders(path), schema)

    # check the recipe of each combination
    points: dict[str, SweepPoint] = {}
    problems: dict[str, None] = {}  # without duplicates, in order
    combinations, is_swept = _combinations(command.overrides, groups, config)
    for combination in combinations:
        swept = [word for word, varies in zip(combination, is_swept, strict=True) if varies]
        try:
            recipe: Any = checked(recipe_type, command.recipe, combination)
        except UserError as error:
            name = ",".join(map(public_override, swept))
            problems |= dict.fromkeys(f"{name}: {line}" for line in error.problems)
            continue
        point = _placed(recipe, combination, swept, points)
        points[point.place] = point
    if problems:
        raise UserError(*problems)

    # check that halving is possible
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
    """Return the overrides of each point, and which of the words have several values.

    In a grid, the last key varies fastest.

    Raises:
        UserError: no word has several values, or there are too many points.
    """
    if config.n is None:
        lists = [list(dict.fromkeys(choices(word, groups))) for word in words]
        is_swept = [len(options) > 1 for options in lists]
        combinations = list(itertools.islice(itertools.product(*lists), MOST_POINTS + 1))
        if len(combinations) > MOST_POINTS:
            raise UserError(f"-m: more than {MOST_POINTS:,} points; write fewer values")
    else:
        is_swept = [is_interval(word) or len({*choices(word, groups)}) > 1 for word in words]
        combinations = _sampled(words, is_swept, groups, config) if any(is_swept) else []
    if not any(is_swept):
        raise UserError("-m: nothing to sweep; list values as in optimizer.lr=1e-3,3e-4 or drop -m")
    return combinations, is_swept


def _sampled(
    words: Sequence[str],
    is_swept: Sequence[bool],
    groups: dict[str, list[str]],
    config: SweepConfig,
) -> list[tuple[str, ...]]:
    """Sample `config.n` different combinations.

    A sample depends only on the seed, the key and the number of the sample.

    Raises:
        UserError: there are fewer combinations.
    """
    n = config.n or 0
    combinations: dict[tuple[str, ...], None] = {}  # without duplicates, in order
    for number in range(MOST_TRIES * n):
        combination = []
        for word, varies in zip(words, is_swept, strict=True):
            if varies:
                key = key_and_text(word)[0]
                at = _uniform(f"{config.seed}/{key}/{number}")
                combination.append(draw(word, groups, at))
            else:
                combination.append(word)
        combinations[tuple(combination)] = None
        if len(combinations) == n:
            return list(combinations)
    raise UserError(
        f"sweep.n: {n}, but no more than {len(combinations)} different points were found; write at"
        " most that, or sweep=grid for all"
    )


def _uniform(name: str) -> float:
    """Return a pseudorandom number in [0, 1) that is the same in every release of Python."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _placed(
    recipe: Any, combination: tuple[str, ...], swept: list[str], points: dict[str, SweepPoint]
) -> SweepPoint:
    """Return the point of a combination, with a folder that is named after its swept values.

    Args:
        recipe: recipe of the point.
        combination: its overrides.
        swept: those of them that vary.
        points: earlier points by folder.
    """
    words = [word for word in swept if key_and_text(word)[0] not in PLACES]
    parents = {key: getattr(recipe, key) for key in PLACES if getattr(recipe, key, None)}
    parent = list(parents.values())[-1:]  # empty, or the last of them
    for number in itertools.count(1):
        # a number distinguishes values that differ only in characters not allowed in a name
        name = _folder_name(words) + (f".{number}" if number > 1 else "")
        place = "/".join([*parent, name] if name else parent)
        if place not in points:
            break
    folders = [f"{key}={folder}/{name}" for key, folder in parents.items() if name]
    digest = hashlib.sha256(to_yaml(recipe, resolve=True).encode()).hexdigest()[:16]
    return SweepPoint(
        place,
        [*combination, *folders],
        "".join(parent),
        digest,
        dict(map(key_and_text, swept)),
        parents.get("run_name", ""),
    )


def _folder_name(words: list[str]) -> str:
    """Join overrides to a name (`optimizer.lr=1e-3,seed=1`) without characters unfit for paths."""
    return re.sub(r"[^\w.,=+-]+", "-", ",".join(map(public_override, words)))[:150]


def choices(override: str, groups: dict[str, list[str]]) -> list[str]:
    """Return the overrides that `key=a,b` or `key=range(1,4)` lists; a plain one lists itself.

    Raises:
        UserError: the override is an interval or a glob, whose values cannot be listed.
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
    """Return one value of a swept override.

    `interval(a,b)` is uniform, `tag(log,interval(a,b))` is uniform in the logarithm, and
    `int(interval(a,b))` has integers including both ends. Floats have four digits, because folders
    are named after them.

    Args:
        override: `key=` with a list or an interval.
        groups: choices of each group.
        at: position in the list or interval, in [0, 1).

    Raises:
        UserError: the interval is not valid.
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
    """Return whether an override is an interval."""
    return _interval(override) is not None


def _interval(override: str) -> IntervalSweep | None:
    from hydra.core.override_parser.types import IntervalSweep

    parsed = None if override.startswith("~") else parse_value(key_and_text(override)[1])
    swept = None if parsed is None else parsed._value
    return swept if isinstance(swept, IntervalSweep) else None
