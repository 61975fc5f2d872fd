"""The heat map of experts' loads: colors, places, and what the report makes of routing.jsonl."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from llmfoundry.loggers.pages.frame import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from llmfoundry.loggers.pages.heat_map import LEVELS, MAX_COLUMNS, level, load_maps
from llmfoundry.loggers.pages.report import write_report
from tests.loggers.test_report import Page

BLUE, ORANGE = "var(--s0)", "var(--s1)"


def row(batch: int, load: list[list[int]]) -> dict[str, Any]:
    return {"time/batch": batch, "time/token": 100 * batch, "load": load}


def figures(rows: list[dict[str, Any]]) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(f"<div>{load_maps(rows)}</div>"))


def cells(figure: ElementTree.Element) -> list[tuple[str, float, tuple[float, ...]]]:
    """(color, opacity, (left, top, right, height)) of every cell that is drawn."""
    found = []
    for path in figure.iter("path"):
        for shape in re.findall(r"M(\S+) (\S+)H(\S+)v(\S+)H\S+z", path.attrib["d"]):
            place = tuple(map(float, shape))
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
    width, height = WIDTH - LEFT - RIGHT, (HEIGHT - TOP - BOTTOM) / 2
    middle = LEFT + width / 2
    least, most = sorted(cells(figure))
    assert least[:2] == (BLUE, 1.0) and most[:2] == (ORANGE, 0.5)
    assert least[2] == pytest.approx((middle, TOP, LEFT + width, height), abs=0.1)
    assert most[2] == pytest.approx((middle, TOP + height, LEFT + width, height), abs=0.1)
    titles = [title.text for title in figure.iter("title")]
    assert titles[1] == "most: expert 0, 2.00 of the mean\nleast: expert 1, 0.00"


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
