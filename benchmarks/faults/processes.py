"""Faults of processes, numbers and recipes."""

from __future__ import annotations

import signal

from benchmarks.faults.outcome import Expected, Seen
from benchmarks.faults.runs import SAVE, STOPPED, Place
from benchmarks.faults.table import fault

LOST = 2 * SAVE
"""Steps at most: a save in the background may not be whole yet when the next is due."""


@fault(
    "rank killed",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def rank_killed(place: Place) -> Seen:
    """As the kernel does where memory runs out, or somebody by mistake."""
    return _killed(place, "rank-killed", 2 * SAVE + 3)


@fault(
    "rank killed while saving",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def rank_killed_while_saving(place: Place) -> Seen:
    """The others' saves wait for it, in the background: they must not hold the end up."""
    return _killed(place, "killed-while-saving", 2 * SAVE)


def _killed(place: Place, name: str, step: int) -> Seen:
    whole = place.undisturbed()
    with place.start(name) as run:
        run.wait_for(step - 1)
        rank = run.ranks()[1]
        run.wait_for(step)
        run.strike(rank)
        run.end()
        return run.seen(whole)


@fault(
    "agent (torchrun) killed",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def agent_killed(place: Place) -> Seen:
    """The ranks are orphans, which must not go on beside those of the next start."""
    whole = place.undisturbed()
    with place.start("agent-killed") as run:
        run.wait_for(12)
        run.strike(run.launcher())
        run.end()
        return run.seen(whole)


@fault(
    "rank stopped (SIGSTOP)",
    Expected("hang", "end, restart", detect_seconds=STOPPED + 10, lost_steps=LOST),
)
def rank_stopped(place: Place) -> Seen:
    """It neither ends nor goes on; all others wait for it."""
    whole = place.undisturbed()
    with place.start("rank-stopped") as run:
        run.wait_for(12)
        run.strike(run.ranks()[1], signal.SIGSTOP)
        run.end()
        return run.seen(whole)
