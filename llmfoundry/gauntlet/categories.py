"""From scores to accuracies, categories and one average, and how they are shown.

`Gauntlet.run` calls `grade` for each task and `combine` once. The idea: a number that is missing
stays missing. A task that failed makes its categories and the average n/a, with the reason beside
them; a mean over what happens to be left would not be comparable with any other run's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.gauntlet.prompts import Question
from llmfoundry.gauntlet.score import Score
from llmfoundry.gauntlet.tasks import BenchmarkConfig, CategoryConfig, EvalGauntlet
from llmfoundry.recipe.checks import nearest

TIE = 1e-6  # nats per token; closer means are the same number up to rounding

WEIGHTS: dict[str, Callable[[int], float]] = {
    "EQUAL": lambda n: 1.0,
    "SAMPLE_SZ": float,
    "LOG_SAMPLE_SZ": lambda n: max(math.log2(n), 1.0),
}


@dataclass(frozen=True)
class TaskResult:
    """One task with one number of worked examples.

    Attributes:
        label: the task's name.
        num_fewshot: number of worked examples.
        metric: Composer's name of the accuracy.
        n: questions asked.
        accuracy: share answered rightly; None where the task failed.
        stderr: binomial standard error of the accuracy.
        chance: accuracy of guessing, from the rows.
        majority: accuracy of the best constant answer, from the rows.
        ties: questions where the best answer was not alone; each counts as wrong.
        truncated: questions whose context lost its start to fit into the model's window.
        failure: why there is no accuracy.
        category: the categories that it counts in, joined by commas; None: in none.
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

    @property
    def name(self) -> str:
        """As in metric names: label/2-shot."""
        return f"{self.label}/{self.num_fewshot}-shot"


@dataclass(frozen=True)
class GauntletResult:
    """All of one evaluation.

    Attributes:
        tasks: in the file's order.
        categories: score of each; None where a benchmark is missing or failed.
        average: mean of the categories; None where one is, or where there are none.
        problems: what a reader must know: missing and failed benchmarks, wrong baselines.
    """

    tasks: list[TaskResult]
    categories: dict[str, float | None]
    average: float | None
    problems: list[str] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Every number that exists, under Composer's names."""
        tasks = {f"metrics/{t.name}/{t.metric}": t.accuracy for t in self.tasks}
        scores = {**self.categories, "average": self.average} if self.categories else {}
        gauntlet = {f"icl/metrics/eval_gauntlet/{name}": score for name, score in scores.items()}
        return {name: v for name, v in {**tasks, **gauntlet}.items() if v is not None}

    def to_json(self) -> dict[str, Any]:
        """The same as plain values, for json.dumps; what does not exist is null."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """Tasks, then categories and average, then problems, for a terminal."""
        head = ("task", "shots", "n", "accuracy %", "chance %", "majority %", "notes")
        rows = [head, *(_task_cells(task) for task in self.tasks)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [_align(row, widths) for row in rows]
        if self.categories:
            scores = {**self.categories, "average": self.average}
            width = max(len(name) for name in scores)
            lines.append("")
            lines += [f"{name:<{width}}  {_number(score):>7}" for name, score in scores.items()]
        return "\n".join([*lines, *(f"! {problem}" for problem in self.problems)])


def grade(
    result: TaskResult, questions: Sequence[Question], scores: Sequence[Sequence[Score]]
) -> TaskResult:
    """`result` with accuracy, standard error, ties and failure filled in.

    Args:
        result: what is known without a model.
        questions: the task's questions.
        scores: for each question the scores of its requests.
    """
    for question, answer in zip(questions, scores, strict=True):
        if not all(math.isfinite(score.logprob) for score in answer):
            reason = f"a log-probability at {question.place} is not a finite number"
            return dataclasses.replace(result, failure=reason)
    judge = _judge_greedy if result.metric == "InContextLearningLMAccuracy" else _judge_choice
    verdicts = [judge(q, s) for q, s in zip(questions, scores, strict=True)]
    accuracy = sum(right for right, _ in verdicts) / result.n
    return dataclasses.replace(
        result,
        accuracy=accuracy,
        stderr=math.sqrt(accuracy * (1 - accuracy) / result.n),
        ties=sum(tied for _, tied in verdicts),
    )


def combine(tasks: list[TaskResult], gauntlet: EvalGauntlet, notes: list[str]) -> GauntletResult:
    """Categories and average of graded tasks; `notes` are problems known before.

    A benchmark's score is its accuracy, less chance, over 1 - chance, where the file asks for it.
    """
    problems = list(notes)
    by_name = {(t.label, t.num_fewshot): t for t in tasks}
    problems.extend(f"{t.name}: failed: {t.failure}" for t in tasks if t.failure is not None)
    categories: dict[str, float | None] = {}
    for category in gauntlet.categories:
        members = [by_name.get((b.name, b.num_fewshot)) for b in category.benchmarks]
        present = [t for t in members if t is not None and t.accuracy is not None]
        if len(present) < len(members):
            lost = [
                f"{b.name}/{b.num_fewshot}-shot"
                for b, t in zip(category.benchmarks, members, strict=True)
                if t not in present
            ]
            problems.append(f"{category.name}: n/a, and so is the average: no {', '.join(lost)}")
        categories[category.name] = (
            _mean(present, gauntlet) if len(present) == len(members) else None
        )
    scores = [score for score in categories.values() if score is not None]
    whole = bool(scores) and len(scores) == len(categories)
    return GauntletResult(tasks, categories, sum(scores) / len(scores) if whole else None, problems)


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
            f"{category.name}: {benchmark.name}/{benchmark.num_fewshot}-shot is not among"
            f" icl_tasks{hint}; until it is, the category and the average are n/a"
        )


def wrong_baselines(gauntlet: EvalGauntlet, tasks: list[TaskResult]) -> Iterator[str]:
    """A line for each random_baseline that the task's rows contradict; the rows' is used."""
    by_name = {(t.label, t.num_fewshot): t for t in tasks}
    for category, benchmark in _members(gauntlet):
        task = by_name.get((benchmark.name, benchmark.num_fewshot))
        given = benchmark.random_baseline
        if task is not None and given is not None and abs(given - task.chance) > 0.005:
            yield (
                f"{category.name}: {task.name}: random_baseline: {given:g}, but guessing among the"
                f" choices of the rows scores {task.chance:.4g}, which is used; write that"
            )


def _members(gauntlet: EvalGauntlet) -> Iterator[tuple[CategoryConfig, BenchmarkConfig]]:
    for category in gauntlet.categories:
        for benchmark in category.benchmarks:
            yield category, benchmark


def _judge_greedy(question: Question, scores: Sequence[Score]) -> tuple[bool, bool]:
    """(right, tied): right iff every token of the answer is the single likeliest one."""
    return scores[0].greedy, scores[0].tied


def _judge_choice(question: Question, scores: Sequence[Score]) -> tuple[bool, bool]:
    """(right, tied): right iff the gold choice alone has the highest mean log-probability."""
    means = [
        score.logprob / len(request.targets)
        for score, request in zip(scores, question.requests, strict=True)
    ]
    best = [i for i, mean in enumerate(means) if mean >= max(means) - TIE]
    return best == [question.gold], len(best) > 1


def _mean(tasks: list[TaskResult], gauntlet: EvalGauntlet) -> float:
    total = weight = 0.0
    for task in tasks:
        assert task.accuracy is not None
        score = task.accuracy
        if gauntlet.subtract_random_baseline:
            score -= task.chance
            score /= 1 - task.chance if gauntlet.rescale_accuracy else 1
        w = WEIGHTS[gauntlet.weighting](task.n)
        total, weight = total + w * score, weight + w
    return total / weight


def _task_cells(task: TaskResult) -> tuple[str, ...]:
    accuracy = "n/a"
    if task.accuracy is not None and task.stderr is not None:
        accuracy = f"{100 * task.accuracy:.1f} ± {100 * task.stderr:.1f}"
    notes = [f"{task.ties} ties"] * bool(task.ties)
    notes += [f"{task.truncated} truncated"] * bool(task.truncated)
    notes += ["failed"] * bool(task.failure)
    numbers = (str(task.num_fewshot), str(task.n), accuracy)
    shares = (f"{100 * task.chance:.1f}", f"{100 * task.majority:.1f}")
    return (task.label, *numbers, *shares, ", ".join(notes))


def _align(cells: tuple[str, ...], widths: list[int]) -> str:
    """First and last column to the left, numbers to the right."""
    last = len(cells) - 1
    padded = [
        f"{cell:<{width}}" if i in (0, last) else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def _number(score: float | None) -> str:
    return "n/a" if score is None else f"{score:.4f}"
