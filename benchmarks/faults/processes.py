"""Faults of processes, numbers and recipes."""

from __future__ import annotations

import signal

from benchmarks.faults.outcome import Expected, Seen
from benchmarks.faults.runs import SAVE, Place
from benchmarks.faults.table import fault

LOST = 2 * SAVE
"""Steps at most: a save in the background may not be whole yet when the next is due."""


@fault(
    "rank killed (SIGKILL)",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def rank_killed(place: Place) -> Seen:
    """As the kernel does where memory runs out, or somebody by mistake."""
    whole = place.undisturbed()
    with place.start("rank-killed") as run:
        run.wait_for(12)
        run.strike(run.ranks()[1])
        run.end()
        return run.seen(whole)


@fault(
    "agent killed (torchrun, SIGKILL)",
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
    Expected("hang", "end, restart", detect_seconds=15, lost_steps=LOST),
)
def rank_stopped(place: Place) -> Seen:
    """It neither ends nor goes on; all others wait for it. hang.stopped_seconds is 5 here."""
    whole = place.undisturbed()
    with place.start("rank-stopped") as run:
        run.wait_for(12)
        run.strike(run.ranks()[1], signal.SIGSTOP)
        run.end()
        return run.seen(whole)
