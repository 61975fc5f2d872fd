"""What is expected of a fault, and what was seen of it.

The idea: a fault says beforehand who has to see it, in how many seconds, what has to be done and
what it may cost; what was seen is read from the run's files by code that knows nothing of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from llmfoundry.processes import cores

EQUAL = "equal"
"""Every step's loss is, bit for bit, that of the undisturbed run."""
ENDED = "equal until its end"
"""The run was ended by the fault, and every step's loss until then is the undisturbed run's."""
NONE = "no step was done"
SKIPPED = "not comparable: batches were skipped"


class NotHereError(Exception):
    """A fault cannot be injected on this machine, which lacks what it says."""


def need(is_there: bool, what: str) -> None:
    """Refuse to inject a fault where this machine lacks something.

    Raises:
        NotHereError: so it is.
    """
    if not is_there:
        raise NotHereError(f"it needs {what}")


@dataclass(frozen=True)
class Expected:
    """What has to become of a fault.

    Attributes:
        detected_by: as `Seen` has it.
        action: as `Seen` has it.
        detect_seconds: from the fault until it is told, at most, on a machine of the run's own;
            where others use its cores too, as many times as long as its load is above them.
        lost_steps: steps that are done again, at most; None: no process is started again.
        losses: EQUAL, or ENDED, NONE or SKIPPED where they cannot be.
        status: the exit status of the supervisor.
    """

    detected_by: str
    action: str
    detect_seconds: float | None
    lost_steps: int | None = None
    losses: str = EQUAL
    status: int = 0


@dataclass(frozen=True)
class Seen:
    """What became of a fault; `runs.Run.seen` reads it from the run's files.

    Attributes:
        detected_by: what was told first: hang, a kind of watch's or another event, with the rank
            that it names; or `supervisor: ` and the cause of its decision; empty: nothing.
        action: all that was done, in order, with commas between; `none` and repeats left out.
        detect_seconds: from the fault to the first event that tells it; None: nobody has.
        back_seconds: from the fault to the end of the first step by processes that were started
            after it; None: none were.
        lost_steps: done more than once; None: none, and no process was started after it.
        losses: beside the undisturbed run's.
        status: the exit status of the supervisor; None: there was none.
        notes: what the first event says.
        busy: processes that want a core, for each core; at least 1.
    """

    detected_by: str
    action: str
    detect_seconds: float | None
    back_seconds: float | None
    lost_steps: int | None
    losses: str
    status: int | None
    notes: str = ""
    busy: float = field(default_factory=lambda: max(1.0, os.getloadavg()[0] / cores()))


@dataclass(frozen=True)
class Outcome:
    """A fault, what was expected of it, and what was seen."""

    fault: str
    expected: Expected
    seen: Seen

    @property
    def wrong(self) -> list[str]:
        """What was not as expected, a line each."""
        seen, expected = self.seen, self.expected
        names = ("detected_by", "action", "losses", "status")
        pairs = ((name, getattr(seen, name), getattr(expected, name)) for name in names)
        lines = [
            f"{name}: {one!r}, expected {other!r}" for name, one, other in pairs if one != other
        ]
        most = expected.detect_seconds and expected.detect_seconds * seen.busy
        limits = (("detect_seconds", most), ("lost_steps", expected.lost_steps))
        for name, limit in limits:
            value = getattr(seen, name)
            if (value is None) != (limit is None) or (value or 0) > (limit or 0):
                lines.append(f"{name}: {value}, expected at most {limit}")
        return lines

    @property
    def as_expected(self) -> bool:
        """Whether it was seen by whom it has to be, in time, and cost no more than it may."""
        return not self.wrong
