"""Results of an evaluation and their formats: table, JSON, metrics, and rows.jsonl.

`aggregate` makes the results. The trainer, `scripts/eval.py` and the pages of `track` read them.
A number that does not exist is None here, null in JSON, n/a in a table and absent from the metrics.
It is never replaced by another value.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.gauntlet.answer_metrics import (
    NOT_GENERATED,
    UNITS,
    AnsweredQuestion,
    Interval,
    answers_of,
)
from llmfoundry.gauntlet.questions import Question, Refusal, Score, TaskConfig
from llmfoundry.gauntlet.task_rows import row_hash
from llmfoundry.gauntlet.task_types import judge_answer
from llmfoundry.redaction import public
from llmfoundry.terminal import columns

GAUNTLET = "icl/metrics/eval_gauntlet/"


@dataclass(frozen=True)
class CategoryOfTask:
    """Result of one `category` of the rows of a task with has_categories.

    Attributes:
        n: number of questions.
        metrics: all metrics by name.
        stderrs: standard errors, for metrics that have one.
        intervals: 95 % intervals, for metrics that have one.
    """

    n: int
    metrics: dict[str, float]
    stderrs: dict[str, float]
    intervals: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskResult:
    """Result of one task with one number of few-shot examples.

    Attributes:
        label: the task's name.
        num_fewshot: number of few-shot examples.
        metric: Composer's name of the accuracy; TeacherForcedGreedyAccuracy if a generation task
            was scored without generation.
        n: number of evaluated questions, without those that cannot be scored.
        accuracy: share of right answers, or its mean over categories; None if the task failed.
        stderr: binomial standard error of the accuracy.
        chance: accuracy of guessing, computed from the rows.
        majority: accuracy of the best constant answer, computed from the rows.
        ties: number of questions whose best answers tie; each counts as wrong.
        truncated: number of questions whose context was truncated to fit into the model's window.
        failure: why there is no accuracy.
        category: categories that include the task, joined by commas; None: no category does.
        metrics: all metrics by name, including the accuracy.
        stderrs: standard errors, for metrics that have one.
        by_category: results for each category of the rows, with has_categories.
        mode: prompt style: native, harness or foundry; lm_eval if lm-evaluation-harness made the
            prompts.
        rows_hash: hash of the rows' content.
        rows_total: number of rows of the task, including those not evaluated; 0: unknown, taken to
            be n.
        dropped: few-shot examples removed to fit into the model's window, summed over questions.
        tokens: total length of all inputs in Cost.unit, without prefix sharing.
        refused: number of questions that the model rejected; each counts as wrong.
        refusal: the model's message for the first rejected question.
        missing: number of rows that cannot be scored; they are excluded from every metric.
        missing_reason: reason and location of the first such row.
        interval: 95 % Wilson interval of the accuracy; None: unknown.
        intervals: 95 % intervals, for metrics that have one.
    """

    label: str
    num_fewshot: int
    metric: str
    n: int
    accuracy: float | None
    stderr: float | None
    chance: float
    majority: float
    ties: int = 0
    truncated: int = 0
    failure: str | None = None
    category: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    by_category: dict[str, CategoryOfTask] = field(default_factory=dict)
    mode: str = "native"
    rows_hash: str = ""
    rows_total: int = 0
    dropped: int = 0
    tokens: int = 0
    refused: int = 0
    refusal: str | None = None
    interval: Interval | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)
    missing: int = 0
    missing_reason: str | None = None

    @property
    def name(self) -> str:
        """Name of the result in metric names, such as label/2-shot."""
        return f"{self.label}/{self.num_fewshot}-shot"

    @property
    def size(self) -> int:
        """Number of rows of the task, including those not evaluated."""
        return self.rows_total or self.n


@dataclass(frozen=True)
class EvaluationCost:
    """Cost of an evaluation.

    Attributes:
        tokens_computed: number of positions that the model computed, with padding.
        tokens_unshared: total length of all inputs in `unit`, without prefix sharing.
        seconds: wall time.
        unit: tokens, or bytes if the model's tokenizer is unknown.
    """

    tokens_computed: int
    tokens_unshared: int
    seconds: float
    unit: str = "tokens"


@dataclass(frozen=True)
class GauntletResult:
    """Result of one evaluation.

    Attributes:
        tasks: results of the tasks, in the order of the file.
        categories: score of each category; None if a benchmark is missing or failed.
        averages: named means of categories; None if a category has no score.
        stderrs: standard errors of categories and averages, by name.
        problems: warnings about missing and failed benchmarks and wrong baselines.
        cost: cost of the evaluation; None: not measured.
        members: names of the tasks of each category and average, including missing tasks.
        asked: description of the prompts (`PromptSettings.describe`); "": unknown.
        intervals: 95 % intervals of categories and averages, by name.
        weights: derivative of each category and average with respect to the accuracy of each task,
            by name; scores without a value are absent.
    """

    tasks: list[TaskResult]
    categories: dict[str, float | None]
    averages: dict[str, float | None] = field(default_factory=dict)
    stderrs: dict[str, float | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    cost: EvaluationCost | None = None
    members: dict[str, list[str]] = field(default_factory=dict)
    asked: str = ""
    intervals: dict[str, Interval | None] = field(default_factory=dict)
    weights: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def average(self) -> float | None:
        """The first average; None if it is n/a or if there are no averages."""
        return next(iter(self.averages.values()), None)

    def metrics(self) -> dict[str, float]:
        """Return all numbers that exist, under Composer's names.

        For the categories of a task's rows, only the accuracy is included.
        """
        values: dict[str, float | None] = {}
        for task in self.tasks:
            for name, value in {task.metric: task.accuracy, **task.metrics}.items():
                values[f"metrics/{task.name}/{name}"] = value
            for category, result in task.by_category.items():
                name = f"metrics/{task.name}/{category}/{task.metric}"
                values[name] = result.metrics[task.metric]
        for name, score in {**self.categories, **self.averages}.items():
            values[f"{GAUNTLET}{name}"] = score
        return {name: value for name, value in values.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values for json.dumps; missing numbers are None."""
        return {**dataclasses.asdict(self), "average": self.average}

    def table(self) -> str:
        """Return a terminal table: tasks, categories, averages, prompt settings, problems."""
        head = ("task", "shots", "n", "accuracy %", "chance %", "majority %", "notes")
        rows = [_task_cells(task) for task in self.tasks]
        lines = columns(head, rows, left=(0, len(head) - 1))
        for scores in (self.categories, self.averages):
            width = max((len(name) for name in (*self.categories, *self.averages)), default=0)
            if scores:
                lines.append("")  # a blank line before each block
            for name, score in scores.items():
                shown = _number(score, self.stderrs.get(name), self.intervals.get(name))
                lines.append(f"{name:<{width}}  {shown:>7}")
        lines += ["", f"asked: {self.asked}"] if self.asked else []
        return "\n".join([*lines, *(f"! {problem}" for problem in self.problems)])


def rows_lines(
    task: TaskConfig,
    num_fewshot: int,
    questions: Sequence[Question],
    scores: Sequence[Sequence[Score | Refusal]],
    texts: Sequence[str | Refusal] | None = None,
) -> Iterator[str]:
    """Yield a task's lines of rows.jsonl: one for each row and choice, without line ends.

    `hash` identifies the row's content, so that evaluations of different models can be paired.
    `right` is the verdict of the task's accuracy. `chosen` is the option with the best score; it is
    null for a tie and for tasks without options. Floats survive the round trip exactly; a float
    that is not finite becomes null.
    """
    for answer in answers_of(questions, scores, texts):
        verdict = judge_answer(task, answer)
        row = answer.question.row
        head: dict[str, Any] = {"task": task.label, "shots": num_fewshot, "row": public(row.place)}
        head["hash"] = row_hash(row)
        if row.category is not None:
            head["category"] = row.category
        tail: dict[str, Any] = {"chosen": verdict.chosen, "right": verdict.right}
        if answer.text is not None:
            tail["text"] = answer.text
        if answer.refusal is not None:
            tail["missing" if answer.refusal.left_out else "refused"] = answer.refusal.reason
        for i, numbers in enumerate(_choices(answer)):
            line = {**head, "choice": i, "gold": row.gold, **numbers, **tail}
            yield json.dumps(line, ensure_ascii=False, allow_nan=False)


def _choices(answer: AnsweredQuestion) -> Iterator[dict[str, Any]]:
    """Yield the numbers of each option; one empty mapping if no request was scored."""
    if not answer.scores:
        yield {}
        return
    for request, score in zip(answer.question.requests, answer.scores, strict=True):
        yield {
            "logprob": _finite(score.logprob),
            "best_logprob": _finite(score.best_logprob),
            **{f"{unit}s": UNITS[unit](request, score) for unit in ("token", "char", "byte")},
            "greedy": score.greedy,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _task_cells(task: TaskResult) -> tuple[str, ...]:
    accuracy = "n/a"
    if task.accuracy is not None:
        accuracy = f"{100 * task.accuracy:.1f}"
        error = 100 * task.stderr if task.stderr is not None else None
        interval = None
        if task.interval:
            low, high = task.interval
            interval = (100 * low, 100 * high)
        accuracy += _within(interval, error, digits=1)
    n = str(task.n) if task.n == task.size else f"{task.n}/{task.size}"
    shares = (f"{100 * task.chance:.1f}", f"{100 * task.majority:.1f}")
    return (task.label, str(task.num_fewshot), n, accuracy, *shares, ", ".join(notes_of(task)))


def notes_of(task: TaskResult) -> list[str]:
    """Return short remarks about an accuracy, for the notes column of a table."""
    notes = []
    if task.ties:
        notes.append(f"{task.ties} tied")
    if task.dropped:
        notes.append(f"{task.dropped} examples dropped")
    if task.truncated:
        notes.append(f"{task.truncated} truncated")
    if task.refused:
        notes.append(f"{task.refused} refused")
    if task.missing:
        notes.append(f"{task.missing} not scored")
    if task.by_category:
        notes.append(f"mean of {len(task.by_category)} categories")
    if task.metric == NOT_GENERATED:
        notes.append("not generated")
    if task.mode != "native":
        notes.append(f"{task.mode} prompts")
    if task.failure:
        notes.append("failed")
    return notes


def _number(score: float | None, stderr: float | None, interval: Interval | None) -> str:
    return "n/a" if score is None else f"{score:.4f}" + _within(interval, stderr, digits=4)


def _within(interval: Interval | None, stderr: float | None, *, digits: int) -> str:
    """Format the 95 % interval, or the standard error if there is no interval."""
    if interval is not None:
        low, high = interval
        return f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f" ± {stderr:.{digits}f}" if stderr is not None else ""
