"""Durations such as `10ba`, `2e9tok`, `1ep`, `500sp`, `0.1dur`, and the clock that counts them.

Every optimizer step of a run sees the same number of rows and tokens, so a duration in any unit is
a (possibly fractional) number of batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

UNITS = {
    "ba": "batches (optimizer steps)",
    "sp": "samples (rows of max_seq_len)",
    "tok": "tokens",
    "ep": "epochs (passes over the training rows)",
    "dur": "fraction of max_duration",
}
LONGEST = 1e18
"""In any unit; counts stay far from what 64 bits hold."""
_FORM = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)(ba|sp|tok|ep|dur)")


@dataclass(frozen=True)
class Duration:
    """A length of training: `value` in `unit` (see UNITS)."""

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Duration:
        """Read `10ba`; raises ValueError that shows what a duration looks like."""
        match = _FORM.fullmatch(str(text).strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a duration; write a number and a unit: 10ba, 2e9tok, 1ep, 500sp"
                " or 0.1dur"
            )
        value, unit = float(match[1]), match[2]
        if value > LONGEST:
            raise ValueError(f"{text!r} is too long; write {LONGEST:.0e} or less")
        if unit in ("ba", "sp", "tok") and not value.is_integer():
            raise ValueError(f"{text!r} is not a whole number of {UNITS[unit].split()[0]}")
        return cls(value, unit)

    def __str__(self) -> str:
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{number}{self.unit}"


def check_duration(
    key: str, text: str, *, allow_dur: bool = True, allow_zero: bool = True
) -> Iterator[str]:
    """Lines for a text that is not a duration, is one relative to itself, or is zero."""
    try:
        duration = Duration.parse(text)
    except ValueError as error:
        yield f"{key}: {error}"
        return
    if duration.unit == "dur" and not allow_dur:
        yield f"{key}: '{text}' is a fraction of itself; write ba, sp, tok or ep"
    if duration.value == 0 and not allow_zero:
        yield f"{key}: '{text}' is zero; write at least 1ba"


@dataclass(frozen=True)
class Clock:
    """Turns durations into batches.

    Attributes:
        samples_per_batch: rows in one global batch.
        tokens_per_batch: tokens in one global batch.
        batches_per_epoch: rows of the training set / samples_per_batch; may be fractional.
        max_duration: the length of the run.
    """

    samples_per_batch: int
    tokens_per_batch: int
    batches_per_epoch: float
    max_duration: Duration

    @cached_property
    def total(self) -> int:
        """Batches of the run."""
        return max(1, math.ceil(self.batches(self.max_duration) - 1e-9))

    @cache  # noqa: B019  a run has one clock
    def batches(self, duration: Duration | str) -> float:
        """The length of `duration` in batches, not rounded."""
        if isinstance(duration, str):
            duration = Duration.parse(duration)
        scale = {
            "ba": 1.0,
            "sp": 1 / self.samples_per_batch,
            "tok": 1 / self.tokens_per_batch,
            "ep": self.batches_per_epoch,
        }
        if duration.unit == "dur":
            return duration.value * self.batches(self.max_duration)
        return duration.value * scale[duration.unit]
