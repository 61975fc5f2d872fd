"""Aggregation: answers of a task to its result, results to categories and averages.

Entry points: `Gauntlet.run` calls `grade` for each task and `combine_tasks` once. If a task fails,
its categories and the averages over them are n/a, and the reason is reported. A mean over the
remaining tasks would not be comparable with other runs. Categories and averages are linear in the
accuracies: their standard errors are exact, and their 95 % intervals follow from the intervals of
the accuracies.
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
    AnsweredQuestion,
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
from llmfoundry.gauntlet.results import CategoryOfTask, EvaluationCost, GauntletResult, TaskResult
from llmfoundry.gauntlet.task_types import judge_answer, type_of
from llmfoundry.recipe.checks import nearest
from llmfoundry.redaction import public

CONTRADICTED = 0.005  # tolerance: files specify baselines with two or three decimals
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
    """A score that is linear in the accuracies of tasks.

    Attributes:
        value: the score.
        slopes: derivative of the score with respect to the accuracy of each task, by task name.
    """

    value: float
    slopes: dict[str, float]

    def interval(self, tasks: Mapping[str, TaskResult]) -> Interval | None:
        """Return the 95 % interval for independent tasks; None if a task has no interval."""
        by_name = ((tasks[name], slope) for name, slope in self.slopes.items())
        return combined(
            self.value, ((slope, t.accuracy or 0.0, t.interval) for t, slope in by_name)
        )

    def stderr(self, tasks: Mapping[str, TaskResult]) -> float | None:
        """Return the standard error for independent tasks; None if a task has none."""
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
    """Judge the answers of a task and return its result.

    Args:
        blank: the result without metrics.
        task: the task's settings.
        questions: the evaluated questions; at least one.
        scores: for each question, the scores of its requests; may be empty if there are texts.
        texts: the generated text of each question; None: nothing was generated.

    Returns:
        `blank` with accuracy, metrics, standard errors, intervals, ties or the failure.
    """
    assert len(questions) > 0
    # exclude questions that cannot be scored; fail if nothing usable remains
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
    # compute all metrics
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
    blank: TaskResult, answers: Sequence[AnsweredQuestion]
) -> tuple[TaskResult, list[AnsweredQuestion]]:
    """Exclude the answers that cannot be scored, and count them in `blank`.

    The task fails if no answer remains in total or in a category.
    """
    scored = [a for a in answers if a.refusal is None or not a.refusal.left_out]
    missing = [a for a in answers if a.refusal is not None and a.refusal.left_out]
    if not missing:
        return blank, scored
    reason = _reason(missing[0])
    blank = dataclasses.replace(blank, n=len(scored), missing=len(missing), missing_reason=reason)
    missing_categories = {answer.question.row.category for answer in missing}
    empty_categories = missing_categories - {answer.question.row.category for answer in scored}
    if not scored or empty_categories:
        of = f" of category {min(map(str, empty_categories))}" if scored else ""
        blank = dataclasses.replace(blank, failure=f"no row{of} can be scored: {reason}")
    return blank, scored


def _reason(answer: AnsweredQuestion) -> str:
    assert answer.refusal is not None
    return f"{answer.refusal.reason} ({public(answer.question.row.place)})"


@dataclass(frozen=True)
class TaskMeasures:
    """All metrics of a task.

    Attributes:
        metric: name of the accuracy in `estimates`.
        estimates: estimates by metric name.
        ties: number of tied answers.
        by_category: for a task with categories, the number of answers and the estimates of each.
    """

    metric: str
    estimates: dict[str, Estimate]
    ties: int
    by_category: dict[str, tuple[int, dict[str, Estimate]]] = field(default_factory=dict)


def measure_task(task: TaskConfig, answers: Sequence[AnsweredQuestion]) -> TaskMeasures:
    """Compute all metrics of a task. All answers must be finite, and one must not be a refusal.

    With has_categories, each metric is the unweighted mean over the categories, as in LLM Foundry.
    Its standard error is that of a mean of independent numbers.
    """
    generated = any(answer.text is not None for answer in answers)
    kind = type_of(task)
    metric = NOT_GENERATED if kind.generates and not generated else kind.metric
    ties = sum(judge_answer(task, answer).tied for answer in answers)
    if not task.has_categories:
        return TaskMeasures(metric, _estimates(task, metric, answers), ties)
    groups: dict[str, list[AnsweredQuestion]] = {}
    for answer in answers:
        category = answer.question.row.category
        assert category is not None, answer.question.row.place
        groups.setdefault(category, []).append(answer)
    parts = {c: (len(group), _estimates(task, metric, group)) for c, group in groups.items()}
    return TaskMeasures(metric, _macro([part for _, part in parts.values()]), ties, parts)


def _estimates(
    task: TaskConfig, metric: str, answers: Sequence[AnsweredQuestion]
) -> dict[str, Estimate]:
    """Return the task's accuracy, followed by all other metrics of its type.

    Refused questions count as wrong in accuracies and are excluded from all other metrics.
    """
    estimates = {metric: share_right([judge_answer(task, answer).right for answer in answers])}
    accepted = [answer for answer in answers if answer.refusal is None]
    if any(answer.text is not None for answer in accepted):
        estimates[WHOLE_WORDS] = share_right([is_whole(task, answer) for answer in answers])
    if not accepted or not all(answer.scores for answer in accepted):
        return estimates  # generated by a model that reports no log-probabilities
    estimates |= type_of(task).metrics(accepted, len(answers) - len(accepted))
    estimates[BITS] = bits_per_byte(accepted)
    return estimates


def _macro(categories: Sequence[dict[str, Estimate]]) -> dict[str, Estimate]:
    """Return the unweighted mean of each metric that all categories have."""
    names = [name for name in categories[0] if all(name in category for category in categories)]
    return {name: _mean_of([category[name] for category in categories]) for name in names}


def _mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates."""
    n = len(estimates)
    value = sum(estimate.value for estimate in estimates) / n
    errors = [estimate.stderr for estimate in estimates if estimate.stderr is not None]
    error = math.hypot(*errors) / n if len(errors) == n else None
    interval = combined(value, ((1 / n, e.value, e.interval) for e in estimates))
    return Estimate(value, error, interval)


def combine_tasks(
    tasks: list[TaskResult],
    gauntlet: EvalGauntlet,
    notes: list[str],
    *,
    cost: EvaluationCost | None = None,
) -> GauntletResult:
    """Compute the categories and averages of graded tasks.

    A benchmark's score is (accuracy - baseline) / (1 - baseline), as far as the file enables
    subtraction and rescaling. A category is the weighted mean of its benchmarks. An average is the
    mean of its categories.

    Args:
        tasks: results of all tasks.
        gauntlet: categories and averages of the file.
        notes: problems that were known before the run.
        cost: cost of the evaluation.
    """
    # problems of single tasks
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
    # categories; a category with a missing task is n/a
    categories: dict[str, _Score | None] = {}
    for category in gauntlet.categories:
        lost = list(_lost(category, gauntlet, by_name))
        categories[category.name] = None if lost else _category(category, gauntlet, by_name)
        if lost:
            needing = [name for name, names in averages.items() if category.name in names]
            so = f", and so is {', '.join(needing)}" if needing else ""
            problems.append(f"{category.name}: n/a{so}: {'; '.join(lost)}")
    # averages; an average with a missing category is n/a
    means: dict[str, _Score | None] = {}
    for name, members in averages.items():
        means[name] = _average([categories.get(member) for member in members])
        unknown = [member for member in members if member not in categories]
        if unknown or not members:
            problems.append(f"{name}: n/a: no category {', '.join(unknown) or 'is listed'}")
    both = {**categories, **means}
    return GauntletResult(
        tasks,
        {name: score.value if score else None for name, score in categories.items()},
        {name: score.value if score else None for name, score in means.items()},
        {name: score.stderr(by_name) if score else None for name, score in both.items()},
        problems,
        cost,
        tasks_of,
        intervals={
            name: score.interval(by_name) if score else None for name, score in both.items()
        },
        weights={name: score.slopes for name, score in both.items() if score},
    )


def members_of(gauntlet: EvalGauntlet) -> dict[str, list[str]]:
    """Return the names of the tasks of each category and average."""
    of_categories: dict[str, list[str]] = {}
    for category in gauntlet.categories:
        of_categories[category.name] = [_name(benchmark) for benchmark in category.benchmarks]
    of_averages: dict[str, list[str]] = {}
    for average, names in _averages(gauntlet).items():
        of_averages[average] = [task for name in names for task in of_categories.get(name, [])]
    return of_categories | of_averages


def missing_rows(
    tasks: Sequence[TaskResult], tasks_of: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield a line for each task with rows that cannot be scored, with the affected scores.

    Args:
        tasks: results, before or after the evaluation.
        tasks_of: names of the tasks of each category and average.
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
    """Yield a line for each benchmark that is not among the tasks."""
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
    """Yield a line for each random_baseline that the rows contradict.

    The accuracy of guessing and the accuracy of the best constant answer are both accepted.
    """
    by_name = {task.name: task for task in tasks}
    for category, benchmark in _members(gauntlet):
        task, baseline = by_name.get(_name(benchmark)), benchmark.random_baseline
        if task is None or baseline is None or not gauntlet.subtract_random_baseline:
            continue
        if min(abs(baseline - task.chance), abs(baseline - task.majority)) > CONTRADICTED:
            used = BASELINES[gauntlet.baseline](benchmark, task)
            yield (
                f"{category.name}: {task.name}: random_baseline: {baseline:g}, but on these rows"
                f" guessing scores {task.chance:.4g}, the best constant answer"
                f" {task.majority:.4g}; with baseline: {gauntlet.baseline}, {used:.4g} is taken off"
            )


def _members(gauntlet: EvalGauntlet) -> Iterator[tuple[CategoryConfig, BenchmarkConfig]]:
    for category in gauntlet.categories:
        for benchmark in category.benchmarks:
            yield category, benchmark


def _name(benchmark: BenchmarkConfig) -> str:
    """Return the name of the benchmark's TaskResult."""
    return f"{benchmark.name}/{benchmark.num_fewshot}-shot"


def _averages(gauntlet: EvalGauntlet) -> dict[str, list[str]]:
    """Return the categories of each average; by default one average of all categories."""
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
    """Yield the reasons why a category has no score."""
    results = {_name(benchmark): tasks.get(_name(benchmark)) for benchmark in category.benchmarks}
    missing = [name for name, task in results.items() if task is None or task.accuracy is None]
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
    """Return the weighted mean of the benchmarks. All of them must have an accuracy."""
    scores, weights = [], []
    for benchmark in category.benchmarks:
        task = tasks[_name(benchmark)]
        assert task.accuracy is not None
        score, slope = task.accuracy, 1.0
        if gauntlet.subtract_random_baseline:
            baseline = BASELINES[gauntlet.baseline](benchmark, task)
            scale = 1 - baseline if gauntlet.rescale_accuracy else 1.0
            score, slope = (score - baseline) / scale, 1 / scale
        scores.append(_Score(score, {task.name: slope}))
        weights.append(WEIGHTS[gauntlet.weighting](task.size))
    return _mean(scores, weights)


def _average(scores: Sequence[_Score | None]) -> _Score | None:
    """Return the mean of categories; None if there are none or a category has no score."""
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
