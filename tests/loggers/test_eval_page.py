"""The page of the gauntlet's results: its numbers, its pictures' geometry, what it warns of."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from llmfoundry.loggers.pages.eval_page import eval_page, score_table, task_table, write_eval_page
from llmfoundry.loggers.pages.score_tables import (
    ShownScore,
    TaskDots,
    accuracy_bar,
    bars,
    dots,
)
from tests.loggers.test_report import Page

MC = "InContextLearningMultipleChoiceAccuracy"


def entry(label: str, accuracy: float | None, **keys: Any) -> dict[str, Any]:
    """As GauntletResult.to_json has tasks."""
    known = {
        "label": label, "num_fewshot": 3, "metric": MC, "n": 100, "accuracy": accuracy,
        "stderr": None if accuracy is None else 0.05, "chance": 0.25, "majority": 0.31, "ties": 0,
        "truncated": 0, "failure": None, "category": None, "metrics": {}, "stderrs": {},
        "by_category": {}, "mode": "native", "rows_hash": "a1", "rows_total": 100, "dropped": 0,
        "tokens": 1000,
    }  # fmt: skip
    return {**known, **keys}


def result(*tasks: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "tasks": list(tasks),
        "categories": {"one": 0.25, "two": -0.05, "three": 0.4},
        "averages": {"core_average": 0.2},
        "stderrs": {"one": 0.02, "two": 0.03, "three": 0.01, "core_average": 0.0123},
        "problems": [],
        "cost": {"tokens_computed": 46_000_000, "tokens_unshared": 130_000_000, "seconds": 192.0},
        "average": 0.2,
        **keys,
    }


def lanes(figure: str, kind: str) -> list[ElementTree.Element]:
    return [
        lane
        for group in ElementTree.fromstring(figure).findall(f".//div[@class='group {kind}']")
        for lane in group.findall("div")
    ]


def style(element: ElementTree.Element | None) -> dict[str, float]:
    """Percents of a part's place."""
    assert element is not None
    found = re.findall(r"(left|width):(-?[\d.]+)%", element.attrib["style"])
    return {name: float(value) for name, value in found}


def within(lane: ElementTree.Element, kind: str) -> ElementTree.Element | None:
    return lane.find(f"i[@class='{kind}']")


def ticks(figure: str) -> list[tuple[float, float]]:
    """(value, percent) of the axis of bars."""
    spans = ElementTree.fromstring(figure).findall(".//div[@class='ticks']/span")
    return [(float(span.text or ""), style(span)["left"]) for span in spans]


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    html = eval_page([("a", result(entry("copa", 0.5))), ("b", result(entry("copa", 0.6)))])
    page = Page(html)
    assert page.loaded == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", html)


def test_one_models_page_has_every_number() -> None:
    metrics = {MC: 0.5432, "acc_norm": 0.51, "gold_bits_per_byte": 1.2345}
    law = {"n": 7, "metrics": {MC: 0.2857}, "stderrs": {MC: 0.17}}
    copa = entry(
        "copa", 0.5432, stderr=0.0426, n=137, rows_total=1370, ties=1, dropped=2, truncated=3,
        metrics=metrics, stderrs={MC: 0.0426}, by_category={"law": law},
    )  # fmt: skip
    page = Page(eval_page([("mpt", result(copa))]))
    for text in (
        "Evaluation: mpt finished · 1 model, 1 task",
        "0.2000 core_average ± 0.0123",
        "copa 3 54.3% ± 4.3",
        "1 tie, 2 dropped examples, 3 truncated questions 137 of 1370 25.0% 31.0%",
        "two -0.0500 ± 0.0300",
        "46.0M 130M 2.83 3m12s",
        "copa/3-shot metric mpt",
        "acc_norm 0.51",
        "gold_bits_per_byte 1.234",
        f"law {MC} 0.2857 ± 0.17",
    ):
        assert text in page.text, text


def test_models_stand_side_by_side_in_their_order_even_with_one_name() -> None:
    first = result(entry("copa", 0.51), entry("only_first", 0.3))
    second = result(entry("copa", 0.62), averages={"core_average": 0.3})
    page = Page(eval_page([("same", first), ("same", second)]))
    assert "2 models, 2 tasks" in page.text
    assert re.search(r"copa 3 51\.0% ± 5\.0 62\.0% ± 5\.0 100 25\.0% 31\.0%", page.text)
    assert re.search(r"only_first .* not asked", page.text)
    assert "core_average 0.2000 ± 0.0123 0.3000 ± 0.0123" in page.text


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rows_hash": "b2"}, "rows"),
        ({"n": 50}, "numbers of questions"),
        ({"mode": "foundry"}, "prompts"),
        ({"metric": "TeacherForcedGreedyAccuracy"}, "ways of judging"),
    ],
)
def test_what_does_not_compare_is_said(change: dict[str, Any], word: str) -> None:
    one, other = result(entry("copa", 0.5)), result(entry("copa", 0.5, **change))
    page = Page(eval_page([("a", one), ("b", other)]))
    assert f"{word} differ between the models in all tasks: copa/3-shot" in page.text
    assert "compar" not in Page(eval_page([("a", one), ("b", one)])).text
    assert "compar" not in Page(eval_page([("a", one), ("b", result())])).text


def test_what_is_missing_is_na_with_its_reason() -> None:
    failed = entry("copa", None, failure="row 3 is <not> finite")
    scores = {"categories": {"one": None}, "averages": {"core_average": None}, "stderrs": {}}
    broken = result(failed, **scores, problems=["one: n/a: no <copa>"], cost=None)
    page = Page(eval_page([("m", broken)]))
    assert "not complete · 1 model" in page.text
    assert "n/a failed: row 3 is <not> finite" in page.text
    assert "one: n/a: no <copa>" in page.text and "n/a core_average" in page.text
    assert "tokens computed" not in page.text
    assert "finished · 1 model" in Page(eval_page([("m", result(entry("copa", 0.0)))])).text


def test_texts_are_escaped() -> None:
    evil = "<script>alert(1)</script>&\"'"
    bad = result(
        entry(evil, 0.5, metrics={evil: 1.0}, failure=evil, mode=evil),
        entry("b", None, failure=evil),
        categories={evil: 0.1, "x": 0.2, "y": 0.3},
        averages={evil + "2": 0.1},
        problems=[evil],
    )
    for results in ([(evil, bad)], [(evil, bad), (evil, result())]):
        page = Page(eval_page(results, title=evil))
        assert "script" not in page.tags and evil in page.text


def test_results_of_older_runs_can_be_shown() -> None:
    old = {
        "tasks": [
            {"label": "copa", "num_fewshot": 2, "metric": MC, "n": 9, "accuracy": 0.5,
             "stderr": 0.1, "chance": 0.5, "majority": 0.5, "ties": 0, "truncated": 0,
             "failure": None, "category": None}
        ],
        "categories": {"one": 0.1},
        "average": 0.1,
        "problems": [],
    }  # fmt: skip
    page = Page(eval_page([("old", old), ("new", result(entry("copa", 0.5, num_fewshot=2)))]))
    assert "one 0.1000 0.2500 ± 0.0200" in page.text


def test_a_bar_is_as_long_as_its_score_and_its_whisker_as_its_error() -> None:
    draw = random.Random(0)
    names = ["one", "two", "three", "four"]
    scores: list[list[ShownScore]] = [
        [ShownScore(draw.uniform(-0.3, 0.9), draw.uniform(0.01, 0.1)) for _ in names]
        for _ in range(3)
    ]
    scores[1][2] = ShownScore(None)
    figure = bars("t", names, ["a", "b", "c"], scores)
    (v0, x0), (v1, x1) = ticks(figure)[0], ticks(figure)[-1]
    assert [x0, x1] == [0, 100]

    def place(value: float) -> float:
        return x0 + (value - v0) * (x1 - x0) / (v1 - v0)

    found = lanes(figure, "bars")
    assert len(found) == 12
    for row in range(len(names)):
        for model in range(3):
            lane = found[3 * row + model]
            value, error, _ = scores[model][row]
            if value is None or error is None:
                assert within(lane, "value") is None and lane.findtext("span") == "n/a"
                continue
            bar, whisker = style(within(lane, "value")), style(within(lane, "whisker"))
            left, right = sorted((place(0), place(value)))
            assert bar["left"] == pytest.approx(left, abs=0.02)
            assert bar["left"] + bar["width"] == pytest.approx(right, abs=0.03)
            assert whisker["left"] == pytest.approx(place(value - error), abs=0.02)
            ends = whisker["left"] + whisker["width"]
            assert ends == pytest.approx(place(value + error), abs=0.03)


def test_bars_of_a_group_have_their_models_colors_and_numbers() -> None:
    figure = bars("t", ["x", "y"], ["a", "b"], [[ShownScore(0.1), ShownScore(0.2)]] * 2)
    found = lanes(figure, "bars")
    colors = [re.search(r"--s\d", within(lane, "value").attrib["style"]) for lane in found]  # type: ignore[union-attr]
    assert [c and c[0] for c in colors] == ["--s0", "--s1", "--s0", "--s1"]
    assert [lane.findtext("b") for lane in found] == ["1", "2", "1", "2"]
    assert "95% interval; 0: guessing" in figure
    assert "legend" not in bars("t", ["x"], ["a"], [[ShownScore(0.1)]])


@pytest.mark.parametrize("value", [0.0, 1.0, -0.4, 1e-4])
def test_any_single_score_can_be_drawn(value: float) -> None:
    (lane,) = lanes(bars("t", ["x"], ["a"], [[ShownScore(value, 0.0)]]), "bars")
    bar = style(within(lane, "value"))
    assert bar["left"] >= 0 and bar["left"] + bar["width"] <= 100.01
    assert bars("t", [], ["a"], [[]]) == ""
    assert "n/a" in bars("t", ["x"], ["a"], [[ShownScore(None)]])


def test_accuracies_are_dots_at_their_share_beside_chance() -> None:
    asked = [
        TaskDots("copa, 3-shot", 0.5, 0.55, [ShownScore(0.25, 0.05), ShownScore(0.75)]),
        TaskDots("svamp, 0-shot", 0.0, 0.1, [ShownScore(None), ShownScore(0.0)]),
    ]
    figure = dots("t", asked, ["a", "b"])
    found = lanes(figure, "dots")
    shown = [(i, within(lane, "dot")) for i, lane in enumerate(found)]
    assert [(i, style(dot)["left"]) for i, dot in shown if dot is not None] == [
        (0, 25.0), (1, 75.0), (3, 0.0)
    ]  # fmt: skip
    kinds = ["--s0" in dot.attrib["style"] for _, dot in shown if dot is not None]
    assert kinds == [True, False, False]
    assert found[0].attrib["title"] == "a, copa, 3-shot: 25.0% ± 5.0; chance 50.0%"
    marks = ElementTree.fromstring(figure).findall(".//i")
    strokes = [style(m)["left"] for m in marks if m.attrib.get("class", "").startswith("mark")]
    assert strokes == [50, 55, 0, 10]
    assert dots("t", [], ["a"]) == ""


def test_scores_at_chance_do_not_fill_the_frame() -> None:
    values = [
        ticks(bars("t", ["x"], ["a"], [[ShownScore(score, 0.01)]]))[-1][0]
        for score in (0.004, -0.01)
    ]
    assert min(values) >= 0.25


def test_ten_models_are_distinguished_by_number_and_color() -> None:
    results = [(f"model-{i}", result(entry("copa", 0.5))) for i in range(10)]
    html = eval_page(results)
    styles = re.findall(r'<i class="dot" style="[^"]*?(background.*?)"', html)
    assert len(set(styles)) == len(styles) == 10
    assert "10 model-9" in Page(html).text
    assert 'class="tiles"' not in html, "ten averages are a table"


def test_what_does_not_compare_is_said_once_with_a_list() -> None:
    tasks = [f"task{i}" for i in range(19)]
    one = result(*(entry(name, 0.5) for name in tasks))
    other = result(*(entry(name, 0.5, rows_hash="b2", mode="foundry") for name in tasks))
    page = Page(eval_page([("a", one), ("b", other)]))
    assert page.text.count("differ between the models") == 1
    assert "rows and prompts differ between the models in all tasks: task0/3-shot" in page.text
    assert page.text.count("≠") == 1 + 19, "the legend, and a mark in each row"


def test_models_lead_to_their_pages(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a <b>" / "report.html"
    links: list[dict[str, Path]] = [{"run": run}, {}]
    path = tmp_path / "gauntlet.html"
    write_eval_page(path, [("a", result()), ("b", result())], links=links)
    assert 'href="runs/a%20%3Cb%3E/report.html"' in path.read_text()


def test_the_small_bar_marks_chance_and_majority() -> None:
    drawn = accuracy_bar(ShownScore(0.75, 0.05), chance=0.25, majority=0.4, model=11)
    bar = ElementTree.fromstring(drawn)
    value, whisker, chance, majority = bar.findall("i")
    assert style(value) == {"width": 75.0} and "--s1" in value.attrib["style"]
    assert style(whisker) == {"left": 70.0, "width": 10.0}
    assert (style(chance)["left"], style(majority)["left"]) == (25, 40)
    assert chance.attrib["class"] == "mark" and majority.attrib["class"] == "mark dashed"
    assert bar.attrib["title"] == "75.0% ± 5.0; chance 25.0%, majority 40.0%"
    assert "whisker" not in accuracy_bar(ShownScore(0.75), chance=0, majority=0, model=0)


def test_intervals_that_are_not_symmetric_are_what_is_written_and_drawn() -> None:
    """Of none right of 20, as 0.00 ± 0.00 would say that there is no doubt."""
    within = {"interval": [0.0, 0.1611], "stderr": 0.0, "n": 20, "rows_total": 20}
    none = entry("copa", 0.0, metrics={MC: 0.0}, intervals={MC: [0.0, 0.1611]}, **within)
    scores = {"averages": {"core": -0.05}, "intervals": {"core": [-0.05, 0.12]}}
    page = eval_page([("m", result(none, **scores))])
    for text in (
        "copa 3 0.0% [0.0, 16.1]",
        "-0.0500 core [-0.0500, 0.1200]",
        f"{MC} 0 [0, 0.1611]",
        "Lines: chance (solid), majority class (dashed); whiskers: 95% interval.",
    ):
        assert text in Page(page).text, text
    asked = [TaskDots("copa", 0.25, 0.31, [ShownScore(0.0, 0.0, (0.0, 0.1611))])]
    (lane,) = lanes(dots("t", asked, ["m"]), "dots")
    assert style(lane.find("i[@class='whisker']"))["width"] == pytest.approx(16.11)
    bar = accuracy_bar(ShownScore(1.0, 0.0, (0.8389, 1.0)), chance=0, majority=0)
    assert style(ElementTree.fromstring(bar).find("i[@class='whisker']")) == {
        "left": 83.89,
        "width": 16.11,
    }


def test_a_page_of_one_task_has_no_empty_heading_and_names_its_model_once() -> None:
    alone = {"categories": {}, "averages": {}, "stderrs": {}, "asked": "as trained"}
    page = Page(eval_page([("quickstart", result(entry("copa", 0.5), **alone))]))
    assert "1 model, 1 task Accuracy Accuracy in each task" in page.text
    assert "verages" not in page.text and "ategories" not in page.text
    assert "Prompt format as trained Cost" in page.text
    assert "tokens computed tokens unshared unshared over computed time 46.0M" in page.text
    (heads,) = re.findall(r"<tr>(<th>task.*?)</tr>", task_table([("m", result(entry("a", 0.5)))]))
    assert re.findall(r">([^<>]+)<", heads)[:3] == ["task", "shots", "m"]  # what a phone shows
    assert ".apart figure{max-width" in eval_page([("m", result())])  # one chart is not blown up


def test_the_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "eval.html"
    path.write_text("old")
    write_eval_page(path, [("m", result(entry("copa", 0.5)))], title="Models")
    assert "Models: m" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_scores_over_different_rows_are_marked_where_they_are_shown() -> None:
    members = {"members": {"one": ["a/3-shot"], "two": ["b/3-shot"]}}
    members["members"]["core_average"] = ["a/3-shot", "b/3-shot"]
    ours = result(entry("a", 0.5), entry("b", 0.5), **members)
    theirs = result(entry("a", 0.5), entry("b", 0.5, rows_hash="b2"), **members)
    marks = re.findall(
        r"<tr><td>(\w+) <span title=\"not comparable",
        score_table([("x", ours), ("y", theirs)]),
    )
    assert marks == ["core_average", "two"]
    assert "not comparable" not in score_table([("x", ours), ("y", ours)])
