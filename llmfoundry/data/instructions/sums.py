"""Sums with carry, a step for each digit, the answer after ####, as GSM8K writes it."""

from __future__ import annotations

import random

from llmfoundry.data.instructions.exchange import Exchange, another, ask


def two_digit_sum(rng: random.Random) -> Exchange:
    """`47 + 25` → `7 + 5 = 12, 4 + 2 + 1 = 7 #### 72`; numbers below 100."""
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    right = {"check": "final_number", "value": a + b}
    wrong = another(rng, a + b, max(0, a + b - 10), a + b + 10)
    return ask(f"{a} + {b}", f"{_steps(a, b)} #### {a + b}", f"{_steps(a, b)} #### {wrong}", right)


def _steps(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    tens, carried = a // 10 + b // 10, ones // 10
    first = f"{a % 10} + {b % 10} = {ones}"
    second = f"{a // 10} + {b // 10}" + (" + 1" if carried else "") + f" = {tens + carried}"
    return f"{first}, {second}"
