"""What is asserted of a fault, and how losses are compared: without a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults.runs import ENDED, EQUAL, NONE, Expected, Observed, as_table, compared

SEEN = Observed("hang, rank 1", "end, restart", 4.0, 30.0, 3, EQUAL, 0, busy=1.0)
EXPECTED = Expected("hang, rank 1", "end, restart", detect_seconds=5, lost_steps=5)


def test_what_is_not_as_expected_is_named() -> None:
    def wrong(**changes: Any) -> str:
        return "; ".join(replace(SEEN, **changes).wrong(EXPECTED))

    assert wrong() == ""
    assert wrong(detect_seconds=9.0) == "detect_seconds: 9.0, expected at most 5.0"
    assert wrong(lost_steps=6) == "lost_steps: 6, expected at most 5"
    assert "lost_steps: None" in wrong(lost_steps=None) and "status: 1" in wrong(status=1)
    nobody = wrong(detected_by="", detect_seconds=None)
    assert "detected_by: ''" in nobody and "detect_seconds: None" in nobody
    lines = as_table({"one": (EXPECTED, replace(SEEN, losses="differ"))}).splitlines()
    assert lines[2].endswith("| 30.0 | 3 | differ | NO |") and "expected 'equal'" in lines[-1]


def test_losses_against_the_undisturbed_run() -> None:
    whole = {1: 4.0, 2: 3.0, 3: 2.5}
    assert compared(whole, whole) == EQUAL and compared({}, whole) == NONE
    assert compared({1: 4.0, 2: 3.0}, whole) == ENDED
    assert "missing" in compared({1: 4.0, 3: 2.5}, whole)
    assert compared({**whole, 2: 3.25, 3: 2.6}, whole) == "differ from step 2 on, by 0.2 at most"
