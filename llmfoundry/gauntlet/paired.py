"""Paired comparison: the difference of two models on the rows that both answered.

Entry point: `compare_rows`, of two `ModelAnswers`. `scripts/eval.py models=[A,B]`,
`scripts/compare.py` and the Python API call it. The idea: two models that answer the same rows
share most of the luck of these rows, so that the interval of their difference is much narrower than
the distance at which their own intervals separate.

The interval is the percentile bootstrap over rows (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13): the rows of each task are resampled with replacement, and accuracies,
categories and averages are recomputed. In a pair of right or wrong answers, a row's difference is
1, 0 or -1. The counts of the three in a resample have a multinomial distribution, so that the cost
does not depend on the number of rows. Categories and averages are linear in the accuracies
(`GauntletResult.weights`), with the weighting and the baselines of the gauntlet file.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmfoundry.errors import UserError
from llmfoundry.files import open_guarded, parse_json, read_object, read_object_if_there
from llmfoundry.gauntlet.answer_metrics import Interval, answers_of
from llmfoundry.gauntlet.gauntlet import TaskAnswers
from llmfoundry.gauntlet.task_rows import row_hash
from llmfoundry.gauntlet.task_types import judge_answer
from llmfoundry.terminal import columns

RESULTS, ROWS = "results.json", "rows.jsonl"
RESAMPLES = 10_000  # the ends of an interval repeat to about 1 % of its width
FEW = 10  # with fewer rows of spread, percentile intervals cover only 85 to 93 %
AGAIN = "evaluate the model again with scripts/eval.py"

_SAME_PROMPTS = {"harness": "native"}  # the two differ in special tokens, not in text
_TOLERANCE = 1e-9  # of weights, which went through a file
_WEIGHTS_DIFFER = (
    "its tasks or their weights or baselines differ between the evaluations, or an older version"
    " made one of them"
)

RowKey = tuple[str, int]  # hash of the row's content, its number among rows with this content
Draws = NDArray[np.float64]  # (RESAMPLES,): a difference in each resample


@dataclass(frozen=True)
class TaskRights:
    """Judged answers to the rows of one task.

    Attributes:
        rights: for each row, whether the answer counts as right; None: the row cannot be scored.
        categories: the category of each row; only in a task with has_categories.
    """

    rights: dict[RowKey, bool | None] = field(default_factory=dict)
    categories: dict[RowKey, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelAnswers:
    """One model's results and judged answers.

    Attributes:
        name: the model's name in tables and messages.
        result: `GauntletResult.to_json()`.
        tasks: answers by the name of the task, such as label/2-shot.
    """

    name: str
    result: Mapping[str, Any]
    tasks: Mapping[str, TaskRights]

    @classmethod
    def of(
        cls, name: str, result: Mapping[str, Any], answered: Sequence[TaskAnswers]
    ) -> ModelAnswers:
        """Return the answers of an evaluation in memory; see the attributes for `result`."""
        return cls(name, result, judged_answers(answered))

    @classmethod
    def read(cls, name: str, folder: Path) -> ModelAnswers:
        """Read results.json and rows.jsonl of an evaluation.

        Raises:
            UserError: a file is missing or damaged, or the two do not belong together.
        """
        result = _read_result(folder / RESULTS)
        tasks = _read_rows(folder / ROWS)
        for task in result.get("tasks", []):
            label = _task_name(task)
            expected = task["n"] + task.get("missing", 0)
            n_rows = len(tasks[label].rights) if label in tasks else 0
            if task.get("mode") != "lm_eval" and n_rows != expected:
                raise UserError(
                    f"{folder / ROWS}: has {n_rows:,} rows of {label}, but {RESULTS} has"
                    f" {expected:,}; the file is incomplete or was changed: {AGAIN}"
                )
        return cls(name, result, tasks)


def latest_answers(name: str, run_folder: Path) -> ModelAnswers | None:
    """Read the evaluation of a run's latest checkpoint that scripts/eval.py made.

    Returns:
        The answers, under the name of the run and the checkpoint; None: there is no evaluation
        with answers of rows. Evaluations in training keep none.

    Raises:
        UserError: see `ModelAnswers.read`.
    """
    found: list[tuple[int, Path]] = []
    for path in run_folder.glob(f"eval/*/{ROWS}"):
        batch = read_object_if_there(path.parent / RESULTS, instead=AGAIN).get("time/batch")
        if type(batch) is int:
            found.append((batch, path.parent))
    if not found:
        return None
    _, folder = max(found)
    return ModelAnswers.read(f"{name} {folder.name}", folder)


def judged_answers(answered: Sequence[TaskAnswers]) -> dict[str, TaskRights]:
    """Return the judged answers of each task, by name."""
    tasks: dict[str, TaskRights] = {}
    for part in answered:
        answers, seen = TaskRights(), Counter[str]()
        for answer in answers_of(part.questions, part.scores, part.texts):
            row, refusal = answer.question.row, answer.refusal
            is_missing = refusal is not None and refusal.left_out
            right = None if is_missing else judge_answer(part.task, answer).right
            _add(answers, seen, row_hash(row), right, row.category)
        tasks[f"{part.task.label}/{part.num_fewshot}-shot"] = answers
    return tasks


class _Task(msgspec.Struct):
    """The keys of a task in results.json that a comparison reads."""

    label: str
    num_fewshot: int
    n: int
    accuracy: float | None
    metric: str
    missing: int = 0
    mode: str = "native"


class _Result(msgspec.Struct):
    """The keys of results.json that a comparison reads."""

    tasks: list[_Task] = []
    categories: dict[str, float | None] | None = None
    averages: dict[str, float | None] | None = None
    members: dict[str, list[str]] | None = None
    weights: dict[str, dict[str, float]] | None = None


def _read_result(path: Path) -> dict[str, Any]:
    """Read results.json; an evaluation without a gauntlet has an empty result."""
    result = read_object(path, instead=AGAIN).get("gauntlet") or {}
    try:
        msgspec.convert(result, _Result)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: gauntlet: {error}; {AGAIN}") from error
    assert isinstance(result, dict), "converted"
    return result


def _read_rows(path: Path) -> dict[str, TaskRights]:
    """Read rows.jsonl. A row has a line for each choice; the first one is enough."""
    tasks: dict[str, TaskRights] = {}
    seen: dict[str, Counter[str]] = {}
    for number, line in _lines(path):
        if '"choice": 0' not in line:
            continue
        try:
            row = parse_json(line)
            if row["choice"] != 0:
                continue
            name = f"{row['task']}/{int(row['shots'])}-shot"
            right = None if "missing" in row else row["right"]
            key, category = str(row["hash"]), row.get("category")
            if not (isinstance(right, bool | None) and isinstance(category, str | None)):
                raise ValueError("right is not a boolean, or category is not a text")
        except KeyError as error:
            raise UserError(
                f"{path}:{number}: has no {error}, which pairs rows of different models; an older"
                f" version wrote the file: {AGAIN}"
            ) from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{number}: is not a line of an evaluation; {AGAIN}") from error
        _add(
            tasks.setdefault(name, TaskRights()),
            seen.setdefault(name, Counter()),
            key,
            right,
            category,
        )
    return tasks


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line numbers and lines of a text file.

    Raises:
        UserError: the file cannot be read, or its last line has no end.
    """
    try:
        with open_guarded(path) as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    raise UserError(f"{path}:{number}: the file ends within a line; {AGAIN}")
                yield number, line.decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; {AGAIN}") from error


def _add(
    answers: TaskRights, seen: Counter[str], content: str, right: bool | None, category: str | None
) -> None:
    """Add a row; rows with the same content are numbered in their order."""
    key = (content, seen[content])
    seen[content] += 1
    answers.rights[key] = right
    if category is not None:
        answers.categories[key] = category


@dataclass(frozen=True)
class PairedDifference:
    """Difference of one score between two models, on the rows that both answered.

    Attributes:
        name: name of the task (label/2-shot), category or average.
        model: the model's score on these rows.
        baseline: the score of the model that it is compared with.
        value: `model - baseline`.
        interval: 95 % interval of the difference.
        n: number of rows.
        gained: rows that only the model answered right; of a category, of all its tasks.
        lost: rows that only the baseline answered right.
        is_share: whether the scores are shares of right answers, as those of tasks.
    """

    name: str
    model: float
    baseline: float
    value: float
    interval: Interval
    n: int
    gained: int
    lost: int
    is_share: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return name, difference with its interval, both scores and the counts, as texts."""
        scale, digits, unit = (100, 1, "%") if self.is_share else (1, 4, "")
        low, high = (f"{scale * end:+.{digits}f}" for end in self.interval)
        value = f"{scale * self.value:+.{digits}f}{unit} [{low}, {high}]"
        scores = (f"{scale * x:.{digits}f}{unit}" for x in (self.baseline, self.model))
        counts = (f"{count:,}" for count in (self.n, self.gained, self.lost))
        return (self.name, value, *scores, *counts)


@dataclass(frozen=True)
class PairedComparison:
    """Differences of two models that answered the same rows.

    Attributes:
        model: name of the model.
        baseline: name of the model that it is compared with.
        tasks: a difference for each task that compares.
        categories: a difference for each category whose tasks all compare.
        averages: a difference for each average whose tasks all compare.
        notes: lines about what is not compared and why, and about rows left out.
    """

    model: str
    baseline: str
    tasks: list[PairedDifference]
    categories: list[PairedDifference]
    averages: list[PairedDifference]
    notes: list[str]

    @property
    def advice(self) -> str:
        """A line about the number of intervals; empty without a comparison."""
        n = len(self.tasks)
        if not n:
            return ""
        head = "1 task was compared" if n == 1 else f"{n} tasks were compared"
        if n == 1:
            return f"{head}, on the rows that both models answered"
        return (
            f"{head}, each with a 95 % interval: {n / 20:.1f} of {n} such intervals miss the true"
            " difference on average. Decide by an average, or by a task chosen in advance"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values for json.dumps."""
        return asdict(self)

    def scores(self) -> list[PairedDifference]:
        """Return all differences: averages, categories, tasks."""
        return [*self.averages, *self.categories, *self.tasks]

    def table(self) -> str:
        """Return a terminal table: averages, categories, tasks, notes."""
        head = ("", "difference", "baseline", "model", "rows", "gained", "lost")
        rows = [difference.cells() for difference in self.scores()]
        lines = columns(head, rows) if rows else []
        notes = ["", f"{self.advice}."] if self.advice else []
        title = f"{self.model} minus {self.baseline}, on the rows that both answered:"
        return "\n".join([title, *lines, *notes, *(f"! {note}" for note in self.notes)])


def compare_rows(
    model: ModelAnswers, baseline: ModelAnswers, *, resamples: int = RESAMPLES
) -> PairedComparison:
    """Compare two models on the rows that both answered.

    Rows are matched by their content, not by their position. A task without common rows, or with
    different prompts or ways of judging, is not compared, and a note says so. A category or an
    average is compared if all its tasks are.

    Args:
        model: the model.
        baseline: the model that it is compared with.
        resamples: number of bootstrap samples.

    Returns:
        The differences `model - baseline`; the same for every call.
    """
    notes: list[str] = []
    pairs: dict[str, PairedCounts] = {}
    entries = {_task_name(task): task for task in baseline.result.get("tasks", [])}
    # tasks
    for entry in model.result.get("tasks", []):
        name = _task_name(entry)
        reason = _why_not(entry, entries.get(name), baseline.name)
        if reason:
            notes.append(f"{name}: not compared: {reason}")
            continue
        pair, task_notes = _pair(name, model, baseline)
        notes += [f"{name}: {note}" for note in task_notes]
        if pair is not None:
            pairs[name] = pair
    names = [_task_name(entry) for entry in model.result.get("tasks", [])]
    notes += [
        f"{n}: not compared: {model.name} has no such task" for n in entries if n not in names
    ]
    # categories and averages, from the draws of their tasks
    draws = {name: pair.draws(resamples) for name, pair in pairs.items()}
    tasks = [pair.difference(draws[name]) for name, pair in pairs.items()]
    scores: dict[str, list[PairedDifference]] = {"categories": [], "averages": []}
    lacking: list[str] = []
    for kind, found in scores.items():
        for name in model.result.get(kind) or {}:
            members = (model.result.get("members") or {}).get(name, [])
            if any(task not in pairs for task in members):
                lacking.append(name)
                continue
            weights = _common_weights(name, model.result, baseline.result)
            if weights is None:
                notes.append(f"{name}: not compared: {_WEIGHTS_DIFFER}")
                continue
            offset = _offset(name, kind, weights, baseline.result)
            found.append(_combined(name, weights, offset, pairs, draws))
    if lacking:
        notes.append(f"not compared, as one of their tasks is not: {', '.join(lacking)}")
    return PairedComparison(
        model.name, baseline.name, tasks, scores["categories"], scores["averages"], notes
    )


def _why_not(entry: Mapping[str, Any], other: Mapping[str, Any] | None, name: str) -> str:
    """Return why a task cannot be compared; empty if it can."""
    if other is None:
        return f"{name} has no such task"
    if entry["accuracy"] is None or other["accuracy"] is None:
        return "it failed"
    if "lm_eval" in (entry.get("mode"), other.get("mode")):
        return "lm-evaluation-harness reports no answers of rows"
    modes = [_SAME_PROMPTS.get(e.get("mode", ""), e.get("mode")) for e in (entry, other)]
    if modes[0] != modes[1]:
        return f"different prompts, {entry['mode']} and {other['mode']}"
    if entry["metric"] != other["metric"]:
        return f"judged differently, by {entry['metric']} and {other['metric']}"
    return ""


@dataclass(frozen=True)
class PairedCounts:
    """A task's answers of both models, counted.

    Attributes:
        name: name of the task.
        counts: for each group of rows (one if the task has no categories) the numbers of rows that
            only the model, both or neither, and only the baseline answered right.
        weights: weight of each group in the accuracy; their sum is 1.
        baseline: accuracy of the baseline.
    """

    name: str
    counts: NDArray[np.int64]  # (groups, 3)
    weights: NDArray[np.float64]  # (groups,)
    baseline: float

    @property
    def value(self) -> float:
        """Difference of the accuracies."""
        return float(self.weights @ (_signed(self.counts) / self.counts.sum(axis=1)))

    def draws(self, resamples: int = RESAMPLES) -> Draws:
        """Return the difference in each resample of the rows, within each group of rows.

        A sample without spread, such as equal answers to all rows, would give an interval of width
        0. If fewer than FEW rows are outside the most frequent of the three outcomes, resamples are
        drawn with one row added to each outcome, and centered on the difference.

        The variance of a resampled mean is (n - 1) / n of that of the mean (Hesterberg, The
        American Statistician 69, 2015). In a task with several groups, which may have few rows
        each, the draws are scaled accordingly.
        """
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        n_groups, spread = len(self.counts), self.counts.sum() - self.counts.max(axis=1).sum()
        added = 1 / n_groups if spread < FEW else 0.0
        total = np.full(resamples, self.value)
        for weight, counts in zip(self.weights, self.counts, strict=True):
            n = int(counts.sum())
            shares = (counts + added) / (n + 3 * added)
            drawn = _signed(generator.multinomial(n, shares, size=resamples)) / n
            correction = math.sqrt(n / (n - 1)) if n_groups > 1 and n > 1 else 1.0
            total += weight * correction * (drawn - _signed(shares))
        return np.clip(total, -1.0, 1.0)

    def difference(self, draws: Draws) -> PairedDifference:
        """Return the task's difference and its interval."""
        gained, _, lost = self.counts.sum(axis=0).tolist()
        value, n = self.value, int(self.counts.sum())
        score, interval = self.baseline, percentile_interval(draws)
        return PairedDifference(
            self.name, score + value, score, value, interval, n, gained, lost, is_share=True
        )


def paired_counts(
    name: str, categories: Mapping[str, Sequence[int]], baseline: float
) -> PairedCounts:
    """Return the groups of rows to resample: the categories, those with one row as one group.

    Args:
        name: name of the task.
        categories: counts of gained, same and lost rows by category; one if the task has none.
        baseline: accuracy of the baseline.
    """
    single = [counts for counts in categories.values() if sum(counts) == 1]
    groups = [(1, counts) for _, counts in sorted(categories.items()) if sum(counts) > 1]
    if single:
        groups.append((len(single), [sum(column) for column in zip(*single, strict=True)]))
    weights = np.array([n for n, _ in groups]) / len(categories)
    return PairedCounts(name, np.array([counts for _, counts in groups]), weights, baseline)


def _signed(counts: NDArray[Any]) -> NDArray[Any]:
    """Return gained minus lost of counts or shares in the order of `PairedCounts.counts`."""
    return counts[..., 0] - counts[..., 2]


def percentile_interval(draws: Draws) -> Interval:
    """Return the middle 95 % of the draws."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return round(float(low), 12), round(float(high), 12)  # 0 stays 0 where sums end at 1e-17


def _pair(
    name: str, model: ModelAnswers, baseline: ModelAnswers
) -> tuple[PairedCounts | None, list[str]]:
    """Match the rows of one task.

    Returns:
        The counts, None without a common row; and notes about rows left out.
    """
    ours, theirs = (m.tasks.get(name, TaskRights()) for m in (model, baseline))
    common = [key for key in ours.rights if key in theirs.rights]
    notes: list[str] = []
    if not common:
        return None, ["not compared: the models answered different rows"]
    if len(common) < max(len(ours.rights), len(theirs.rights)):
        notes.append(
            f"only {len(common):,} rows are in both evaluations, of {len(ours.rights):,} of"
            f" {model.name} and {len(theirs.rights):,} of {baseline.name}; they are compared"
        )
    # count the outcomes in each category of rows
    counts: dict[str, list[int]] = {}
    rights: dict[str, int] = {}
    n_missing = 0
    for key in common:
        right, other = ours.rights[key], theirs.rights[key]
        if right is None or other is None:
            n_missing += 1
            continue
        category = ours.categories.get(key, "")
        outcome = 1 if right == other else 0 if right else 2
        counts.setdefault(category, [0, 0, 0])[outcome] += 1
        rights[category] = rights.get(category, 0) + other
    if n_missing:
        notes.append(f"{n_missing:,} rows cannot be scored for one of the models, and are left out")
    if not counts:
        return None, [*notes, "not compared: no row was scored for both models"]
    shares = [rights[category] / sum(of) for category, of in counts.items()]
    return paired_counts(name, counts, sum(shares) / len(shares)), notes


def _common_weights(
    name: str, result: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, float] | None:
    """Return the weights of a score's tasks; None if they differ between the evaluations."""
    ours, theirs = ((part.get("weights") or {}).get(name) for part in (result, other))
    if not ours or not theirs or ours.keys() != theirs.keys():
        return None
    gaps = (abs(weight - theirs[task]) / abs(weight) for task, weight in ours.items() if weight)
    return dict(ours) if max(gaps, default=0.0) <= _TOLERANCE else None


def _offset(name: str, kind: str, weights: Mapping[str, float], result: Mapping[str, Any]) -> float:
    """Return a score without its accuracies: what the baselines take off."""
    accuracies = {_task_name(task): task["accuracy"] for task in result["tasks"]}
    weighted = sum(weight * accuracies[task] for task, weight in weights.items())
    return float(result[kind][name] - weighted)


def _combined(
    name: str,
    weights: Mapping[str, float],
    offset: float,
    pairs: Mapping[str, PairedCounts],
    draws: Mapping[str, Draws],
) -> PairedDifference:
    """Return the difference of a category or an average, from those of its tasks."""
    members = [(weight, pairs[task], draws[task]) for task, weight in weights.items()]
    value = sum(weight * pair.value for weight, pair, _ in members)
    score = offset + sum(weight * pair.baseline for weight, pair, _ in members)
    drawn = sum((weight * of_task for weight, _, of_task in members), np.zeros(1))
    counts = sum(pair.counts.sum(axis=0) for _, pair, _ in members)
    gained, same, lost = np.asarray(counts).tolist()
    return PairedDifference(
        name,
        score + value,
        score,
        value,
        percentile_interval(drawn),
        gained + same + lost,
        gained,
        lost,
    )


def _task_name(entry: Mapping[str, Any]) -> str:
    return f"{entry['label']}/{entry['num_fewshot']}-shot"
