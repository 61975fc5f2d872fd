"""What every task draws: messages that end with a question, the right answer, a wrong one.

The modules beside this one return an `Exchange`; `rows` makes rows of supervised data of it, and
`gauntlet.generated.chats` rows of a task. Words that several tasks use stand here too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
WORDS = (
    *("block", "box", "class", "code", "color", "day", "end", "error", "field", "file"),
    *("group", "hour", "image", "item", "key", "line", "link", "list", "map", "month"),
    *("name", "page", "path", "point", "root", "state", "table", "text", "tree", "year"),
)
"""Short and common: most tokenizers have a token for each."""
LENGTHS = (3, 4, 5, 7, 8)
"""Items of the lists that training sees."""
UNSEEN_LENGTHS = (6,)
"""And of those that it never sees."""


@dataclass(frozen=True)
class Exchange:
    """A conversation up to its last question, and how to answer it.

    Attributes:
        messages: role and content of each turn, the last of which is the user's.
        answer: the right answer's content; empty where it is a call of a tool.
        wrong: a wrong answer's content.
        checks: what makes an answer right, each for `checks.is_right`.
        call: the right call of a tool, {"name": …, "arguments": {…}}.
        wrong_call: a wrong one.
        tools: schemas of the functions that may be called.
    """

    messages: tuple[Message, ...]
    answer: str
    wrong: str
    checks: tuple[Mapping[str, Any], ...]
    call: Mapping[str, Any] | None = None
    wrong_call: Mapping[str, Any] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


def ask(question: str, answer: str, wrong: str, *checks: Mapping[str, Any]) -> Exchange:
    """One question and its answer, which is right as it stands unless `checks` say otherwise."""
    needed = checks or ({"check": "exact", "text": answer},)
    return Exchange(({"role": "user", "content": question},), answer, wrong, needed)


def shuffled(rng: random.Random, items: Sequence[str]) -> list[str]:
    """The items in another order than theirs."""
    result = list(items)
    while result == list(items):
        rng.shuffle(result)
    return result


def another(rng: random.Random, value: int, low: int, high: int) -> int:
    """A number from low to high that is not `value`."""
    return rng.choice([n for n in range(low, high + 1) if n != value])
