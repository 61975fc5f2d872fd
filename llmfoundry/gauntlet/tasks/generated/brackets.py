"""Brackets: which closes next in a line of Python, Dyck words to complete or to judge.

`sets.GENERATORS` names the public functions.
"""

from __future__ import annotations

import itertools
import random

from llmfoundry.gauntlet.tasks.generated.items import CHOICES, NAMES, Item, in_order

_PYTHON = {"(": ")", "[": "]", "{": "}"}
_DYCK = {**_PYTHON, "<": ">"}
VERDICTS = ("valid", "invalid")


def brackets(rng: random.Random, level: int) -> Item:
    """Level 1, `print(items[1` → `]`: which of three brackets comes next?

    From level 2 on all open brackets are to be closed, `])`; wrong are other orders of them first.
    """
    item = brackets_completion(rng, level)
    closers = "".join(_PYTHON.values())
    if level == 1:
        closed, right = rng.choice([("", item.answer[0]), tuple(item.answer)])
        return Item(item.question + closed, right, tuple(closers.replace(right, "")))
    wrong = {"".join(p) for p in itertools.product(closers, repeat=len(item.answer))}
    wrong -= {item.answer}
    orders = sorted(closing for closing in wrong if sorted(closing) == sorted(item.answer))
    others = sorted(wrong.difference(orders))
    rng.shuffle(orders)
    rng.shuffle(others)
    return Item(item.question, item.answer, tuple([*orders, *others][: CHOICES - 1]))


def brackets_completion(rng: random.Random, level: int) -> Item:
    """A line of Python with 2 to level + 1 brackets open; the answer closes them all."""
    text = rng.choice(("", f"{rng.choice(NAMES)} = ", "return "))
    closing = ""
    for _ in range(rng.randint(2, level + 1)):
        if closing.startswith("}"):
            text += f'"{rng.choice(NAMES)}": '
        elif closing and rng.random() < 0.4:
            text += f"{_atom(rng, level)}, "
        opener = rng.choice((f"{rng.choice(NAMES)}(", f"{rng.choice(NAMES)}[", "[", "{"))
        text += opener
        closing = _PYTHON[opener[-1]] + closing
    key = f'"{rng.choice(NAMES)}": ' if closing.startswith("}") else ""
    return Item(text + key + _atom(rng, level), closing)


def dyck(rng: random.Random, level: int) -> Item:
    """`( [ ] {` → `} )`: 1 to level brackets are open, level to 3 * level pairs are closed."""
    opened, closed = rng.randint(1, level), rng.randint(level, 3 * level)
    word, stack = _walk(rng, _kinds(level), opened=opened, closed=closed)
    return Item(" ".join(word), " ".join(_DYCK[symbol] for symbol in reversed(stack)))


def dyck_validity(rng: random.Random, level: int) -> Item:
    """`( [ ) ]` → invalid: level + 1 to 2 * level + 1 pairs; as many are valid as not.

    Invalid words are valid ones in which, up to level 2, one bracket has become another; above,
    two closing brackets have changed places, so that counting is not enough.
    """
    pairs = rng.randint(level + 1, 2 * level + 1)
    word: list[str] = []
    while len(closers := {symbol for symbol in word if symbol in _DYCK.values()}) < 2:
        word, _ = _walk(rng, _kinds(level + 1), opened=0, closed=pairs)
    verdict = rng.randrange(len(VERDICTS))
    if VERDICTS[verdict] == "invalid":
        places = [i for i, symbol in enumerate(word) if symbol in closers]
        a = rng.choice(places)
        if level > 2:
            b = rng.choice([i for i in places if word[i] != word[a]])
            word[a], word[b] = word[b], word[a]
        else:
            a = rng.randrange(len(word))
            symbols = [symbol for pair in _kinds(level + 1) for symbol in pair]
            word[a] = rng.choice([symbol for symbol in symbols if symbol != word[a]])
    return in_order(" ".join(word), VERDICTS, verdict)


def _atom(rng: random.Random, level: int) -> str:
    """A value; from level 2 on some contain brackets that are closed already."""
    name, number = rng.choice(NAMES), rng.randrange(10)
    closed = (f"{name}[{number}]", f"len({name})") if level > 1 else ()
    return rng.choice((name, str(number), *closed))


def _kinds(level: int) -> list[tuple[str, str]]:
    """Pairs of brackets: two kinds at level 1, all four from level 3 on."""
    return list(_DYCK.items())[: level + 1]


def _walk(
    rng: random.Random, kinds: list[tuple[str, str]], *, opened: int, closed: int
) -> tuple[list[str], list[str]]:
    """A word with `closed` closed pairs and `opened` brackets left open, and the open ones."""
    word: list[str] = []
    stack: list[str] = []
    to_open, to_close = opened + closed, closed
    while to_open or to_close:
        if to_open and (not stack or not to_close or rng.random() < 0.5):
            stack.append(rng.choice(kinds)[0])
            word.append(stack[-1])
            to_open -= 1
        else:
            word.append(_DYCK[stack.pop()])
            to_close -= 1
    return word, stack
