"""Accuracies, categories and the average; what is shown where a number is missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gauntlet_stand_ins import (
    ByteTokenizer,
    TableRoot,
    constant_root,
    random_root,
    write_gauntlet,
)

from llmfoundry.gauntlet.categories import GauntletResult, TaskResult, combine
from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.gauntlet.tasks import BenchmarkConfig, CategoryConfig, EvalGauntlet

LM, MC = "InContextLearningLMAccuracy", "InContextLearningMultipleChoiceAccuracy"


def evaluate(path: Path, root: TableRoot, **keys: Any) -> GauntletResult:
    gauntlet = Gauntlet(path, ByteTokenizer(), seq_len=64, validation_texts=list, **keys)
    return gauntlet.run(root, device=torch.device("cpu"), batch_rows=4)


def questions(n: int) -> list[dict[str, Any]]:
    words = ["ab", "cde", "fg", "hijk", "lm", "no"]
    return [
        {
            "query": f"{words[i % 6]}{i}",
            "choices": [words[(i + j) % 6] for j in range(4)],
            "gold": i % 4,
        }
        for i in range(n)
    ]


def sums(n: int) -> list[dict[str, Any]]:
    return [{"context": f"{i} + 1 =", "continuation": str((i + 1) % 10)} for i in range(n)]


def task(label: str, accuracy: float | None, **keys: Any) -> TaskResult:
    known = {"n": 100, "stderr": 0.01, "chance": 0.25, "majority": 0.3, **keys}
    return TaskResult(label, 0, MC, accuracy=accuracy, **known)


def categories(**members: list[str]) -> list[CategoryConfig]:
    return [
        CategoryConfig(name, [BenchmarkConfig(label, 0) for label in labels])
        for name, labels in members.items()
    ]


def test_accuracies_equal_a_slow_evaluation_in_float64(tmp_path: Path) -> None:
    root = random_root()
    path = write_gauntlet(tmp_path, {"words": questions(24), "sums": sums(20)})
    words, plain = evaluate(path, root).tasks

    def logprobs(context: str, answer: str) -> list[float]:
        ids = [0, *ByteTokenizer().encode(context + answer)]
        table = root.logprobs(ids[:-1])
        return [float(table[i - 1, ids[i]]) for i in range(len(ids) - len(answer), len(ids))]

    right = 0
    for q in questions(24):
        means = [sum(lp) / len(lp) for c in q["choices"] if (lp := logprobs(q["query"] + " ", c))]
        right += means.index(max(means)) == q["gold"]
    assert 0 < right < 24
    assert words.accuracy == right / 24
    assert words.stderr == pytest.approx(math.sqrt(right / 24 * (1 - right / 24) / 24))
    assert (words.n, words.chance, words.majority, words.ties) == (24, 0.25, 0.25, 0)

    right = 0
    for row in sums(20):
        ids = [0, *ByteTokenizer().encode(row["context"] + " ")]
        right += ByteTokenizer().encode(row["continuation"]) == [
            int(root.logprobs(ids)[-1].argmax())
        ]
    assert plain.accuracy == right / 20


def test_a_model_that_knows_the_answers_scores_one(tmp_path: Path) -> None:
    rows = [{"query": "q", "choices": ["aaa", "b", "cc"], "gold": 1}] * 3
    rows += [{"query": "q", "choices": ["b", "aa"], "gold": 0}]
    root = constant_root()
    root.model.head_weight[ord("b") + 1] = 9.0
    lines = [{"context": str(i), "continuation": "bb"} for i in range(4)]
    result = evaluate(
        write_gauntlet(
            tmp_path,
            {"choice": rows, "free": lines},
            categories=[
                {"name": c, "benchmarks": [{"name": b, "num_fewshot": 0}]}
                for c, b in (("one", "choice"), ("two", "free"))
            ],
        ),
        root,
    )
    assert [t.accuracy for t in result.tasks] == [1, 1]
    assert result.tasks[0].chance == pytest.approx((3 / 3 + 1 / 2) / 4)
    assert result.categories == {"one": pytest.approx(1), "two": pytest.approx(1)}
    assert result.average == pytest.approx(1)


@pytest.mark.parametrize("gold", [0, 1])
def test_ties_are_wrong_and_counted_wherever_gold_is(tmp_path: Path, gold: int) -> None:
    rows = [{"query": f"q{i}", "choices": ["abc", "de"], "gold": gold} for i in range(8)]
    path = write_gauntlet(tmp_path, {"words": rows, "sums": sums(8)})
    for result in evaluate(path, constant_root()).tasks:
        assert (result.accuracy, result.ties) == (0, 8)


def test_a_duplicate_of_the_best_choice_is_a_tie(tmp_path: Path) -> None:
    rows = [{"query": "q", "choices": ["x", "x", "y"], "gold": 0}]
    (result,) = evaluate(write_gauntlet(tmp_path, {"words": rows}), random_root(seed=3)).tasks
    assert result.accuracy == 0
    assert result.ties == 1  # with this seed x is likelier than y


def test_a_number_that_is_not_finite_fails_the_task_by_name_and_what_depends_on_it(
    tmp_path: Path,
) -> None:
    root = random_root()
    head = root.model.head
    seven = ByteTokenizer().encode("7")[0]

    def lost_after_seven(hidden: torch.Tensor) -> torch.Tensor:
        return head(hidden).masked_fill(hidden[:, [seven]] == 1, float("nan"))

    root.model.head = lost_after_seven  # type: ignore[method-assign]
    rows = [{"query": "q7", "choices": ["a", "b"], "gold": 0}]
    result = evaluate(
        write_gauntlet(
            tmp_path,
            {"broken": rows, "words": [{"query": "q", "choices": ["a", "b"], "gold": 0}]},
            categories=[
                {"name": "one", "benchmarks": [{"name": "broken", "num_fewshot": 0}]},
                {"name": "two", "benchmarks": [{"name": "words", "num_fewshot": 0}]},
            ],
            task_keys={"continuation_delimiter": ""},
        ),
        root,
    )
    broken, words = result.tasks
    assert broken.accuracy is None and words.accuracy is not None
    assert broken.failure and broken.failure.endswith("broken.jsonl:1 is not a finite number")
    assert result.categories["one"] is None and result.categories["two"] is not None
    assert result.average is None
    assert any(p.startswith("broken/0-shot: failed: ") for p in result.problems)
    assert "one: n/a, and so is the average: no broken/0-shot" in result.problems
    assert set(result.metrics()) == {
        f"metrics/words/0-shot/{MC}",
        "icl/metrics/eval_gauntlet/two",
    }
    assert json.loads(json.dumps(result.to_json()))["average"] is None


def test_a_missing_benchmark_is_told_at_once_and_leaves_no_average(tmp_path: Path) -> None:
    members = [{"name": "words", "num_fewshot": 0}, {"name": "copa", "num_fewshot": 0}]
    other = [{"name": "words", "num_fewshot": 5}]
    path = write_gauntlet(
        tmp_path,
        {"words": questions(4)},
        categories=[{"name": "one", "benchmarks": members}, {"name": "two", "benchmarks": other}],
    )
    gauntlet = Gauntlet(path, ByteTokenizer(), seq_len=64, validation_texts=list)
    assert gauntlet.problems[0].startswith("one: copa/0-shot is not among icl_tasks")
    assert "words/5-shot is not among icl_tasks; its num_fewshot is 0" in gauntlet.problems[1]
    result = gauntlet.run(random_root(), device=torch.device("cpu"), batch_rows=1)
    assert result.categories == {"one": None, "two": None}
    assert result.average is None
    assert "one: n/a, and so is the average: no copa/0-shot" in result.problems


def test_categories_are_means_of_rescaled_accuracies_and_the_average_is_theirs() -> None:
    tasks = [
        task("a", 0.55),
        task("b", 0.2, chance=0.5),
        task("c", 0.1, chance=0.0),
        task("unused", 1.0),
    ]
    result = combine(tasks, EvalGauntlet(categories(one=["a", "b"], two=["c"])), [])
    one = ((0.55 - 0.25) / 0.75 + (0.2 - 0.5) / 0.5) / 2
    assert result.categories == {"one": pytest.approx(one), "two": pytest.approx(0.1)}
    assert result.average == pytest.approx((one + 0.1) / 2)
    assert result.problems == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rescale_accuracy": False}, (0.3 + 0.5) / 2),
        ({"rescale_accuracy": False, "subtract_random_baseline": False}, (0.55 + 0.75) / 2),
        ({"weighting": "SAMPLE_SZ"}, (64 * 0.4 + 4 * 0.5 / 0.75) / 68),
        ({"weighting": "LOG_SAMPLE_SZ"}, (6 * 0.4 + 2 * 0.5 / 0.75) / 8),
    ],
)
def test_weighting_and_baselines_are_settings(settings: dict[str, Any], expected: float) -> None:
    tasks = [task("a", 0.55, n=64), task("b", 0.75, n=4)]
    result = combine(tasks, EvalGauntlet(categories(one=["a", "b"]), **settings), [])
    assert result.categories["one"] == pytest.approx(expected)


def test_a_random_baseline_that_the_rows_contradict_is_told_and_not_used(tmp_path: Path) -> None:
    member = {"name": "words", "num_fewshot": 0, "random_baseline": 0.5}
    path = write_gauntlet(
        tmp_path,
        {"words": questions(8)},
        categories=[{"name": "one", "benchmarks": [member]}],
    )
    result = evaluate(path, constant_root())
    (problem,) = result.problems
    assert problem.startswith("one: words/0-shot: random_baseline: 0.5, but guessing")
    assert "scores 0.25, which is used" in problem
    assert result.categories["one"] == pytest.approx(-0.25 / 0.75)


def test_max_rows_takes_the_first_rows_and_truncation_is_counted(tmp_path: Path) -> None:
    rows = [{"context": "x" * (10 * i), "continuation": "y"} for i in range(12)]
    path = write_gauntlet(tmp_path, {"long": rows}, shots=1)
    (result,) = evaluate(path, random_root(), max_rows=9).tasks
    assert result.n == 9
    drawn = Gauntlet(path, ByteTokenizer(), seq_len=10**6, validation_texts=list, max_rows=9)
    lengths = [len(r.tokens) for r in drawn._requests]
    assert result.truncated == sum(n > 64 for n in lengths) > 0


def test_the_table_shows_every_number_and_every_gap() -> None:
    tasks = [
        task("words", 0.5, stderr=0.05, category="one"),
        task("sums", None, stderr=None, failure="why", ties=0, truncated=3),
    ]
    table = combine(tasks, EvalGauntlet(categories(one=["words"], two=["sums"])), ["note"]).table()
    assert table == (
        "task   shots    n  accuracy %  chance %  majority %  notes\n"
        "words      0  100  50.0 ± 5.0      25.0        30.0\n"
        "sums       0  100         n/a      25.0        30.0  3 truncated, failed\n"
        "\n"
        "one       0.3333\n"
        "two          n/a\n"
        "average      n/a\n"
        "! note\n"
        "! sums/0-shot: failed: why\n"
        "! two: n/a, and so is the average: no sums/0-shot"
    )


def test_metric_names_are_composers() -> None:
    result = combine([task("words", 0.5)], EvalGauntlet(categories(one=["words"])), [])
    assert result.metrics() == {
        f"metrics/words/0-shot/{MC}": 0.5,
        "icl/metrics/eval_gauntlet/one": pytest.approx(1 / 3),
        "icl/metrics/eval_gauntlet/average": pytest.approx(1 / 3),
    }
    assert combine([task("words", 0.5)], EvalGauntlet(), []).metrics() == {
        f"metrics/words/0-shot/{MC}": 0.5
    }
