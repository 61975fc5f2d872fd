"""Scores of several models side by side as inline SVG: bars, dots beside chance, a bar in a table.

`eval_page` draws with them. The idea: model number i has the page's color i and the number i + 1
in every picture, and guessing is a line in each, so that a model that only guesses is seen to. A
score that does not exist is written n/a where its bar would be, and has no dot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from llmfoundry.loggers.pages.frame import COLORS, Axis, Frame, figure, svg, text


class ShownScore(NamedTuple):
    """A score, its standard error and its 95 % interval; None: not known."""

    value: float | None
    stderr: float | None = None
    interval: Sequence[float] | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of its whisker: of the interval, else one standard error to both sides."""
        if self.interval is not None:
            return self.interval[0], self.interval[1]
        if self.value is None or not self.stderr:
            return None
        return self.value - self.stderr, self.value + self.stderr


Scores = Sequence[Sequence[ShownScore]]  # of every model: of every name

LEFT, RIGHT, TOP, BOTTOM = 24, 52, 6, 24  # of the frame; numbers of models stand to the left
BAR, GAP, NAME = 14, 8, 20  # heights of a bar, of the room between groups, of a group's name
DOT_ROW = 7  # height of a model's place in a row of dots
LEAST_REACH = 0.25  # of the bars' axis: noise around zero is not to fill the frame
_MARK = "stroke:var(--fg);stroke-width:1.5"


@dataclass(frozen=True)
class TaskDots:
    """A row of dots: a task, what guessing gets of it, and every model's accuracy."""

    name: str
    chance: float
    majority: float
    accuracies: Sequence[ShownScore]


def bars(title: str, names: Sequence[str], models: Sequence[str], scores: Scores) -> str:
    """A <figure> with a group of horizontal bars for each name, a bar for each model.

    Whiskers are 95 % intervals, or reach one standard error. Empty if there is no name.
    """
    if not names:
        return ""
    group = NAME + len(models) * BAR + GAP
    frame = Frame(_axis(scores), TOP + len(names) * group, LEFT, RIGHT, TOP)
    parts = list(_grid(frame, _tick))
    for row, name in enumerate(names):
        top = TOP + row * group
        parts.append(_name(name, top))
        for i, model in enumerate(models):
            label = f"{model}, {name}" if len(models) > 1 else name
            parts += _bar(frame, top + NAME + i * BAR, scores[i][row], i, label)
            parts += _number(top + NAME + i * BAR + BAR / 2, i) if len(models) > 1 else ()
    hint = f"{whiskers_of(e for of_model in scores for e in of_model)}; 0: guessing"
    return _figure(title, hint, models, frame, parts)


def dots(title: str, asked: Sequence[TaskDots], models: Sequence[str]) -> str:
    """A <figure> with a row for each task: accuracies as dots, beside what guessing gets.

    Chance is a solid stroke, always the likeliest answer a dashed one. Empty without a task.
    """
    if not asked:
        return ""
    group = NAME + len(models) * DOT_ROW + GAP
    frame = Frame(Axis(0.0, 1.0), TOP + len(asked) * group, LEFT, RIGHT, TOP)
    parts = list(_grid(frame, lambda value: f"{100 * value:.0f}%"))
    for row, task in enumerate(asked):
        top = TOP + row * group
        parts.append(_name(task.name, top))
        parts += _guesses(frame, task, top + NAME - 2, len(models) * DOT_ROW + 4)
        for i, (model, estimate) in enumerate(zip(models, task.accuracies, strict=True)):
            parts += _dot(frame, top + NAME + (i + 0.5) * DOT_ROW, estimate, i, model, task)
    hint = "lines: chance (solid), majority class (dashed)"
    hint += f"; {whiskers_of(e for task in asked for e in task.accuracies)}"
    return _figure(title, hint, models, frame, parts)


def whiskers_of(estimates: Iterable[ShownScore]) -> str:
    """What whiskers mean, as words; results of older versions have standard errors alone."""
    has_intervals = {e.interval is not None for e in estimates if e.ends is not None}
    words = {True: "95% interval", False: "± one standard error"}
    return " or ".join(words[kind] for kind in sorted(has_intervals or {True}, reverse=True))


def percents(estimate: ShownScore) -> str:
    """A share for people: 54.3% [45.9, 62.5], or 54.3% ± 4.3."""
    value, error, interval = estimate
    if value is None:
        return "n/a"
    if interval is not None:
        return f"{100 * value:.1f}% [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{100 * value:.1f}%" + (f" ± {100 * error:.1f}" if error is not None else "")


def accuracy_bar(estimate: ShownScore, *, chance: float, majority: float, model: int = 0) -> str:
    """A small bar of a share of one: lines at chance (solid) and majority (dashed), a whisker."""
    width, share, ends = 120, estimate.value or 0.0, estimate.ends
    title = f"{percents(estimate)}; chance {100 * chance:.1f}%, majority {100 * majority:.1f}%"
    low, high = ends or (share, share)
    whisker = f'<path class="whisker" style="{_MARK}" d="M{_at(low)} 6H{_at(high)}"/>'
    return (
        f'<svg class="bar" viewBox="0 0 {width} 12">'
        f'<rect class="track" width="{width}" height="12" rx="2"/>'
        f'<rect width="{_at(share)}" height="12" rx="2" style="{_fill(model)}"/>'
        f"{whisker if ends else ''}"
        f'<line class="mark" x1="{_at(chance)}" x2="{_at(chance)}" y1="0" y2="12"/>'
        f'<line class="mark" x1="{_at(majority)}" x2="{_at(majority)}" y1="0" y2="12"'
        f' stroke-dasharray="2 2"/><title>{title}</title></svg>'
    )


def _at(share: float) -> str:
    """Where a share is on the small bar."""
    return f"{120 * min(max(share, 0.0), 1.0):.1f}"


def _axis(scores: Scores) -> Axis:
    """From zero, or a tick below the least score, to a tick above the greatest."""
    ends = [0.0, LEAST_REACH]
    for estimate in (estimate for model in scores for estimate in model):
        if estimate.value is not None:
            ends += [estimate.value, *(estimate.ends or ())]
    low, high = min(ends), max(ends)
    ticks = Axis(low, high).ticks()
    step = ticks[1] - ticks[0]
    down, up = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(down * step, up * step)


def _grid(frame: Frame, form: Callable[[float], str]) -> Iterator[str]:
    for value in frame.x_axis.ticks():
        kind = "base" if abs(value) < 1e-12 else "grid"
        yield frame.vertical(kind, value, frame.top, frame.base)
    yield from frame.x_labels(form)


def _name(name: str, top: float) -> str:
    """A group's name, above it: beside it, a phone would have no room."""
    shown = f"{escape(_short(name))}<title>{escape(name)}</title>"
    return text(LEFT, top + NAME - 6, shown, kind="axis name")


def _number(middle: float, model: int) -> Iterator[str]:
    yield text(LEFT - 6, middle + 4, str(model + 1), kind="axis number", anchor="end")


def _guesses(frame: Frame, task: TaskDots, top: float, height: float) -> Iterator[str]:
    yield frame.vertical("mark", task.chance, top, top + height)
    yield frame.vertical("mark", task.majority, top, top + height, dashed=True)


def _dot(
    frame: Frame, y: float, estimate: ShownScore, model: int, label: str, task: TaskDots
) -> Iterator[str]:
    value = estimate.value
    if value is None:
        return
    style = f"--c:var(--s{model % COLORS})"
    if estimate.ends:
        low, high = (frame.x(min(max(0.0, end), 1.0)) for end in estimate.ends)
        path = f"M{low:.1f} {y:.1f}H{high:.1f}"
        yield f'<path class="line" style="{style};stroke-opacity:.5" d="{path}"/>'
    title = f"{label}, {task.name}: {percents(estimate)}; chance {100 * task.chance:.1f}%"
    yield (
        f'<circle class="dot" style="{style}" cx="{frame.x(value):.1f}" cy="{y:.1f}" r="3.4">'
        f"<title>{escape(title)}</title></circle>"
    )


def _bar(frame: Frame, top: float, estimate: ShownScore, model: int, label: str) -> Iterator[str]:
    value = estimate.value
    zero, middle = frame.x(0.0), top + BAR / 2
    if value is None:
        yield text(zero + 4, middle + 4, "n/a")
        return
    end = frame.x(value)
    reach = end
    yield (
        f'<rect class="value" x="{min(zero, end):.1f}" y="{top + 1:.1f}"'
        f' width="{abs(end - zero):.1f}" height="{BAR - 2}" style="{_fill(model)}">'
        f"<title>{escape(label)}: {written(estimate)}</title></rect>"
    )
    if estimate.ends:
        left, reach = map(frame.x, estimate.ends)
        yield (
            f'<path class="whisker" style="{_MARK}" d="M{left:.1f} {middle:.1f}H{reach:.1f}'
            f'M{left:.1f} {middle - 3:.1f}v6M{reach:.1f} {middle - 3:.1f}v6"/>'
        )
    yield text(max(zero, end, reach) + 5, middle + 4, f"{value:.3f}")


def written(estimate: ShownScore) -> str:
    """A score for people: 0.3333 [0.3098, 0.3568], 0.3333 ± 0.0120, or n/a."""
    value, error, interval = estimate
    if value is None:
        return "n/a"
    if interval is not None:
        return f"{value:.4f} [{interval[0]:.4f}, {interval[1]:.4f}]"
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def in_parts(shown: str) -> tuple[str, str]:
    """A score as `written` or `percents` shows it, and how sure it is."""
    value, _, rest = shown.partition(" ")
    return value, rest


def _figure(
    title: str, note: str, models: Sequence[str], frame: Frame, parts: Sequence[str]
) -> str:
    """With caption and legend; a single model is in the page's title."""
    keys = [
        f"<span>{swatch(i)}<b>{i + 1}</b> {escape(model)}</span>" for i, model in enumerate(models)
    ]
    drawn = svg(title, parts, height=frame.base + BOTTOM)
    return figure(title, drawn, hints=[("hint", note)], legend=keys if len(models) > 1 else ())


def swatch(model: int) -> str:
    """The model's color, for a legend."""
    drawn = f'<rect width="18" height="8" rx="2" style="{_fill(model)}"/>'
    return f'<svg class="key" viewBox="0 0 18 8">{drawn}</svg>'


def _fill(model: int) -> str:
    """The model's color, paler where colors begin again."""
    return f"fill:var(--s{model % COLORS});fill-opacity:{max(0.3, 1 - 0.35 * (model // COLORS))}"


def _tick(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) > 1e-12 else "0"


def _short(name: str, limit: int = 60) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
