"""Heat maps as inline SVG: how much of the load each expert had, over training.

`report.py` calls `load_maps` with what routing.jsonl holds. The idea: perfect balance is a blank
picture. A cell is blue where an expert got less than the mean and orange where it got more, fully
colored at a quarter of the mean and at four times it, so that what catches the eye is imbalance.
Cells of one color are one path: a map of thousands of cells stays a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from llmfoundry.loggers.metrics import TOKEN
from llmfoundry.loggers.pages.frame import Axis, Frame, figure, svg

MAX_COLUMNS, MAX_LAYERS = 70, 8
LEVELS = 6  # of each color
FULL = 2.0  # base-2 logarithm of the relative load at which a color is full
LESS, MORE = 0, 1  # --s0 and --s1 of the page

Load = list[list[float]]  # of every column: the relative load of every expert


def load_maps(rows: Sequence[Mapping[str, Any]]) -> str:
    """A <figure> for each layer, for eight of them where there are more; "" without any row."""
    if not rows:
        return ""
    n_layers = len(rows[0]["load"])
    shown = sorted({round(i * (n_layers - 1) / (MAX_LAYERS - 1)) for i in range(MAX_LAYERS)})
    if n_layers <= MAX_LAYERS:
        shown = list(range(n_layers))
    groups = [rows[start:stop] for start, stop in _stretches(len(rows))]
    edges = [0.0, *(float(group[-1][TOKEN]) for group in groups)]
    figures = []
    for layer in shown:
        columns = [_relative([row["load"][layer] for row in group]) for group in groups]
        figures.append(heat_map(f"Load of experts, layer {layer}", columns, edges))
    return "".join(figures)


def heat_map(title: str, columns: Load, edges: Sequence[float]) -> str:
    """A <figure> of one layer, of `columns` between `edges`, in tokens from the left to the right.

    Expert 0 is the lowest row.
    """
    frame = Frame(Axis(edges[0], edges[-1]))
    places = [frame.x(edge) for edge in edges]
    parts = [*_cells(frame, columns, places), *_axes(frame, len(columns[0]))]
    parts += _strips(frame, columns, places)
    hint = "orange: above the mean, up to 4 times; blue: below, to a quarter"
    return figure(title, svg(title, parts), hints=[("hint", hint)])


def level(relative: float) -> int:
    """Color of a load over the mean: 0 near 1, up to LEVELS of orange, down to -LEVELS of blue."""
    if relative <= 0:
        return -LEVELS
    steps = round(math.log2(relative) / FULL * LEVELS)
    return max(-LEVELS, min(LEVELS, steps))


def _relative(loads: Sequence[Sequence[float]]) -> list[float]:
    """Loads of several steps together, over their mean."""
    totals = [float(sum(expert)) for expert in zip(*loads, strict=True)]
    mean = sum(totals) / len(totals)
    return [total / mean if mean else 1.0 for total in totals]


def _stretches(n: int) -> Iterator[tuple[int, int]]:
    """Bounds of at most MAX_COLUMNS stretches of n rows."""
    wanted = min(n, MAX_COLUMNS)
    return pairwise(i * n // wanted for i in range(wanted + 1))


def _cells(frame: Frame, columns: Load, places: Sequence[float]) -> Iterator[str]:
    """One path for each color."""
    height = frame.height / len(columns[0])
    shapes: dict[int, list[str]] = {}
    for column, (left, right) in zip(columns, pairwise(places), strict=True):
        for expert, relative in enumerate(column):
            y = frame.base - (expert + 1) * height
            shape = f"M{left:.1f} {y:.1f}H{right:.1f}v{height:.1f}H{left:.1f}z"
            shapes.setdefault(level(relative), []).append(shape)
    for step, found in sorted(shapes.items()):
        if step:
            color = f"var(--s{MORE if step > 0 else LESS})"
            opacity = abs(step) / LEVELS
            yield f'<path fill="{color}" fill-opacity="{opacity:.2f}" d="{"".join(found)}"/>'


def _axes(frame: Frame, n_experts: int) -> Iterator[str]:
    yield from frame.token_axis()
    yield frame.horizontal("base", frame.top)
    for expert in range(0, n_experts, max(1, n_experts // 8)):
        yield frame.y_label(frame.y((expert + 0.5) / n_experts), str(expert))


def _strips(frame: Frame, columns: Load, places: Sequence[float]) -> Iterator[str]:
    """Invisible columns whose title names the most and the least loaded expert."""
    for column, (left, right) in zip(columns, pairwise(places), strict=True):
        most, least = max(column), min(column)
        title = (
            f"most: expert {column.index(most)}, {most:.2f} of the mean\n"
            f"least: expert {column.index(least)}, {least:.2f}"
        )
        yield (
            f'<rect class="hit" x="{left:.1f}" y="{frame.top}" width="{right - left:.1f}"'
            f' height="{frame.height}"><title>{escape(title)}</title></rect>'
        )
