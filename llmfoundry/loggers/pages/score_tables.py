"""Scores as text, bars and dots: with their uncertainty, next to chance, before and after a run.

The report of a run, the gauntlet page and a model card use the same format. `bars` and `dots` are
charts of several models: model i has color i and number i + 1 in all of them, and lines mark the
accuracy of guessing. `changes` compares the evaluation before the first step (`eval_first`, which
fine-tuning runs have) with the last one.
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
LEAST_REACH = 0.25  # minimal end of the bars' axis, so that noise around zero stays small


class ShownScore(NamedTuple):
    """A score with its standard error and its 95 % interval; None: unknown."""

    value: float | None
    stderr: float | None = None
    interval: Sequence[float] | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Return the ends of the whisker: the interval, else one standard error to both sides."""
        if self.interval is not None:
            return self.interval[0], self.interval[1]
        if self.value is None or not self.stderr:
            return None
        return self.value - self.stderr, self.value + self.stderr


def whiskers_of(estimates: Iterable[ShownScore]) -> str:
    """Return the meaning of the whiskers in words; old results have only standard errors."""
    has_intervals = {score.interval is not None for score in estimates if score.ends is not None}
    meanings = []
    if True in has_intervals or not has_intervals:
        meanings.append("95% interval")
    if False in has_intervals:
        meanings.append("± one standard error")
    return " or ".join(meanings)


def percents(estimate: ShownScore) -> str:
    """Return a fraction as a percentage: 54.3% [45.9, 62.5], 54.3% ± 4.3, or n/a."""
    return _text(estimate, lambda share: f"{100 * share:.1f}", unit="%")


def written(estimate: ShownScore) -> str:
    """Return a score as text: 0.3333 [0.3098, 0.3568], 0.3333 ± 0.0120, or n/a."""
    return _text(estimate, lambda score: f"{score:.4f}")


def _text(estimate: ShownScore, number: Callable[[float], str], unit: str = "") -> str:
    value, error, interval = estimate
    if value is None:
        return "n/a"
    if interval is not None:
        return f"{number(value)}{unit} [{number(interval[0])}, {number(interval[1])}]"
    return number(value) + unit + (f" ± {number(error)}" if error is not None else "")


def in_parts(shown: str) -> tuple[str, str]:
    """Split an output of `written` or `percents` into the score and its uncertainty."""
    value, _, rest = shown.partition(" ")
    return value, rest


Scores = Sequence[Sequence[ShownScore]]  # [model][name]


@dataclass(frozen=True)
class TaskDots:
    """A row of the dots chart: a task with its two guessing baselines and all accuracies."""

    name: str
    chance: float
    majority: float
    accuracies: Sequence[ShownScore]


class _Axis(NamedTuple):
    """A horizontal axis from `low` to `high`. Positions are in percent of its width."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at `low`, 100 at `high`."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def span(self, ends: tuple[float, float] | None) -> tuple[float, float] | None:
        """Return start and width of an interval, clipped to the axis; None without an interval."""
        if ends is None:
            return None
        left, right = [min(max(self.at(end), 0.0), 100.0) for end in sorted(ends)]
        return left, round(right - left, 2)

    def ticks(self, form: Callable[[float], str]) -> list[tuple[float, str, bool]]:
        """Return the position and the text of each tick, and whether it is zero."""
        values = linear_ticks(self.low, self.high)
        return [(self.at(value), form(value), abs(value) < 1e-12) for value in values]


def linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about `wanted` ticks in [low, high]: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def bars(title: str, names: Sequence[str], models: Sequence[str], scores: Scores) -> Markup:
    """Return a <figure> with a group of horizontal bars for each name, one bar per model.

    Whiskers are 95 % intervals, or one standard error. A missing score is n/a. The figure is empty
    without names.
    """
    if not names:
        return Markup()
    axis = _axis(scores)
    groups = []
    for row, name in enumerate(names):
        labels = [f"{model}, {name}" if len(models) > 1 else name for model in models]
        lanes = [_bar(axis, scores[i][row], i, label) for i, label in enumerate(labels)]
        groups.append({"name": name, "kind": "bars", "marks": (), "lanes": lanes})
    all_scores = [score for model_scores in scores for score in model_scores]
    hint = f"{whiskers_of(all_scores)}; 0: guessing"
    return part("lanes", title, hint, models, axis.ticks(_tick), groups)


def dots(title: str, asked: Sequence[TaskDots], models: Sequence[str]) -> Markup:
    """Return a <figure> with a row for each task: accuracies as dots, next to guessing.

    Lines mark chance (solid) and the majority class (dashed). A missing accuracy has no dot. The
    figure is empty without tasks.
    """
    if not asked:
        return Markup()
    axis, groups = _Axis(0.0, 1.0), []
    for task in asked:
        marks = [(axis.at(task.chance), ""), (axis.at(task.majority), "dashed")]
        lanes = []
        for i, (model, score) in enumerate(zip(models, task.accuracies, strict=True)):
            lanes.append(_dot(axis, score, i, f"{model}, {task.name}", task))
        groups.append({"name": task.name, "kind": "dots", "marks": marks, "lanes": lanes})
    all_scores = [score for task in asked for score in task.accuracies]
    hint = f"lines: chance (solid), majority class (dashed); {whiskers_of(all_scores)}"
    ticks = axis.ticks(lambda value: f"{100 * value:.0f}%")
    return part("lanes", title, hint, models, ticks, groups)


def accuracy_bar(score: ShownScore, *, chance: float, majority: float, model: int = 0) -> Markup:
    """Return a small bar with a whisker, and lines at chance (solid) and majority (dashed)."""
    axis, value = _Axis(0.0, 1.0), score.value or 0.0
    words = f"{percents(score)}; chance {100 * chance:.1f}%, majority {100 * majority:.1f}%"
    width, whisker = axis.at(min(max(value, 0.0), 1.0)), axis.span(score.ends)
    return part("small_bar", words, model, width, whisker, axis.at(chance), axis.at(majority))


def _axis(scores: Scores) -> _Axis:
    """Return an axis from a tick at or below the lowest score (or 0) to one above the highest."""
    values = [0.0, LEAST_REACH]
    for model_scores in scores:
        for score in model_scores:
            if score.value is not None:
                values += [score.value, *(score.ends or ())]
    low, high = min(values), max(values)

    # extend the range to multiples of the tick step
    ticks = linear_ticks(low, high)
    step = ticks[1] - ticks[0]
    down, up = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _Axis(down * step, up * step)


_NO_LANE: dict[str, Any] = {"bar": None, "whisker": None, "dot": None, "text": "", "text_at": 0}


def _bar(axis: _Axis, score: ShownScore, model: int, label: str) -> dict[str, Any]:
    """Return the template values of a bar; its text is right of the bar and of the whisker."""
    lane = {**_NO_LANE, "color": fill(model), "words": f"{label}: {written(score)}"}
    if score.value is None:
        return {**lane, "text": "n/a", "text_at": axis.at(0.0)}
    text_at = max(map(axis.at, (0.0, score.value, *(score.ends or ()))))
    lane |= {"bar": axis.span((0.0, score.value)), "whisker": axis.span(score.ends)}
    return {**lane, "text": f"{score.value:.3f}", "text_at": text_at}


def _dot(axis: _Axis, score: ShownScore, model: int, label: str, task: TaskDots) -> dict[str, Any]:
    """Return the template values of a dot."""
    words = f"{label}: {percents(score)}; chance {100 * task.chance:.1f}%"
    lane = {**_NO_LANE, "color": fill(model), "words": words}
    if score.value is None:
        return lane
    return {**lane, "whisker": axis.span(score.ends), "dot": axis.at(score.value)}


def _tick(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) > 1e-12 else "0"


@dataclass(frozen=True)
class Change:
    """A score before the first step and after the last step.

    Attributes:
        name: title of the score.
        before: value before the first step; None: unknown.
        after: value after the last step; None: unknown.
        kind: "average", "category", "task" or "measure" (a metric of the validation set).
    """

    name: str
    before: float | None
    after: float | None
    kind: str

    def cells(self) -> tuple[str, str, str, str]:
        """Return name, value before, value after and difference as text."""
        difference = ""
        if self.before is not None and self.after is not None:
            difference = f"{self.after - self.before:+.4f}"
            if self.kind == "task":  # in percentage points
                difference = f"{100 * (self.after - self.before):+.1f}"
        return self.name, self._form(self.before), self._form(self.after), difference

    def _form(self, value: float | None) -> str:
        """Return a value as text."""
        if value is None:
            return "n/a"
        return f"{100 * value:.1f}%" if self.kind == "task" else f"{value:.4f}"


def changes(
    evaluations: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[Change]:
    """Return the scores before the first step and after the last step.

    Args:
        evaluations: results of the gauntlet, oldest first.
        rows: rows of metrics.jsonl, oldest first.

    Returns:
        Averages, categories, tasks, then metrics of the validation set. Empty without an evaluation
        at batch 0 and a later one.
    """
    scores: list[Change] = []
    if len(evaluations) > 1 and evaluations[0][BATCH] == 0:
        first, last = evaluations[0], evaluations[-1]
        for key, kind in (("averages", "average"), ("categories", "category")):
            before, after = first.get(key) or {}, last.get(key) or {}
            scores += [Change(name, before.get(name), after[name], kind) for name in after]
        scores += _tasks(first, last)
    return [*scores, *_measures(rows)]


def before_and_after(found: Sequence[Change]) -> Markup:
    """Return the tables of the report, one for each kind of score; empty without scores."""
    heads = {"average": "average", "measure": "validation rows", "category": "category"}
    heads["task"] = "task"
    tables = []
    for kind, head in heads.items():
        rows = [change.cells() for change in found if change.kind == kind]
        tables.append(table((head, "before", "after", "change"), rows, right=(1, 2, 3)))
    return together(tables, "tables")


def console_lines(found: Sequence[Change]) -> list[tuple[str, str]]:
    """Return label and text of the lines at the end of a run: averages and validation metrics."""
    lines = []
    for change in found:
        if change.kind in ("average", "measure"):
            name, before, after, difference = change.cells()
            lines.append((name.replace("_", " "), f"{before} → {after} ({difference})"))
    return lines


def _tasks(first: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the accuracy of each task of the last evaluation."""

    def accuracies(result: Mapping[str, Any]) -> dict[str, float | None]:
        return {f"{t['label']}, {t['num_fewshot']}-shot": t["accuracy"] for t in result["tasks"]}

    before = accuracies(first)
    for name, accuracy in accuracies(last).items():
        yield Change(name, before.get(name), accuracy, "task")


def _measures(rows: Sequence[Mapping[str, Any]]) -> Iterator[Change]:
    """Yield the metrics of the validation set that were logged at batch 0 and later."""
    names = dict.fromkeys(n for row in rows for n in row if n.startswith(_OF_ROWS))
    for name in names:
        logged = [(row[BATCH], row[name]) for row in rows if name in row]
        (start, before), (end, after) = logged[0], logged[-1]
        if start == 0 < end and name not in _NOT_SHOWN:
            yield Change(title(name).text, before, after, "measure")
