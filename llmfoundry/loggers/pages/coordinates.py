"""Parallel coordinates chart: an axis for each key in which runs differ, a line for each run.

`comparison.py` calls `drawn`. All positions are computed here, in percent. The style sheet and a
few lines of `templates/charts.js` do the rest, so that the chart needs no library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from llmfoundry.loggers.pages.page import part

LOG_SPREAD = 20.0  # ratio of maximum to minimum from which an axis is logarithmic
MARGIN = 6.0  # margin at both ends, in percent of the height
LOST = -2.0  # position of a run without a finite result: above the maximum
APART = 7.0  # minimal distance of two labels, in percent
_NUMBER = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)([a-z]*)")


@dataclass(frozen=True)
class Axis:
    """An axis of the chart.

    Attributes:
        name: name of the axis.
        places: position of each run, in percent from the top.
        labels: position and text of each label.
    """

    name: str
    places: Sequence[float]
    labels: Sequence[tuple[float, str]]


def key_axis(name: str, values: Sequence[str]) -> Axis:
    """Return the axis of a recipe key.

    Numbers, with or without a common unit (50ba, 100ba), are placed by their size. Their axis is
    logarithmic if all are positive and span a factor of LOG_SPREAD. Other values are categories.
    """
    # numbers
    matches = [_NUMBER.fullmatch(value) for value in values]
    units = {match[2] for match in matches if match}
    numbers = [float(match[1]) for match in matches if match]
    if len(numbers) == len(values) and len(units) == 1 and all(map(math.isfinite, numbers)):
        positions = _positions(numbers)
        labels = dict(sorted(zip(positions, values, strict=True), reverse=True))
        return Axis(name, positions, _spread(list(labels.items())))

    # categories, from top to bottom
    categories = sorted(set(values))
    ranks = [float(-n) for n in range(len(categories))]
    position_of = dict(zip(categories, _positions(ranks), strict=True))
    category_labels = [(at, category or "not set") for category, at in position_of.items()]
    return Axis(name, [position_of[value] for value in values], _spread(category_labels))


def result_axis(name: str, values: Sequence[float | None]) -> Axis:
    """Return the axis of the result, the minimum at the bottom.

    Runs without a finite value are above all others.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    position_of = dict(zip(finite, _positions(finite), strict=True))
    places = [LOST if value is None else position_of.get(value, LOST) for value in values]
    labels = [(position_of[value], f"{value:.4g}") for value in sorted(finite)]
    if LOST in places:
        labels.append((LOST, "not finite"))
    return Axis(name, places, _spread(labels))


def drawn(
    title: str, hint: str, axes: Sequence[Axis], words: Mapping[int, str], best: Collection[int]
) -> Markup:
    """Return the <figure>; the best runs are drawn last, on top.

    Args:
        title: caption.
        hint: explanation in the caption.
        axes: axes from left to right; the last one is the result.
        words: tooltip of each run, by the number of the run, which is its color. The order is that
            of the positions of the axes.
        best: numbers of the best runs.
    """
    x_positions = [100 * i / (len(axes) - 1) for i in range(len(axes))]
    lines = []
    for n, (run, text) in enumerate(words.items()):
        corners = []
        for x, axis in zip(x_positions, axes, strict=True):
            corners.append(f"{x:.2f},{axis.places[n]:.2f}")
        is_lost = axes[-1].places[n] == LOST
        style = "best" if run in best else "lost" if is_lost else ""
        lines.append((run, style, " ".join(corners), text))
    lines.sort(key=lambda line: line[0] in best)
    return part("coordinates", title, hint, list(zip(x_positions, axes, strict=True)), lines)


def _positions(numbers: Sequence[float]) -> list[float]:
    """Return the positions of numbers on a linear or logarithmic axis, in percent from the top."""
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    if low == high:
        return [50.0] * len(numbers)
    if low > 0 and high / low >= LOG_SPREAD:
        return [_share(math.log(value), math.log(low), math.log(high)) for value in numbers]
    return [_share(value, low, high) for value in numbers]


def _share(value: float, low: float, high: float) -> float:
    """Return the position of a value between `low` and `high`, in percent from the top."""
    return round(100 - MARGIN - (100 - 2 * MARGIN) * (value - low) / (high - low), 2)


def _spread(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return labels without overlap, from top to bottom: both ends, and others that fit."""
    ordered = sorted(labels)
    if len(ordered) < 3:
        return ordered
    spread = [ordered[0]]
    for at, text in ordered[1:-1]:
        if at - spread[-1][0] >= APART and ordered[-1][0] - at >= APART:
            spread.append((at, text))
    return [*spread, ordered[-1]]
