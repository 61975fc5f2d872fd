"""Parallel coordinates: an axis for each key in which runs differ, a line for each run.

`comparison.py` calls `drawn`. The idea: everything is placed here, in percent, and the page's style
sheet and a few lines of `templates/charts.js` do the rest, so that the picture needs no library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from llmfoundry.loggers.pages.page import part

LOG_SPREAD = 20.0  # greatest over least from which an axis is logarithmic
MARGIN = 6.0  # percent of the height that is free at both ends
LOST = -2.0  # place of a run without a finite result: a label's room above the greatest
APART = 7.0  # percent between two labels
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)([a-z]*)")


@dataclass(frozen=True)
class Axis:
    """A name, each run's place (percent from the top), labels at places."""

    name: str
    places: Sequence[float]
    labels: Sequence[tuple[float, str]]


def key_axis(name: str, values: Sequence[str]) -> Axis:
    """Numbers, also those with one unit (50ba, 100ba), by their size; other values as categories.

    Numbers are logarithmic where all are above 0 and span a factor of LOG_SPREAD.
    """
    read = [_NUMBER.fullmatch(value) for value in values]
    units = {found[2] for found in read if found}
    numbers = [float(found[1]) for found in read if found]
    if len(numbers) == len(values) and len(units) == 1 and all(map(math.isfinite, numbers)):
        places = _placed(numbers)
        named = dict(sorted(zip(places, values, strict=True), reverse=True))
        return Axis(name, places, _spread(list(named.items())))
    words = sorted(set(values))
    at = dict(zip(words, _placed([float(-n) for n in range(len(words))]), strict=True))
    shown = [(place, word or "not set") for word, place in at.items()]
    return Axis(name, [at[value] for value in values], _spread(shown))


def result_axis(name: str, values: Sequence[float | None]) -> Axis:
    """What came out, the least at the bottom; runs without a finite value are above all others."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    placed = dict(zip(finite, _placed(finite), strict=True))
    places = [placed.get(value, LOST) if value is not None else LOST for value in values]
    ends = [(placed[value], f"{value:.4g}") for value in sorted(finite)]
    ends += [(LOST, "not finite")] if LOST in places else []
    return Axis(name, places, _spread(ends))


def drawn(
    title: str, hint: str, axes: Sequence[Axis], words: Mapping[int, str], best: Collection[int]
) -> Markup:
    """The <figure>; the `best` are drawn last.

    `words`: of each run by its number, which is its color, what a pointer finds on its line; in
    the order of the axes' places.
    """
    across = [100 * i / (len(axes) - 1) for i in range(len(axes))]
    lines = []
    for n, (run, text) in enumerate(words.items()):
        places = [(x, axis.places[n]) for x, axis in zip(across, axes, strict=True)]
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
        kind = "best" if run in best else "lost" if axes[-1].places[n] == LOST else ""
        lines.append((run, kind, points, text))
    lines.sort(key=lambda line: line[0] in best)
    return part("coordinates", title, hint, list(zip(across, axes, strict=True)), lines)


def _placed(numbers: Sequence[float]) -> list[float]:
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    if low == high:
        return [50.0] * len(numbers)
    if low > 0 and high / low >= LOG_SPREAD:
        return [_share(math.log(value), math.log(low), math.log(high)) for value in numbers]
    return [_share(value, low, high) for value in numbers]


def _share(value: float, low: float, high: float) -> float:
    """Percent from the top."""
    return round(100 - MARGIN - (100 - 2 * MARGIN) * (value - low) / (high - low), 2)


def _spread(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Labels with room between them: both ends, and of the others those that fit; as read down."""
    ordered = sorted(labels)
    if len(ordered) < 3:
        return ordered
    kept = [ordered[0]]
    for place, text in ordered[1:-1]:
        if place - kept[-1][0] >= APART and ordered[-1][0] - place >= APART:
            kept.append((place, text))
    return [*kept, ordered[-1]]
