"""Scores as people read them: with how sure they are, beside what guessing gets, before and after.

The run's report, the gauntlet's page and a model's card write them alike. `bars` and `dots` are
pictures of several models: number i has the page's color i and the number i + 1 in each, and
guessing is a line, so that a model that only guesses is seen to. `changes` is what a run changed:
its evaluation of batch 0 (`eval_first`, as fine-tuning runs have it) beside the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from llmfoundry.loggers.metrics_file import BATCH
from llmfoundry.loggers.pages.page import fill, part, table, together
from llmfoundry.loggers.pages.titles import title

_OF_ROWS = "metrics/eval/"
_NOT_SHOWN = ("metrics/eval/LanguagePerplexity",)
LEAST_REACH = 0.25  # of the bars' axis: noise around zero is not to fill the frame


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


def whiskers_of(estimates: Iterable[ShownScore]) -> str:
    """What whiskers mean, as words; results of older versions have standard errors alone."""
    has_intervals = {e.interval is not None for e in estimates if e.ends is not None}
    words = {True: "95% interval", False: "± one standard error"}
    return " or ".join(words[kind] for kind in sorted(has_intervals or {True}, reverse=True))


def percents(estimate: ShownScore) -> str:
    """A share for people: 54.3% [45.9, 62.5], or 54.3% ± 4.3."""
    return _text(estimate, lambda share: f"{100 * share:.1f}", unit="%")


def written(estimate: ShownScore) -> str:
    """A score for people: 0.3333 [0.3098, 0.3568], 0.3333 ± 0.0120, or n/a."""
    return _text(estimate, lambda score: f"{score:.4f}")


def _text(estimate: ShownScore, number: Callable[[float], str], unit: str = "") -> str:
    value, error, interval = estimate
    if value is None:
        return "n/a"
    if interval is not None:
        return f"{number(value)}{unit} [{number(interval[0])}, {number(interval[1])}]"
    return number(value) + unit + (f" ± {number(error)}" if error is not None else "")


def in_parts(shown: str) -> tuple[str, str]:
    """A score as `written` or `percents` shows it, and how sure it is."""
    value, _, rest = shown.partition(" ")
    return value, rest


Scores = Sequence[Sequence[ShownScore]]  # of every model: of every name


@dataclass(frozen=True)
class TaskDots:
    """A row of dots: a task, what guessing gets of it, and every model's accuracy."""

    name: str
    chance: float
    majority: float
    accuracies: Sequence[ShownScore]


class _Axis(NamedTuple):
    """From left to right; `at` is a place on it in percent."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """0 at `low`, 100 at `high`."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def span(self, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        """Where something begins, and its width; what is outside is cut off."""
        if ends is None:
            return None
        left, right = (min(max(self.at(end), 0.0), 100.0) for end in sorted(ends))
        return left, round(right - left, 2)

    def ticks(self, form: Callable[[float], str]) -> list[tuple[float, str, bool]]:
        """Places, texts, and whether it is zero."""
        values = linear_ticks(self.low, self.high)
        return [(self.at(value), form(value), abs(value) < 1e-12) for value in values]


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside [low, high], about `wanted` of them."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def bars(title: str, names: Sequence[str], models: Sequence[str], scores: Scores) -> Markup:
    """A <figure> with a group of horizontal bars for each name, a bar for each model.

    Whiskers are 95 % intervals, or reach one standard error. A score that does not exist is written
    n/a. Empty if there is no name.
    """
    if not names:
        return Markup()
    axis = _axis(scores)
    groups = []
    for row, name in enumerate(names):
        labels = [f"{model}, {name}" if len(models) > 1 else name for model in models]
        lanes = [_bar(axis, scores[i][row], i, label) for i, label in enumerate(labels)]
        groups.append({"name": name, "kind": "bars", "marks": (), "lanes": lanes})
    hint = f"{whiskers_of(score for model in scores for score in model)}; 0: guessing"
    return part("lanes", title, hint, models, axis.ticks(_tick), groups)


def dots(title: str, asked: Sequence[TaskDots], models: Sequence[str]) -> Markup:
    """A <figure> with a row for each task: accuracies as dots, beside what guessing gets.

    Chance is a solid line, the majority class a dashed one; a score that does not exist has no dot.
    Empty without a task.
    """
    if not asked:
        return Markup()
    axis, groups = _Axis(0.0, 1.0), []
    for task in asked:
        marks = [(axis.at(task.chance), ""), (axis.at(task.majority), "dashed")]
        both = enumerate(zip(models, task.accuracies, strict=True))
        lanes = [_dot(axis, score, i, f"{model}, {task.name}", task) for i, (model, score) in both]
        groups.append({"name": task.name, "kind": "dots", "marks": marks, "lanes": lanes})
    hint = "lines: chance (solid), majority class (dashed)"
    hint += f"; {whiskers_of(score for task in asked for score in task.accuracies)}"
    ticks = axis.ticks(lambda value: f"{100 * value:.0f}%")
    return part("lanes", title, hint, models, ticks, groups)


def accuracy_bar(score: ShownScore, *, chance: float, majority: float, model: int = 0) -> Markup:
    """A small bar of a share of one: lines at chance (solid) and majority (dashed), a whisker."""
    axis, value = _Axis(0.0, 1.0), score.value or 0.0
    words = f"{percents(score)}; chance {100 * chance:.1f}%, majority {100 * majority:.1f}%"
    width, whisker = axis.at(min(max(value, 0.0), 1.0)), axis.span(score.ends)
    return part("small_bar", words, model, width, whisker, axis.at(chance), axis.at(majority))


def _axis(scores: Scores) -> _Axis:
    """From zero, or a tick below the least score, to a tick above the greatest."""
    known = [score for model in scores for score in model if score.value is not None]
    ends = [
        0.0,
        LEAST_REACH,
        *(end for score in known for end in (score.value, *(score.ends or ()))),
    ]
    low, high = min(ends), max(ends)
    ticks = linear_ticks(low, high)
    step = ticks[1] - ticks[0]
    down, up = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _Axis(down * step, up * step)


_NO_LANE: dict[str, Any] = {"bar": None, "whisker": None, "dot": None, "text": "", "text_at": 0}


def _bar(axis: _Axis, score: ShownScore, model: int, label: str) -> dict[str, Any]:
    lane = {**_NO_LANE, "color": fill(model), "words": f"{label}: {written(score)}"}
    if score.value is None:
        return {**lane, "text": "n/a", "text_at": axis.at(0.0)}
    text_at = max(map(axis.at, (0.0, score.value, *(score.ends or ()))))
    lane |= {"bar": axis.span((0.0, score.value)), "whisker": axis.span(score.ends)}
    return {**lane, "text": f"{score.value:.3f}", "text_at": text_at}


def _dot(axis: _Axis, score: ShownScore, model: int, label: str, task: TaskDots) -> dict[str, Any]:
    words = f"{label}: {percents(score)}; chance {100 * task.chance:.1f}%"
    lane = {**_NO_LANE, "color": fill(model), "words": words}
    if score.value is None:
        return lane
    return {**lane, "whisker": axis.span(score.ends), "dot": axis.at(score.value)}


def _tick(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) > 1e-12 else "0"


@dataclass(frozen=True)
class Change:
    """A number before the first step and after the last.

    Attributes:
        name: in words.
        before: None: not known.
        after: None: not known.
        kind: average, category, task or measure.
    """

    name: str
    before: float | None
    after: float | None
    kind: str

    def cells(self) -> tuple[str, str, str, str]:
        """Name, before, after and the difference, as they are read."""
        if self.before is None or self.after is None:
            return self.name, self._form(self.before), self._form(self.after), ""
        if self.kind == "task":
            return (*self._both(), f"{100 * (self.after - self.before):+.1f}")
        return (*self._both(), f"{self.after - self.before:+.4f}")

    def _both(self) -> tuple[str, str, str]:
        return self.name, self._form(self.before), self._form(self.after)

    def _form(self, value: float | None) -> str:
        if value is None:
            return "n/a"
        return f"{100 * value:.1f}%" if self.kind == "task" else f"{value:.4f}"


def changes(
    evaluations: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[Change]:
    """Every number that the evaluation of batch 0 and the last one have.

    Args:
        evaluations: the gauntlet's results, oldest first.
        rows: of metrics.jsonl, oldest first.

    Returns:
        Averages, categories, tasks, then measures of validation rows; empty without an evaluation
        of batch 0 and a later one.
    """
    found: list[Change] = []
    if len(evaluations) > 1 and evaluations[0][BATCH] == 0:
        first, last = evaluations[0], evaluations[-1]
        for kind in ("averages", "categories"):
            before, after = first.get(kind) or {}, last.get(kind) or {}
            name = {"averages": "average", "categories": "category"}[kind]
            found += [Change(key, before.get(key), after[key], name) for key in after]
        found += _tasks(first, last)
    return [*found, *_measures(rows)]


def before_and_after(found: Sequence[Change]) -> Markup:
    """The tables of the report; empty without a change."""
    heads = {"average": "average", "measure": "validation rows", "category": "category"}
    tables = [
        table(
            (heads.get(kind, kind), "before", "after", "change"),
            [change.cells() for change in found if change.kind == kind],
            right=(1, 2, 3),
        )
        for kind in (*heads, "task")
    ]
    return together(tables, "tables")


def console_lines(found: Sequence[Change]) -> list[tuple[str, str]]:
    """Label and text of the lines at a run's end: averages and measures; tasks by their count."""
    lines = []
    for change in found:
        if change.kind in ("average", "measure"):
            name, before, after, step = change.cells()
            lines.append((name.replace("_", " "), f"{before} → {after} ({step})"))
    return lines


def _tasks(first: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[Change]:
    def accuracies(result: Mapping[str, Any]) -> dict[str, float | None]:
        return {f"{t['label']}, {t['num_fewshot']}-shot": t["accuracy"] for t in result["tasks"]}

    before = accuracies(first)
    for name, accuracy in accuracies(last).items():
        yield Change(name, before.get(name), accuracy, "task")


def _measures(rows: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    names = dict.fromkeys(n for row in rows for n in row if n.startswith(_OF_ROWS))
    for name in names:
        logged = [(row[BATCH], row[name]) for row in rows if name in row]
        (start, before), (end, after) = logged[0], logged[-1]
        if start == 0 < end and name not in _NOT_SHOWN:
            yield Change(title(name).text, before, after, "measure")
