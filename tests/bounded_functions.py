"""What test_bounded.py lets a bounded child compute."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from llmfoundry.errors import UserError


@dataclass(frozen=True)
class Foreign:
    """A dataclass that is not of the package."""

    value: int


def double(number: int) -> int:
    return 2 * number


def slow_at_two(number: int) -> int:
    while number == 2:
        pass
    return number


def squares(number: int) -> int:
    while True:  # in C, where no signal's handler in Python is reached
        number *= number


def grow(number: int) -> list[str]:
    return ["a" * 2 * 10**9 for _ in range(number)]


def busy(content: bytes) -> int:
    """Takes 0.6 s."""
    start = time.process_time()
    while time.process_time() < start + 0.6:
        pass
    return len(content)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def refuse(word: str) -> None:
    raise UserError(f"no {word}", "nor this")


def bad_value(word: str) -> None:
    raise ValueError(word)


def tries(what: str) -> str:
    """What is tried, as an attacker would who came out of the sandbox: with descriptor 2 free."""
    with suppress(OSError):  # closed by an earlier call
        os.close(2)
    tried = {
        "read": partial(open, "/etc/passwd"),
        "write": partial(open, "/tmp/bounded-test", "w"),
        "connect": socket.socket,
        "fork": os.fork,
        "exec": partial(os.execv, "/bin/true", ["true"]),
    }
    try:
        tried[what]()
    except OSError as error:
        return type(error).__name__
    return "done"


def environment(_: int) -> list[str]:
    return sorted(os.environ)


def pid(_: int) -> int:
    return os.getpid()


def end(status: int) -> None:
    os._exit(status)


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def foreign(value: int) -> Foreign:
    return Foreign(value)


def function(_: int) -> object:
    return os.system
