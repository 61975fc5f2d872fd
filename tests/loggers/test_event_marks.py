"""What happened to a run is marked on its charts, at its step, and listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmfoundry.events import add_event
from llmfoundry.loggers.pages.report import marks, write_report
from tests.loggers.test_report import Page, figure, numbers, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path, 300)
    add_event(
        tmp_path, "loss_spike", "step 100: the loss is <9>", step=100, action="skip", done="x"
    )
    add_event(tmp_path, "restart", "a node was lost", action="restart", done="started again")
    (tmp_path / "events.jsonl").open("a").write('{"time": 1.0, "step": 250, "torn')
    return tmp_path


def test_an_event_is_marked_where_its_step_is_and_listed_newest_first(run: Path) -> None:
    html = write_report(run).read_text()
    page = Page(html)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    tokens = last["time/token"] / last["time/batch"]
    for title in ("Loss", "Gradient norm", "Throughput"):
        drawn = figure(html, title)
        (mark,) = numbers(drawn)["marks"]
        assert mark["x"] == pytest.approx(100 * tokens)
        assert mark["what"] == "loss_spike: step 100: the loss is <9>; x"
    assert "marks" not in numbers(figure(html, "Learning rate"))
    assert page.text.index("a node was lost") < page.text.rindex("step 100: the loss is <9>")


def test_a_run_without_events_is_drawn_as_before(tmp_path: Path) -> None:
    write_run(tmp_path, 300)
    html = write_report(tmp_path).read_text()
    assert ">Events<" not in html
    assert "marks" not in numbers(figure(html, "Loss"))


def test_events_of_no_step_have_no_place() -> None:
    rows = [{"time/batch": 10, "time/token": 1000}]
    events = [{"time": 0.0, "step": None}, {"time": 0.0}, {"time": 0.0, "step": 5, "kind": "a"}]
    assert marks(events, rows) == [(500.0, "a: ; ")]
    assert marks(events, []) == []
