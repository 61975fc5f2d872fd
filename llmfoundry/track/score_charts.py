"""Scores of several models side by side as inline SVG: grouped bars, a radar, a bar in a table.

`eval_page` draws with them. The idea: model number i has the page's colour i in every picture; a
score that does not exist is written n/a where its bar would be, and leaves a gap in the radar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from llmfoundry.track.chart import COLOURS, WIDTH, Axis

Estimate = tuple[float | None, float | None]  # a score and its standard error; None: not known
Scores = Sequence[Sequence[Estimate]]  # of every model: of every name

LEFT, RIGHT, TOP, BOTTOM = 184, 52, 6, 24  # of the bars' frame; names stand to the left
BAR, GAP = 14, 12  # height of a bar, and between groups
RADIUS, RADAR_HEIGHT = 124.0, 318
_MARK = "stroke:var(--fg);stroke-width:1.5"


def bars(title: str, names: Sequence[str], models: Sequence[str], scores: Scores) -> str:
    """A <figure> with a group of horizontal bars for each name, a bar for each model.

    Whiskers reach one standard error to both sides. Empty if there is no name.
    """
    if not names:
        return ""
    axis = _axis(scores)
    group = len(models) * BAR + GAP
    bottom = TOP + len(names) * group
    parts = list(_bars_grid(axis, bottom))
    for row, name in enumerate(names):
        top = TOP + row * group + GAP / 2
        middle = top + len(models) * BAR / 2 + 4
        parts.append(
            f'<text class="axis" x="{LEFT - 8}" y="{middle:.1f}" text-anchor="end">'
            f"{escape(_short(name))}<title>{escape(name)}</title></text>"
        )
        for i, model in enumerate(models):
            label = f"{model}, {name}" if len(models) > 1 else name
            parts += _bar(axis, top + i * BAR, scores[i][row], i, label)
    drawn = _svg(title, bottom + BOTTOM, parts)
    return _figure(title, "± one standard error", models, drawn)


def radar(title: str, names: Sequence[str], models: Sequence[str], scores: Scores) -> str:
    """A <figure> with a spoke for each name, a line around for each model.

    The centre is the least tick, below zero where a score is. Empty with less than three names.
    """
    if len(names) < 3:
        return ""
    axis = _axis(scores, errors=False)
    parts = list(_web(axis, names))
    for i, model in enumerate(models):
        parts += _around(axis, names, scores[i], i, model)
    return _figure(title, "", models, _svg(title, RADAR_HEIGHT, parts))


def accuracy_bar(
    share: float, stderr: float | None, *, chance: float, majority: float, model: int
) -> str:
    """A small bar of a share of one: strokes at chance (solid) and majority (dashed), a whisker."""
    width, shown = 120, f"{100 * share:.1f}%"
    shown += f" ± {100 * stderr:.1f}" if stderr is not None else ""
    title = f"{shown}; chance {100 * chance:.1f}%, majority {100 * majority:.1f}%"
    low, high = share - (stderr or 0.0), share + (stderr or 0.0)
    whisker = f'<path class="whisker" style="{_MARK}" d="M{_at(low)} 6H{_at(high)}"/>'
    return (
        f'<svg class="bar" viewBox="0 0 {width} 12">'
        f'<rect class="track" width="{width}" height="12" rx="2"/>'
        f'<rect width="{_at(share)}" height="12" rx="2" style="{_fill(model)}"/>'
        f"{whisker if stderr else ''}"
        f'<line class="mark" x1="{_at(chance)}" x2="{_at(chance)}" y1="0" y2="12"/>'
        f'<line class="mark" x1="{_at(majority)}" x2="{_at(majority)}" y1="0" y2="12"'
        f' stroke-dasharray="2 2"/><title>{title}</title></svg>'
    )


def _at(share: float) -> str:
    """Where a share is on the small bar."""
    return f"{120 * min(max(share, 0.0), 1.0):.1f}"


def _axis(scores: Scores, *, errors: bool = True) -> Axis:
    """From zero, or a tick below the least score, to a tick above the greatest."""
    ends = [0.0]
    for value, error in (estimate for model in scores for estimate in model):
        if value is not None:
            reach = (error or 0.0) if errors else 0.0
            ends += [value - reach, value + reach]
    low, high = min(ends), max(ends)
    if high - low < 0.05:
        high = low + 0.05
    ticks = Axis(low, high).ticks()
    step = ticks[1] - ticks[0]
    down, up = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(down * step, up * step)


def _bars_grid(axis: Axis, bottom: float) -> Iterator[str]:
    for value in axis.ticks():
        x = _x(axis, value)
        kind = "base" if abs(value) < 1e-12 else "grid"
        yield f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield (
            f'<text class="axis" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{_tick(value)}</text>"
        )


def _bar(axis: Axis, top: float, estimate: Estimate, model: int, label: str) -> Iterator[str]:
    value, error = estimate
    zero, middle = _x(axis, 0.0), top + BAR / 2
    if value is None:
        yield f'<text class="axis" x="{zero + 4:.1f}" y="{middle + 4:.1f}">n/a</text>'
        return
    end = _x(axis, value)
    reach = end
    yield (
        f'<rect class="value" x="{min(zero, end):.1f}" y="{top + 1:.1f}"'
        f' width="{abs(end - zero):.1f}" height="{BAR - 2}" style="{_fill(model)}">'
        f"<title>{escape(label)}: {written(estimate)}</title></rect>"
    )
    if error:
        left, reach = _x(axis, value - error), _x(axis, value + error)
        yield (
            f'<path class="whisker" style="{_MARK}" d="M{left:.1f} {middle:.1f}H{reach:.1f}'
            f'M{left:.1f} {middle - 3:.1f}v6M{reach:.1f} {middle - 3:.1f}v6"/>'
        )
    yield (
        f'<text class="axis" x="{max(zero, end, reach) + 5:.1f}" y="{middle + 4:.1f}">'
        f"{value:.3f}</text>"
    )


def _web(axis: Axis, names: Sequence[str]) -> Iterator[str]:
    """Rings at the ticks, with their values beside the first spoke, and the spokes' names."""
    n = len(names)
    ticks = axis.ticks()
    for at, value in enumerate(ticks):
        corners = [_spoke(axis, i, n, value) for i in range(n)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
        kind = "base" if abs(value) < 1e-12 else "grid"
        yield f'<path class="{kind}" fill="none" d="M{path}z"/>'
        if (len(ticks) - 1 - at) % math.ceil(len(ticks) / 4) == 0:
            x, y = corners[0]
            yield (
                f'<text class="axis" x="{x - 4:.1f}" y="{y + 4:.1f}" text-anchor="end">'
                f"{_tick(value)}</text>"
            )
    for i, name in enumerate(names):
        (x0, y0), (x, y) = (_spoke(axis, i, n, end) for end in (axis.low, axis.high))
        yield f'<line class="grid" x1="{x0:.1f}" y1="{y0:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>'
        side = round(math.sin(2 * math.pi * i / n), 3)
        anchor = "middle" if side == 0 else "start" if side > 0 else "end"
        x_name = x + 9 * (x - x0) / RADIUS
        y_name = y + 13 * (y - y0) / RADIUS + 4
        yield (
            f'<text class="axis" x="{x_name:.1f}" y="{y_name:.1f}" text-anchor="{anchor}">'
            f"{escape(_short(name))}<title>{escape(name)}</title></text>"
        )


def _around(
    axis: Axis, names: Sequence[str], scores: Sequence[Estimate], model: int, label: str
) -> Iterator[str]:
    """A model's line, from each score to the next where both exist, and a dot at each."""
    n = len(names)
    style = f"--c:var(--s{model % COLOURS})"
    values = [value for value, _ in scores]
    places = [None if v is None else _spoke(axis, i, n, v) for i, v in enumerate(values)]
    for start, end in pairwise([*places, places[0]]):
        if start is not None and end is not None:
            path = f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
            yield f'<path class="line" style="{style}" d="{path}"/>'
    for place, name, estimate in zip(places, names, scores, strict=True):
        if place is not None:
            title = escape(f"{label}, {name}: {written(estimate)}")
            yield (
                f'<circle class="dot" style="{style}" cx="{place[0]:.1f}" cy="{place[1]:.1f}"'
                f' r="3"><title>{title}</title></circle>'
            )


def written(estimate: Estimate) -> str:
    """A score for people: 0.3333 ± 0.0120, or n/a."""
    value, error = estimate
    if value is None:
        return "n/a"
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _spoke(axis: Axis, i: int, n: int, value: float) -> tuple[float, float]:
    """Place of a value on spoke i of n; spoke 0 points up, the others follow clockwise."""
    angle, reach = 2 * math.pi * i / n, RADIUS * axis.place(value)
    return WIDTH / 2 + reach * math.sin(angle), RADAR_HEIGHT / 2 - reach * math.cos(angle)


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _figure(title: str, note: str, models: Sequence[str], drawn: str) -> str:
    """With caption and legend; a single model is in the page's title."""
    keys = [
        f'<span><svg viewBox="0 0 18 8"><rect width="18" height="8" style="{_fill(i)}"/></svg>'
        f"{escape(model)}</span>"
        for i, model in enumerate(models)
    ]
    legend = f'<div class="legend">{"".join(keys)}</div>' if len(models) > 1 else ""
    hint = f'<span class="hint">{escape(note)}</span>' if note else ""
    return f"<figure><figcaption><b>{escape(title)}</b>{hint}</figcaption>{legend}{drawn}</figure>"


def _fill(model: int) -> str:
    """The model's colour, paler where colours begin again."""
    return f"fill:var(--s{model % COLOURS});fill-opacity:{max(0.3, 1 - 0.35 * (model // COLOURS))}"


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _tick(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) > 1e-12 else "0"


def _short(name: str, limit: int = 26) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
