"""The chart's geometry: ticks, thinning, gaps and the places of points."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from llmfoundry.loggers.pages.chart import Series, line_chart, thin
from llmfoundry.loggers.pages.frame import Axis, linear_ticks


def svg(figure: str) -> ElementTree.Element:
    """The parsed figure; fails where it is not well formed."""
    return ElementTree.fromstring(figure)


def path_points(figure: str, kind: str = "line") -> list[list[tuple[float, float]]]:
    paths = svg(figure).findall(f".//svg[@role]//path[@class='{kind}']")
    return [
        [(float(x), float(y)) for x, y in (p.split() for p in path.attrib["d"][1:].split("L"))]
        for path in paths
    ]


def test_thinning_keeps_the_extremes_of_every_stretch_and_both_ends() -> None:
    draw = random.Random(0)
    points = [(float(i), draw.gauss(0, 1)) for i in range(10_000)]
    points[1234] = (1234.0, 99.0)
    points[7777] = (7777.0, -99.0)
    kept = thin(points, 600)
    assert len(kept) <= 600
    assert kept == sorted(kept) and set(kept) <= set(points)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert (1234.0, 99.0) in kept and (7777.0, -99.0) in kept
    for start in range(0, 10_000, 100):  # three stretches long: each holds its own extremes
        near = [y for x, y in kept if start <= x < start + 100]
        inner = [y for x, y in points[start + 34 : start + 66]]
        assert max(near) >= max(inner) and min(near) <= min(inner)


def test_a_short_series_is_not_thinned() -> None:
    points = [(float(i), float(i * i)) for i in range(600)]
    assert thin(points, 600) == points


def test_ticks_are_round_and_inside() -> None:
    draw = random.Random(1)
    for _ in range(500):
        low = draw.uniform(-1, 1) * 10 ** draw.uniform(-6, 12)
        high = low + 10 ** draw.uniform(math.log10(abs(low)) - 2, math.log10(abs(low)) + 3)
        ticks = linear_ticks(low, high)
        step = ticks[1] - ticks[0]
        assert 3 <= len(ticks) <= 9
        assert f"{step:.5e}"[:7] in ("1.00000", "2.00000", "5.00000")
        assert all(b - a == pytest.approx(step) for a, b in pairwise(ticks))
        assert all(low - step * 1e-6 <= t <= high + step * 1e-6 for t in ticks)
        assert ticks[0] - step < low and ticks[-1] + step > high


def test_a_logarithmic_axis_has_ticks_at_its_decades() -> None:
    assert Axis(0.5, 2000, log=True).ticks() == pytest.approx([1, 10, 100, 1000])
    assert Axis(1, 100, log=True).place(10) == pytest.approx(0.5)


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
    points = list(enumerate(values))
    figure = line_chart("t", [Series("a", points)], x_end=2.0, y_from_zero=zero)
    assert (">log scale<" in figure) == log
    assert f'"log":{str(log).lower()}' in figure
    [[(_, low), (_, middle), (_, high)]] = path_points(figure)
    place: Callable[[float], float] = math.log if log else float
    share = (place(values[1]) - place(values[0])) / (place(values[2]) - place(values[0]))
    assert (middle - low) / (high - low) == pytest.approx(share, abs=0.002)


def test_what_lies_before_the_frame_makes_no_axis_logarithmic() -> None:
    points = [(float(x), 1000.0 if x < 5 else 3.0) for x in range(1000)]
    figure = line_chart("Loss", [Series("a", points)], x_end=999.0, y_skip=0.05)
    assert ">log scale<" not in figure
    assert ">log scale<" in line_chart("Loss", [Series("a", points)], x_end=999.0)


def test_a_straight_line_is_drawn_straight_from_edge_to_edge() -> None:
    points = [(float(x), 2.0 + x / 10) for x in range(11)]
    [line] = path_points(line_chart("t", [Series("a", points)], x_end=10.0))
    assert line[0][0] == pytest.approx(52) and line[-1][0] == pytest.approx(540)
    (x0, y0), (x1, y1) = line[0], line[-1]
    assert y1 < y0  # greater values are higher up
    for x, y in line:
        assert y == pytest.approx(y0 + (x - x0) * (y1 - y0) / (x1 - x0), abs=0.11)


def test_values_that_are_not_finite_break_the_line_and_are_counted() -> None:
    values = [3.0, 2.5, math.nan, math.inf, 2.0, 1.5]
    figure = line_chart("t", [Series("loss", list(enumerate(values)))], x_end=5.0)
    assert [len(line) for line in path_points(figure)] == [2, 2]
    assert "2 not finite" in figure
    assert '"y":[3,2.5,null,null,2,1.5]' in figure


def test_a_series_without_any_finite_value_draws_nothing() -> None:
    assert line_chart("t", [Series("loss", [(1.0, math.nan)])], x_end=1.0) == ""
    assert line_chart("t", [], x_end=1.0) == ""


@pytest.mark.parametrize("values", [[0.0], [5.0], [5.0, 5.0], [-3.0, -3.0], [0.0, 0.0]])
def test_constant_and_single_values_have_a_chart(values: list[float]) -> None:
    for from_zero in (False, True):
        figure = line_chart(
            "t", [Series("a", list(enumerate(values)))], x_end=1.0, y_from_zero=from_zero
        )
        dots = svg(figure).findall(".//circle")
        assert len(dots) == len(values)
        assert all(10 <= float(dot.attrib["cy"]) <= 212 for dot in dots)


def test_a_steep_start_leaves_the_frame_and_is_said() -> None:
    points = [(float(x), 100.0 - x if x < 5 else 3.0 + x / 1000) for x in range(1000)]
    figure = line_chart("Loss", [Series("a", points)], x_end=999.0, y_skip=0.05)
    assert "begins above the frame, at 100" in figure
    labels = [float(t.text or "") for t in svg(figure).findall(".//text[@text-anchor='end']")[:-1]]
    assert max(labels) <= 4.2


def test_texts_are_escaped() -> None:
    figure = line_chart("<b>&", [Series("<i>", [(1.0, 2.0), (2.0, 3.0)])], x_end=2.0, note="<u>")
    svg(figure)
    assert not re.search(r"<(i|u)>", figure) and "&lt;i&gt;" in figure


def test_more_series_than_colors_are_distinguished() -> None:
    lines = [Series(str(i), [(0.0, float(i)), (1.0, i + 1.0)]) for i in range(20)]
    figure = svg(line_chart("t", lines, x_end=1.0))
    styles = [p.attrib["style"] for p in figure.findall(".//svg[@role]//path")]
    assert len(set(styles)) == 20
