"""Operators defined on the spot and applied: `a @ b = max(a, b)`, `3 @ 7 =`.

`sets.GENERATORS` names `operators`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from llmfoundry.gauntlet.tasks.generated.items import Item

_SYMBOLS = "@#$&~^"
_PICK: dict[str, Callable[[int, int], int]] = {
    "a": lambda a, b: a,
    "b": lambda a, b: b,
    "max(a, b)": max,
    "min(a, b)": min,
}
_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "b - a": lambda a, b: b - a,
    "a * b": lambda a, b: a * b,
}


@dataclass(frozen=True)
class _Operator:
    symbol: str
    formula: str
    apply: Callable[[int, int], int]


def operators(rng: random.Random, level: int) -> Item:
    """Apply one's definition to two numbers below 10.

    Level 1 picks one of the two, level 2 has one step of arithmetic, level 3 factors as well, level
    4 applies the operator twice, level 5 two operators.
    """
    symbols = rng.sample(_SYMBOLS, 2 if level == 5 else 1)
    defined = [_define(rng, level, symbol) for symbol in symbols]
    outer, inner = defined[0], defined[-1]
    a, b, c = (rng.randrange(10) for _ in range(3))
    if level < 4:
        text, value = f"{a} {outer.symbol} {b}", outer.apply(a, b)
    elif rng.random() < 0.5:
        text = f"({a} {inner.symbol} {b}) {outer.symbol} {c}"
        value = outer.apply(inner.apply(a, b), c)
    else:
        text = f"{a} {outer.symbol} ({b} {inner.symbol} {c})"
        value = outer.apply(a, inner.apply(b, c))
    lines = [f"a {operator.symbol} b = {operator.formula}" for operator in defined]
    return Item("\n".join([*lines, f"{text} ="]), str(value))


def _define(rng: random.Random, level: int, symbol: str) -> _Operator:
    if level == 1:
        return _Operator(symbol, *rng.choice(list(_PICK.items())))
    if level == 2 or rng.random() < 0.5:
        return _Operator(symbol, *rng.choice(list(_COMPUTE.items())))
    p, q = rng.randrange(1, 5), rng.randrange(2, 5)
    left = "a" if p == 1 else f"{p} * a"
    return _Operator(symbol, f"{left} + {q} * b", lambda a, b: p * a + q * b)
