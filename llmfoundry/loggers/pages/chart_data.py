"""A chart's numbers for `charts.js`, which draws it anew at the reader's zoom and smoothing.

`line_chart` puts them beside the picture. The idea: a series of any length becomes at most LIMIT
stretches of as many points each, of which mean, least and greatest are kept. A mean of means is
then the mean that smoothing shows, and the least and the greatest are the peaks that it hides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from llmfoundry.loggers.console import format_gib, number, short_count

LIMIT = 800
DIGITS = 6  # of a value: more than a screen has pixels

Points = Sequence[tuple[float, float]]
FORMS: dict[str, Callable[[float], str]] = {
    "number": number,
    "count": short_count,
    "size": format_gib,
    "tenth": lambda value: f"{value:.1f}",
}
"""How values are read; charts.js has the same by these names."""


def stretches(points: Points, limit: int = LIMIT) -> dict[str, list[float | None]]:
    """Places and values of a series: x and y; of a long one also the least and greatest.

    Args:
        points: in order of x; y may be NaN or infinite.
        limit: the most stretches.

    Returns:
        x: the end of each stretch. y: the mean of its finite values, None without any. low and
        high: left out where every stretch is one point.
    """
    n = min(len(points), limit)
    bounds = [i * len(points) // n for i in range(n + 1)] if n else []
    found: dict[str, list[float | None]] = {"x": [], "y": [], "low": [], "high": []}
    for start, stop in pairwise(bounds):
        values = [y for _, y in points[start:stop] if math.isfinite(y)]
        found["x"].append(_short(points[stop - 1][0], 12))
        found["y"].append(_short(math.fsum(values) / len(values)) if values else None)
        found["low"].append(_short(min(values)) if values else None)
        found["high"].append(_short(max(values)) if values else None)
    if len(points) <= limit:
        del found["low"], found["high"]
    return found


def script(data: dict[str, Any]) -> str:
    """An element that a browser neither shows nor runs, and charts.js reads."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json">{text}</script>'


def _short(value: float, digits: int = DIGITS) -> float:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
