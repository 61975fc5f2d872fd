"""Arithmetic: expressions, remainders, and word problems with a chain of thought.

`sets.GENERATORS` names the public functions. Values are computed here without `eval`, which is what
the tests compare them with.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmfoundry.gauntlet.tasks.generated.items import CHOICES, PEOPLE, Item

# level: operators in an expression, digits of an operand, which operators; level 5 is about as hard
# as LLM Foundry's simple_arithmetic (1 to 4 operators, operands below 1000)
_LEVELS = {1: (1, 1, "+-"), 2: (1, 2, "+-"), 3: (2, 2, "+-*"), 4: (3, 3, "+-*"), 5: (4, 3, "+-*")}
_THINGS = (
    "apples",
    "books",
    "boxes",
    "coins",
    "eggs",
    "keys",
    "pens",
    "shells",
    "stones",
    "tickets",
)
_GAINS = ("finds", "buys", "gets")
_LOSSES = ("loses", "sells", "gives away")


def arithmetic(rng: random.Random, level: int, *, spaces: bool = True) -> Item:
    """`3 + 4 =`, or `3+4=` without spaces; a single difference is not negative."""
    n_operators, digits, symbols = _LEVELS[level]
    numbers = [rng.randrange(10**digits) for _ in range(n_operators + 1)]
    operators = [rng.choice(symbols) for _ in range(n_operators)]
    if operators == ["-"]:
        numbers.sort(reverse=True)
    text = str(numbers[0])
    for operator, number in zip(operators, numbers[1:], strict=True):
        text += f" {operator} {number}"
    text += " ="
    return Item(text if spaces else text.replace(" ", ""), str(_value(numbers, operators)))


def arithmetic_choice(rng: random.Random, level: int, *, spaces: bool = True) -> Item:
    """The same with three wrong numbers close by, negative only where the right one is."""
    item = arithmetic(rng, level, spaces=spaces)
    value = int(item.answer)
    near = [value + step for step in (-10, -2, -1, 1, 2, 10) if value < 0 or value + step >= 0]
    return Item(item.question, item.answer, tuple(map(str, rng.sample(near, CHOICES - 1))))


def remainder(rng: random.Random, level: int) -> Item:
    """`17 % 5 ==`: a dividend of level + 1 digits at most, a divisor of one; two from level 3."""
    dividend = rng.randrange(10 ** (level + 1))
    divisor = rng.randrange(2, 10 if level < 3 else 100)
    return Item(f"{dividend} % {divisor} ==", str(dividend % divisor))


def word_problem(rng: random.Random, level: int) -> Item:
    """`Ann has 3 apples. She finds 4 more.` How many now? A step of thought for each sentence.

    Level 1 has one change of one digit, 2 and 3 two, 4 and 5 three of two digits; from level 3 on
    some come in boxes, at level 5 somebody else has some as well.
    """
    (person, other), things = rng.sample(PEOPLE, 2), rng.choice(_THINGS)
    high = 10 if level < 4 else 100
    count = rng.randrange(2, high)
    story = _Story(f"{person} has {count} {things}.", count)
    if level == 5:
        story.text += f" {other} has {rng.randrange(2, high)} {things}."
    for _ in range((1, 2, 2, 3, 3)[level - 1]):
        _happen(rng, story, person, things, high, by_boxes=level > 2 and rng.random() < 0.4)
    question = f"{story.text} How many {things} does {person} have now?"
    return Item(question, str(story.count), steps=" ".join(story.steps))


def _value(numbers: Sequence[int], operators: Sequence[str]) -> int:
    """Products first, then sums and differences."""
    terms = [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)


@dataclass
class _Story:
    """A word problem while it is written."""

    text: str
    count: int
    steps: list[str] = field(default_factory=list)


def _happen(
    rng: random.Random, story: _Story, person: str, things: str, high: int, *, by_boxes: bool
) -> None:
    """One more sentence: the count grows or shrinks, never below zero."""
    before = story.count
    if by_boxes:
        packs, each = rng.randrange(2, 10), rng.randrange(2, 10)
        change = packs * each
        story.text += f" {person} buys {packs} packs of {each} {things} each."
        story.steps.append(f"{packs} * {each} = {change}.")
    elif before < 2 or rng.random() < 0.5:
        change = rng.randrange(2, high)
        story.text += f" {person} {rng.choice(_GAINS)} {change} more."
    else:
        change = -rng.randrange(2, min(before + 1, high))
        story.text += f" {person} {rng.choice(_LOSSES)} {-change}."
    story.count += change
    story.steps.append(f"{before} {'+' if change > 0 else '-'} {abs(change)} = {story.count}.")
