"""Calls with a time limit: what hangs in a driver or a file system must not hang the check.

Every probe that waits for hardware is called through `within`. The idea: the call has a thread of
its own, so that the main thread of each process, rank 0's too, stays free to say what hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


class Late(RuntimeError):
    """There was no answer in time."""


def within(seconds: float, call: Callable[[], Made]) -> Made:
    """What a call returns or raises; one that is late goes on until the process ends.

    Raises:
        Late: it took longer than `seconds`.
    """
    answers: list[Made] = []
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
        raise Late(f"no answer within {seconds:.3g} s")
    return answers[0]
