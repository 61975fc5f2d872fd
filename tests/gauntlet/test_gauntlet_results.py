"""Categories, averages and their errors; what is shown where a number is missing; what is saved."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from llmfoundry.gauntlet.aggregate import (
    combine_tasks,
    grade,
    missing_benchmarks,
    wrong_baselines,
)
from llmfoundry.gauntlet.answer_metrics import wilson
from llmfoundry.gauntlet.gauntlet_file import (
    BenchmarkConfig,
    CategoryConfig,
    EvalGauntlet,
    TaskConfig,
)
from llmfoundry.gauntlet.questions import GenerationPrompt, Question, Score, ScoreRequest, TaskRow
from llmfoundry.gauntlet.results import EvaluationCost, GauntletResult, TaskResult, rows_lines

LM, MC = "InContextLearningLMAccuracy", "InContextLearningMultipleChoiceAccuracy"
GENERATION = "InContextLearningGenerationExactMatchAccuracy"

# (category, benchmark, shots, baseline, rows, accuracy): LLM Foundry's gauntlet v0.3, with
# accuracies as a model of about a billion parameters has them.
TABLE = [
    ("world_knowledge", "jeopardy", 3, 0.0, 2117, 0.1532),
    ("world_knowledge", "bigbench_qa_wikidata", 3, 0.0, 20321, 0.4931),
    ("world_knowledge", "arc_easy", 3, 0.25, 2376, 0.6174),
    ("world_knowledge", "arc_challenge", 3, 0.25, 1172, 0.2969),
    ("world_knowledge", "mmlu", 5, 0.25, 14042, 0.2518),
    ("world_knowledge", "triviaqa_sm_sub", 3, 0.0, 3000, 0.1407),
    ("commonsense_reasoning", "copa", 0, 0.5, 100, 0.71),
    ("commonsense_reasoning", "siqa", 3, 0.5, 1954, 0.5369),
    ("commonsense_reasoning", "commonsense_qa", 0, 0.25, 1221, 0.2318),
    ("commonsense_reasoning", "piqa", 0, 0.5, 1838, 0.7024),
    ("commonsense_reasoning", "openbook_qa", 10, 0.25, 500, 0.346),
    ("commonsense_reasoning", "bigbench_strange_stories", 0, 0.5, 174, 0.4828),
    ("commonsense_reasoning", "bigbench_strategy_qa", 0, 0.5, 2289, 0.5225),
    ("language_understanding", "lambada_openai", 0, 0.0, 5153, 0.5216),
    ("language_understanding", "hellaswag", 0, 0.25, 10042, 0.5011),
    ("language_understanding", "winograd", 3, 0.5, 273, 0.7363),
    ("language_understanding", "winogrande", 5, 0.5, 1267, 0.5501),
    ("symbolic_problem_solving", "gsm8k", 0, 0.0, 1319, 0.0091),
    ("symbolic_problem_solving", "bigbench_operators", 3, 0.0, 210, 0.2048),
    ("reading_comprehension", "squad", 3, 0.0, 10570, 0.3612),
    ("reading_comprehension", "boolq", 0, 0.5, 3270, 0.4911),
    ("reading_comprehension", "agi_eval_sat_en", 5, 0.25, 206, 0.2476),
]

# DCLM's CORE: (task, baseline v1, baseline v2, accuracy of guessing), in percent.
CORE = [
    *((name, 0.0, 0.0, 0.0) for name in (
        "jeopardy", "bigbench_qa_wikidata", "bigbench_dyck_languages", "lambada_openai",
        "bigbench_cs_algorithms", "bigbench_operators", "bigbench_repeat_copy_logic", "squad",
        "coqa")),
    *((name, 25.0, 25.0, 25.0) for name in (
        "arc_easy", "arc_challenge", "openbook_qa", "hellaswag_0", "hellaswag_10")),
    *((name, 50.0, 50.0, 50.0) for name in ("copa", "piqa", "winograd", "winogrande")),
    ("commonsense_qa", 20.0, 40.3, 25.0),
    ("agi_eval_lsat_ar", 20.0, 25.0, 25.0),
    ("bigbench_language_identification", 9.1, 25.0, 25.0),
    ("boolq", 62.0, 62.0, 50.0),
]  # fmt: skip


def task(label: str, accuracy: float | None, **keys: Any) -> TaskResult:
    known = {"n": 100, "stderr": 0.01, "chance": 0.25, "majority": 0.3, **keys}
    return TaskResult(label, known.pop("shots", 0), MC, accuracy=accuracy, **known)


def gauntlet(averages: dict[str, list[str]] | None = None, /, **members: list[str]) -> EvalGauntlet:
    """Categories of benchmarks without worked examples and without a baseline of the file."""
    categories = [
        CategoryConfig(name, [BenchmarkConfig(label, 0) for label in labels])
        for name, labels in members.items()
    ]
    return EvalGauntlet(categories, averages=averages or {})


def table_tasks() -> list[TaskResult]:
    return [
        task(name, accuracy, shots=shots, n=n, stderr=math.sqrt(accuracy * (1 - accuracy) / n))
        for _, name, shots, _, n, accuracy in TABLE
    ]


def table_gauntlet(**settings: Any) -> EvalGauntlet:
    members: dict[str, list[BenchmarkConfig]] = defaultdict(list)
    for category, name, shots, baseline, _, _ in TABLE:
        members[category].append(BenchmarkConfig(name, shots, baseline))
    return EvalGauntlet([CategoryConfig(*item) for item in members.items()], **settings)


def question(gold: int, place: str, texts: Sequence[str] = ("ab", "cde"), **keys: Any) -> Question:
    row = TaskRow(("q",), tuple(texts), gold, place, **keys)
    return Question(row, tuple(ScoreRequest((1, 2), (3,) * len(t), t) for t in texts))


def choose(*logprobs: float) -> list[Score]:
    return [Score(lp, greedy=False, tied=False, best_logprob=-0.25) for lp in logprobs]


def config(kind: str = "multiple_choice", **keys: Any) -> TaskConfig:
    return TaskConfig("words", "words.jsonl", kind, [2], **keys)


def blank(n: int, **keys: Any) -> TaskResult:
    return TaskResult(
        "words", 2, MC, n, accuracy=None, stderr=None, chance=0.5, majority=0.6, **keys
    )


@pytest.mark.parametrize("weighting", ["EQUAL", "SAMPLE_SZ", "LOG_SAMPLE_SZ"])
@pytest.mark.parametrize(("subtract", "rescale"), [(True, True), (True, False), (False, False)])
def test_a_saved_table_gives_what_llm_foundrys_loop_gives(
    weighting: str, subtract: bool, rescale: bool
) -> None:
    weights = {
        "EQUAL": lambda n: Fraction(1),
        "SAMPLE_SZ": lambda n: Fraction(n),
        "LOG_SAMPLE_SZ": lambda n: Fraction(max(math.log(n, 2), 1)),
    }
    expected = {}
    for category in dict.fromkeys(entry[0] for entry in TABLE):
        total = weight = Fraction(0)
        for of, _, _, base, n, accuracy in TABLE:
            if of != category:
                continue
            score = Fraction(str(accuracy))
            if subtract:
                score -= Fraction(str(base))
            if rescale:
                score /= 1 - Fraction(str(base))
            total += score * weights[weighting](n)
            weight += weights[weighting](n)
        expected[category] = total / weight
    settings = {
        "weighting": weighting,
        "subtract_random_baseline": subtract,
        "rescale_accuracy": rescale,
        "averages": {
            "core_average": list(expected),
            "known": ["world_knowledge", "reading_comprehension"],
        },
    }
    result = combine_tasks(table_tasks(), table_gauntlet(**settings), [])
    assert result.categories == {n: pytest.approx(float(v), abs=1e-12) for n, v in expected.items()}
    known = (expected["world_knowledge"] + expected["reading_comprehension"]) / 2
    assert result.averages["known"] == pytest.approx(float(known))
    assert result.average == result.averages["core_average"]
    assert result.average == pytest.approx(float(sum(expected.values()) / 5))
    assert result.problems == []


@pytest.mark.parametrize(("version", "at_chance"), [(1, -0.001), (2, -0.026)])
def test_core_of_both_versions_is_one_category_with_the_files_baselines(
    version: int, at_chance: float
) -> None:
    """`at_chance` is what a model that guesses scores, by DCLM's own published baselines."""
    assert len(CORE) == 22
    members = [BenchmarkConfig(entry[0], 0, 0.01 * entry[version]) for entry in CORE]
    core = EvalGauntlet([CategoryConfig("core", members)])
    draw = random.Random(version)
    drawn = {name: draw.random() for name, *_ in CORE}
    centered = [
        (Fraction(drawn[entry[0]]) - Fraction(str(entry[version])) / 100)
        / (1 - Fraction(str(entry[version])) / 100)
        for entry in CORE
    ]
    result = combine_tasks([task(name, drawn[name]) for name, *_ in CORE], core, [])
    assert result.averages["default_average"] == pytest.approx(float(sum(centered) / 22), abs=1e-12)
    guessed = combine_tasks([task(entry[0], entry[3] / 100) for entry in CORE], core, [])
    assert guessed.average == pytest.approx(at_chance, abs=5e-4)


@pytest.mark.parametrize("weighting", ["EQUAL", "LOG_SAMPLE_SZ"])
def test_standard_errors_are_those_of_independent_tasks(weighting: str) -> None:
    """By the derivative of each score with respect to each accuracy, taken numerically."""
    settings = table_gauntlet(weighting=weighting)
    first, *others = settings.categories
    again = CategoryConfig("again", first.benchmarks[:3])  # counted in two categories
    settings = dataclasses.replace(settings, categories=[first, *others, again])
    tasks = table_tasks()
    result = combine_tasks(tasks, settings, [])

    def scores(of: list[TaskResult]) -> dict[str, float]:
        moved = combine_tasks(of, settings, [])
        return {**moved.categories, **moved.averages}  # type: ignore[dict-item]

    variances: dict[str, float] = defaultdict(float)
    for i, member in enumerate(tasks):
        assert member.accuracy is not None and member.stderr is not None
        up = [
            *tasks[:i],
            dataclasses.replace(member, accuracy=member.accuracy + 1),
            *tasks[i + 1 :],
        ]
        before = scores(tasks)
        for name, value in scores(up).items():
            variances[name] += ((value - before[name]) * member.stderr) ** 2
    assert set(result.stderrs) == set(variances) and len(variances) == 7
    for name, variance in variances.items():
        assert result.stderrs[name] == pytest.approx(math.sqrt(variance), rel=1e-9), name


def test_intervals_of_categories_follow_from_those_of_tasks() -> None:
    """Of accuracies 1 and 0.5 of 20 rows each, above chance, 0.25, and over what is left, 0.75."""
    ones, halves = wilson(20, 20), wilson(10, 20)
    tasks = [task("a", 1.0, n=20, stderr=0.0, interval=ones),
             task("b", 0.5, n=20, stderr=0.11, interval=halves)]  # fmt: skip
    result = combine_tasks(
        tasks, gauntlet({"all": ["one"], "none": ["two"]}, one=["a", "b"], two=["c"]), []
    )
    value = (1 + 1 / 3) / 2
    down = math.hypot(1 - ones[0], 0.5 - halves[0]) / 2 / 0.75
    up = (halves[1] - 0.5) / 2 / 0.75
    assert result.intervals["one"] == pytest.approx((value - down, value + up))
    assert result.intervals["all"] == pytest.approx(result.intervals["one"])
    assert result.intervals["two"] is None and result.intervals["none"] is None
    low, high = result.intervals["one"] or (0, 0)
    table = result.table()
    assert f"one   {value:.4f} [{low:.4f}, {high:.4f}]" in table
    assert "100.0 [83.9, 100.0]" in table and "50.0 [29.9, 70.1]" in table
    saved = json.loads(json.dumps(result.to_json()))
    assert saved["tasks"][0]["interval"] == list(ones)
    assert saved["intervals"]["one"] == [low, high]


def test_weights_are_of_all_rows_where_some_were_asked() -> None:
    tasks = [task("a", 0.55, n=50, rows_total=64), task("b", 0.75, n=4)]
    settings = dataclasses.replace(gauntlet(one=["a", "b"]), weighting="SAMPLE_SZ")
    score = combine_tasks(tasks, settings, []).categories["one"]
    assert score == pytest.approx((64 * 0.4 + 4 * 0.5 / 0.75) / 68)


def test_a_task_of_one_row_still_weighs_something_by_the_logarithm() -> None:
    tasks = [task("a", 1.0, n=1), task("b", 0.25, n=8)]
    settings = dataclasses.replace(gauntlet(one=["a", "b"]), weighting="LOG_SAMPLE_SZ")
    assert combine_tasks(tasks, settings, []).categories["one"] == pytest.approx(1 / (1 + 3))


@pytest.mark.parametrize(("baseline", "of"), [("file", 0.4), ("chance", 0.25), ("majority", 0.3)])
def test_what_is_subtracted_is_a_choice(baseline: str, of: float) -> None:
    members = [BenchmarkConfig("a", 0, 0.4), BenchmarkConfig("b", 0)]
    settings = EvalGauntlet([CategoryConfig("one", members)], baseline=baseline)
    b = 0.3 if baseline == "majority" else 0.25  # the file gives none: chance
    expected = ((0.55 - of) / (1 - of) + (0.55 - b) / (1 - b)) / 2
    score = combine_tasks([task("a", 0.55), task("b", 0.55)], settings, []).categories["one"]
    assert score == pytest.approx(expected)


def test_a_baseline_of_one_leaves_no_score_and_says_so() -> None:
    constant = task("stories", 0.9, majority=1.0)
    settings = dataclasses.replace(gauntlet(one=["stories"]), baseline="majority")
    result = combine_tasks([constant], settings, [])
    assert result.categories == {"one": None} and result.average is None
    assert result.problems == [
        "one: n/a, and so is default_average:"
        " the majority baseline of stories/0-shot is 1: nothing can be gained"
    ]
    plain = dataclasses.replace(settings, rescale_accuracy=False)
    assert combine_tasks([constant], plain, []).categories["one"] == pytest.approx(-0.1)


def test_what_is_missing_or_failed_takes_everything_that_needs_it() -> None:
    averages = {"all": ["one", "two", "three"], "few": ["one"], "odd": ["one", "programming"]}
    tasks = [task("a", 0.5), task("b", None, failure="why"), task("c", 0.5)]
    result = combine_tasks(
        tasks, gauntlet(averages, one=["a"], two=["b", "c"], three=["copa"]), ["note"]
    )
    assert result.categories == {"one": pytest.approx(1 / 3), "two": None, "three": None}
    assert result.averages == {"all": None, "few": pytest.approx(1 / 3), "odd": None}
    assert [name for name, error in result.stderrs.items() if error is None] == [
        "two", "three", "all", "odd",
    ]  # fmt: skip
    assert result.problems == [
        "note",
        "b/0-shot: failed: why",
        "two: n/a, and so is all: no b/0-shot",
        "three: n/a, and so is all: no copa/0-shot",
        "odd: n/a: no category programming",
    ]
    assert set(result.metrics()) == {
        f"metrics/a/0-shot/{MC}",
        f"metrics/c/0-shot/{MC}",
        "icl/metrics/eval_gauntlet/one",
        "icl/metrics/eval_gauntlet/few",
    }


def test_without_categories_there_is_no_average() -> None:
    result = combine_tasks([task("a", 0.5)], EvalGauntlet(), [])
    assert (result.categories, result.averages, result.average) == ({}, {}, None)
    assert result.metrics() == {f"metrics/a/0-shot/{MC}": 0.5}


def test_a_missing_benchmark_is_reported_before_the_run() -> None:
    settings = gauntlet(one=["word"], two=["words"])
    settings.categories[1].benchmarks.append(BenchmarkConfig("words", 5))
    first, second = missing_benchmarks(settings, [task("words", None)])
    assert first.startswith("one: word/0-shot is not among icl_tasks") and "words" in first
    assert "two: words/5-shot is not among icl_tasks; its num_fewshot is 0" in second


def test_a_baseline_is_wrong_where_neither_guessing_nor_a_constant_answer_scores_it() -> None:
    def lines(given: float | None, **settings: Any) -> list[str]:
        member = BenchmarkConfig("words", 0, given)
        return list(
            wrong_baselines(
                EvalGauntlet([CategoryConfig("one", [member])], **settings),
                [task("words", None, chance=0.25, majority=0.403)],
            )
        )

    for fine in (0.25, 0.253, 0.40, None):
        assert lines(fine) == []
    (line,) = lines(0.2)
    assert line == (
        "one: words/0-shot: random_baseline: 0.2, but on these rows guessing scores 0.25, the best"
        " constant answer 0.403; with baseline: file, 0.2 is taken off"
    )
    (line,) = lines(0.2, baseline="chance")
    assert line.endswith("with baseline: chance, 0.25 is taken off")
    assert lines(0.2, subtract_random_baseline=False, rescale_accuracy=False) == []


def test_a_graded_task_keeps_what_was_known_and_gains_every_number() -> None:
    questions = [question(i % 2, f"w:{i}") for i in range(8)]
    scores = [choose(-1.0, -3.0) for _ in range(6)] + [choose(-2.0, -3.0), choose(-2.0, -3.0)]
    before = blank(8, rows_hash="cafe", rows_total=80, tokens=99, dropped=3, truncated=1)
    result = grade(before, config(), questions, scores)
    # -1/2 against -3/3 is the first; -2/2 against -3/3 is a tie, and wrong.
    assert (result.accuracy, result.ties) == (3 / 8, 2)
    assert result.stderr == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 8))
    assert result.metrics[MC] == 3 / 8 and result.metrics["acc"] == 4 / 8
    assert result.stderrs["acc"] == pytest.approx(math.sqrt(1 / 4 / 8))
    assert set(result.metrics) == {
        MC, "acc", "acc_token", "acc_norm", "acc_byte", "expected_calibration_error",
        "gold_bits_per_byte",
    }  # fmt: skip
    kept = ("n", "rows_hash", "rows_total", "tokens", "dropped", "truncated", "mode", "chance")
    assert all(getattr(result, name) == getattr(before, name) for name in kept)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_fails_the_task_by_name(broken: float) -> None:
    questions = [question(0, "w.jsonl:1"), question(0, "w.jsonl:2")]
    result = grade(blank(2), config(), questions, [choose(-1, -2), choose(broken, -2)])
    assert result.failure == "a log-probability at w.jsonl:2 is not a finite number"
    assert (result.accuracy, result.stderr, result.metrics) == (None, None, {})
    best = [Score(-1.0, greedy=False, tied=False, best_logprob=broken)]
    row = [Question(TaskRow(("q",), ("a",), 0, "w.jsonl:3"), (ScoreRequest((1,), (2,), "a"),))]
    failed = grade(blank(1), config("language_modeling"), row, [best])
    assert failed.failure and "w.jsonl:3" in failed.failure


def test_a_model_that_outputs_nan_scores_nothing_where_the_first_is_always_right() -> None:
    questions = [question(0, f"w:{i}") for i in range(4)]
    result = grade(blank(4), config(), questions, [choose(math.nan, math.nan)] * 4)
    assert result.accuracy is None and result.failure


def test_categories_of_rows_have_metrics_of_their_own() -> None:
    questions = [question(0, f"w:{i}", category="law" if i < 3 else "art") for i in range(5)]
    scores = [choose(-1, -9), choose(-9, -1), choose(-9, -1), choose(-1, -9), choose(-1, -9)]
    result = grade(blank(5), config(has_categories=True), questions, scores)
    assert result.accuracy == pytest.approx((1 / 3 + 1) / 2)
    assert result.stderr == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 3) / 2)
    metrics = combine_tasks([result], gauntlet(), []).metrics()
    assert metrics[f"metrics/words/2-shot/law/{MC}"] == pytest.approx(1 / 3)
    assert metrics[f"metrics/words/2-shot/art/{MC}"] == 1
    assert metrics[f"metrics/words/2-shot/{MC}"] == result.accuracy
    assert metrics["metrics/words/2-shot/acc"] == result.metrics["acc"]
    assert {name: part.n for name, part in result.by_category.items()} == {"law": 3, "art": 2}


def generation() -> tuple[TaskConfig, list[Question]]:
    prompt = GenerationPrompt((1,), "q", (), 4)
    questions = [
        Question(
            TaskRow(("q",), (a,), 0, f"g:{a}", aliases=(a,)), (ScoreRequest((1,), (2,), a),), prompt
        )
        for a in ("12", "7")
    ]
    return config("generation_task_with_answers"), questions


def test_an_accuracy_without_generation_is_named_and_reported() -> None:
    kind, questions = generation()
    scores = [[Score(-1.0, greedy=True, tied=False, best_logprob=-1.0)], choose(-2.0)]
    result = combine_tasks([grade(blank(2), kind, questions, scores)], gauntlet(one=["words"]), [])
    assert result.tasks[0].metric == "TeacherForcedGreedyAccuracy"
    assert result.tasks[0].accuracy == 0.5
    assert "metrics/words/2-shot/TeacherForcedGreedyAccuracy" in result.metrics()
    assert result.problems[0].startswith("words/2-shot: nothing was generated")
    assert "not generated" in result.table()
    done = grade(blank(2), kind, questions, scores, ["12.", "8"])
    assert (done.metric, done.accuracy) == (GENERATION, 0.5)
    assert combine_tasks([done], gauntlet(), []).problems == []


def test_the_table_shows_every_number_and_every_gap() -> None:
    tasks = [
        task("words", 0.5, stderr=0.05, category="one", rows_total=2000),
        task("sums", None, stderr=None, failure="why", truncated=3, dropped=12, mode="foundry"),
    ]
    averages = {"core": ["one"], "both": ["one", "two"]}
    settings = gauntlet(averages, one=["words"], two=["sums"])
    assert combine_tasks(tasks, settings, ["note"]).table() == (
        "task   shots         n  accuracy %  chance %  majority %  notes\n"
        "words      0  100/2000  50.0 ± 5.0      25.0        30.0\n"
        "sums       0       100         n/a      25.0        30.0"
        "  12 examples dropped, 3 truncated, foundry prompts, failed\n"
        "\n"
        "one   0.3333 ± 0.0667\n"
        "two       n/a\n"
        "\n"
        "core  0.3333 ± 0.0667\n"
        "both      n/a\n"
        "! note\n"
        "! sums/0-shot: failed: why\n"
        "! two: n/a, and so is both: no sums/0-shot"
    )


def test_json_holds_everything_and_null_for_what_does_not_exist() -> None:
    tasks = [task("a", 0.5, metrics={MC: 0.5, "acc": 0.25}), task("b", None, stderr=None)]
    cost = EvaluationCost(tokens_computed=1024, tokens_unshared=4096, seconds=1.5)
    result = combine_tasks(tasks, gauntlet(one=["a"], two=["b"]), [], cost=cost)
    saved = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert saved["average"] is None and saved["averages"] == {"default_average": None}
    assert saved["categories"] == {"one": pytest.approx(1 / 3), "two": None}
    assert saved["stderrs"]["one"] == pytest.approx(0.01 / 0.75)
    counted = {"tokens_computed": 1024, "tokens_unshared": 4096, "unit": "tokens"}
    assert saved["cost"] == {**counted, "seconds": 1.5}
    assert saved["tasks"][0]["metrics"] == {MC: 0.5, "acc": 0.25}
    read = GauntletResult(
        [TaskResult(**entry) for entry in saved.pop("tasks")],
        **{name: value for name, value in saved.items() if name not in ("average", "cost")},
        cost=EvaluationCost(**saved["cost"]),
    )
    assert read == result


def test_every_metric_can_be_computed_again_from_rows_jsonl() -> None:
    draw = random.Random(5)
    texts = [["a", "bcä"], ["defg", "h"], ["ij", "klm"]]
    questions = [question(draw.randrange(2), f"w:{i}", texts[i % 3]) for i in range(30)]
    scores = [choose(-draw.expovariate(0.5), -draw.expovariate(0.5)) for _ in questions]
    lines = list(rows_lines(config(), 2, questions, scores))
    assert lines == list(rows_lines(config(), 2, questions, scores))
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in map(json.loads, lines):
        assert (line["task"], line["shots"]) == ("words", 2)
        rows[line["row"]].append(line)
    assert list(rows) == [f"w:{i}" for i in range(30)]
    assert [[c["logprob"] for c in of] for of in rows.values()] == [
        [score.logprob for score in of] for of in scores
    ], "read back to the last digit"
    result = grade(blank(30), config(), questions, scores)
    for name, unit in (("acc", None), ("acc_token", "tokens"), ("acc_norm", "chars"),
                       ("acc_byte", "bytes"), (MC, "tokens")):  # fmt: skip
        right = 0
        for choices in rows.values():
            values = [c["logprob"] / (c[unit] if unit else 1) for c in choices]
            right += values.index(max(values)) == choices[0]["gold"]
        assert result.metrics[name] == right / 30
    assert sum(choices[0]["right"] for choices in rows.values()) / 30 == result.accuracy
    for choices in rows.values():
        assert (choices[0]["chosen"] == choices[0]["gold"]) == choices[0]["right"]
    gold = [choices[choices[0]["gold"]] for choices in rows.values()]
    bits = sum(-c["logprob"] for c in gold) / math.log(2) / sum(c["bytes"] for c in gold)
    assert result.metrics["gold_bits_per_byte"] == pytest.approx(bits)


def test_rows_jsonl_has_a_line_where_there_is_no_number() -> None:
    (broken, _) = rows_lines(config(), 0, [question(0, "w:1")], [choose(math.nan, -1.0)])
    line = json.loads(broken, parse_constant=pytest.fail)
    assert line["logprob"] is None and line["chosen"] is None and line["right"] is False
    (endless, _) = rows_lines(config(), 0, [question(0, "w:1")], [choose(math.inf, -1.0)])
    assert json.loads(endless)["chosen"] is None, "the task failed: nothing is right"
    (tied, _) = rows_lines(config(), 0, [question(0, "w:1")], [choose(-2.0, -3.0)])
    assert json.loads(tied)["chosen"] is None
    kind, questions = generation()
    lines = [json.loads(x) for x in rows_lines(kind, 0, questions, [[], []], ["12\n", "ü"])]
    assert [(x["row"], x["choice"], x["right"], x["text"]) for x in lines] == [
        ("g:12", 0, True, "12\n"),
        ("g:7", 0, False, "ü"),
    ]
