"""What an evaluation found, and how it is written down: table, JSON, metrics, one line per choice.

`scores` makes the results; the trainer, `scripts/eval.py` and the pages of `track` read them.
The idea: a number that does not exist is None here, null in JSON, n/a in a table, absent among the
metrics, and never replaced by something else.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.gauntlet.answer_metrics import NOT_GENERATED, UNITS, Answer, Interval, answers_of
from llmfoundry.gauntlet.questions import Question, Refusal, Score, TaskConfig
from llmfoundry.gauntlet.task_types import judge_answer
from llmfoundry.redaction import public
from llmfoundry.terminal import columns

GAUNTLET = "icl/metrics/eval_gauntlet/"


@dataclass(frozen=True)
class CategoryOfTask:
    """Rows of one `category` of a task with has_categories.

    Attributes:
        n: questions asked.
        metrics: every number, by name.
        stderrs: the standard errors of those that have one.
        intervals: the 95 % intervals of those that have one.
    """

    n: int
    metrics: dict[str, float]
    stderrs: dict[str, float]
    intervals: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskResult:
    """One task with one number of worked examples.

    Attributes:
        label: the task's name.
        num_fewshot: number of worked examples.
        metric: Composer's name of the accuracy; TeacherForcedGreedyAccuracy where texts were to be
            generated and were not.
        n: questions asked, less those that cannot be scored.
        accuracy: share answered rightly, over categories their mean; None where the task failed.
        stderr: binomial standard error of the accuracy.
        chance: accuracy of guessing, from the rows.
        majority: accuracy of the best constant answer, from the rows.
        ties: questions where the best answer was not alone; each counts as wrong.
        truncated: questions whose context lost its start to fit into the model's window.
        failure: why there is no accuracy.
        category: the categories that it counts in, joined by commas; None: in none.
        metrics: every number, the accuracy among them, by name.
        stderrs: the standard errors of those that have one.
        by_category: the same for each category of the rows, with has_categories.
        mode: how questions became prompts: native, harness, foundry, or lm_eval, where
            lm-evaluation-harness made them itself.
        rows_hash: of the rows' content.
        rows_total: rows of the task, of which n were asked; 0: not known, taken to be n.
        dropped: worked examples left out to fit into the model's window, over all questions.
        tokens: tokens (Cost.unit) of all inputs, none of them shared.
        refused: questions that the model would not take; each counts as wrong.
        refusal: its words to the first of them.
        missing: rows that cannot be scored, and are left out of every number.
        missing_reason: why not, of the first of them, and where it is.
        interval: the accuracy's 95 % interval (Wilson's); None: not known.
        intervals: those of all metrics that have one.
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
        """As in metric names: label/2-shot."""
        return f"{self.label}/{self.num_fewshot}-shot"

    @property
    def size(self) -> int:
        """Rows of the whole task, whatever part of them was asked."""
        return self.rows_total or self.n


@dataclass(frozen=True)
class Cost:
    """What an evaluation took.

    Attributes:
        tokens_computed: places that the model was run on, padding among them.
        tokens_unshared: of all inputs, as many as without shared beginnings, in `unit`.
        seconds: wall time.
        unit: tokens, or bytes where the model's tokens are not known.
    """

    tokens_computed: int
    tokens_unshared: int
    seconds: float
    unit: str = "tokens"


@dataclass(frozen=True)
class GauntletResult:
    """All of one evaluation.

    Attributes:
        tasks: in the file's order.
        categories: score of each; None where a benchmark is missing or failed.
        averages: named means of categories; None where one of them is.
        stderrs: standard errors of categories and averages, by name.
        problems: what a reader must know: missing and failed benchmarks, wrong baselines.
        cost: what it took, where that was measured.
        members: names of the tasks behind each category and average, whether they are there or not.
        asked: how questions became tokens, and what stood before them; "": not known.
        intervals: 95 % intervals of categories and averages, by name.
    """

    tasks: list[TaskResult]
    categories: dict[str, float | None]
    averages: dict[str, float | None] = field(default_factory=dict)
    stderrs: dict[str, float | None] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    cost: Cost | None = None
    members: dict[str, list[str]] = field(default_factory=dict)
    asked: str = ""
    intervals: dict[str, Interval | None] = field(default_factory=dict)

    @property
    def average(self) -> float | None:
        """The first average; None where it is n/a, or where there is none."""
        return next(iter(self.averages.values()), None)

    def metrics(self) -> dict[str, float]:
        """Every number that exists, under Composer's names; of categories of rows, accuracies."""
        found: dict[str, float | None] = {}
        for task in self.tasks:
            for name, value in {task.metric: task.accuracy, **task.metrics}.items():
                found[f"metrics/{task.name}/{name}"] = value
            for category, part in task.by_category.items():
                name = f"metrics/{task.name}/{category}/{task.metric}"
                found[name] = part.metrics[task.metric]
        for name, score in {**self.categories, **self.averages}.items():
            found[f"{GAUNTLET}{name}"] = score
        return {name: value for name, value in found.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for json.dumps; what does not exist is null."""
        return {**dataclasses.asdict(self), "average": self.average}

    def table(self) -> str:
        """Tasks, categories and averages, how was asked, then problems, for a terminal."""
        head = ("task", "shots", "n", "accuracy %", "chance %", "majority %", "notes")
        rows = [_task_cells(task) for task in self.tasks]
        lines = columns(head, rows, left=(0, len(head) - 1))
        for scores in (self.categories, self.averages):
            width = max((len(name) for name in (*self.categories, *self.averages)), default=0)
            lines += [""] * bool(scores)
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
    """rows.jsonl's lines of a task: one for each row and choice, in order, without line ends.

    `right` is the row's verdict by the task's own accuracy, `chosen` the option with the best
    score, null where that is no choice or a tie. Numbers are written so that reading them gives the
    same floats; one that is not finite is null.
    """
    for answer in answers_of(questions, scores, texts):
        verdict = judge_answer(task, answer)
        row = answer.question.row
        head: dict[str, Any] = {"task": task.label, "shots": num_fewshot, "row": public(row.place)}
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


def _choices(answer: Answer) -> Iterator[dict[str, Any]]:
    """What is known of each option; nothing of the only one where no request was scored."""
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
        ends = task.interval and (100 * task.interval[0], 100 * task.interval[1])
        accuracy += _within(ends, error, digits=1)
    n = str(task.n) if task.n == task.size else f"{task.n}/{task.size}"
    shares = (f"{100 * task.chance:.1f}", f"{100 * task.majority:.1f}")
    return (task.label, str(task.num_fewshot), n, accuracy, *shares, ", ".join(notes_of(task)))


def notes_of(task: TaskResult) -> list[str]:
    """What a reader of the accuracy should know, in a few words each."""
    notes = [f"{task.ties} tied"] * bool(task.ties)
    notes += [f"{task.dropped} examples dropped"] * bool(task.dropped)
    notes += [f"{task.truncated} truncated"] * bool(task.truncated)
    notes += [f"{task.refused} refused"] * bool(task.refused)
    notes += [f"{task.missing} not scored"] * bool(task.missing)
    notes += [f"mean of {len(task.by_category)} categories"] * bool(task.by_category)
    notes += ["not generated"] * (task.metric == NOT_GENERATED)
    notes += [f"{task.mode} prompts"] * (task.mode != "native")
    return notes + ["failed"] * bool(task.failure)


def _number(score: float | None, stderr: float | None, interval: Interval | None) -> str:
    return "n/a" if score is None else f"{score:.4f}" + _within(interval, stderr, digits=4)


def _within(interval: Interval | None, stderr: float | None, *, digits: int) -> str:
    """The 95 % interval, or the standard error where none is known."""
    if interval is not None:
        low, high = interval
        return f" [{low:.{digits}f}, {high:.{digits}f}]"
    return f" ± {stderr:.{digits}f}" if stderr is not None else ""
