"""Logical deduction: clues about an order of 3, 5 or 7 that leave exactly one possible.

`sets.GENERATORS` names `deduction`. Clues are drawn until one order is left of all permutations;
then every clue that the others make needless is taken back.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from llmfoundry.gauntlet.tasks.generated.items import COLOURS, PEOPLE, Item

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")

# A clue's kind -> what it says of an order, order[x] being the place of thing x; y is a thing in
# the first two and a place in the others.
_RULES: dict[str, Callable[[tuple[int, ...], int, int], bool]] = {
    "before": lambda order, x, y: order[x] < order[y],
    "just_before": lambda order, x, y: order[x] + 1 == order[y],
    "at": lambda order, x, y: order[x] == y,
    "not_at": lambda order, x, y: order[x] != y,
}


@dataclass(frozen=True)
class _Setting:
    """What is ordered, and how one says so: {x} and {y} are things or the names of places."""

    things: tuple[str, ...]
    first: str
    last: str
    nth: str
    intro: str
    clues: dict[str, str]
    asked: str

    def place(self, i: int, n: int) -> str:
        """The name of place i of n."""
        names = {0: self.first, n - 1: self.last}
        return names.get(i, self.nth.format(_ORDINALS[i]))


_SETTINGS = (
    _Setting(
        things=PEOPLE,
        first="first",
        last="last",
        nth="{}",
        intro="{things} ran a race.",
        clues={
            "before": "{x} finished before {y}.",
            "just_before": "{x} finished just before {y}.",
            "at": "{x} finished {y}.",
            "not_at": "{x} did not finish {y}.",
        },
        asked="Who finished {place}?",
    ),
    _Setting(
        things=COLOURS,
        first="leftmost",
        last="rightmost",
        nth="{} from the left",
        intro="On a shelf are books in {things}.",
        clues={
            "before": "The {x} book is left of the {y} book.",
            "just_before": "The {x} book is just left of the {y} book.",
            "at": "The {x} book is {y}.",
            "not_at": "The {x} book is not {y}.",
        },
        asked="Which book is {place}?",
    ),
    _Setting(
        things=PEOPLE,
        first="the oldest",
        last="the youngest",
        nth="the {} oldest",
        intro="{things} are of different ages.",
        clues={
            "before": "{x} is older than {y}.",
            "just_before": "{x} comes just before {y} in age, the oldest first.",
            "at": "{x} is {y}.",
            "not_at": "{x} is not {y}.",
        },
        asked="Who is {place}?",
    ),
)

_Clue = tuple[str, int, int]


def deduction(rng: random.Random, level: int) -> Item:
    """Who is at one place? 3 things up to level 2, 5 up to level 4, then 7.

    From level 2 on no clue names the thing at the place that is asked for, and some say only what
    is not so; from level 4 on some say who is next to whom.
    """
    n = (3, 3, 5, 5, 7)[level - 1]
    setting = rng.choice(_SETTINGS)
    things = rng.sample(setting.things, n)
    truth = rng.sample(range(n), n)
    asked = rng.randrange(n)
    clues: list[_Clue] = []
    while not _leave_one_order(n, clues):
        clues.append(_clue(rng, level, truth, asked))
    clues = list(dict.fromkeys(clues))
    for clue in list(clues):
        fewer = [other for other in clues if other != clue]
        clues = fewer if _leave_one_order(n, fewer) else clues
    intro = setting.intro.format(things=f"{', '.join(things[:-1])} and {things[-1]}")
    question = setting.asked.format(place=setting.place(asked, n))
    answer = things[truth.index(asked)]
    wrong = rng.sample([thing for thing in things if thing != answer], n - 1)
    texts = [_say(setting, things, clue) for clue in clues]
    return Item(" ".join([intro, *texts, question]), answer, tuple(wrong))


def _clue(rng: random.Random, level: int, truth: list[int], asked: int) -> _Clue:
    """Something that is true."""
    n = len(truth)
    kinds = ["before", "before", "at"] + ["not_at"] * (level > 1) + ["just_before"] * (level > 3)
    kind = rng.choice(kinds)
    x = rng.randrange(n)
    if kind == "at" and (level == 1 or truth[x] != asked):
        return "at", x, truth[x]
    if kind == "not_at":
        return "not_at", x, rng.choice([place for place in range(n) if place != truth[x]])
    if kind == "just_before" and truth[x] < n - 1:
        return "just_before", x, truth.index(truth[x] + 1)
    first, second = sorted(rng.sample(range(n), 2), key=lambda thing: truth[thing])
    return "before", first, second


def _leave_one_order(n: int, clues: list[_Clue]) -> bool:
    possible = _orders_with(n, None)
    for clue in clues:
        possible &= _orders_with(n, clue)
    return possible & (possible - 1) == 0  # true orders are among them, so at least one is left


@cache
def _orders_with(n: int, clue: _Clue | None) -> int:
    """Which of all orders of n things agree with a clue: a bit for each."""
    bits = 0
    for i, order in enumerate(itertools.permutations(range(n))):
        if clue is None or _RULES[clue[0]](order, clue[1], clue[2]):
            bits |= 1 << i
    return bits


def _say(setting: _Setting, things: list[str], clue: _Clue) -> str:
    kind, x, y = clue
    about_things = kind in ("before", "just_before")
    other = things[y] if about_things else setting.place(y, len(things))
    return setting.clues[kind].format(x=things[x], y=other)
