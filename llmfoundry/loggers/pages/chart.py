"""Line charts, as inline SVG in a `Frame`.

`line_chart` is called by the report. The idea: a long series is thinned to the least and greatest
value of each stretch, so spikes survive. The numbers go beside the picture; `charts.js` draws it
anew where a reader zooms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from llmfoundry.loggers.console import number, short_count
from llmfoundry.loggers.pages.chart_data import FORMS, script, stretches
from llmfoundry.loggers.pages.frame import COLORS, TOP, WIDTH, Axis, Frame, figure, short, svg

_DASHES = ("", "6 3", "2 3")
_MAX_POINTS = 600

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """A line: (x, y) points in order of x; y may be NaN or infinite, which breaks the line.

    `trend`, where given, is drawn over the points, which then are faint. `key` is the metric's name
    in metrics.jsonl. A single line needs no label: it is the caption's.
    """

    label: str
    points: Points
    trend: Points | None = None
    trend_label: str = ""
    key: str = ""


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_end: float,
    form: str = "number",
    y_from_zero: bool = False,
    y_skip: float = 0.0,
    smooth: bool = False,
    note: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A <figure> with caption, legend and SVG; the empty string if no value is finite.

    The x axis goes from 0 to `x_end`, so that a page's charts can be compared at a
    glance. The y axis is logarithmic where positive values span more than a factor of 30. It
    ignores points before the share `y_skip` of the x axis: a steep start runs out of the frame,
    and the caption says from where, instead of flattening the rest.

    Args:
        title: the caption.
        series: the lines.
        x_end: end of the x axis, in tokens.
        form: how values are read, a name in FORMS.
        y_from_zero: the y axis has zero.
        y_skip: see above.
        smooth: a reader may smooth it.
        note: what is to be known beside the caption.
        marks: places of the x axis where something happened, and what.
    """
    finite = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return ""
    x_axis = Axis(0.0, x_end or 1.0)
    framed = [y for x, y in finite if x >= y_skip * x_axis.high]
    if len(framed) < 40:
        framed = [y for _, y in finite]
    y_axis, y_form = _y_axis(framed, zero=y_from_zero), FORMS[form]
    highest = max(y for _, y in finite)
    above = f"begins above the frame, at {y_form(highest)}" if highest > y_axis.high else ""
    frame = Frame(x_axis)
    parts = [*_grid(frame, y_axis), _clipped(frame, _lines(series, frame, y_axis))]
    parts += [_event(frame, x, what) for x, what in marks if 0 <= x <= x_axis.high]
    log = "log scale" if y_axis.log else ""
    data = {"form": form, "log": y_axis.log, "zero": y_from_zero, "skip": y_skip}
    lines = [{"label": line.label, **stretches(line.points)} for line in series]
    data |= {"smooth": smooth, "end": x_axis.high, "lines": lines}
    if marks:
        data["marks"] = [{"x": x, "what": what} for x, what in marks]
    return figure(
        title,
        svg(title, parts) + script(data),
        hints=(("hint", note), ("hint still", log), ("hint above", above)),
        legend=_legend(series),
        tooltip=series[0].key if len(series) == 1 else "",
    )


def thin(points: Points, limit: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """At most about `limit` points: first, last, and the least and greatest of each stretch."""
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 2 - 1)
    inner = points[1:-1]
    kept = [points[0]]
    for i in range(stretches):
        stretch = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return [*kept, points[-1]]


def _y_axis(values: list[float], *, zero: bool) -> Axis:
    """From zero; or logarithmic, or a little more than the values' range."""
    low, high = min(values), max(values)
    if not zero and low > 0 and high / low > 30:
        return Axis(low / 1.1, high * 1.1, log=True)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        spread = abs(high) * 0.1 or 1.0
        return Axis(low - spread, high + spread)
    margin = 0.05 * (high - low)
    return Axis(low if zero and low == 0 else low - margin, high + margin)


def _grid(frame: Frame, y_axis: Axis) -> Iterator[str]:
    ticks = y_axis.ticks()
    for value in ticks:
        y = frame.y(y_axis.place(value))
        yield frame.horizontal("grid", y)
        yield frame.y_label(y, _tick_label(value, ticks, log=y_axis.log))
    yield from frame.token_axis()


def _event(frame: Frame, x: float, what: str) -> str:
    """A line at a place, which says what happened there where a pointer rests on it."""
    line = frame.vertical("event", x, TOP, TOP + frame.height, dashed=True)
    return f"<g><title>{escape(what)}</title>{line}</g>"


def _clipped(frame: Frame, shapes: Iterator[str]) -> str:
    """Shapes cut off above and below the frame: an inner <svg> clips without needing an id."""
    return (
        f'<svg y="{TOP}" width="{WIDTH}" height="{frame.height}"'
        f' viewBox="0 {TOP} {WIDTH} {frame.height}">{"".join(shapes)}</svg>'
    )


def _lines(series: Sequence[Series], frame: Frame, y_axis: Axis) -> Iterator[str]:
    for i, line in enumerate(series):
        style = _style(i)
        yield from _path(line.points, frame, y_axis, style, faint=line.trend is not None)
        if line.trend is not None:
            yield from _path(line.trend, frame, y_axis, style, faint=False)


def _path(points: Points, frame: Frame, y_axis: Axis, style: str, *, faint: bool) -> Iterator[str]:
    """The line, broken where a value is not finite; few points are marked as dots too."""
    kind = "line faint" if faint else "line"
    for run in _finite_runs(points):
        places = [(frame.x(x), frame.y(y_axis.place(y))) for x, y in thin(run)]
        if len(places) > 1:
            text = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            yield f'<path class="{kind}" style="{style}" d="M{text}"/>'
        if len(places) == 1 or len(points) <= 20:
            for x, y in places:
                yield f'<circle class="dot" style="{style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'


def _legend(series: Sequence[Series]) -> list[str]:
    """Names and colors; left out for a plain line without a name, which is the caption's."""
    items = []
    for i, line in enumerate(series):
        broken = sum(not math.isfinite(y) for _, y in line.points)
        label = escape(line.label)
        if line.trend is not None:
            label += f'<span class="still"> ({escape(line.trend_label)})</span>'
        if broken:
            label += f"; {broken} not finite"
        key = f' title="{escape(line.key)}"' if line.key else ""
        items.append(
            f'<span{key}><svg viewBox="0 0 18 8"><path class="line" style="{_style(i)}"'
            f' d="M1 4L17 4"/></svg>{label}</span>'
        )
        if not line.label and not broken and line.trend is None:
            return []
    return items


def _finite_runs(points: Points) -> Iterator[Points]:
    start = 0
    for i, (_, y) in enumerate(points):
        if not math.isfinite(y):
            if i > start:
                yield points[start:i]
            start = i + 1
    if start < len(points):
        yield points[start:]


def _style(i: int) -> str:
    dash = _DASHES[i // COLORS % len(_DASHES)]
    return f"--c:var(--s{i % COLORS})" + (f";stroke-dasharray:{dash}" if dash else "")


def _tick_label(value: float, ticks: list[float], *, log: bool) -> str:
    """The value with as many decimals as the ticks beside it need."""
    top = max(abs(t) for t in ticks)
    if log or top < 1e-3:
        return number(value, digits=3) if top < 1e4 else short(short_count(value))
    if top >= 1e4:
        return short(short_count(value))
    step = ticks[1] - ticks[0] if len(ticks) > 1 else top
    return f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
