"""From a task's answers to its result, and from results to categories and averages.

`Gauntlet.run` calls `grade` for each task and `combine_tasks` once. The idea: a number that is
missing stays missing. A task that failed makes its categories, and the averages over them, n/a,
with the reason beside them; a mean over what happens to be left would not be comparable with any
other run's. Categories and averages are linear in the accuracies, so their standard errors are
exact, and their 95 % intervals follow from those of the accuracies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmfoundry.gauntlet.answer_metrics import (
    BITS,
    NOT_GENERATED,
    WHOLE_WORDS,
    Answer,
    Estimate,
    Interval,
    answers_of,
    bits_per_byte,
    combined,
    is_whole,
    share_right,
)
from llmfoundry.gauntlet.gauntlet_file import BenchmarkConfig, CategoryConfig, EvalGauntlet
from llmfoundry.gauntlet.questions import Question, Refusal, Score, TaskConfig
from llmfoundry.gauntlet.results import CategoryOfTask, Cost, GauntletResult, TaskResult
from llmfoundry.gauntlet.task_types import judge_answer, type_of
from llmfoundry.recipe.checks import nearest
from llmfoundry.redaction import public

CONTRADICTED = 0.005  # baselines are given with two or three decimals
DEFAULT_AVERAGE = "default_average"  # LLM Foundry's name of the mean of all categories

WEIGHTS: dict[str, Callable[[int], float]] = {
    "EQUAL": lambda n: 1.0,
    "SAMPLE_SZ": float,
    "LOG_SAMPLE_SZ": lambda n: max(math.log2(n), 1.0),
}


def _given(benchmark: BenchmarkConfig, task: TaskResult) -> float:
    given = benchmark.random_baseline
    return task.chance if given is None else given


BASELINES: dict[str, Callable[[BenchmarkConfig, TaskResult], float]] = {
    "file": _given,
    "chance": lambda benchmark, task: task.chance,
    "majority": lambda benchmark, task: task.majority,
}


@dataclass(frozen=True)
class _Score:
    """A sum of accuracies with weights, and a constant.

    Attributes:
        value: the score.
        slopes: for each task by name how much the score changes with its accuracy.
    """

    value: float
    slopes: dict[str, float]

    def interval(self, tasks: Mapping[str, TaskResult]) -> Interval | None:
        """Of 95 %, of independent tasks; None where that of one is not known."""
        by_name = ((tasks[name], slope) for name, slope in self.slopes.items())
        return combined(
            self.value, ((slope, t.accuracy or 0.0, t.interval) for t, slope in by_name)
        )

    def stderr(self, tasks: Mapping[str, TaskResult]) -> float | None:
        """Of independent tasks; None where the error of one is not known."""
        total = 0.0
        for name, slope in self.slopes.items():
            error = tasks[name].stderr
            if error is None:
                return None
            total += (slope * error) ** 2
        return math.sqrt(total)


def grade(
    blank: TaskResult,
    task: TaskConfig,
    questions: Sequence[Question],
    scores: Sequence[Sequence[Score | Refusal]],
    texts: Sequence[str | Refusal] | None = None,
) -> TaskResult:
    """`blank` with accuracy, every other metric, standard errors, ties and failure filled in.

    Args:
        blank: what is known without a model.
        task: what the questions are of.
        questions: those asked, at least one.
        scores: for each question the scores of its requests; may be empty where there are texts.
        texts: what was generated for each question; None: nothing was.
    """
    assert len(questions) > 0
    blank, answers = _without_missing(blank, answers_of(questions, scores, texts))
    if blank.failure is not None:
        return blank
    for answer in answers:
        if not answer.is_finite:
            reason = f"a log-probability at {answer.question.row.place} is not a finite number"
            return dataclasses.replace(blank, failure=reason)
    refused = [answer for answer in answers if answer.refusal is not None]
    if refused:
        blank = dataclasses.replace(blank, refused=len(refused), refusal=_reason(refused[0]))
    if len(refused) == len(answers):
        return dataclasses.replace(blank, failure=f"every question was refused: {blank.refusal}")
    measured = measure_task(task, answers)
    accuracy = measured.estimates[measured.metric]
    return dataclasses.replace(
        blank,
        metric=measured.metric,
        accuracy=accuracy.value,
        stderr=accuracy.stderr,
        ties=measured.ties,
        metrics=_values(measured.estimates),
        stderrs=_errors(measured.estimates),
        interval=accuracy.interval,
        intervals=_intervals(measured.estimates),
        by_category={
            name: CategoryOfTask(n, _values(found), _errors(found), _intervals(found))
            for name, (n, found) in measured.by_category.items()
        },
    )


def _without_missing(
    blank: TaskResult, answers: Sequence[Answer]
) -> tuple[TaskResult, list[Answer]]:
    """The answers that make the score, and how many are missing; a failure where none are left."""
    kept = [a for a in answers if a.refusal is None or not a.refusal.left_out]
    missing = [a for a in answers if a.refusal is not None and a.refusal.left_out]
    if not missing:
        return blank, kept
    reason = _reason(missing[0])
    blank = dataclasses.replace(blank, n=len(kept), missing=len(missing), missing_reason=reason)
    categories = {a.question.row.category for a in missing} - {
        a.question.row.category for a in kept
    }
    if not kept or categories:
        of = f" of category {min(map(str, categories))}" if kept else ""
        blank = dataclasses.replace(blank, failure=f"no row{of} can be scored: {reason}")
    return blank, kept


def _reason(answer: Answer) -> str:
    assert answer.refusal is not None
    return f"{answer.refusal.reason} ({public(answer.question.row.place)})"


@dataclass(frozen=True)
class TaskMeasures:
    """All numbers of a task.

    Attributes:
        metric: the name of its accuracy among `estimates`.
        estimates: by metric.
        ties: answers that were tied.
        by_category: of a task with categories: each one's count and its own estimates.
    """

    metric: str
    estimates: dict[str, Estimate]
    ties: int
    by_category: dict[str, tuple[int, dict[str, Estimate]]] = field(default_factory=dict)


def measure_task(task: TaskConfig, answers: Sequence[Answer]) -> TaskMeasures:
    """Every metric of a task, whose answers are finite, and one of which was not refused.

    With has_categories each metric is the unweighted mean over the categories, as LLM Foundry's
    accuracies are, and its standard error that of a mean of independent numbers.
    """
    generated = any(answer.text is not None for answer in answers)
    kind = type_of(task)
    metric = NOT_GENERATED if kind.generates and not generated else kind.metric
    ties = sum(judge_answer(task, answer).tied for answer in answers)
    if not task.has_categories:
        return TaskMeasures(metric, _estimates(task, metric, answers), ties)
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        category = answer.question.row.category
        assert category is not None, answer.question.row.place
        groups.setdefault(category, []).append(answer)
    parts = {c: (len(group), _estimates(task, metric, group)) for c, group in groups.items()}
    return TaskMeasures(metric, _macro([part for _, part in parts.values()]), ties, parts)


def _estimates(task: TaskConfig, metric: str, answers: Sequence[Answer]) -> dict[str, Estimate]:
    """The task's accuracy first, then every other metric of its type.

    Refused questions are wrong; what is no share of right ones is of the others alone.
    """
    found = {metric: share_right([judge_answer(task, answer).right for answer in answers])}
    taken = [answer for answer in answers if answer.refusal is None]
    if any(answer.text is not None for answer in taken):
        found[WHOLE_WORDS] = share_right([is_whole(task, answer) for answer in answers])
    if not taken or not all(answer.scores for answer in taken):
        return found  # generated by a model that reports no probabilities
    found |= type_of(task).metrics(taken, len(answers) - len(taken))
    found[BITS] = bits_per_byte(taken)
    return found


def _macro(parts: Sequence[dict[str, Estimate]]) -> dict[str, Estimate]:
    """Unweighted means of the metrics that all parts have."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: _mean_of([part[name] for part in parts]) for name in names}


def _mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent numbers."""
    n = len(estimates)
    value = sum(estimate.value for estimate in estimates) / n
    errors = [estimate.stderr for estimate in estimates if estimate.stderr is not None]
    error = math.hypot(*errors) / n if len(errors) == n else None
    return Estimate(
        value, error, combined(value, ((1 / n, e.value, e.interval) for e in estimates))
    )


def combine_tasks(
    tasks: list[TaskResult], gauntlet: EvalGauntlet, notes: list[str], *, cost: Cost | None = None
) -> GauntletResult:
    """Categories and averages of graded tasks; `notes` are problems known before.

    A benchmark's score is its accuracy, less the baseline, over 1 - baseline, where the file asks
    for it; a category is the weighted mean of its benchmarks, an average the mean of categories.
    """
    problems = list(notes)
    problems.extend(f"{t.name}: failed: {t.failure}" for t in tasks if t.failure is not None)
    problems.extend(
        f"{t.name}: {t.refused} of {t.n} questions were refused, and count as wrong: {t.refusal}"
        for t in tasks
        if t.refused and t.failure is None
    )
    problems.extend(_not_generated(tasks))
    by_name = {task.name: task for task in tasks}
    averages = _averages(gauntlet)
    tasks_of = members_of(gauntlet)
    problems.extend(missing_rows(tasks, tasks_of))
    categories: dict[str, _Score | None] = {}
    for category in gauntlet.categories:
        lost = list(_lost(category, gauntlet, by_name))
        categories[category.name] = None if lost else _category(category, gauntlet, by_name)
        if lost:
            needing = [name for name, names in averages.items() if category.name in names]
            so = f", and so is {', '.join(needing)}" if needing else ""
            problems.append(f"{category.name}: n/a{so}: {'; '.join(lost)}")
    means: dict[str, _Score | None] = {}
    for name, members in averages.items():
        means[name] = _average([categories.get(member) for member in members])
        unknown = [member for member in members if member not in categories]
        if unknown or not members:
            problems.append(f"{name}: n/a: no category {', '.join(unknown) or 'is listed'}")
    return GauntletResult(
        tasks,
        {name: score.value if score else None for name, score in categories.items()},
        {name: score.value if score else None for name, score in means.items()},
        {n: s.stderr(by_name) if s else None for n, s in {**categories, **means}.items()},
        problems,
        cost,
        tasks_of,
        intervals={
            n: s.interval(by_name) if s else None for n, s in {**categories, **means}.items()
        },
    )


def members_of(gauntlet: EvalGauntlet) -> dict[str, list[str]]:
    """Names of the tasks behind each category and average."""
    found = {c.name: [_name(benchmark) for benchmark in c.benchmarks] for c in gauntlet.categories}
    of_averages = {
        name: [task for category in names for task in found.get(category, [])]
        for name, names in _averages(gauntlet).items()
    }
    return found | of_averages


def missing_rows(
    tasks: Sequence[TaskResult], tasks_of: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """A line for each task some of whose rows cannot be scored, with the scores that lack them.

    Args:
        tasks: before or after a model was asked.
        tasks_of: names of the tasks behind each category and average.
    """
    for task in tasks:
        if not task.missing or task.failure is not None:
            continue
        lacking = [name for name, members in tasks_of.items() if task.name in members]
        scores = ", ".join(["its score", *lacking])
        yield (
            f"{task.name}: {task.missing} of {task.n + task.missing} rows cannot be scored, and are"
            f" missing from {scores}: {task.missing_reason}"
        )


def missing_benchmarks(gauntlet: EvalGauntlet, tasks: list[TaskResult]) -> Iterator[str]:
    """A line for each benchmark that no task of the file provides."""
    for category, benchmark in _members(gauntlet):
        shots = [task.num_fewshot for task in tasks if task.label == benchmark.name]
        if benchmark.num_fewshot in shots:
            continue
        hint = nearest(benchmark.name, [task.label for task in tasks])
        if shots:
            hint = f"; its num_fewshot is {', '.join(map(str, shots))}"
        yield (
            f"{category.name}: {_name(benchmark)} is not among icl_tasks{hint};"
            " until it is, the category and every average over it are n/a"
        )


def wrong_baselines(gauntlet: EvalGauntlet, tasks: list[TaskResult]) -> Iterator[str]:
    """A line for each random_baseline that is neither guessing's nor the best constant answer's."""
    by_name = {task.name: task for task in tasks}
    for category, benchmark in _members(gauntlet):
        task, given = by_name.get(_name(benchmark)), benchmark.random_baseline
        if task is None or given is None or not gauntlet.subtract_random_baseline:
            continue
        if min(abs(given - task.chance), abs(given - task.majority)) > CONTRADICTED:
            used = BASELINES[gauntlet.baseline](benchmark, task)
            yield (
                f"{category.name}: {task.name}: random_baseline: {given:g}, but on these rows"
                f" guessing scores {task.chance:.4g}, the best constant answer"
                f" {task.majority:.4g}; with baseline: {gauntlet.baseline}, {used:.4g} is taken off"
            )


def _members(gauntlet: EvalGauntlet) -> Iterator[tuple[CategoryConfig, BenchmarkConfig]]:
    for category in gauntlet.categories:
        for benchmark in category.benchmarks:
            yield category, benchmark


def _name(benchmark: BenchmarkConfig) -> str:
    """The TaskResult's name."""
    return f"{benchmark.name}/{benchmark.num_fewshot}-shot"


def _averages(gauntlet: EvalGauntlet) -> dict[str, list[str]]:
    """Categories of each average: the file's, else LLM Foundry's default, if it has categories."""
    if gauntlet.averages or not gauntlet.categories:
        return gauntlet.averages
    return {DEFAULT_AVERAGE: [category.name for category in gauntlet.categories]}


def _not_generated(tasks: list[TaskResult]) -> Iterator[str]:
    names = [task.name for task in tasks if task.metric == NOT_GENERATED]
    if names:
        yield (
            f"{', '.join(names)}: nothing was generated; the accuracy is the share of gold answers"
            " that are greedy, which compares with other runs' only where they did the same"
        )


def _lost(
    category: CategoryConfig, gauntlet: EvalGauntlet, tasks: Mapping[str, TaskResult]
) -> Iterator[str]:
    """Why a category has no score; nothing where it has."""
    found = {_name(benchmark): tasks.get(_name(benchmark)) for benchmark in category.benchmarks}
    missing = [name for name, task in found.items() if task is None or task.accuracy is None]
    if missing:
        yield f"no {', '.join(missing)}"
    if not (gauntlet.subtract_random_baseline and gauntlet.rescale_accuracy):
        return
    for benchmark in category.benchmarks:
        task = tasks.get(_name(benchmark))
        if task is not None and BASELINES[gauntlet.baseline](benchmark, task) >= 1:
            yield f"the {gauntlet.baseline} baseline of {task.name} is 1: nothing can be gained"


def _category(
    category: CategoryConfig, gauntlet: EvalGauntlet, tasks: Mapping[str, TaskResult]
) -> _Score:
    """The weighted mean of benchmarks, all of which are there."""
    scores, weights = [], []
    for benchmark in category.benchmarks:
        task = tasks[_name(benchmark)]
        assert task.accuracy is not None
        score, slope = task.accuracy, 1.0
        if gauntlet.subtract_random_baseline:
            baseline = BASELINES[gauntlet.baseline](benchmark, task)
            left = 1 - baseline if gauntlet.rescale_accuracy else 1.0
            score, slope = (score - baseline) / left, 1 / left
        scores.append(_Score(score, {task.name: slope}))
        weights.append(WEIGHTS[gauntlet.weighting](task.size))
    return _mean(scores, weights)


def _average(scores: Sequence[_Score | None]) -> _Score | None:
    """The mean of categories; None where one of them has no score, or there are none."""
    known = [score for score in scores if score is not None]
    return _mean(known, [1.0] * len(known)) if len(known) == len(scores) > 0 else None


def _mean(scores: Sequence[_Score], weights: Sequence[float]) -> _Score:
    value, slopes, total = 0.0, dict[str, float](), sum(weights)
    for score, weight in zip(scores, weights, strict=True):
        value += weight * score.value
        for name, slope in score.slopes.items():
            slopes[name] = slopes.get(name, 0.0) + weight * slope / total
    return _Score(value / total, slopes)


def _values(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: estimate.value for name, estimate in estimates.items()}


def _intervals(estimates: Mapping[str, Estimate]) -> dict[str, Interval]:
    return {name: e.interval for name, e in estimates.items() if e.interval is not None}


def _errors(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: e.stderr for name, e in estimates.items() if e.stderr is not None}
