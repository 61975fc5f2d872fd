"""Every metric against its formula written out, on answers made by hand or drawn at random."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from llmfoundry.gauntlet.aggregate import measure_task
from llmfoundry.gauntlet.answer_metrics import (
    AnsweredQuestion,
    answers_of,
    bits_per_byte,
    calibration_error,
    combined,
    judge_by,
    share_right,
    wilson,
)
from llmfoundry.gauntlet.questions import (
    GenerationPrompt,
    Question,
    Score,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)
from llmfoundry.gauntlet.task_types import judge_answer

LM, MC = "InContextLearningLMAccuracy", "InContextLearningMultipleChoiceAccuracy"
GENERATION = "InContextLearningGenerationExactMatchAccuracy"
LM_ERROR = "InContextLearningLMExpectedCalibrationError"
MC_ERROR = "InContextLearningMCExpectedCalibrationError"


def task(kind: str = "multiple_choice", **keys: Any) -> TaskConfig:
    return TaskConfig("words", "words.jsonl", kind, [0], **keys)


def request(text: str, n_tokens: int = 1) -> ScoreRequest:
    return ScoreRequest((7,) * n_tokens, (9,) * n_tokens, text)


def choice(
    logprobs: Sequence[float],
    gold: int = 0,
    *,
    texts: Sequence[str] = (),
    tokens: Sequence[int] = (),
    category: str | None = None,
) -> AnsweredQuestion:
    """An answer to a question with an option for each log-probability."""
    texts, tokens = texts or ["ab"] * len(logprobs), tokens or [1] * len(logprobs)
    row = TaskRow(("q",), tuple(texts), gold, "words.jsonl:1", category)
    requests = tuple(map(request, texts, tokens))
    scores = [Score(lp, greedy=False, tied=False, best_logprob=-0.1) for lp in logprobs]
    return AnsweredQuestion(Question(row, requests), scores)


def written(
    logprob: float, *, greedy: bool, best: float, text: str = "ab", n: int = 1
) -> AnsweredQuestion:
    """A language_modeling answer."""
    question = Question(TaskRow(("q",), (text,), 0, "w:1"), (request(text, n),))
    return AnsweredQuestion(
        question, [Score(logprob, greedy=greedy, tied=False, best_logprob=best)]
    )


def generated(
    text: str | None, answer: str = "12", *, greedy: bool | None = None
) -> AnsweredQuestion:
    row = TaskRow(("q",), (answer,), 0, "w:1", aliases=(answer, "twelve"))
    question = Question(row, (request(answer, 2),), GenerationPrompt((1,), "q", (), 4))
    scores = [] if greedy is None else [Score(-2.0, greedy, tied=False, best_logprob=-1.0)]
    return AnsweredQuestion(question, scores, text)


def values(task: TaskConfig, answers: list[AnsweredQuestion]) -> dict[str, float]:
    return {name: e.value for name, e in measure_task(task, answers).estimates.items()}


def test_each_normalization_prefers_the_option_that_its_formula_says() -> None:
    # Log-probability over       nothing  tokens  characters  bytes
    #   "a"     -3.0, 1 token:    -3.0     -3.0    -3.0       -3.0
    #   "bbbb"  -4.0, 2 tokens:   -4.0     -2.0    -1.0       -1.0
    #   "cc"    -4.5, 3 tokens:   -4.5     -1.5    -2.25      -2.25
    #   "ääää"  -5.0, 2 tokens:   -5.0     -2.5    -1.25      -0.625
    texts, tokens, logprobs = ["a", "bbbb", "cc", "ääää"], [1, 2, 3, 2], [-3.0, -4.0, -4.5, -5.0]
    best = {"sum": 0, "token": 2, "char": 1, "byte": 3}
    names = {"sum": "acc", "token": "acc_token", "char": "acc_norm", "byte": "acc_byte"}
    for gold in range(4):
        answer = choice(logprobs, gold, texts=texts, tokens=tokens)
        for unit, chosen in best.items():
            verdict = judge_by(answer, unit)
            assert (verdict.chosen, verdict.right, verdict.tied) == (chosen, chosen == gold, False)
            found = values(task(choice_by=unit), [answer])
            assert found[MC] == found[names[unit]] == (chosen == gold)
            assert [found[names[u]] for u in best] == [float(i == gold) for i in best.values()]


def test_the_default_choice_is_llm_foundrys_lowest_perplexity() -> None:
    draw = random.Random(0)
    answers, right = [], 0
    for _ in range(200):
        tokens = [draw.randint(1, 6) for _ in range(4)]
        logprobs = [-draw.uniform(0.5, 3) * n for n in tokens]
        gold = draw.randrange(4)
        answers.append(choice(logprobs, gold, tokens=tokens))
        perplexities = [math.exp(-lp / n) for lp, n in zip(logprobs, tokens, strict=True)]
        right += perplexities.index(min(perplexities)) == gold
    assert values(task(), answers)[MC] == right / 200


def test_schema_compares_one_continuation_after_several_contexts() -> None:
    row = TaskRow(("she went", "he went"), ("home",), 1, "s:1")
    requests = (request("home", 2), request("home", 2))
    scores = [Score(lp, greedy=False, tied=False, best_logprob=-1.0) for lp in (-4.0, -3.0)]
    found = values(task("schema"), [AnsweredQuestion(Question(row, requests), scores)])
    assert found[MC] == found["acc_norm"] == 1
    assert found["gold_bits_per_byte"] == pytest.approx(3.0 / math.log(2) / 4)


@pytest.mark.parametrize("gold", [0, 1, 2])
def test_ties_are_wrong_and_counted_wherever_gold_is(gold: int) -> None:
    answers = [choice([-2.0, -2.0, -2.0], gold), choice([-1.0, -1.0 - 5e-7, -3.0], gold)]
    measured = measure_task(task(), answers)
    assert measured.ties == 2
    assert measured.estimates[MC].value == 0
    assert judge_answer(task(), answers[0]).chosen is None


def test_a_difference_of_more_than_rounding_is_no_tie() -> None:
    measured = measure_task(
        task(), [choice([-1.0, -1.0 + 3e-6], 1), choice([-1.0, -1.0 + 3e-6], 0)]
    )
    assert (measured.ties, measured.estimates[MC].value) == (0, 0.5)


def test_a_tie_below_the_best_does_not_count() -> None:
    assert measure_task(task(), [choice([-1.0, -2.0, -2.0], 0)]).ties == 0


def test_a_written_answer_is_right_where_it_alone_is_greedy() -> None:
    answers = [written(-0.1, greedy=True, best=-0.1)] * 3 + [written(-2, greedy=False, best=-0.1)]
    tied = AnsweredQuestion(
        answers[0].question, [Score(-0.7, greedy=False, tied=True, best_logprob=-0.7)]
    )
    measured = measure_task(task("language_modeling"), [*answers, tied])
    assert measured.estimates[LM].value == 3 / 5
    assert measured.ties == 1


def test_calibration_error_is_that_of_ten_buckets_with_middles_as_confidence() -> None:
    judged = [(0.05, False), (0.31, True), (0.34, False), (0.39, False), (0.95, True), (1.0, True)]
    # bucket 0: 1 of 0 right, |0 - 1/20|; bucket 3: 1 of 3, |1/3 - 7/20|; bucket 9: |1 - 19/20|
    tenth = Fraction(1, 20)
    expected = Fraction(1, 6) * tenth + Fraction(3, 6) * abs(Fraction(1, 3) - Fraction(7, 20))
    expected += Fraction(2, 6) * tenth
    assert calibration_error(judged) == pytest.approx(float(expected))


def test_calibration_of_choices_compares_the_share_of_the_best_options_probability() -> None:
    draw = random.Random(1)
    answers, totals, rights = [], [0] * 10, [0] * 10
    for _ in range(300):
        probabilities = [draw.random() for _ in range(4)]
        gold = draw.choices(range(4), weights=probabilities)[0]
        answers.append(choice([math.log(p) for p in probabilities], gold))
        bucket = int(10 * max(probabilities) / sum(probabilities))
        totals[bucket] += 1
        rights[bucket] += probabilities.index(max(probabilities)) == gold
    expected = Fraction(0)
    for i in range(10):
        if totals[i]:
            gap = abs(Fraction(rights[i], totals[i]) - Fraction(2 * i + 1, 20))
            expected += Fraction(totals[i], 300) * gap
    found = values(task(), answers)
    assert found["expected_calibration_error"] == pytest.approx(float(expected))
    assert MC_ERROR not in found, "what Composer's needs is not known"


def test_calibration_does_not_underflow_where_answers_are_long() -> None:
    found = values(task(), [choice([-5000.0, -5001.0], 0, tokens=[900, 900])])
    share = 1 / (1 + math.exp(-1))  # 0.731, in the bucket from 0.7 to 0.8, and right
    assert 0.7 < share < 0.8
    assert found["expected_calibration_error"] == pytest.approx(0.25)


def test_calibration_of_written_answers_is_of_what_greedy_decoding_would_write() -> None:
    answers = [
        written(math.log(0.62), greedy=True, best=math.log(0.62)),
        written(math.log(0.1), greedy=False, best=math.log(0.66)),
        written(math.log(0.2), greedy=False, best=math.log(0.24)),
    ]
    found = values(task("language_modeling"), answers)
    expected = Fraction(2, 3) * abs(Fraction(1, 2) - Fraction(13, 20)) + Fraction(1, 3) * Fraction(
        1, 4
    )
    assert found["expected_calibration_error"] == pytest.approx(float(expected))
    assert LM_ERROR not in found, "what Composer's needs is not known"


def test_composers_calibration_errors_are_of_single_tokens_probabilities() -> None:
    draw = random.Random(6)
    choices, plain = [], []
    totals, rights = {"MC": [0] * 10, "LM": [0] * 10}, {"MC": [0] * 10, "LM": [0] * 10}
    for _ in range(300):
        drawn = [[draw.random() for _ in range(draw.randint(1, 5))] for _ in range(4)]
        means, gold = [sum(of) / len(of) for of in drawn], draw.randrange(4)
        answer = choice(
            [math.log(math.prod(of)) for of in drawn], gold, tokens=list(map(len, drawn))
        )
        scores = [
            replace(score, mean_probability=mean)
            for score, mean in zip(answer.scores, means, strict=True)
        ]
        choices.append(replace(answer, scores=scores))
        bucket = int(10 * max(means) / sum(means))
        totals["MC"][bucket] += 1
        rights["MC"][bucket] += means.index(max(means)) == gold
        best, greedy = [draw.uniform(0.3, 1) for _ in range(3)], draw.random() < 0.5
        row = written(-9.0, greedy=greedy, best=math.log(math.prod(best)), n=3)
        plain.append(replace(row, scores=[replace(row.scores[0], least_best=min(best))]))
        totals["LM"][int(10 * min(best))] += 1
        rights["LM"][int(10 * min(best))] += greedy
    for kind, name, answers in (("multiple_choice", MC_ERROR, choices),
                                ("language_modeling", LM_ERROR, plain)):  # fmt: skip
        of = "MC" if answers is choices else "LM"
        expected = sum(
            n / 300 * abs(right / n - (i + 0.5) / 10)
            for i, (n, right) in enumerate(zip(totals[of], rights[of], strict=True))
            if n
        )
        found = values(task(kind), answers)
        assert found[name] == pytest.approx(expected)
        assert abs(found["expected_calibration_error"] - expected) > 0.01, "products differ"


def test_bits_per_byte_are_of_all_bytes_together() -> None:
    answers = [choice([-8 * math.log(2), -1], 0, texts=["äö", "x"])]  # 8 bits for 4 bytes
    answers += [choice([-1, -3 * math.log(2)], 1, texts=["x", "yz"])]  # 3 bits for 2
    estimate = bits_per_byte(answers)
    assert estimate.value == pytest.approx(11 / 6)
    # residuals 8 - 4 * 11/6 = 2/3 and -2/3; 2 rows: sqrt(2 * (4/9 + 4/9)) / 6
    assert estimate.stderr == pytest.approx(math.sqrt(Fraction(16, 9)) / 6)
    assert bits_per_byte(answers[:1]).stderr is None


def test_the_standard_error_of_bits_per_byte_is_the_spread_over_repeated_samples() -> None:
    draw = random.Random(2)

    def sample() -> list[AnsweredQuestion]:
        lengths = [draw.randint(1, 20) for _ in range(60)]
        return [
            choice([-draw.gauss(2.0, 0.4) * n - draw.uniform(0, 3)], texts=["x" * n])
            for n in lengths
        ]

    estimates = [bits_per_byte(sample()) for _ in range(600)]
    mean = sum(e.value for e in estimates) / 600
    spread = math.sqrt(sum((e.value - mean) ** 2 for e in estimates) / 599)
    claimed = sum(e.stderr or math.nan for e in estimates) / 600
    assert claimed == pytest.approx(spread, rel=0.1)


def test_generated_texts_are_judged_by_their_answer() -> None:
    kind = task("generation_task_with_answers", do_normalization=True)
    answers = [generated(text) for text in ("12", " Twelve.", "120", "31", "")]
    found = values(kind, answers)
    # A model that reports no probabilities has no other metric.
    assert found == {GENERATION: 3 / 5, "whole_word_exact_match": 2 / 5}


def test_what_was_not_generated_is_judged_by_its_gold_under_another_name() -> None:
    kind = task("generation_task_with_answers")
    answers = [generated(None, greedy=greedy) for greedy in (True, False, False, False)]
    measured = measure_task(kind, answers)
    assert measured.metric == "TeacherForcedGreedyAccuracy"
    assert measured.estimates[measured.metric].value == 0.25
    assert GENERATION not in measured.estimates
    bits = 2 / math.log(2) / 2
    assert measured.estimates["gold_bits_per_byte"].value == pytest.approx(bits)
    both = measure_task(kind, [generated("12", greedy=False), generated("no", greedy=True)])
    assert both.metric == GENERATION and both.estimates[GENERATION].value == 0.5
    assert both.estimates["TeacherForcedGreedyAccuracy"].value == 0.5


def test_categories_weigh_the_same_whatever_their_size() -> None:
    groups = {"law": [1, 1, 1, 0], "art": [1, 0], "sea": [0, 0, 0, 0, 0, 1]}
    answers = [
        choice([-1.0, -2.0], 0 if right else 1, category=category)
        for category, rights in groups.items()
        for right in rights
    ]
    random.Random(3).shuffle(answers)
    measured = measure_task(task(has_categories=True), answers)
    shares = [Fraction(3, 4), Fraction(1, 2), Fraction(1, 6)]
    accuracy = measured.estimates[MC]
    assert accuracy.value == pytest.approx(float(sum(shares) / 3))
    variances = [p * (1 - p) / n for p, n in zip(shares, (4, 2, 6), strict=True)]
    assert accuracy.stderr == pytest.approx(math.sqrt(sum(variances)) / 3)
    parts = measured.by_category
    assert {name: n for name, (n, _) in parts.items()} == {"law": 4, "art": 2, "sea": 6}
    assert parts["sea"][1][MC].value == pytest.approx(1 / 6)
    errors = [estimates["expected_calibration_error"].value for _, estimates in parts.values()]
    assert measured.estimates["expected_calibration_error"].value == pytest.approx(sum(errors) / 3)


def test_the_standard_error_of_one_row_is_not_known_nor_is_that_of_a_mean_with_it() -> None:
    answers = [choice([-1.0, -2.0], category=c) for c in ("law", "art", "art")]
    measured = measure_task(task(has_categories=True), answers)
    assert measured.by_category["law"][1][MC].stderr is None
    assert measured.by_category["art"][1][MC].stderr == 0
    assert measured.estimates[MC].value == 1 and measured.estimates[MC].stderr is None


def test_a_refused_question_counts_as_wrong_and_only_where_right_ones_are_counted() -> None:
    taken = [choice([-1.0, -2.0], 0), choice([-1.0, -3.0], 1)]
    refused = AnsweredQuestion(taken[0].question, (), None, "too long")
    alone, measured = measure_task(task(), taken), measure_task(task(), [*taken, refused])
    for name in (MC, "acc", "acc_norm", "acc_byte"):
        assert measured.estimates[name].value == pytest.approx(alone.estimates[name].value * 2 / 3)
    for name in ("gold_bits_per_byte", "expected_calibration_error"):
        assert measured.estimates[name].value == alone.estimates[name].value


def test_a_metric_that_one_category_lacks_has_no_mean() -> None:
    known = choice([-1.0, -2.0], category="a")
    scores = [replace(score, mean_probability=0.5) for score in known.scores]
    answers = [replace(known, scores=scores), choice([-1.0, -2.0], category="b")]
    measured = measure_task(task(has_categories=True), answers)
    assert MC_ERROR in measured.by_category["a"][1] and MC_ERROR not in measured.estimates
    assert "gold_bits_per_byte" in measured.estimates


def test_answers_go_with_their_questions_in_order() -> None:
    a, b = choice([-1.0, -2.0]), choice([-3.0, -1.0])
    found = answers_of([a.question, b.question], [a.scores, b.scores], ["x", "y"])
    assert [(x.question, x.scores, x.text) for x in found] == [
        (a.question, a.scores, "x"),
        (b.question, b.scores, "y"),
    ]
    with pytest.raises(ValueError):
        answers_of([a.question, b.question], [a.scores], None)


@pytest.mark.parametrize(
    ("rights", "n", "low", "high"),
    [  # scipy 1.17: binomtest(rights, n).proportion_ci(0.95, "wilson")
        (0, 1, 0.0, 0.7934506856227626),
        (1, 1, 0.20654931437723745, 1.0),
        (0, 20, 0.0, 0.16112515805281935),
        (20, 20, 0.8388748419471808, 1.0),
        (1, 20, 0.008881448800795402, 0.23613119344674205),
        (19, 20, 0.763868806553258, 0.9911185511992047),
        (50, 100, 0.4038315303659956, 0.5961684696340044),
        (999, 1000, 0.9943574414020421, 0.9998234536293739),
        (0, 10042, 0.0, 0.00038239293706164893),
    ],
)
def test_the_interval_of_a_share_is_wilsons(rights: int, n: int, low: float, high: float) -> None:
    assert wilson(rights, n) == pytest.approx((low, high), rel=1e-12, abs=1e-15)
    found = share_right([True] * rights + [False] * (n - rights))
    assert found.interval == wilson(rights, n)
    assert (found.stderr == 0) == (n > 1 and rights in (0, n))  # which knows of no doubt


def test_the_interval_of_a_sum_of_shares_is_newcombes() -> None:
    """Statistics in Medicine 17 (1998), page 879, method 10: 56/70 - 48/80, and two others."""
    published = [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((10, 10), (0, 20), 0.6791, 1.0),
    ]
    for (a, m), (b, n), low, high in published:
        parts = [(1.0, a / m, wilson(a, m)), (-1.0, b / n, wilson(b, n))]
        assert combined(a / m - b / n, parts) == pytest.approx((low, high), abs=6e-5)
    assert combined(0.5, [(1.0, 0.5, None)]) is None


def test_categories_of_right_answers_alone_are_no_points() -> None:
    answers = [choice([-1.0, -2.0], category="ab"[n % 2]) for n in range(8)]
    found = measure_task(task(has_categories=True), answers)
    estimate = found.estimates[MC]
    assert (estimate.value, estimate.stderr) == (1.0, 0.0)
    low, high = wilson(4, 4)
    assert estimate.interval == pytest.approx((1 - (1 - low) / math.sqrt(2), 1.0))
    count, part = found.by_category["a"]
    assert (count, part[MC].interval) == (4, (low, high))
