"""Retries with backoff (`retry`, `backoff`) and time limits (`within`) for calls that fail or hang.

Stores, preparations, the gauntlet's endpoint and the loggers use `retry`. Each caller decides which
errors are transient and what to raise for the others. Calls of a driver, a file system or a
cluster's API use `within`, which runs the call in a thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_random = random.Random()  # separate, so that seeded sampling elsewhere is not affected
_MOST_DOUBLINGS = 60


def retry(
    call: Callable[[], T],
    *,
    again: Callable[[Exception, int], float],
    wait: Callable[[float], object] = time.sleep,
) -> T:
    """Call a function until it succeeds, and return its result.

    Args:
        call: the function.
        again: gets the error and the number of failures so far; returns the seconds to wait before
            the next attempt, or raises the final error.
        wait: sleeps for a number of seconds.
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
    """Return the seconds to wait after consecutive failures (exponential backoff with jitter).

    Args:
        failures: number of failures, at least 1.
        first: seconds after the first failure, before jitter.
        longest: maximum, before jitter.
        jitter: bounds of a random factor, so that ranks that failed together do not retry together.
    """
    doubled = first * 2 ** min(failures - 1, _MOST_DOUBLINGS)
    return min(longest, doubled) * _random.uniform(*jitter)


class DeadlineExceeded(RuntimeError):
    """A call did not return within its time limit."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """Run a call in a thread, and return its result or raise its error.

    A call that exceeds the limit keeps running in its thread until the process ends.

    Raises:
        DeadlineExceeded: the call took longer than `seconds`.
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
        raise failures.pop()  # popped, because a reference would keep its frames and sockets alive
    if not answers:
        raise DeadlineExceeded(f"no answer within {seconds:.3g} s")
    return answers[0]
