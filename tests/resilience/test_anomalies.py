"""Rounds of times, judged: who is slow, what fell, and nothing where nothing is."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from llmfoundry.recipe.resilience import WatchConfig
from llmfoundry.resilience.watch.anomalies import Anomaly, History, RankTimes, find_anomalies

CONFIG = WatchConfig()


def a_round(draw: random.Random, ranks: int, noise: float, **changes: float) -> list[RankTimes]:
    """Times of processes that are alike, but for noise."""
    return [
        RankTimes(
            compute=0.1 * draw.lognormvariate(0, noise),
            data_wait=0.002 * draw.lognormvariate(0, 0.5),
            step=changes.get("step", 0.4) * draw.lognormvariate(0, noise),
            stall=draw.random(),
        )
        for _ in range(ranks)
    ]


def reported(
    rounds: list[list[RankTimes]], config: WatchConfig = CONFIG
) -> list[tuple[int, Anomaly]]:
    """Findings by the number of their round; the history goes through a checkpoint each time."""
    history, found = History({"processes": 4}), []
    for number, table in enumerate(rounds):
        findings, history = find_anomalies(table, history, config)
        saved = json.loads(json.dumps(history.state()))
        history = History.restored(saved, {"processes": 4})
        found += [(number, finding) for finding in findings]
    return found


@pytest.mark.parametrize(("ranks", "noise"), [(1, 0.05), (4, 0.05), (4, 0.01), (64, 0.03)])
def test_the_rounds_of_forty_thousand_quiet_steps_have_no_finding(ranks: int, noise: float) -> None:
    draw = random.Random(ranks)
    assert reported([a_round(draw, ranks, noise) for _ in range(400)]) == []


@pytest.mark.parametrize("ranks", [4, 8, 256])
def test_a_rank_slowed_by_half_is_named_once_and_so_is_its_return(ranks: int) -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, ranks, 0.03) for _ in range(30)]
    for table in rounds[10:20]:
        table[3] = replace(table[3], compute=1.5 * table[3].compute)
    found = reported(rounds)
    assert [(n, f.kind, f.rank, f.has_ended) for n, f in found] == [
        (11, "slow_rank", 3, False),
        (20, "slow_rank", 3, True),
    ]
    assert "rank 3 ({host}) computes 1." in found[0][1].seen


def test_a_rank_that_is_slow_in_one_round_is_chance() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.03) for _ in range(10)]
    rounds[5][1] = replace(rounds[5][1], compute=0.9)
    assert reported(rounds) == []
    assert [f.rank for _, f in reported(rounds, WatchConfig(in_a_row=1))] == [1, 1]


def test_of_fewer_than_four_none_is_slow() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 3, 0.01) for _ in range(10)]
    for table in rounds:
        table[0] = replace(table[0], compute=5.0)
    assert reported(rounds) == []


def test_a_rank_that_waits_for_its_data_is_named() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.02) for _ in range(6)]
    for table in rounds:
        table[2] = replace(table[2], data_wait=0.3)
    found = reported(rounds)
    assert [(f.kind, f.rank) for _, f in found] == [("slow_rank", 2)]
    assert "waits 300 ms a step for data" in found[0][1].seen


def test_a_drop_of_mfu_is_one_against_the_runs_own_rounds() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.02) for _ in range(12)]
    rounds += [a_round(draw, 4, 0.02, step=0.6) for _ in range(40)]
    rounds += [a_round(draw, 4, 0.02) for _ in range(5)]
    found = reported(rounds)
    assert [(n, f.kind, f.has_ended) for n, f in found] == [
        (13, "mfu_drop", False),
        (52, "mfu_drop", True),
    ]
    assert "utilisation is 67% of the usual" in found[0][1].seen or "66%" in found[0][1].seen
    small = [a_round(draw, 4, 0.02) for _ in range(12)]
    small += [a_round(draw, 4, 0.02, step=0.44) for _ in range(40)]  # 9 % less is within the limit
    assert reported(small) == []


def test_in_another_configuration_nothing_is_known() -> None:
    history = History({"processes": 4}, steps=(0.1,) * 20, waits=(0.01,) * 20)
    assert History.restored(history.state(), {"processes": 4}) == history
    assert History.restored(history.state(), {"processes": 8}) == History({"processes": 8})
    assert History.restored({}, {"processes": 8}) == History({"processes": 8})


def test_a_rising_wait_for_data_names_who_waits_longest() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.02) for _ in range(20)]
    for table in rounds[10:]:
        for rank in range(4):
            table[rank] = replace(table[rank], data_wait=0.2 + 0.01 * (rank == 1))
    found = [(n, f) for n, f in reported(rounds) if f.kind == "data_wait"]
    assert [(n, f.rank) for n, f in found] == [(11, 1)]
    assert "wait for data 35% of their time, and waited" in found[0][1].seen


def test_a_stall_is_reported_at_once_with_what_it_waited_for() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.02) for _ in range(8)]
    rounds[6][2] = replace(rounds[6][2], stall=70.0, stall_wait=69.0)
    rounds[7] = [replace(times, stall=45.0) for times in rounds[7]]
    found = reported(rounds)
    assert [(n, f.kind, f.rank) for n, f in found] == [(6, "stall", 2), (7, "stall", None)]
    assert "waited 69 s for data" in found[0][1].seen
    assert "no process waited for data" in found[1][1].seen
    slow = [[replace(times, step=10.0) for times in table] for table in rounds]
    assert reported(slow) == []  # of steps of ten seconds a stall is longer


def test_what_is_off_is_not_reported() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.02) for _ in range(8)]
    for table in rounds:
        table[2] = replace(table[2], stall=70.0, compute=9.0)
    assert reported(rounds, WatchConfig(stall="off", slow_rank="off")) == []


def test_errors_of_a_gpu_are_reported_at_once_and_its_slowness_in_two_rounds() -> None:
    draw = random.Random(0)
    rounds = [a_round(draw, 4, 0.02) for _ in range(8)]
    rounds[1][0] = replace(rounds[1][0], xid=79.0)
    rounds[2][1] = replace(rounds[2][1], lost=1.0, xid=999.0)
    for n in (4, 5):
        rounds[n][3] = replace(rounds[n][3], slowed=float(0x40 | 0x8))
    found = reported(rounds)
    assert [(n, f.kind, f.rank, f.has_ended) for n, f in found] == [
        (1, "gpu", 0, False),
        (2, "gpu", 1, False),
        (2, "gpu", 1, False),
        (5, "gpu", 3, False),
        (6, "gpu", 3, True),
    ]
    assert "XID 79, the GPU has fallen off the bus; take the machine out" in found[0][1].seen
    assert [finding.is_bad for _, finding in found] == [True, True, False, False, False]
    assert "is lost" in found[1][1].seen and "XID 999, not in the table" in found[2][1].seen
    assert "slowed: hardware slowdown, too hot (hardware)" in found[3][1].seen
