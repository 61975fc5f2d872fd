"""From a model's answers to the numbers of a task, each with its standard error.

`categories.grade` calls `measure`, `results.rows_lines` calls `judge`. The idea: a model is asked
once, which gives one table with a log-probability, tokens, characters, bytes and whether it is
greedy for every choice. All metrics are functions of that table, and rows.jsonl is the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmfoundry.gauntlet.grading.answers import is_right, runs_on
from llmfoundry.gauntlet.prompts.parts import generates
from llmfoundry.gauntlet.questions import Question, Refusal, Request, Score
from llmfoundry.gauntlet.tasks.gauntlet_file import CALIBRATION_METRICS, METRICS, TaskConfig

TIE = 1e-6  # nats per unit compared; closer numbers are the same up to rounding
BUCKETS = 10  # of confidence, as Composer's

NOT_GENERATED = "TeacherForcedGreedyAccuracy"
"""Share of generation's gold answers of which every token is the likeliest after those before."""
WHOLE_WORDS = "whole_word_exact_match"
"""Share of generated answers that are right, and not only as the start of a longer number."""
BITS, CALIBRATION = "gold_bits_per_byte", "expected_calibration_error"

UNITS: dict[str, Callable[[Request, Score], int]] = {
    "sum": lambda request, score: 1,
    "token": lambda request, score: score.n_tokens or len(request.targets),
    "char": lambda request, score: len(request.text),
    "byte": lambda request, score: len(request.text.encode()),
}
"""`choice_by`: what a log-probability is divided by before choices are compared."""

CHOICE_ACCURACIES = {"acc": "sum", "acc_token": "token", "acc_norm": "char", "acc_byte": "byte"}
"""Reported for each multiple_choice and schema task, the harness's names among them."""


@dataclass(frozen=True)
class Answer:
    """A question, and what a model said.

    Attributes:
        question: what was asked.
        scores: of each of its requests; may be empty where a text was generated.
        text: what was generated; None where nothing was.
        refusal: why the model would not take the question, which then counts as wrong; else None.
    """

    question: Question
    scores: Sequence[Score]
    text: str | None = None
    refusal: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether every number is one."""
        return all(math.isfinite(s.logprob) and math.isfinite(s.best_logprob) for s in self.scores)

    @property
    def gold(self) -> int:
        """Which request is the right one's."""
        return self.question.row.gold


@dataclass(frozen=True)
class Verdict:
    """How an answer is judged.

    Attributes:
        chosen: the option with the best score; None where there are no options or the best tie.
        right: whether the answer counts as right; never where it is tied.
        tied: the best was not alone.
    """

    chosen: int | None
    right: bool
    tied: bool = False


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error; None where there is no formula for one."""

    value: float
    stderr: float | None = None


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


def answers_of(
    questions: Sequence[Question],
    scores: Sequence[Sequence[Score | Refusal]],
    texts: Sequence[str | Refusal] | None,
) -> list[Answer]:
    """Each question with its scores and, in generation, its text."""
    written = [None] * len(questions) if texts is None else texts
    return [_answer(*parts) for parts in zip(questions, scores, written, strict=True)]


def _answer(
    question: Question, scores: Sequence[Score | Refusal], text: str | Refusal | None
) -> Answer:
    said = [score for score in scores if isinstance(score, Score)]
    refusals = [part.reason for part in (*scores, text) if isinstance(part, Refusal)]
    if refusals:
        return Answer(question, (), None, refusals[0])
    assert not isinstance(text, Refusal)
    return Answer(question, said, text)


def measure(task: TaskConfig, answers: Sequence[Answer]) -> TaskMeasures:
    """Every metric of a task, whose answers are finite, and one of which was not refused.

    With has_categories each metric is the unweighted mean over the categories, as LLM Foundry's
    accuracies are, and its standard error that of a mean of independent numbers.
    """
    generated = any(answer.text is not None for answer in answers)
    metric = METRICS[task.icl_task_type]
    if generates(task) and not generated:
        metric = NOT_GENERATED
    ties = sum(judge(task, answer).tied for answer in answers)
    if not task.has_categories:
        return TaskMeasures(metric, _estimates(task, metric, answers), ties)
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        category = answer.question.row.category
        assert category is not None, answer.question.row.place
        groups.setdefault(category, []).append(answer)
    parts = {c: (len(group), _estimates(task, metric, group)) for c, group in groups.items()}
    return TaskMeasures(metric, _macro([part for _, part in parts.values()]), ties, parts)


def judge(task: TaskConfig, answer: Answer) -> Verdict:
    """Whether an answer counts as right by the task's own accuracy."""
    if not answer.is_finite or answer.refusal is not None:
        return Verdict(None, False)
    if answer.text is not None:
        return Verdict(None, is_right(answer.text, answer.question.row, task))
    if task.icl_task_type in ("multiple_choice", "schema"):
        return judge_choice(answer, task.choice_by)
    score = answer.scores[answer.gold]
    return Verdict(None, score.greedy, score.tied)


def judge_choice(answer: Answer, unit: str) -> Verdict:
    """Right iff the gold option alone has the highest log-probability per unit.

    LLM Foundry takes the first of equals, and so gives a model that says the same of every option
    full marks where the first is always right.
    """
    per_unit = UNITS[unit]
    values = [
        score.logprob / per_unit(request, score)
        for score, request in zip(answer.scores, answer.question.requests, strict=True)
    ]
    best = [i for i, value in enumerate(values) if value >= max(values) - TIE]
    return Verdict(best[0] if len(best) == 1 else None, best == [answer.gold], len(best) > 1)


def calibration_error(judged: Sequence[tuple[float, bool]]) -> float:
    """Expected calibration error of (confidence, right) pairs, with Composer's buckets.

    A bucket's confidence is its middle, not the mean of what is in it
    (composer.metrics.nlp.InContextLearningExpectedCalibrationError).
    """
    totals, rights = [0] * BUCKETS, [0] * BUCKETS
    for confidence, right in judged:
        bucket = min(int(confidence * BUCKETS), BUCKETS - 1)
        totals[bucket] += 1
        rights[bucket] += right
    gaps = [
        total * abs(right / total - (i + 0.5) / BUCKETS)
        for i, (total, right) in enumerate(zip(totals, rights, strict=True))
        if total
    ]
    return sum(gaps) / len(judged)


def bits_per_byte(answers: Sequence[Answer]) -> Estimate:
    """Bits that the gold answers take, over their UTF-8 bytes.

    The standard error is that of a ratio of two means over rows (Cochran, Sampling Techniques,
    section 6.3): sqrt(n / (n - 1) * sum of (bits - ratio * bytes)^2) / sum of bytes.
    """
    bits = [-a.scores[a.gold].logprob / math.log(2) for a in answers]
    sizes = [UNITS["byte"](a.question.requests[a.gold], a.scores[a.gold]) for a in answers]
    n, size = len(answers), sum(sizes)
    ratio = sum(bits) / size
    if n == 1:
        return Estimate(ratio)
    residual = sum((b - ratio * s) ** 2 for b, s in zip(bits, sizes, strict=True))
    return Estimate(ratio, math.sqrt(n / (n - 1) * residual) / size)


def _estimates(task: TaskConfig, metric: str, answers: Sequence[Answer]) -> dict[str, Estimate]:
    """The task's accuracy first, then every other metric of its type.

    Refused questions are wrong; what is no share of right ones is of the others alone.
    """
    found = {metric: _share([judge(task, answer).right for answer in answers])}
    taken = [answer for answer in answers if answer.refusal is None]
    refused = [False] * (len(answers) - len(taken))
    if any(answer.text is not None for answer in taken):
        found[WHOLE_WORDS] = _share([_is_whole(task, answer) for answer in answers])
    if not taken or not all(answer.scores for answer in taken):
        return found  # generated by a model that tells no probabilities
    if task.icl_task_type in ("multiple_choice", "schema"):
        for name, unit in CHOICE_ACCURACIES.items():
            rights = [judge_choice(answer, unit).right for answer in taken]
            found[name] = _share([*rights, *refused])
        found |= _choice_calibration(taken)
    elif task.icl_task_type == "language_modeling":
        found |= _greedy_calibration(taken)
    else:
        found[NOT_GENERATED] = _share([*(a.scores[0].greedy for a in taken), *refused])
    found[BITS] = bits_per_byte(taken)
    return found


def _is_whole(task: TaskConfig, answer: Answer) -> bool:
    if answer.text is None:
        return False
    row = answer.question.row
    return is_right(answer.text, row, task) and not runs_on(answer.text, row, task)


def _share(rights: Sequence[bool]) -> Estimate:
    """The share that is right, with the binomial standard error; that of one row is not known."""
    share = sum(rights) / len(rights)
    error = math.sqrt(share * (1 - share) / len(rights)) if len(rights) > 1 else None
    return Estimate(share, error)


def _choice_calibration(answers: Sequence[Answer]) -> dict[str, Estimate]:
    """With the probability of whole options, and with Composer's."""
    found = {CALIBRATION: [_confidence(a, _of_whole(a)) for a in answers]}
    means = [[score.mean_probability for score in a.scores] for a in answers]
    if all(mean is not None for of in means for mean in of):
        judged = [
            _confidence(a, [m or 0.0 for m in of]) for a, of in zip(answers, means, strict=True)
        ]
        found[CALIBRATION_METRICS["multiple_choice"]] = judged
    return {name: Estimate(calibration_error(judged)) for name, judged in found.items()}


def _of_whole(answer: Answer) -> list[float]:
    """Probabilities of the options, up to a common factor, which keeps them from underflow."""
    best = max(score.logprob for score in answer.scores)
    return [math.exp(score.logprob - best) for score in answer.scores]


def _confidence(answer: Answer, probabilities: Sequence[float]) -> tuple[float, bool]:
    """(the greatest share, whether it alone is the right option's)."""
    best, total = max(probabilities), sum(probabilities)
    leaders = [i for i, p in enumerate(probabilities) if p >= best * (1 - TIE)]
    return best / total if total else 0.0, leaders == [answer.gold]


def _greedy_calibration(answers: Sequence[Answer]) -> dict[str, Estimate]:
    """With the probability of all the likeliest tokens, and with Composer's, of one of them."""
    scores = [answer.scores[0] for answer in answers]
    found = {CALIBRATION: [(math.exp(s.best_logprob), s.greedy) for s in scores]}
    known = [(s.least_best, s.greedy) for s in scores if s.least_best is not None]
    if len(known) == len(scores):
        found[CALIBRATION_METRICS["language_modeling"]] = known
    return {name: Estimate(calibration_error(judged)) for name, judged in found.items()}


def _macro(parts: Sequence[dict[str, Estimate]]) -> dict[str, Estimate]:
    """Unweighted means of the metrics that all parts have."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: _mean([part[name] for part in parts]) for name in names}


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent numbers."""
    n = len(estimates)
    value = sum(estimate.value for estimate in estimates) / n
    errors = [estimate.stderr for estimate in estimates if estimate.stderr is not None]
    return Estimate(value, math.hypot(*errors) / n if len(errors) == n else None)
