"""Faults of what a supervisor depends on: its log, the checkpoints' folder, what it resumes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.faults.outcome import ENDED, Expected, Seen
from benchmarks.faults.processes import LOST
from benchmarks.faults.runs import SAVE, Place
from benchmarks.faults.table import fault


@fault(
    "logs on a full disk, rank killed",
    Expected("supervisor: unknown", "restart", detect_seconds=15, lost_steps=LOST),
)
def logs_on_a_full_disk(place: Place) -> Seen:
    """Neither the run nor its supervisor can print a line from the start on."""
    whole = place.undisturbed()
    with place.start("full-log", log=Path("/dev/full")) as run:
        run.wait_for(12)
        run.strike(run.ranks()[1])
        run.end()
        return run.seen(whole)


@fault(
    "checkpoints' folder renamed, rank killed",
    Expected(
        "supervisor: unknown",
        "restart, wait, stop",
        detect_seconds=15,
        losses=ENDED,
        status=93,
    ),
)
def checkpoints_renamed(place: Place) -> Seen:
    """While the run is under way: nothing begins at step 1."""
    whole = place.undisturbed()
    with place.start("renamed", "supervise.vanished_seconds=5") as run:
        run.wait_for(2 * SAVE + 3)
        (run.folder / "checkpoints").rename(run.folder / "elsewhere")
        run.strike(run.ranks()[1])
        run.end()
        return run.seen(whole, but=("save_failed", "hang"))


@fault(
    "callback does not return",
    Expected("hang, rank 2", "end, restart", detect_seconds=25, lost_steps=LOST),
)
def callback_hangs(place: Place) -> Seen:
    """One of the user's own, in one rank; its name is said."""
    return _inside(place, "callback-hangs", "stuck={step: 23}", "hang.callback_seconds=10")


@fault(
    "checkpoint of weights that are not finite",
    Expected("supervisor: numerical", "restart", detect_seconds=30, lost_steps=LOST),
)
def bad_checkpoint(place: Place) -> Seen:
    """Saved before the step that finds it out: the second restart resumes from the one before."""
    return _inside(place, "bad-checkpoint", f"bad_weights={{step: {4 * SAVE}}}")


def _inside(place: Place, name: str, plugin: str, *overrides: str) -> Seen:
    whole = place.undisturbed()
    with place.start(name, f"callbacks.plugins.{plugin}", *overrides) as run:
        run.end()
        return run.seen(whole)
