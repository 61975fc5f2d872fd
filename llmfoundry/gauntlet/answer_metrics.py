"""Judgment of answers, and metrics with their standard errors.

`task_types.TASK_TYPES` selects the functions of each task type. A model is evaluated once. The
result is a table with the log-probability, tokens, characters and bytes of every choice, and
whether it is greedy. All metrics are functions of this table, and rows.jsonl contains it.

Generated answers are judged as in LLM Foundry. The text is truncated before a stop string, the part
after the last `cot_delimiter` is normalized, and the answer is right if it *begins* with a
normalized alias, because models continue after the answer. This has two known weaknesses. An alias
that is empty after normalization would accept every text: here it accepts none, and
`empty_aliases` reports it. And "3" accepts "30": this is kept for comparability with LLM Foundry,
and `runs_on` counts such answers separately. A row with `checks`, mappings such as
{"check": "words", "n": 3}, is right if all checks hold (`meets_checks`).
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmfoundry.gauntlet.questions import (
    Question,
    Refusal,
    Score,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)
from llmfoundry.recipe.checks import nearest

TIE = 1e-6  # nats per unit; values that are closer count as equal, because of rounding
BUCKETS = 10  # of the calibration error, as in Composer

NOT_GENERATED = "TeacherForcedGreedyAccuracy"
"""Fraction of gold answers of generation tasks that are greedy: every token is the likeliest."""
WHOLE_WORDS = "whole_word_exact_match"
"""Fraction of generated answers that are right and not merely the start of a longer word."""
BITS, CALIBRATION = "gold_bits_per_byte", "expected_calibration_error"
LM_CALIBRATION = "InContextLearningLMExpectedCalibrationError"
CHOICE_CALIBRATION = "InContextLearningMCExpectedCalibrationError"
"""Names that metric_names of LLM Foundry may contain; these metrics are always computed."""

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "\u2018\u2019\u00b4", " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_GOES_ON = re.compile(r"\w|[.,]\d")  # continuation of a word or number: 3|0, 3|.5, 2|,125

UNITS: dict[str, Callable[[ScoreRequest, Score], int]] = {
    "sum": lambda request, score: 1,
    "token": lambda request, score: score.n_tokens or len(request.targets),
    "char": lambda request, score: len(request.text),
    "byte": lambda request, score: len(request.text.encode()),
}
"""`choice_by`: unit by whose number a log-probability is divided before choices are compared."""

CHOICE_ACCURACIES = {"acc": "sum", "acc_token": "token", "acc_norm": "char", "acc_byte": "byte"}
"""Accuracies of each multiple_choice and schema task; some have the names of the harness."""


@dataclass(frozen=True)
class AnsweredQuestion:
    """A question and the model's answer.

    Attributes:
        question: the question.
        scores: scores of the question's requests; may be empty if a text was generated.
        text: the generated text; None: nothing was generated.
        refusal: why there are neither scores nor a text; None: the model answered.
    """

    question: Question
    scores: Sequence[Score]
    text: str | None = None
    refusal: Refusal | None = None

    @property
    def is_finite(self) -> bool:
        """Return whether all log-probabilities are finite."""
        return all(math.isfinite(s.logprob) and math.isfinite(s.best_logprob) for s in self.scores)

    @property
    def gold(self) -> int:
        """Return the number of the request with the correct answer."""
        return self.question.row.gold


@dataclass(frozen=True)
class Judgment:
    """Judgment of an answer.

    Attributes:
        chosen: the option with the best score; None if there are no options or the best ones tie.
        right: whether the answer counts as right; False for ties.
        tied: whether several options share the best score.
    """

    chosen: int | None
    right: bool
    tied: bool = False


Interval = tuple[float, float]
_Z95 = 1.959963984540054  # 95 % of a normal distribution are within this many standard deviations


@dataclass(frozen=True)
class Estimate:
    """A number with its standard error and its 95 % interval; None if there is no formula.

    The interval of a share of right answers is Wilson's, which has a positive width even if no or
    all answers are right. `combined` computes the intervals of sums of shares.
    """

    value: float
    stderr: float | None = None
    interval: Interval | None = None


def answers_of(
    questions: Sequence[Question],
    scores: Sequence[Sequence[Score | Refusal]],
    texts: Sequence[str | Refusal] | None,
) -> list[AnsweredQuestion]:
    """Combine questions with the scores and texts of a model.

    Args:
        questions: questions.
        scores: scores of the requests of each question.
        texts: generated text of each question; None: nothing was generated.
    """
    generated = [None] * len(questions) if texts is None else texts
    return [_answer(*parts) for parts in zip(questions, scores, generated, strict=True)]


def _answer(
    question: Question, scores: Sequence[Score | Refusal], text: str | Refusal | None
) -> AnsweredQuestion:
    accepted = [score for score in scores if isinstance(score, Score)]
    refusals = [output for output in (*scores, text) if isinstance(output, Refusal)]
    if question.problem:
        refusals = [Refusal(question.problem, left_out=True)]
    if refusals:  # one that counts as wrong takes precedence over one that is left out
        return AnsweredQuestion(
            question, (), None, min(refusals, key=lambda refusal: refusal.left_out)
        )
    assert not isinstance(text, Refusal)
    return AnsweredQuestion(question, accepted, text)


def judge_written(task: TaskConfig, answer: AnsweredQuestion) -> Judgment:
    """Judge by the generated text; without one, by whether the gold answer is greedy."""
    if answer.text is None:
        return judge_greedy(task, answer)
    return Judgment(None, is_right(answer.text, answer.question.row, task))


def judge_greedy(task: TaskConfig, answer: AnsweredQuestion) -> Judgment:
    """Judge by whether the gold answer is greedy: every token is the likeliest."""
    score = answer.scores[answer.gold]
    return Judgment(None, score.greedy, score.tied)


def judge_choice(task: TaskConfig, answer: AnsweredQuestion) -> Judgment:
    """Judge by the log-probability per unit that the task configures."""
    return judge_by(answer, task.choice_by)


def judge_by(answer: AnsweredQuestion, unit: str) -> Judgment:
    """Judge by log-probability per unit: right iff the gold option alone has the highest value.

    LLM Foundry chooses the first of tied options. A model with the same score for every option then
    gets full marks on tasks whose first option is always right.
    """
    per_unit = UNITS[unit]
    values = [
        score.logprob / per_unit(request, score)
        for score, request in zip(answer.scores, answer.question.requests, strict=True)
    ]
    best = [i for i, value in enumerate(values) if value >= max(values) - TIE]
    return Judgment(best[0] if len(best) == 1 else None, best == [answer.gold], len(best) > 1)


def calibration_error(judged: Sequence[tuple[float, bool]]) -> float:
    """Return the expected calibration error of (confidence, right) pairs, as in Composer.

    The confidence of a bucket is its middle, not the mean of its pairs
    (composer.metrics.nlp.InContextLearningExpectedCalibrationError).
    """
    # count pairs and right answers per bucket of confidence
    totals, rights = [0] * BUCKETS, [0] * BUCKETS
    for confidence, right in judged:
        bucket = min(int(confidence * BUCKETS), BUCKETS - 1)
        totals[bucket] += 1
        rights[bucket] += right

    # mean gap between accuracy and confidence, weighted by the number of pairs
    gaps = [
        total * abs(right / total - (i + 0.5) / BUCKETS)
        for i, (total, right) in enumerate(zip(totals, rights, strict=True))
        if total
    ]
    return sum(gaps) / len(judged)


def bits_per_byte(answers: Sequence[AnsweredQuestion]) -> Estimate:
    """Return the bits of the gold answers per UTF-8 byte.

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


def choice_metrics(answers: Sequence[AnsweredQuestion], n_refused: int) -> dict[str, Estimate]:
    """Return the accuracy by each unit, and both calibration errors."""
    metrics = {}
    for name, unit in CHOICE_ACCURACIES.items():
        rights = [judge_by(answer, unit).right for answer in answers]
        metrics[name] = share_right([*rights, *[False] * n_refused])
    return metrics | _choice_calibration(answers)


def greedy_metrics(answers: Sequence[AnsweredQuestion], n_refused: int) -> dict[str, Estimate]:
    """Return both calibration errors."""
    return _greedy_calibration(answers)


def generation_metrics(answers: Sequence[AnsweredQuestion], n_refused: int) -> dict[str, Estimate]:
    """Return the fraction of gold answers that are greedy."""
    rights = [*(answer.scores[0].greedy for answer in answers), *[False] * n_refused]
    return {NOT_GENERATED: share_right(rights)}


def is_whole(task: TaskConfig, answer: AnsweredQuestion) -> bool:
    """Return whether a text is right and not merely the start of a longer word or number."""
    if answer.text is None:
        return False
    row = answer.question.row
    return is_right(answer.text, row, task) and not runs_on(answer.text, row, task)


def share_right(rights: Sequence[bool]) -> Estimate:
    """Return the fraction of right answers with its binomial standard error.

    The error of a single answer is None.
    """
    share = sum(rights) / len(rights)
    error = math.sqrt(share * (1 - share) / len(rights)) if len(rights) > 1 else None
    return Estimate(share, error, wilson(sum(rights), len(rights)))


def wilson(rights: int, n: int) -> Interval:
    """Return the 95 % interval of a fraction of right answers (Wilson, JASA 22, 1927).

    It contains every p with |rights / n - p| <= 1.96 sqrt(p (1 - p) / n).
    """
    z2, share = _Z95**2, rights / n
    middle = (rights + z2 / 2) / (n + z2)
    half = _Z95 / (n + z2) * math.sqrt(n * share * (1 - share) + z2 / 4)
    low = max(0.0, middle - half) if rights else 0.0
    return low, min(1.0, middle + half) if rights < n else 1.0


def combined(
    value: float, parts: Iterable[tuple[float, float, Interval | None]]
) -> Interval | None:
    """Return the 95 % interval of a weighted sum of independent shares (method MOVER).

    The distance of each end from the sum is the root of the sum of squares of the terms' weighted
    distances (Zou and Donner, Statistics in Medicine 27, 2008).

    Args:
        value: the sum.
        parts: weight, value and interval of each share.

    Returns:
        The interval; None if a share has no interval.
    """
    down = up = 0.0
    for weight, share, interval in parts:
        if interval is None:
            return None
        moves = sorted(weight * (end - share) for end in interval)
        down, up = math.hypot(down, moves[0]), math.hypot(up, moves[1])
    return value - down, value + up


def _choice_calibration(answers: Sequence[AnsweredQuestion]) -> dict[str, Estimate]:
    """Return calibration errors with two confidences.

    They are the probability of an option, and the mean probability of its tokens, as in Composer.
    """
    pairs = {CALIBRATION: [_confidence(a, _probabilities(a)) for a in answers]}
    means = [[score.mean_probability for score in a.scores] for a in answers]
    if all(mean is not None for of_answer in means for mean in of_answer):
        composer_pairs = []
        for answer, of_answer in zip(answers, means, strict=True):
            composer_pairs.append(_confidence(answer, [mean or 0.0 for mean in of_answer]))
        pairs[CHOICE_CALIBRATION] = composer_pairs
    return {name: Estimate(calibration_error(judged)) for name, judged in pairs.items()}


def _probabilities(answer: AnsweredQuestion) -> list[float]:
    """Return the probabilities of the options relative to the best one, to avoid underflow."""
    best = max(score.logprob for score in answer.scores)
    return [math.exp(score.logprob - best) for score in answer.scores]


def _confidence(answer: AnsweredQuestion, probabilities: Sequence[float]) -> tuple[float, bool]:
    """Return the largest normalized probability, and whether only the gold option has it."""
    best, total = max(probabilities), sum(probabilities)
    leaders = [i for i, p in enumerate(probabilities) if p >= best * (1 - TIE)]
    return best / total if total else 0.0, leaders == [answer.gold]


def _greedy_calibration(answers: Sequence[AnsweredQuestion]) -> dict[str, Estimate]:
    """Return calibration errors with two confidences.

    They are the product of the likeliest tokens' probabilities, and the least of them, as in
    Composer.
    """
    scores = [answer.scores[0] for answer in answers]
    pairs = {CALIBRATION: [(math.exp(s.best_logprob), s.greedy) for s in scores]}
    composer_pairs = [(s.least_best, s.greedy) for s in scores if s.least_best is not None]
    if len(composer_pairs) == len(scores):
        pairs[LM_CALIBRATION] = composer_pairs
    return {name: Estimate(calibration_error(judged)) for name, judged in pairs.items()}


def until_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings; all of `text` without a stop string.

    The first one is the one that ends first, so that text after it cannot change the result. (LLM
    Foundry uses regular expressions and the stop string that begins first.)
    """
    assert all(stops), "an empty stop would end every text"
    starts = [(text.find(stop), stop) for stop in stops]
    matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
    return text[: min(matches)[1]] if matches else text


def normalize(text: str) -> str:
    """Convert to lower case; remove punctuation, articles and repeated white space.

    This is the normalization of TriviaQA (mandarjoshi90/triviaqa,
    evaluation/triviaqa_evaluation.py), as in LLM Foundry.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def final_answer(text: str, task: TaskConfig) -> str:
    """Return the normalized text after the chain of thought, which is compared with aliases."""
    text = until_stop(text, task.early_stopping_criteria)
    if task.cot_delimiter:
        text = text.split(task.cot_delimiter)[-1]
    return _clean(text, task)


def is_right(text: str, row: TaskRow, task: TaskConfig) -> bool:
    """Return whether a text answers the question of a row.

    It does if it begins with an alias that is not empty. If the row has checks, the text before the
    first stop must meet all of them instead.
    """
    if row.checks:
        return meets_checks(until_stop(text, task.early_stopping_criteria), row.checks)
    return bool(_matches(final_answer(text, task), row, task))


def runs_on(text: str, row: TaskRow, task: TaskConfig) -> bool:
    """Return whether an answer is only the start of a longer word or number: "30" for "3"."""
    if row.checks:
        return False
    answer = final_answer(text, task)
    matches = _matches(answer, row, task)
    return bool(matches) and all(_GOES_ON.match(answer, len(alias)) for alias in matches)


def empty_aliases(rows: Iterable[TaskRow], task: TaskConfig) -> list[str]:
    """Return a note for each row with aliases that are empty after normalization."""
    notes = []
    for row in rows:
        empty = [alias for alias in _aliases(row) if not _clean(alias, task)]
        if not empty or row.checks:
            continue
        names = ", ".join(map(repr, empty))
        only = "" if len(empty) < len(_aliases(row)) else "; it has no other, so none is right"
        notes.append(f"{row.place}: of {names} normalization leaves nothing: never matched{only}")
    return notes


def _matches(answer: str, row: TaskRow, task: TaskConfig) -> list[str]:
    """Return the normalized aliases that a normalized answer begins with."""
    aliases = {_clean(alias, task) for alias in _aliases(row)} - {""}
    return [alias for alias in aliases if answer.startswith(alias)]


def _aliases(row: TaskRow) -> tuple[str, ...]:
    return row.aliases or row.choices


def _clean(text: str, task: TaskConfig) -> str:
    return normalize(text) if task.do_normalization else text.strip()


_BULLET = re.compile(r"^\s*[-*•] ", re.MULTILINE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SENTENCE = re.compile(r"[^.!?]*[^\W_][^.!?]*[.!?]+")


def meets_checks(text: str, checks: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a text meets all checks; an empty text meets none."""
    text = text.strip()
    return bool(text) and all(holds(text, check) for check in checks)


def holds(text: str, check: Mapping[str, Any]) -> bool:
    """Return whether a text meets one check."""
    arguments = {key: value for key, value in check.items() if key != "check"}
    return CHECKS[check["check"]][0](text, **arguments)


def check_problems(checks: Any) -> Iterator[str]:
    """Yield a line for each error in the checks of a row."""
    if not isinstance(checks, list) or not checks:
        yield f"field 'checks' is {checks!r:.60}; write a list of one or more mappings"
        return
    for check in checks:
        name = check.get("check") if isinstance(check, Mapping) else None
        if not isinstance(name, str) or name not in CHECKS:
            hint = nearest(str(name), CHECKS)
            yield f"field 'checks': {name!r:.60} is not a check{hint} ({', '.join(CHECKS)})"
            continue
        parameters = CHECKS[name][1]
        for key in sorted(check.keys() - {"check"} - parameters.keys()):
            yield f"field 'checks': {name}: unknown key '{key}'; its keys: {', '.join(parameters)}"
        for key, kind in parameters.items():
            value = check.get(key)
            if not _KINDS[kind][1](value):
                yield f"field 'checks': {name}: {key} is {value!r:.60}; write {_KINDS[kind][0]}"


def _words(text: str, n: int) -> bool:
    return len(text.split()) == n


def _at_least_words(text: str, n: int) -> bool:
    return len(text.split()) >= n


def _at_most_words(text: str, n: int) -> bool:
    return len(text.split()) <= n


def _lines(text: str, n: int) -> bool:
    return sum(bool(line.strip()) for line in text.splitlines()) == n


def _sentences(text: str, n: int) -> bool:
    return len(_SENTENCE.findall(text)) == n


def _bullets(text: str, n: int) -> bool:
    return len(_BULLET.findall(text)) == n


def _upper(text: str) -> bool:
    return text.isupper()


def _lower(text: str) -> bool:
    return text.islower()


def _finds(text: str, word: str) -> bool:
    """Return whether a text contains a word, in any case, and not inside a longer word."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _number(text: str, value: float) -> bool:
    """Compare the number after the last ####, or else the last number, as GSM8K does."""
    numbers = _NUMBER.findall(text.rpartition("####")[2])
    if not numbers:
        return False
    number = numbers[0] if "####" in text else numbers[-1]
    return float(number.replace(",", "")) == float(value)


def _json(text: str, value: Mapping[str, Any]) -> bool:
    """Return whether the complete text is JSON of a value; the order of keys does not matter."""
    return _loaded(text) == dict(value)


def _json_keys(text: str, keys: Sequence[str]) -> bool:
    parsed = _loaded(text)
    return isinstance(parsed, dict) and sorted(parsed) == sorted(keys)


def _call(text: str, value: Mapping[str, Any]) -> bool:
    """Return whether the first JSON object in a text is a tool call; templates add text around."""
    start = text.find("{")
    if start < 0:
        return False
    try:
        call, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return False
    call = call.get("function", call)
    if not isinstance(call, dict):
        return False
    arguments = call.get("arguments", call.get("parameters"))
    arguments = _loaded(arguments) if isinstance(arguments, str) else arguments
    return call.get("name") == value["name"] and arguments == value["arguments"]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


CHECKS: dict[str, tuple[Callable[..., bool], dict[str, str]]] = {
    "exact": (lambda found, text: found == text.strip(), {"text": "text"}),
    "starts": (lambda found, text: found.startswith(text), {"text": "text"}),
    "ends": (lambda found, text: found.endswith(text), {"text": "text"}),
    "has": (lambda found, text: _finds(found, text), {"text": "text"}),
    "lacks": (lambda found, text: not _finds(found, text), {"text": "text"}),
    "words": (_words, {"n": "count"}),
    "at_least_words": (_at_least_words, {"n": "count"}),
    "at_most_words": (_at_most_words, {"n": "count"}),
    "lines": (_lines, {"n": "count"}),
    "sentences": (_sentences, {"n": "count"}),
    "bullets": (_bullets, {"n": "count"}),
    "upper": (_upper, {}),
    "lower": (_lower, {}),
    "final_number": (_number, {"value": "number"}),
    "json": (_json, {"value": "mapping"}),
    "json_keys": (_json_keys, {"keys": "list"}),
    "call": (_call, {"value": "mapping"}),
}
"""Each check: its function, and the kinds of its parameters."""

_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str) and bool(value)),
    "count": ("a whole number, 0 or more", lambda value: type(value) is int and value >= 0),
    "number": ("a number", lambda value: type(value) in (int, float)),
    "mapping": ("a mapping", lambda value: isinstance(value, Mapping)),
    "list": ("a list of texts", lambda v: isinstance(v, list) and all(type(x) is str for x in v)),
}
"""Each kind of parameter: its description, and a function that checks a value."""
