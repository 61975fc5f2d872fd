"""Calls that fail for a while, or hang: `retry` and `backoff` repeat them, `within` ends them.

Stores, preparations, the gauntlet's endpoint and the loggers call `retry`, each with its own answer
to an error: which of them pass, and what the user sees of the others. Whatever waits for a driver,
a file system or a cluster's API goes through `within`, whose call has a thread of its own.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_random = random.Random()  # its own, so that seeded draws elsewhere are not shifted
_MOST_DOUBLINGS = 60


def retry(
    call: Callable[[], T],
    *,
    again: Callable[[Exception, int], float],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """The result of `call`, which is repeated while it raises.

    Args:
        call: to repeat.
        again: gets an error and how many came in a row; returns the seconds to wait before the
            next attempt, or raises what the caller is to see.
        wait: waits for so many seconds.
    """
    failures = 0
    while True:
        try:
            return call()
        except Exception as error:
            failures += 1
            seconds = again(error, failures)
        wait(seconds)


def backoff(
    failures: int,
    *,
    first: float = 0.5,
    longest: float = 30.0,
    jitter: tuple[float, float] = (0.0, 1.0),
) -> float:
    """Seconds to wait after so many failures in a row: twice as long each time.

    Args:
        failures: one or more.
        first: after the first failure, before jitter.
        longest: ever.
        jitter: bounds of a random factor, so that ranks which failed together do not come back
            together.
    """
    doubled = first * 2 ** min(failures - 1, _MOST_DOUBLINGS)
    return min(longest, doubled) * _random.uniform(*jitter)


class DeadlineExceeded(RuntimeError):
    """There was no answer in time."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns or raises; one that is late runs until the process ends.

    Raises:
        DeadlineExceeded: it took longer than `seconds`.
    """
    answers: list[T] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            answers.append(call())
        except Exception as error:
            failures.append(error)

    working = threading.Thread(target=work, daemon=True)
    working.start()
    working.join(seconds)
    if failures:
        raise failures.pop()  # kept here it would keep all that its frames hold, such as sockets
    if not answers:
        raise DeadlineExceeded(f"no answer within {seconds:.3g} s")
    return answers[0]
