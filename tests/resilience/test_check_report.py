"""check.html, check.json and the table: read back as a browser and a program would."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import combinations

from llmfoundry.resilience.check.check_report import (
    SHADES,
    as_json,
    check_lines,
    check_page,
    collected,
    pair_map,
    shade,
    summary,
)
from llmfoundry.resilience.check.findings import BAD, NOTICE, SOUND, Finding, Report

HOSTILE = "<script>alert(1)</script>"


def a_report() -> Report:
    rates = [(a, b, 0.0 if (a, b) == (0, 1) else 10.0 if 3 in (a, b) else 40.0)
             for a, b in combinations(range(6), 2)]  # fmt: skip
    findings = [
        Finding("pairs", BAD, "n3", "all 5 pairs of it are slow", "look at its ports", ("n3",)),
        Finding("gpus", NOTICE, f"n1, {HOSTILE}", "slowed: too hot (software)", "look at cooling"),
        Finding(
            "pairs", BAD, "n0 - n1", "this pair alone is slow (no answer)", "look at the cable"
        ),
        *(Finding("gpus", SOUND, f"n{n}, GPU 0", "NVIDIA H100") for n in range(6)),
    ]
    speed = {"model": "X", "tflops": 700.0, "copy_gb_s": 2800.0, "mismatches": 0, "error": ""}
    return Report(
        findings,
        [f"n{n}" for n in range(6)],
        speeds=[{"where": f"n{n}, GPU 0", **speed} for n in range(6)],
        pairs={1 << 16: rates, 1 << 30: rates},
        units=[f"n{n}" for n in range(6)],
        seconds=42.0,
    )


class Reader(HTMLParser):
    """What a browser is asked to load, and the titles of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "action") and v]


def test_the_page_loads_nothing_runs_nothing_and_says_who() -> None:
    html = check_page(a_report())
    reader = Reader()
    reader.feed(html)
    assert reader.loads == [] and "script" not in reader.tags and "@import" not in html
    assert html.count("<svg") == 2 and "failed: bad" in html
    assert "all 5 pairs of it are slow" in html and "&lt;script&gt;" in html
    assert html.index("look at its ports") < html.index("<svg") < html.index("too hot")


def test_a_cell_of_the_map_is_where_its_pair_is_and_as_dark_as_it_is_slow() -> None:
    report = a_report()
    html = pair_map(report.units, 1 << 30, report.pairs[1 << 30])
    titles = re.findall(r'<rect class="hit" x="(\d+)" y="(\d+)"[^>]*><title>([^<]*)', html)
    assert len(titles) == 30
    at = {words.split(":")[0]: (float(x), float(y)) for x, y, words in titles}
    assert at["n2 and n3"] == at["n3 and n2"][::-1] or (
        at["n2 and n3"][0] > at["n3 and n2"][0] and at["n2 and n3"][1] < at["n3 and n2"][1]
    )
    assert "n0 and n1: 0 GB/s (0%)" in html and "n2 and n3: 10 GB/s (25%)" in html
    dark = re.findall(r'<path fill="var\(--(s1|bad)\)" fill-opacity="([\d.]+)" d="([^"]*)"', html)
    shown = {name: (float(opacity), path.count("M")) for name, opacity, path in dark}
    assert shown == {"bad": (1.0, 2), "s1": (1.0, 10)}, "one silent pair, five slow ones, twice"
    assert [shade(rate, 40.0) for rate in (44, 40, 25, 10, 1)] == [0, 0, 3, SHADES, SHADES]


def test_many_units_make_a_small_page() -> None:
    every = [(a, b, 40.0) for a, b in combinations(range(200), 2)]
    html = pair_map([f"node-{n}" for n in range(200)], 1 << 30, every)
    assert len(html) < 20_000 and html.count("<span") <= 40


def test_programs_read_the_level_and_whom_to_exclude() -> None:
    found = as_json(a_report())
    assert found["level"] == BAD and found["bad_nodes"] == ["n3"] == a_report().bad_nodes
    assert len(found["pairs"]) == 30 and found["pairs"][0] == {
        "bytes": 1 << 16, "pair": [0, 1], "gb_s": 0.0}  # fmt: skip


def test_the_table_has_the_worst_first_and_no_thousand_sound_lines() -> None:
    shown = [*check_lines(a_report(), None)]
    assert shown[1].startswith("bad") and shown[3].startswith("warning")
    assert sum(line.startswith("passed") for line in shown) == 4 and "3 more" in "\n".join(shown)
    assert shown[-1] == "bad: 2 of what was checked on 6 nodes; to take out: n3"
    only_pair = Report([Finding("pairs", BAD, "n0 - n1", "slow")], ["n0", "n1"])
    assert "no node alone is to blame" in summary(only_pair)
    assert [*collected([])] == [] and "nothing is bad" in summary(Report([], ["n0"]))
