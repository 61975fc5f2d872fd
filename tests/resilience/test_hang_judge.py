"""Who hangs, as pure functions say it: of readings written by hand, and of machines that talk."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llmfoundry.recipe.resilience import HangConfig
from llmfoundry.resilience.hang.judge import RankReading, judge, refine, waits_in_torch
from llmfoundry.resilience.hang.monitor import COLLECT, END, WATCH, Hub, HubClient, HubServer
from llmfoundry.telemetry import PHASES

LIMITS = HangConfig()
LIMITS.fill()
USUAL = {"step": 0.8, "update": 0.2}


def reading(rank: int, phase: str, age: float, step: int = 7, **more: object) -> RankReading:
    """Of a process that has done a few steps."""
    whole = RankReading(rank, f"node{rank // 2}", step, phase, age, longest=USUAL)
    return replace(whole, **more)  # type: ignore[arg-type]


def test_who_is_behind_all_others_hangs_and_not_those_who_wait() -> None:
    waiting = [reading(rank, "update", 40.0) for rank in (0, 2, 3)]
    found = judge([*waiting, reading(1, "step", 41.0)], LIMITS)
    assert found is not None and found.is_final
    assert (found.culprits, found.nodes, found.phase, found.step) == ((1,), ("node0",), "step", 7)
    assert "rank 1 on node0 hangs in phase step of step 7 for 41 s" in found.line()


def test_a_step_earlier_is_behind_whatever_the_phase() -> None:
    found = judge([reading(0, "data", 40.0, step=8), reading(1, "save", 2000.0)], LIMITS)
    assert found is not None and found.culprits == (1,)


@pytest.mark.parametrize(
    ("phase", "healthy", "hung"),
    [
        ("data", 899, 901),
        ("step", 29, 31),  # of a run whose longest step took 1 s
        ("update", 29, 31),
        ("evaluation", 14_399, 14_401),
        ("callbacks", 1799, 1801),
        ("save", 1799, 1801),
    ],
)
def test_the_limit_is_that_of_the_phase_of_who_is_behind(
    phase: str, healthy: float, hung: float
) -> None:
    assert judge([reading(r, phase, healthy) for r in range(4)], LIMITS) is None
    everybody = judge([reading(r, phase, hung) for r in range(4)], LIMITS)
    assert everybody is not None and everybody.culprits == (0, 1, 2, 3)
    ahead = PHASES[PHASES.index(phase) + 1]
    others = [reading(r, ahead, 100_000.0) for r in (0, 1, 2)]
    found = judge([*others, reading(3, phase, healthy)], LIMITS)
    assert found is None or not found.is_final  # they wait, and are not hung
    found = judge([*others, reading(3, phase, hung)], LIMITS)
    assert found is not None and found.is_final and found.culprits == (3,)


@pytest.mark.parametrize("phase", PHASES)
def test_a_callback_has_a_limit_of_its_own_in_every_phase_and_is_named(phase: str) -> None:
    called = "Samples.on_step"
    others = [reading(r, phase, 100_000.0, step=8) for r in (0, 1, 2)]
    waited = judge([*others, reading(3, phase, 1799.0, callback=called)], LIMITS)
    assert waited is not None and not waited.is_final
    found = judge([*others, reading(3, phase, 1801.0, callback=called)], LIMITS)
    assert found is not None and found.is_final and found.culprits == (3,)
    assert found.line().startswith(
        f"rank 3 on node1 hangs in callback Samples.on_step, in phase {phase} of step 7 for 1801 s"
    )


def test_of_a_callback_and_what_waits_beside_it_the_stacks_show_which_hangs() -> None:
    """In one phase who has not come to it, or who is in it, may be what the others wait for."""
    beside = [reading(r, "step", 1810.0) for r in (0, 1)]
    inside = reading(2, "step", 1805.0, callback="Norms.on_gradients")
    found = judge([*beside, inside], LIMITS)
    assert found is not None and found.culprits == (0, 1, 2)
    assert judge([*beside, replace(inside, age=1700.0)], LIMITS) is None
    waits = [replace(r, waits=True) for r in beside]
    named = refine(found, [*waits, replace(inside, waits=False)])
    assert (named.culprits, named.callback) == ((2,), "Norms.on_gradients")
    blamed = refine(found, [replace(beside[0], waits=False), waits[1], replace(inside, waits=True)])
    assert (blamed.culprits, blamed.callback) == ((0,), "")


@pytest.mark.parametrize("phase", ["start", "end"])
def test_tokenizing_and_uploading_take_as_long_as_they_take(phase: str) -> None:
    assert judge([reading(r, phase, 1e6) for r in range(4)], LIMITS) is None


@pytest.mark.parametrize("phase", PHASES)
def test_a_stopped_process_is_found_in_every_phase(phase: str) -> None:
    readings = [reading(r, phase, 40.0) for r in range(3)]
    stopped = reading(3, phase, 1e6, state="stopped", stopped_for=31.0)
    found = judge([*readings, stopped], LIMITS)
    assert found is not None and found.culprits == (3,) and "stopped" in found.line()
    brief = replace(stopped, stopped_for=29.0, age=20.0)  # a debugger looked at it
    assert judge([reading(r, phase, 20.0) for r in range(3)] + [brief], LIMITS) is None


def test_a_stopped_process_explains_a_phase_that_all_are_in() -> None:
    readings = [reading(r, "step", 31.0) for r in range(3)]
    stopped = reading(3, "step", 31.0, state="stopped", stopped_for=20.0)
    found = judge([*readings, stopped], LIMITS)
    assert found is not None and found.culprits == (3,)


def test_the_first_steps_compile_and_later_ones_may_compile_again() -> None:
    first = [replace(reading(r, "step", 1700.0), longest={}) for r in range(2)]
    assert judge(first, LIMITS) is None
    assert judge([replace(r, age=1801.0) for r in first], LIMITS) is not None
    later = [reading(r, "step", 299.0) for r in range(2)]
    assert judge(later, LIMITS, is_compiled=True) is None
    assert judge(later, LIMITS) is not None


def test_long_steps_have_long_limits() -> None:
    slow = {"step": 50.0, "update": 10.0}
    assert judge([replace(reading(r, "step", 299.0), longest=slow) for r in (0, 1)], LIMITS) is None
    assert judge([replace(reading(r, "step", 301.0), longest=slow) for r in (0, 1)], LIMITS)


def test_that_one_keeps_the_others_waiting_is_reported_and_ends_nothing() -> None:
    found = judge([reading(0, "step", 61.0), reading(1, "data", 62.0)], LIMITS)
    assert found is not None and not found.is_final and found.culprits == (1,)
    assert "rank 1 on node0 kept the others waiting in phase data" in found.line()
    assert judge([reading(0, "step", 59.0), reading(1, "data", 62.0)], LIMITS) is None


def test_a_run_that_continues_is_never_judged() -> None:
    """2,000 steps of eight processes with uneven phases, seen at every moment."""
    draw = random.Random(5)
    for _ in range(2000):
        position = draw.choice(PHASES[1:4])
        readings = [
            reading(rank, draw.choice([position, "data"]), draw.uniform(0, 1.2))
            for rank in range(8)
        ]
        assert judge(readings, LIMITS) is None


def test_stacks_show_who_does_not_wait_where_all_are_in_one_phase() -> None:
    readings = [reading(r, "step", 40.0, waits=r != 2) for r in range(4)]
    found = judge(readings, LIMITS)
    assert found is not None and found.culprits == (0, 1, 2, 3)
    assert refine(found, readings).culprits == (2,)
    nobody = [replace(r, waits=True) for r in readings]
    assert refine(found, nobody) == found


def test_the_main_threads_innermost_frame_says_whether_it_waits() -> None:
    threads = 'Thread 0x01 (most recent call first):\n  File "/x/torch/a.py", line 3 in f\n'
    main = 'Current thread 0x02 (most recent call first):\n  File "{}", line 9 in g\n'
    outer = '  File "/repo/train.py", line 1 in h\n'
    waiting = threads + "\n" + main.format("/lib/torch/distributed/c10d.py") + outer
    assert waits_in_torch(waiting) is True
    assert waits_in_torch(threads + "\n" + main.format("/repo/callback.py") + outer) is False
    assert waits_in_torch("") is None


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_machines_speak_to_the_hub_and_one_that_falls_silent_is_named() -> None:
    clock = Clock()
    hub = Hub(LIMITS, ranks=4, clock=clock)
    door = HubServer(hub, "127.0.0.1")
    far = HubClient(door.address)
    try:
        here = [reading(r, "update", 0.0) for r in (0, 1)]
        there = [reading(r, "step", 0.0) for r in (2, 3)]
        assert hub.exchange("node0", here, collected=False).action == WATCH
        assert far.exchange("node1", there, collected=False).action == WATCH
        clock.now = 31.0  # and nothing more from node1
        here = [replace(r, age=31.0) for r in here]
        assert hub.exchange("node0", here, collected=False).action == COLLECT
        assert hub.exchange("node0", here, collected=True).action == COLLECT
        clock.now = 50.0
        assert hub.exchange("node0", here, collected=True).action == END
        assert hub.order.verdict is not None and hub.order.verdict.nodes == ("node1",)
        order = far.exchange("node1", there, collected=False)
        assert order.action == END and order == hub.order  # it is back, and ends its own
        intruder = HubClient(door.address[:-1] + ("0" if door.address[-1] != "0" else "1"))
        with pytest.raises(OSError):
            intruder.exchange("node9", there, collected=True)
    finally:
        door.shutdown()
        door.server_close()


def test_a_report_is_given_once_and_again_only_for_another_hang() -> None:
    clock = Clock()
    hub = Hub(LIMITS, ranks=2, clock=clock)
    hung = [reading(0, "update", 40.0), reading(1, "step", 41.0)]
    assert hub.exchange("node0", hung, collected=False).action == COLLECT
    assert hub.exchange("node0", hung, collected=True).action == END
    hub.resume()
    assert hub.exchange("node0", hung, collected=False).action == WATCH
    later = [replace(r, step=9) for r in hung]
    assert hub.exchange("node0", later, collected=False).action == COLLECT


def test_nothing_is_judged_before_all_have_begun_or_after_one_has_ended() -> None:
    hub = Hub(LIMITS, ranks=3)
    hung = [reading(0, "update", 4000.0), reading(1, "step", 4001.0)]
    assert hub.exchange("node0", hung, collected=False).action == WATCH
