"""Small checks that every section uses; each yields lines `key: why; what to write instead`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any


def nearest(name: str, options: Iterable[str]) -> str:
    """The clause `; did you mean 'x'?` for the closest option, or an empty string."""
    match = difflib.get_close_matches(name, list(options), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def one_of(key: str, value: str, options: Iterable[str]) -> Iterator[str]:
    """`value` must be one of `options`."""
    options = list(options)
    if value not in options:
        hint = nearest(str(value), options)
        yield f"{key}: {value!r} is not a choice{hint} (choices: {', '.join(options)})"


def at_least(key: str, value: float | None, low: float) -> Iterator[str]:
    """`value`, where given, must not be below `low`."""
    if value is not None and value < low:
        yield f"{key}: {value} is too small; write {low} or more"


def above(key: str, value: float | None, low: float) -> Iterator[str]:
    """`value`, where given, must be greater than `low`."""
    if value is not None and not value > low:
        yield f"{key}: {value} must be greater than {low}"


def fraction(key: str, value: float | None) -> Iterator[str]:
    """`value`, where given, must lie in [0, 1)."""
    if value is not None and not 0 <= value < 1:
        yield f"{key}: {value} is not a fraction; write a number from 0 up to, not including, 1"


def divides(key: str, part: int, whole_key: str, whole: int) -> Iterator[str]:
    """`part` must divide `whole`."""
    if part < 1 or whole % part:
        close = min(divisors(whole), key=lambda n: abs(n - part), default=1)
        why = f"{part} does not divide {whole_key} ({whole})"
        yield f"{key}: {why}; the nearest that does is {close}"


def divisors(whole: int) -> list[int]:
    """All divisors of `whole`, ascending, in time of its square root."""
    small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
    return sorted({*small, *(whole // n for n in small)})


def inert(key: str, section: Any, fields: Iterable[str], why: str) -> Iterator[str]:
    """Fields that were set although they have no effect; unset is None.

    `why` completes the sentence "... has no effect", for instance "without alibi: true".
    """
    for field in fields:
        if getattr(section, field) is not None:
            yield f"{key}{field}: has no effect {why}; remove it"


def fill(section: Any, **defaults: Any) -> None:
    """Give fields that are still None the value that a run uses."""
    for field, value in defaults.items():
        if getattr(section, field) is None:
            setattr(section, field, value)
