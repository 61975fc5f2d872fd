"""What is tried at random is another part every day: the day's number seeds it.

pytest's head prints it; TESTS_DAY=20784 repeats a day, on any worker of xdist.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TypeVar

T = TypeVar("T")


def day() -> int:
    """Days since 1970; the first process to ask decides it for those that it starts."""
    today = int(datetime.now(timezone.utc).timestamp()) // 86_400
    return int(os.environ.setdefault("TESTS_DAY", str(today)))


def part_of_the_day(values: Sequence[T], parts: int) -> list[T]:
    """One of `parts` equal shares of the values; so many days have them all."""
    return [value for n, value in enumerate(values) if n % parts == day() % parts]
