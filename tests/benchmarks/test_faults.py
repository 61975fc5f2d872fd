"""Faults injected into runs of four processes are seen in time, and cost no more than they may."""

from __future__ import annotations

import pytest

from benchmarks.faults import links as links
from benchmarks.faults import machines as machines
from benchmarks.faults import processes as processes
from benchmarks.faults import stores as stores
from benchmarks.faults.outcome import NotHereError
from benchmarks.faults.runs import Place
from benchmarks.faults.table import FAULTS


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
