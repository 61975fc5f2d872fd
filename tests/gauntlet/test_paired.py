"""Paired differences next to scipy's bootstrap, to slow recomputation, and to known differences."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.aggregate import combine_tasks
from llmfoundry.gauntlet.gauntlet import TaskAnswers
from llmfoundry.gauntlet.gauntlet_file import BenchmarkConfig, CategoryConfig, EvalGauntlet
from llmfoundry.gauntlet.paired import (
    ModelAnswers,
    PairedDifference,
    compare_rows,
    paired_counts,
    percentile_interval,
)
from tests.gauntlet.answered_rows import Rights, answered, graded, write


def gauntlet(**members: Sequence[str]) -> EvalGauntlet:
    categories = [
        CategoryConfig(name, [BenchmarkConfig(task, 0, 0.25) for task in tasks])
        for name, tasks in members.items()
    ]
    return EvalGauntlet(categories, weighting="SAMPLE_SZ", averages={"all": [*members]})


def model(
    name: str, tasks: Mapping[str, Rights], settings: EvalGauntlet | None = None, **keys: Any
) -> ModelAnswers:
    parts = [answered(task, rights, **keys) for task, rights in tasks.items()]
    result = combine_tasks([*map(graded, parts)], settings or EvalGauntlet(), [])
    return ModelAnswers.of(name, result.to_json(), parts)


def sample(n: int, seed: int, shares: Sequence[float] = (0.15, 0.75, 0.1)) -> NDArray[np.bool_]:
    """Answers of two models: (2, n), of which these shares are gained, the same, and lost."""
    draw = np.random.default_rng(seed)
    outcome = draw.choice(3, size=n, p=shares)
    both = draw.random(n) < 0.6
    return np.array([np.where(outcome == 1, both, outcome == which) for which in (0, 2)])


def assert_near(difference: PairedDifference, value: float, low: float, high: float) -> None:
    """The same value; ends of intervals to 4 % of the width, which two bootstraps differ by."""
    assert difference.value == pytest.approx(value)
    assert difference.interval == pytest.approx((low, high), abs=0.04 * (high - low))


def test_a_task_has_the_interval_of_scipys_paired_bootstrap() -> None:
    stats = pytest.importorskip("scipy.stats")
    first, second = sample(300, 0)
    (difference,) = compare_rows(model("a", {"t": first}), model("b", {"t": second})).tasks
    found = stats.bootstrap(
        (first.astype(float), second.astype(float)),
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        paired=True, vectorized=True, method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert_near(difference, first.mean() - second.mean(), found.low, found.high)
    assert difference.model == pytest.approx(first.mean())
    assert difference.baseline == pytest.approx(second.mean())
    assert (difference.gained, difference.lost) == (
        (first & ~second).sum(),
        (second & ~first).sum(),
    )


def test_categories_and_averages_are_those_of_resampled_rows() -> None:
    sizes = {"one": 40, "two": 160, "three": 90}
    settings = gauntlet(x=["one", "two"], y=["three"])
    rows = {name: sample(n, seed) for seed, (name, n) in enumerate(sizes.items())}
    thirds = [f"category {i % 3}" for i in range(90)]
    parts = [
        [answered(name, of[i], thirds if name == "three" else ()) for name, of in rows.items()]
        for i in (0, 1)
    ]
    blanks = [[*map(graded, of_model)] for of_model in parts]
    results = [combine_tasks(tasks, settings, []) for tasks in blanks]
    answers = [
        ModelAnswers.of("m", result.to_json(), of_model)
        for result, of_model in zip(results, parts, strict=True)
    ]
    comparison = compare_rows(*answers)
    # recompute the gauntlet for each resample of the rows; each third of a task keeps its rows
    draw, found = np.random.default_rng(0), []
    for _ in range(3000):
        picks = {name: draw.integers(n, size=n) for name, n in sizes.items()}
        picks["three"] = np.arange(90) % 3 + 3 * draw.integers(30, size=90)
        pair: list[dict[str, Any]] = []
        for i in (0, 1):
            tasks = [
                dataclasses.replace(
                    task, accuracy=float(rows[task.label][i][picks[task.label]].mean())
                )
                for task in blanks[i]
            ]
            result = combine_tasks(tasks, settings, [])
            pair.append({**result.categories, **result.averages})
        found.append([pair[0][name] - pair[1][name] for name in ("x", "y", "all")])
    ends = np.quantile(np.array(found), (0.025, 0.975), axis=0)
    scores = [{**result.categories, **result.averages} for result in results]
    for i, difference in enumerate((*comparison.categories, *comparison.averages)):
        ours, theirs = (of[difference.name] for of in scores)
        assert ours is not None and theirs is not None
        assert (difference.model, difference.baseline) == pytest.approx((ours, theirs))
        assert_near(difference, ours - theirs, *ends[:, i])


@pytest.mark.parametrize(
    ("n", "shares"),
    [(1000, (0.1, 0.85, 0.05)), (100, (0.3, 0.6, 0.1)), (30, (0.2, 0.6, 0.2))],
)
def test_intervals_cover_a_known_difference(n: int, shares: Sequence[float]) -> None:
    true, covered, trials = shares[0] - shares[2], 0, 1000
    samples = np.random.default_rng(0).multinomial(n, shares, size=trials)
    for trial, counts in enumerate(samples.tolist()):
        pair = paired_counts(f"task {trial}", {"": counts}, 0.5)
        low, high = percentile_interval(pair.draws(1000))
        covered += low - 1e-9 <= true <= high + 1e-9
    assert 0.93 <= covered / trials <= 0.97


def test_a_mean_over_categories_covers_its_difference_with_few_rows_in_each() -> None:
    shares, covered, trials = (0.25, 0.6, 0.15), 0, 400
    draw = np.random.default_rng(0)
    sizes = [*[1] * 10, *[2] * 20, *[5] * 27]
    for trial in range(trials):
        counts = {f"{i}": draw.multinomial(n, shares).tolist() for i, n in enumerate(sizes)}
        pair = paired_counts(f"task {trial}", counts, 0.5)
        low, high = percentile_interval(pair.draws(400))
        covered += low <= 0.1 <= high
    assert 0.92 <= covered / trials <= 0.98


def test_equal_answers_and_a_single_row_have_an_interval_that_is_no_point() -> None:
    same = [True] * 40 + [False] * 60
    (difference,) = compare_rows(model("a", {"t": same}), model("b", {"t": same})).tasks
    assert difference.value == 0 and (difference.gained, difference.lost) == (0, 0)
    assert difference.interval[0] == pytest.approx(-0.03, abs=0.011)
    assert difference.interval[1] == pytest.approx(0.03, abs=0.011), "about three rows of 100"
    (single,) = compare_rows(model("a", {"t": [True]}), model("b", {"t": [False]})).tasks
    assert (single.value, single.n) == (1.0, 1)
    assert single.interval[0] < 0 and single.interval[1] == 1, "one row shows nothing"


def test_rows_are_matched_by_content_also_where_two_are_equal(tmp_path: Path) -> None:
    first, second = sample(60, 3)
    parts = []
    for rights in (first, second):
        part = answered("t", rights)
        for i in (0, 20, 40):  # three rows with the same content
            row = dataclasses.replace(part.questions[i].row, contexts=("the same",))
            part.questions[i] = dataclasses.replace(part.questions[i], row=row)
        parts.append(part)
    memory = [
        ModelAnswers.of(name, combine_tasks([graded(part)], EvalGauntlet(), []).to_json(), [part])
        for name, part in zip("ab", parts, strict=True)
    ]
    files = [
        ModelAnswers.read("a", write(tmp_path / "a", parts[:1])),
        ModelAnswers.read("b", write(tmp_path / "b", parts[1:], shuffled=True)),
    ]
    (of_memory,), (of_files,) = (compare_rows(*pair).tasks for pair in (memory, files))
    assert of_memory.n == of_files.n == 60
    assert of_memory.value == pytest.approx(first.mean() - second.mean()) == of_files.value
    again = ModelAnswers.read("a", tmp_path / "a")
    assert again.tasks == memory[0].tasks and compare_rows(again, again).tasks[0].gained == 0


def test_what_does_not_compare_is_a_line() -> None:
    settings = gauntlet(x=["one"], y=["two"])
    rows = {"one": [True] * 20, "two": [False] * 20}
    full = model("a", rows, settings)
    few = model("b", {"one": [False] * 5, "other": [True]}, gauntlet(x=["one"]))
    comparison = compare_rows(full, few)
    assert [difference.n for difference in comparison.tasks] == [5]
    assert comparison.notes == [
        "one/0-shot: only 5 rows are in both evaluations, of 20 of a and 5 of b; they are compared",
        "two/0-shot: not compared: b has no such task",
        "other/0-shot: not compared: a has no such task",
        "not compared, as one of their tasks is not: y, all",
    ]
    other = model("c", {"one": [True]}, settings)
    renamed = [replace_label(answered("else", [True]), "one")]
    result = combine_tasks([*map(graded, renamed)], settings, [])
    different = compare_rows(ModelAnswers.of("d", result.to_json(), renamed), other)
    assert different.notes[0] == "one/0-shot: not compared: the models answered different rows"
    assert different.tasks == [] and different.advice == ""


def replace_label(part: TaskAnswers, label: str) -> TaskAnswers:
    return dataclasses.replace(part, task=dataclasses.replace(part.task, label=label))


def test_rows_that_one_model_cannot_answer_are_left_out_with_a_line() -> None:
    pair = (
        model("a", {"t": [True, None, True, False]}),
        model("b", {"t": [True, True, False, None]}),
    )
    comparison = compare_rows(*pair)
    assert [(d.n, d.gained, d.lost) for d in comparison.tasks] == [(2, 1, 0)]
    assert comparison.notes == [
        "t/0-shot: 2 rows cannot be scored for one of the models, and are left out"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-40], "rows.jsonl:20: the file ends within a line"),
        (lambda text: "".join(text.splitlines(True)[:10]), "has 5 rows of t/0-shot, but"),
        (lambda text: 2 * text, "has 20 rows of t/0-shot, but results.json has 10"),
        (lambda text: text.replace('"hash"', '"place"'), "rows.jsonl:1: has no 'hash'"),
        (lambda text: text.replace('"right": ', '"right": [', 1), "rows.jsonl:1: is not a line"),
        (lambda text: text.replace('"right": true', '"right": "no"'), "rows.jsonl:1: is not a"),
        (lambda text: text.replace('"choice"', '"category": [], "choice"'), "rows.jsonl:1: is not"),
        (lambda text: "\xff\n" + text, None),
    ],
)  # fmt: skip
def test_a_file_of_rows_that_is_damaged_is_one_line(
    tmp_path: Path, change: Any, message: str | None
) -> None:
    folder = write(tmp_path / "a", [answered("t", [True] * 10)])
    path = folder / "rows.jsonl"
    path.write_text(change(path.read_text()))
    if message is None:
        assert ModelAnswers.read("a", folder).tasks, "lines of other programs are skipped"
        return
    with pytest.raises(UserError) as caught:
        ModelAnswers.read("a", folder)
    (problem,) = caught.value.problems
    assert message in problem and "scripts/eval.py" in problem


@pytest.mark.parametrize(
    "change",
    [
        {"tasks": "x"},
        {"tasks": [{"num_fewshot": 0}]},
        {"weights": {"x": {"t/0-shot": "1"}}},
        {"members": {"x": 1}},
    ],
)
def test_results_that_no_evaluation_writes_are_one_line(tmp_path: Path, change: Any) -> None:
    folder = write(tmp_path / "a", [answered("t", [True] * 10)])
    results = json.loads((folder / "results.json").read_text())
    results["gauntlet"] |= change
    (folder / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match=r"results\.json: gauntlet: .*scripts/eval\.py"):
        ModelAnswers.read("a", folder)


def test_the_table_counts_the_tasks_and_names_both_models() -> None:
    settings = gauntlet(x=["one", "two"])
    first = model("new", {"one": [True] * 30, "two": [True, False] * 15}, settings)
    second = model("old", {"one": [False] * 30, "two": [False, True] * 15}, settings)
    table = compare_rows(first, second).table().splitlines()
    assert table[0] == "new minus old, on the rows that both answered:"
    assert table[1].split() == ["difference", "baseline", "model", "rows", "gained", "lost"]
    names = [line.split()[0] for line in table[2:6]]
    assert names == ["all", "x", "one/0-shot", "two/0-shot"]
    assert table[4].split()[1] == "+100.0%" and table[4].split()[-3:] == ["30", "30", "0"]
    assert table[5].split()[1] == "+0.0%" and table[5].split()[-3:] == ["30", "15", "15"]
    assert "2 tasks were compared, each with a 95 % interval: 0.1 of 2 such" in table[-1]
    assert "*" not in "".join(table)
