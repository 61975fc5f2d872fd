"""Recall: which value did this name get? At any length of context.

`sets.GENERATORS` names `key_value`. With `pairs` or `chars` the context is as long as wanted, and
with `position` the question is about its beginning, middle or end: the usual test of long contexts.
"""

from __future__ import annotations

import random

from llmfoundry.gauntlet.tasks.generated.items import CHOICES, NAMES, Item

POSITIONS = ("any", "begin", "middle", "end")
MAX_PAIRS = len(NAMES) * 1000  # as many different names
_SHORTEST_LINE = len("key_123 = 12345\n")
MIN_CHARS, MAX_CHARS = 200, MAX_PAIRS * _SHORTEST_LINE


def key_value(
    rng: random.Random,
    level: int,
    *,
    pairs: int | None = None,
    chars: int | None = None,
    position: str = "any",
) -> Item:
    """Some assignments and a question for one of them; wrong are the others' values.

    Args:
        rng: the set's.
        level: level + 3 assignments, where neither `pairs` nor `chars` is given.
        pairs: number of assignments.
        chars: length of the context in characters, short of it by less than two lines.
        position: the third of the assignments that is asked for, or any of them.
    """
    if pairs is None and chars is None:
        names = rng.sample(NAMES, level + 3)
        values = rng.sample(range(10, 100), level + 3)
    else:
        names = _many_names(rng, pairs, chars)
        values = rng.sample(range(10_000, 100_000), len(names))
    third = len(names) // 3
    low = {"middle": third, "end": len(names) - third}.get(position, 0)
    high = {"begin": third, "middle": len(names) - third}.get(position, len(names))
    asked = rng.randrange(low, high)
    lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    others = [str(value) for i, value in enumerate(values) if i != asked]
    question = "\n".join([*lines, f"assert {names[asked]} =="])
    return Item(question, str(values[asked]), tuple(rng.sample(others, CHOICES - 1)))


def _many_names(rng: random.Random, pairs: int | None, chars: int | None) -> list[str]:
    """Names such as key_417: `pairs` of them, or as many as `chars` characters have room for."""
    n = min(MAX_PAIRS, chars // _SHORTEST_LINE) if chars is not None else pairs
    assert n is not None, "one of the two is given"
    numbers = rng.sample(range(MAX_PAIRS), n)
    names = [f"{NAMES[number % len(NAMES)]}_{number // len(NAMES):03d}" for number in numbers]
    if chars is None:
        return names
    left = chars - len("assert  ==") - max(map(len, names))
    for i, name in enumerate(names):
        left -= len(f"{name} = 12345\n")
        if left < 0:
            return names[:i]
    return names
