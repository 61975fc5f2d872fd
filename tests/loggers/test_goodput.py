"""Goodput of runs whose every second is known."""

from __future__ import annotations

from typing import Any

import pytest

from llmfoundry.loggers.pages.run_time import goodput, goodput_tile


def start(time: float, attempt: int) -> dict[str, Any]:
    return {"time": time, "kind": "start", "attempt": attempt}


def decision(time: float) -> dict[str, Any]:
    return {"time": time, "kind": "decision"}


def row(batch: int, wall: float, trained: float, evaluated: float = 0.0) -> dict[str, Any]:
    facts = {"time/batch": batch, "time/unix_ms": wall * 1000}
    return {**facts, "time/train": trained, "time/val": evaluated}


def saved(batch: int, wall: float, seconds: float) -> dict[str, Any]:
    facts = {"time/batch": batch, "time/unix_ms": wall * 1000}
    return {**facts, "time/checkpoint_blocking": seconds}


# Starts at 100, trains 1 s a step from 110; saves step 4 in 2 s; dies in step 7 at 119; comes back
# at 125, begins step 5 at 132; an evaluation of 5 s after step 6; done at 145.
EVENTS = [start(100, 1), decision(120), start(125, 2), decision(145)]
ROWS = [row(n, 110 + n, n) for n in (1, 2, 3, 4)]
ROWS += [saved(4, 116, 2.0), row(5, 133, 1), row(6, 134, 2), row(7, 140, 3, 5), row(8, 141, 4, 5)]


def test_every_second_has_its_place() -> None:
    found = goodput(ROWS, EVENTS)
    assert found == pytest.approx(
        {
            "training": 8.0,  # each step once
            "evaluation": 5.0,
            "saving": 2.0,
            "starting": 10.0 + 7.0,
            "lost": 45.0 - 8 - 5 - 2 - 17,
            "whole": 45.0,
        }
    )


def test_nights_between_starts_by_hand_do_not_count() -> None:
    later = [row(9, 100_008, 1)]
    events = [*EVENTS, start(100_000, 1), decision(100_010)]
    found = goodput([*ROWS, *later], events)
    assert found["whole"] == pytest.approx(55.0)
    assert (found["training"], found["starting"]) == pytest.approx((9.0, 17 + 7.0))


def test_a_clock_that_is_set_meanwhile_makes_no_time() -> None:
    for jump in (1e6, -1e6):  # in the second attempt
        events = [start(100, 1), decision(120), start(125, 2), decision(145 + jump)]
        events = [{**e, "took": 20.0} if e["kind"] == "decision" else e for e in events]
        assert goodput(ROWS, events)["whole"] == pytest.approx(45.0)
    events[2:] = [start(125 + jump, 2), decision(145 + jump) | {"took": 20.0}]  # before it
    assert goodput(ROWS, events)["whole"] == pytest.approx(40.0)


def test_a_run_under_way_counts_up_to_its_last_row() -> None:
    assert goodput(ROWS[:4], EVENTS[:1])["whole"] == pytest.approx(14.0)


def test_the_tile_names_what_ate_the_rest_and_is_left_out_without_a_supervisor() -> None:
    (tile,) = goodput_tile(ROWS, EVENTS)
    assert (tile.label, tile.value) == ("goodput", "17.8%")
    for part in ("evaluation 11.1%", "saving 4.4%", "starting 37.8%", "lost 28.9%"):
        assert part in tile.detail
    assert not list(goodput_tile(ROWS, []))
    assert goodput([], EVENTS) == {}
