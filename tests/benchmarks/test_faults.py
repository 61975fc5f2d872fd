"""Faults injected into runs of four processes are seen in time, and cost no more than they may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.faults import links as links
from benchmarks.faults import machines as machines
from benchmarks.faults import processes as processes
from benchmarks.faults import stores as stores
from benchmarks.faults import supervisor as supervisor
from benchmarks.faults.outcome import ENDED, EQUAL, NONE, Expected, NotHereError, Outcome, Seen
from benchmarks.faults.runs import Place, compared
from benchmarks.faults.table import FAULTS, markdown

SEEN = Seen("hang, rank 1", "end, restart", 4.0, 30.0, 3, EQUAL, 0, busy=1.0)
EXPECTED = Expected("hang, rank 1", "end, restart", detect_seconds=5, lost_steps=5)


def test_an_outcome_says_what_was_not_as_expected() -> None:
    def wrong(**changes: Any) -> str:
        return "; ".join(Outcome("one", EXPECTED, replace(SEEN, **changes)).wrong)

    assert wrong() == wrong(detect_seconds=9.0, busy=2.0) == ""
    assert wrong(detect_seconds=9.0) == "detect_seconds: 9.0, expected at most 5.0"
    assert wrong(lost_steps=6) == "lost_steps: 6, expected at most 5"
    assert "lost_steps: None" in wrong(lost_steps=None) and "status: 1" in wrong(status=1)
    nobody = wrong(detected_by="", detect_seconds=None)
    assert "detected_by: ''" in nobody and "detect_seconds: None" in nobody
    lines = markdown([Outcome("one", EXPECTED, replace(SEEN, losses="differ"))]).splitlines()
    assert lines[2].endswith("| 30.0 | 3 | differ | NO |") and "expected 'equal'" in lines[-1]


def test_losses_beside_the_undisturbed_runs() -> None:
    whole = {1: 4.0, 2: 3.0, 3: 2.5}
    assert compared(whole, whole) == EQUAL and compared({}, whole) == NONE
    assert compared({1: 4.0, 2: 3.0}, whole) == ENDED
    assert "missing" in compared({1: 4.0, 3: 2.5}, whole)
    assert compared({**whole, 2: 3.25, 3: 2.6}, whole) == "differ from step 2 on, by 0.2 at most"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("faults") / "place")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_and_costs_no_more_than_it_may(place: Place, name: str) -> None:
    try:
        outcome = FAULTS[name].outcome(place)
    except NotHereError as why:
        pytest.skip(str(why))
    assert outcome.wrong == []
