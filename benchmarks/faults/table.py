"""All faults by name, and the table of what became of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.outcome import Expected, Outcome, Seen
from benchmarks.faults.runs import Place

HEAD = (
    "fault",
    "detected by",
    "after, s",
    "action",
    "back, s",
    "lost steps",
    "losses",
    "as expected",
)


@dataclass(frozen=True)
class Fault:
    """What injects itself into a run, and returns what was seen."""

    name: str
    expected: Expected
    inject: Callable[[Place], Seen]

    def outcome(self, place: Place) -> Outcome:
        """Inject it, and compare."""
        return Outcome(self.name, self.expected, self.inject(place))


FAULTS: dict[str, Fault] = {}
"""By name, in the order of the table."""


def fault(
    name: str, expected: Expected
) -> Callable[[Callable[[Place], Seen]], Callable[[Place], Seen]]:
    """Add the function below it to `FAULTS`."""

    def added(inject: Callable[[Place], Seen]) -> Callable[[Place], Seen]:
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, expected, inject)
        return inject

    return added


def markdown(outcomes: Iterable[Outcome]) -> str:
    """A row for each outcome, and below them what was not as expected."""
    outcomes = list(outcomes)
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for one in outcomes:
        seen = one.seen
        cells = [one.fault, seen.detected_by or "nobody", _number(seen.detect_seconds)]
        cells += [seen.action or "none", _number(seen.back_seconds)]
        cells += ["" if seen.lost_steps is None else str(seen.lost_steps), seen.losses]
        lines.append(f"| {' | '.join([*cells, 'yes' if one.as_expected else 'NO'])} |")
    lines += [f"\n{one.fault}: {'; '.join(one.wrong)}" for one in outcomes if one.wrong]
    return "\n".join(lines)


def row(one: Outcome) -> dict[str, Any]:
    """An outcome for `benchmarks.harness.write`."""
    seen = one.seen
    texts = {"fault": one.fault, "detected by": seen.detected_by, "action": seen.action}
    numbers = {"detected, s": seen.detect_seconds, "back, s": seen.back_seconds}
    found = {**texts, **numbers, "lost steps": seen.lost_steps, "losses": seen.losses}
    kept = {name: value for name, value in found.items() if value is not None}
    return {**kept, "as expected": one.as_expected, "notes": seen.notes}


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
