"""What a browser gets to draw: stretches of a series, axes, gaps, legends; heat maps of experts."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from llmfoundry.loggers.console import format_gib, number, short_count
from llmfoundry.loggers.pages.charts import (
    LEVELS,
    MAX_COLUMNS,
    Chart,
    ChartLine,
    level,
    line_chart,
    load_maps,
    stretches,
)
from llmfoundry.loggers.pages.report import write_report
from tests.loggers.test_report import Page, numbers

SCRIPT = Path(__file__).parents[2] / "llmfoundry/loggers/pages/templates/charts.js"


def drawn(*lines: ChartLine, x_end: float = 1.0, **settings: Any) -> str:
    return line_chart(Chart("t", {}, **settings), lines, x_end=x_end)


def test_a_short_series_is_kept_as_it_is() -> None:
    points = [(float(i), float(i * i)) for i in range(600)]
    found = stretches(points)
    assert found == {"x": list(range(600)), "y": [float(f"{i * i:.6g}") for i in range(600)]}


def test_stretches_keep_the_extremes_and_the_mean() -> None:
    values = [math.sin(i * 12.9898) for i in range(10_000)]
    values[1234], values[7777] = 99.0, -99.0
    found = stretches(list(enumerate(values)))
    assert len(found["x"]) == 800 and found["x"][-1] == 9999
    shown = zip(found["low"], found["y"], found["high"], strict=True)
    for i, (low, mean, high) in enumerate(shown):
        held = values[i * 10_000 // 800 : (i + 1) * 10_000 // 800]
        expected = (min(held), sum(held) / len(held), max(held))
        assert (low, mean, high) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "zero", "log"),
    [
        ([1.0, 5.0, 31.0], False, True),
        ([1.0, 5.0, 30.0], False, False),  # not more than a factor of 30
        ([1e-9, 1e-7, 1e-6], False, True),
        ([0.0, 5.0, 31.0], False, False),  # not all positive
        ([-1.0, 5.0, 31.0], False, False),
        ([1.0, 5.0, 31.0], True, False),  # whose axis has zero
    ],
)
def test_an_axis_is_logarithmic_where_positive_values_span_more_than_a_factor_of_30(
    values: list[float], zero: bool, log: bool
) -> None:
    figure = drawn(ChartLine("a", list(enumerate(values))), x_end=2.0, from_zero=zero)
    assert numbers(figure)["log"] == log and numbers(figure)["zero"] == zero


def test_what_lies_before_the_frame_makes_no_axis_logarithmic() -> None:
    points = [(float(x), 1000.0 if x < 5 else 3.0) for x in range(1000)]
    assert not numbers(drawn(ChartLine("a", points), x_end=999.0, steep=True))["log"]
    assert numbers(drawn(ChartLine("a", points), x_end=999.0))["log"]


def test_values_that_are_not_finite_break_the_line_and_are_counted() -> None:
    values = [3.0, 2.5, math.nan, math.inf, 2.0, 1.5]
    figure = drawn(ChartLine("loss", list(enumerate(values))), x_end=5.0)
    assert "2 not finite" in figure
    assert '"y":[3,2.5,null,null,2,1.5]' in figure


def test_a_series_without_any_finite_value_draws_nothing() -> None:
    assert drawn(ChartLine("loss", [(1.0, math.nan)])) == ""
    assert drawn() == ""


@pytest.mark.parametrize("values", [[0.0], [5.0], [5.0, 5.0], [-3.0, -3.0], [0.0, 0.0]])
def test_constant_and_single_values_have_a_chart(values: list[float]) -> None:
    (line,) = numbers(drawn(ChartLine("a", list(enumerate(values)))))["lines"]
    assert line["y"] == values


def test_texts_are_escaped() -> None:
    chart = Chart("<b>&", {}, note="<u>")
    figure = line_chart(chart, [ChartLine("<i>", [(1.0, 2.0), (2.0, 3.0)], "'\"<x>")], x_end=2.0)
    Page(figure)
    assert not re.search(r"<(u|x)>|<i>", figure) and "&lt;i&gt;" in figure


def test_more_series_than_colors_are_distinguished() -> None:
    lines = [ChartLine(str(i), [(0.0, float(i)), (1.0, i + 1.0)]) for i in range(20)]
    styles = re.findall(r'class="key" style="([^"]+)"', drawn(*lines))
    assert len(set(styles)) == len(styles) == 20


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_writes_numbers_as_python_does_and_its_mean_is_the_mean() -> None:
    text = SCRIPT.read_text()
    functions = text[text.index("const trimmed") : text.index("class Chart")]
    values = [0.0, 1.0, 10.0, 9.9951, 99.96, 950.0, 999.4, 999.6, 12_346.0, 1.5e6, 1e9, 2.5e-7,
              0.000999, 0.0123456, 1234.56, 100.0, -3.25, -12_346.0]  # fmt: skip
    sizes = [0.0001, 0.5, 0.98, 1.27, 79.3, 999.96, 2000.0]
    series = [math.sin(i) * i for i in range(100)]
    asked = json.dumps({"values": values, "sizes": sizes, "series": series})
    script = f"""{functions}
    const asked = {asked};
    console.log(JSON.stringify({{
      number: asked.values.map((v) => number(v)), count: asked.values.map(count),
      size: asked.sizes.map(size), mean: movingMean(asked.series, 10),
      gap: movingMean([1, null, 3], 2), line: movingMean([...Array(50).keys()], 10)}}));"""
    said = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    found = json.loads(said.stdout)
    assert found["number"] == [number(value) for value in values]
    assert found["count"] == [short_count(value) for value in values]
    assert found["size"] == [format_gib(value) for value in sizes]
    for i in range(5, 95):
        assert found["mean"][i] == pytest.approx(sum(series[i - 5 : i + 6]) / 11)
    assert found["gap"][1] == 2.0 and found["line"] == pytest.approx(list(range(50)))


BLUE, ORANGE = "var(--s0)", "var(--s1)"


def row(batch: int, load: list[list[int]]) -> dict[str, Any]:
    return {"time/batch": batch, "time/token": 100 * batch, "load": load}


def figures(rows: list[dict[str, Any]]) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(f"<div>{''.join(load_maps(rows))}</div>"))


def cells(figure: ElementTree.Element) -> list[tuple[str, float, tuple[int, int]]]:
    """(color, opacity, (column, row)) of every cell that is drawn."""
    found = []
    for path in figure.iter("path"):
        for x, y in re.findall(r"M(\d+) (\d+)h1v1h-1z", path.attrib["d"]):
            place = int(x), int(y)
            found.append((path.attrib["fill"], float(path.attrib["fill-opacity"]), place))
    return found


def test_colors_are_symmetric_in_the_logarithm_of_the_load() -> None:
    assert [level(x) for x in (1.0, 4.0, 0.25, 16.0, 0.0)] == [0, LEVELS, -LEVELS, LEVELS, -LEVELS]
    assert level(2.0) == -level(0.5) == LEVELS // 2


def test_balanced_loads_are_a_blank_picture() -> None:
    (figure,) = figures([row(1, [[5, 5, 5, 5]]), row(2, [[6, 6, 6, 6]])])
    assert cells(figure) == []


def test_a_cell_stands_at_its_time_and_expert() -> None:
    (figure,) = figures([row(1, [[4, 4]]), row(2, [[8, 0]])])
    picture = figure.find(".//svg")
    assert picture is not None and picture.attrib["viewBox"] == "0 0 2 2"
    # expert 0, with all of the load, is the lower row of the second column
    assert sorted(cells(figure)) == [(BLUE, 1.0, (1, 0)), (ORANGE, 0.5, (1, 1))]
    titles = [title.text for title in figure.iter("title")]
    assert titles[1] == "most: expert 0, 2.00 of the mean\nleast: expert 1, 0.00"
    assert [span.text for span in figure.findall(".//div[@class='columns']/span")][-1] == "200"


def test_long_runs_add_steps_up_and_deep_models_show_some_layers() -> None:
    load = [[1, 3]] * 40
    found = figures([row(i + 1, load) for i in range(1000)])
    names = [figure.find(".//b").text for figure in found]  # type: ignore[union-attr]
    assert len(names) == 8 and names[0].endswith("layer 0") and names[-1].endswith("layer 39")
    assert len(cells(found[0])) == 2 * MAX_COLUMNS
    (alternating,) = figures([row(i + 1, [[1, 3] if i % 2 else [3, 1]]) for i in range(1400)])
    assert cells(alternating) == [], "twenty steps together are balanced"


def test_the_report_shows_the_experts_of_a_run_that_has_some(tmp_path: Path) -> None:
    metrics = {"time/batch": 1, "time/token": 100, "loss/train/total": 2.0, "moe/load_max": 1.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    assert "Load of experts, layer" not in Page(write_report(tmp_path).read_text()).text
    (tmp_path / "routing.jsonl").write_text(json.dumps(row(1, [[1, 3], [2, 2]])) + "\n")
    page = Page(write_report(tmp_path).read_text())
    assert "Load of experts, layer 0" in page.text and "Load of experts, layer 1" in page.text
    assert page.loaded == []
