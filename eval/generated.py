"""The generated evaluation sets: seeded, answers right by construction; no download.

`python eval/generated.py eval/generated.yaml` writes one jsonl file for each set of that recipe
into the folder beside it, eval/generated/; the same recipe gives the same bytes on every machine. A
gauntlet file may also ask for rows that are in no file, by addresses such as
generated://deduction?level=3: `llmfoundry.gauntlet.task_rows` calls `generated_rows` for these. A
generator draws an `Item` from a random state and a level, 1 the easiest, 5 the hardest;
`GENERATORS` names all of them, `make_rows` turns items into rows in LLM Foundry's schemas. Right
answers are at each place among the choices equally often. Most texts look like Python's sources, so
that a model trained on the interpreter's own can score.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest

MAX_LEVEL = 5
CHOICES = 4
NAMES = (
    *("args", "count", "data", "field", "file", "group", "index", "items", "key", "line"),
    *("name", "node", "parser", "path", "result", "size", "text", "token", "value", "width"),
)
PEOPLE = ("Ann", "Ben", "Carl", "Dora", "Eva", "Fred", "Gina", "Hugo", "Ida", "Jack")
COLOURS = ("black", "blue", "brown", "green", "grey", "pink", "red", "white")


@dataclass(frozen=True)
class Item:
    """A question, its answer, and what else its type of task needs.

    Attributes:
        question: the text before the answer; in `schema` the text after it, the same for all.
        answer: the right answer, choice or context.
        wrong: the other choices or contexts; empty where the answer is written freely.
        gold: the answer's place among the choices, where their order has a meaning (numbers,
            letters); None: `make_rows` chooses one.
        steps: chain of thought, in generation.
    """

    question: str
    answer: str
    wrong: tuple[str, ...] = ()
    gold: int | None = None
    steps: str = ""

    def choices(self, gold: int) -> list[str]:
        """All choices, the answer at place `gold`."""
        return [*self.wrong[:gold], self.answer, *self.wrong[gold:]]


def in_order(question: str, choices: tuple[str, ...], gold: int) -> Item:
    """An item whose choices stay in the order given."""
    return Item(question, choices[gold], (*choices[:gold], *choices[gold + 1 :]), gold)


def quoted(words: list[str]) -> str:
    """A list of texts as Python writes it, in double quotes."""
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


# --- arithmetic -----------------------------------------------------------------------------------

# level: operators in an expression, digits of an operand, which operators; level 5 is about as hard
# as LLM Foundry's simple_arithmetic (1 to 4 operators, operands below 1000)
_LEVELS = {1: (1, 1, "+-"), 2: (1, 2, "+-"), 3: (2, 2, "+-*"), 4: (3, 3, "+-*"), 5: (4, 3, "+-*")}
_COUNTED = (
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
    (person, other), things = rng.sample(PEOPLE, 2), rng.choice(_COUNTED)
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


# --- brackets -------------------------------------------------------------------------------------

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


# --- deduction: clues about an order that leave exactly one possible ------------------------------

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


# --- letters: can the model answer in multiple-choice format at all? ------------------------------

_OBJECTS = ("bag", "ball", "bike", "boat", "book", "chair", "cup", "door", "hat", "shirt")
_CHOICE_LETTERS = tuple("ABCD")


def colour_letters(rng: random.Random, level: int) -> Item:
    """Four colours under letters, and a question for one of them.

    Level 1 names the colour; level 2 says that one object has it; above, level - 1 objects have
    colours, all of which are among the choices.
    """
    colours = rng.sample(COLOURS, CHOICES)
    place = rng.randrange(CHOICES)
    shown = [f"{letter}. {colour}" for letter, colour in zip(_CHOICE_LETTERS, colours, strict=True)]
    if level == 1:
        facts, asked = [], f"Which is {colours[place]}?"
    else:
        objects = rng.sample(_OBJECTS, level - 1)
        others = [colour for i, colour in enumerate(colours) if i != place]
        theirs = [colours[place], *rng.sample(others, level - 2)]
        facts = [f"The {x} is {colour}." for x, colour in zip(objects, theirs, strict=True)]
        asked = f"Which colour is the {objects[0]}?"
        rng.shuffle(facts)
    return in_order("\n".join([*facts, asked, *shown]), _CHOICE_LETTERS, place)


# --- operators defined on the spot ----------------------------------------------------------------

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


# --- pronouns: who or what is meant? --------------------------------------------------------------

_THINGS = ("basket", "bottle", "box", "chair", "cup", "door", "hat", "lamp", "spoon", "table")
_WORKERS = ("baker", "clerk", "driver", "farmer", "guard", "nurse", "painter", "teacher")
_QUALITIES = ("broken", "clean", "dirty", "heavy", "new", "old", "red", "small", "wet", "white")
_PERSON_ENDINGS = ("felt hungry", "wanted to sleep", "knew the answer", "had no time", "smiled")
_THING_ENDINGS = ("was made of wood", "had a hole", "weighed too much", "was empty", "fell apart")
_LARGE = ("big", "large", "wide", "long")
_SMALL = ("small", "narrow", "little", "short")

# past tense, the same in the passive voice, endings that suit who did it, and whom it was done to
_DEEDS = (
    ("thanked", "was thanked by", ("had got help", "had been saved"), ("had helped", "had paid")),
    ("followed", "was followed by", ("did not know the way",), ("knew the way",)),
    ("taught", "was taught by", ("knew more", "was an expert"), ("knew less", "wanted to learn")),
    ("woke", "was woken by", ("was already up", "had got up early"), ("had overslept",)),
    ("carried", "was carried by", ("was strong",), ("had hurt a leg", "could not walk")),
    ("blamed", "was blamed by", ("had been cheated",), ("had lied", "had broken a promise")),
)


def pronouns(rng: random.Random, level: int) -> Item:
    """One of two contexts goes with the ending.

    Level 1 is settled by was or were, level 2 by person or thing, level 3 by what fits into what,
    level 4 by who did it to whom, level 5 likewise in the passive voice.
    """
    if level == 1:
        sentence, right, other, ending = _number(rng)
    elif level == 2:
        sentence, right, other, ending = _kind(rng)
    elif level == 3:
        sentence, right, other, ending = _size(rng)
    else:
        sentence, right, other, ending = _deed(rng, passive=level == 5)
    contexts = (f"{sentence} because {right}", f"{sentence} because {other}")
    return Item(ending, contexts[0], contexts[1:])


def _number(rng: random.Random) -> tuple[str, str, str, str]:
    """One thing and several of another."""
    one, many = rng.sample(_THINGS, 2)
    many = f"{many}es" if many.endswith("x") else f"{many}s"
    pair = [f"the {one}", f"the {many}"]
    verbs = ["was", "were"]
    right = rng.randrange(2)
    ending = f"{verbs[right]} {rng.choice(_QUALITIES)}"
    sentence = f"{rng.choice(PEOPLE)} looked at {' and '.join(rng.sample(pair, 2))}"
    return sentence, pair[right], pair[1 - right], ending


def _kind(rng: random.Random) -> tuple[str, str, str, str]:
    """A person and a thing."""
    pair = [f"the {rng.choice(_WORKERS)}", f"the {rng.choice(_THINGS)}"]
    right = rng.randrange(2)
    ending = rng.choice((_PERSON_ENDINGS, _THING_ENDINGS)[right])
    verb = rng.choice(("put down", "let go of", "left"))
    sentence = f"{pair[0].capitalize()} {verb} {pair[1]}"
    return sentence, pair[right], pair[1 - right], ending


def _size(rng: random.Random) -> tuple[str, str, str, str]:
    """A thing that does not go into another."""
    pair = [f"the {thing}" for thing in rng.sample(_THINGS, 2)]
    right = rng.randrange(2)
    ending = f"was too {rng.choice((_LARGE, _SMALL)[right])}"
    verb = rng.choice(("did not fit into", "could not be put into", "did not go into"))
    sentence = f"{pair[0].capitalize()} {verb} {pair[1]}"
    return sentence, pair[right], pair[1 - right], ending


def _deed(rng: random.Random, *, passive: bool) -> tuple[str, str, str, str]:
    """Somebody who did something to somebody else."""
    pair = rng.sample(PEOPLE, 2)
    done, was_done_by, *endings = rng.choice(_DEEDS)
    right = rng.randrange(2)
    ending = rng.choice(endings[right])
    by, to = pair
    sentence = f"{to} {was_done_by} {by}" if passive else f"{by} {done} {to}"
    return sentence, pair[right], pair[1 - right], ending


# --- recall, at any length of context -------------------------------------------------------------

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


# --- sequences ------------------------------------------------------------------------------------

_LETTERS = "abcdefgh"


def copying(rng: random.Random, level: int) -> Item:
    """A list of level + 2 words, twice, and once more but for its last word.

    The answer ends with a letter: many tokenizers make one token of a bracket and the line end
    after it, so that a bracket alone would never be what a model expects.
    """
    name, *words = rng.sample(NAMES, level + 3)
    line = f"{name} = {quoted(words)}"
    start = line.removesuffix(f'{words[-1]}"]')
    return Item(f"{line}\n{line}\n{start}", words[-1])


def reversing(rng: random.Random, level: int) -> Item:
    """`["key", "node"][::-1] ==`: level + 1 words."""
    words = rng.sample(NAMES, level + 1)
    return Item(f"{quoted(words)}[::-1] ==", quoted(words[::-1]))


def sorting(rng: random.Random, level: int) -> Item:
    """`sorted([52, 7]) ==`: level + 1 numbers below 100."""
    numbers = rng.sample(range(100), level + 1)
    return Item(f"sorted({numbers}) ==", str(sorted(numbers)))


def repeat_copy(rng: random.Random, level: int) -> Item:
    """`say key 3 times` → key key key; the words are separated by spaces.

    Level 1 has one order; level 2 may reverse it; from level 3 on there are two or three, joined by
    `then`; from level 4 on a word may come after each turn; level 5 may ask for all of it twice.
    """
    texts, said = [], []
    for _ in range((1, 1, 2, 2, 3)[level - 1]):
        text, words = _order(rng, level)
        texts.append(text)
        said += words
    question = ", then ".join(texts)
    if level == 5 and rng.random() < 0.5:
        question, said = f"{question}; all of that twice", said * 2
    return Item(question, " ".join(said))


def lcs_length(rng: random.Random, level: int) -> Item:
    """Length of the longest common subsequence of two texts of 2 * level + 3 letters.

    The four choices are level to level + 3, each right equally often.
    """
    length = 2 * level + 3
    place = rng.randrange(CHOICES)
    a = b = ""
    while _lcs(a, b) != level + place:
        common = rng.choices(_LETTERS, k=level + place)
        a, b = (_spread(rng, common, length) for _ in range(2))
    choices = tuple(str(level + i) for i in range(CHOICES))
    return in_order(f"{' '.join(a)}\n{' '.join(b)}", choices, place)


def _order(rng: random.Random, level: int) -> tuple[str, list[str]]:
    """One order, and the words that it asks for."""
    words = rng.sample(NAMES, rng.randint(1, min(level + 1, 3)))
    text, turn = f"say {' '.join(words)}", words
    if level > 1 and len(words) > 1 and rng.random() < 0.5:
        text, turn = f"{text} backwards", words[::-1]
    times = rng.randint(2, 4)
    text = f"{text} {times} times"
    if level > 3 and rng.random() < 0.5:
        after = rng.choice([name for name in NAMES if name not in words])
        text, turn = f"{text} with {after} after each", [*turn, after]
    return text, turn * times


def _spread(rng: random.Random, common: list[str], length: int) -> str:
    """`length` letters, among which are those of `common`, in order."""
    places = set(rng.sample(range(length), len(common)))
    rest = iter(common)
    return "".join(next(rest) if i in places else rng.choice(_LETTERS) for i in range(length))


def _lcs(a: str, b: str) -> int:
    """Length of the longest common subsequence, by dynamic programming over one row."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


# --- sets -----------------------------------------------------------------------------------------

SCHEME = "generated://"
_PATIENCE = 5000  # draws without a new question before a level is said to have no more


@dataclass(frozen=True)
class Generator:
    """How a set is made."""

    make: Callable[..., Item]
    """From a random state, a level and the options to an item."""
    task_type: str
    """The icl_task_type of its rows."""
    options: tuple[str, ...] = ()
    """Names of its settings beside seed, rows and level."""


@dataclass(frozen=True)
class SetConfig:
    """What decides every row of a set."""

    name: str
    """Which generator."""
    seed: int = 1
    """Decides every draw."""
    rows: int = 100
    """Number of rows, all different."""
    level: int = 1
    """Difficulty from 1 to 5: more operators, deeper brackets, longer lists."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that not every generator has."""


_LM, _MC = "language_modeling", "multiple_choice"

GENERATORS: dict[str, Generator] = {
    "arithmetic": Generator(arithmetic, _LM, ("spaces",)),
    "arithmetic_choice": Generator(arithmetic_choice, _MC, ("spaces",)),
    "remainder": Generator(remainder, _LM),
    "word_problem": Generator(word_problem, "generation_task_with_answers"),
    "operators": Generator(operators, _LM),
    "brackets": Generator(brackets, _MC),
    "brackets_completion": Generator(brackets_completion, _LM),
    "dyck": Generator(dyck, _LM),
    "dyck_validity": Generator(dyck_validity, _MC),
    "lcs_length": Generator(lcs_length, _MC),
    "deduction": Generator(deduction, _MC),
    "repeat_copy": Generator(repeat_copy, _LM),
    "reversing": Generator(reversing, _LM),
    "sorting": Generator(sorting, _LM),
    "copying": Generator(copying, _LM),
    "key_value": Generator(key_value, _MC, ("pairs", "chars", "position")),
    "colour_letters": Generator(colour_letters, _MC),
    "pronouns": Generator(pronouns, "schema"),
}

_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "spaces": ("true or false", lambda value: isinstance(value, bool)),
    "pairs": (
        f"a whole number from {CHOICES} to {MAX_PAIRS}",
        lambda value: type(value) is int and CHOICES <= value <= MAX_PAIRS,
    ),
    "chars": (
        f"a whole number from {MIN_CHARS} to {MAX_CHARS}",
        lambda value: type(value) is int and MIN_CHARS <= value <= MAX_CHARS,
    ),
    "position": ("any, begin, middle or end", lambda value: value in POSITIONS),
}
"""What each option may be: in words, and as a check."""


def generated_rows(uri: str, *, key: str = "dataset_uri") -> Iterator[dict[str, Any]]:
    """The rows at an address such as generated://key_value?chars=8192&position=end&rows=50.

    Args:
        uri: a generator's name, then seed, rows, level and its options, all with defaults.
        key: where the address is written; begins every line of an error.

    Raises:
        UserError: an unknown generator or setting, a wrong value, more rows than there are.
    """
    name, _, query = uri.removeprefix(SCHEME).partition("?")
    where = f"{key}: {uri}"
    written = parse_qsl(query, keep_blank_values=True)
    given = {setting: _from_text(value) for setting, value in written}
    if len(given) < len(written):
        raise UserError(f"{where}: has a setting twice; write each once")
    return iter(make_rows(read_set(name, given, where), where))


def read_set(name: Any, given: Mapping[str, Any], where: str) -> SetConfig:
    """Check a generator's name and settings as they are written.

    Raises:
        UserError: an unknown name, or every unknown key and wrong value, after `where`.
    """
    if not isinstance(name, str) or name not in GENERATORS:
        hint = nearest(str(name), GENERATORS)
        raise UserError(f"{where}: {name!r} is no generator{hint} ({', '.join(GENERATORS)})")
    if problems := list(_problems(name, given)):
        raise UserError(*(f"{where}: {problem}" for problem in problems))
    options = {key: given[key] for key in GENERATORS[name].options if key in given}
    common = {key: value for key, value in given.items() if key not in options}
    return SetConfig(name, **common, options=options)


def make_rows(config: SetConfig, where: str) -> list[dict[str, Any]]:
    """The rows of a set, in LLM Foundry's schema for its type.

    Raises:
        UserError: more rows than the level has different questions.
    """
    rng = random.Random(config.seed)
    items = _draw(rng, config, where)
    order = list(range(config.rows))
    rng.shuffle(order)
    write = _ROW_WRITERS[GENERATORS[config.name].task_type]
    rows = []
    for item, number in zip(items, order, strict=True):
        n_choices = len(item.wrong) + 1
        gold = number % n_choices if item.gold is None else item.gold
        rows.append(write(item, item.choices(gold), gold))
    return rows


def make_set(config: SetConfig, where: str) -> str:
    """The text of a set's jsonl file; raises what `make_rows` raises."""
    rows = make_rows(config, where)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _from_text(value: str) -> Any:
    """A setting in an address: a number, true or false, or a text."""
    if value.isascii() and value.isdecimal():
        return int(value)
    return {"true": True, "false": False}.get(value, value)


def _problems(name: str, given: Mapping[str, Any]) -> Iterator[str]:
    known = ("seed", "rows", "level", *GENERATORS[name].options)
    for key, value in given.items():
        if key not in known:
            yield f"unknown key '{key}'{nearest(key, known)} (keys of {name}: {', '.join(known)})"
        elif key in _OPTIONS:
            meaning, is_right = _OPTIONS[key]
            if not is_right(value):
                yield f"{key}: {value!r}; write {meaning}"
        elif type(value) is not int or value < 1:
            yield f"{key}: {value!r}; write a whole number above 0"
        elif key == "level" and value > MAX_LEVEL:
            yield f"level: {value}; write {MAX_LEVEL} or less"
    lengths = [key for key in ("pairs", "chars", "level") if key in given and key in known]
    if len(lengths) > 1:
        yield f"{' and '.join(lengths)}: each decides the length; write one of them"


def _draw(rng: random.Random, config: SetConfig, where: str) -> list[Item]:
    """Different items; those whose choices have an order of their own, for each place as many."""
    generator = GENERATORS[config.name]
    items: dict[tuple[str, str], Item] = {}
    free: Counter[int] = Counter()
    in_vain = 0
    while len(items) < config.rows:
        item = generator.make(rng, config.level, **config.options)
        if item.gold is not None and not items:
            free = Counter(i % (len(item.wrong) + 1) for i in range(config.rows))
        key = (item.question, item.answer)
        if key in items or (item.gold is not None and not free[item.gold]):
            in_vain += 1
            if in_vain == _PATIENCE:
                raise UserError(
                    f"{where}: rows: {config.rows}, but level {config.level} of {config.name} gave"
                    f" only {len(items)} different questions; write less, or a higher level"
                )
            continue
        items[key] = item
        in_vain = 0
        if item.gold is not None:
            free[item.gold] -= 1
    return list(items.values())


def _language_modeling(item: Item, choices: list[str], gold: int) -> dict[str, Any]:
    return {"context": item.question, "continuation": item.answer}


def _multiple_choice(item: Item, choices: list[str], gold: int) -> dict[str, Any]:
    return {"query": item.question, "choices": choices, "gold": gold}


def _schema(item: Item, choices: list[str], gold: int) -> dict[str, Any]:
    return {"context_options": choices, "continuation": item.question, "gold": gold}


def _generation(item: Item, choices: list[str], gold: int) -> dict[str, Any]:
    return {"context": item.question, "answer": item.answer, "chain_of_thought": item.steps}


_ROW_WRITERS: dict[str, Callable[[Item, list[str], int], dict[str, Any]]] = {
    "language_modeling": _language_modeling,
    "multiple_choice": _multiple_choice,
    "schema": _schema,
    "generation_task_with_answers": _generation,
}


# --- the recipe and its files ---------------------------------------------------------------------


def read_recipe(path: Path) -> dict[str, SetConfig]:
    """The sets of a recipe by the names of their files; `file` is the generator's name if unset.

    Raises:
        UserError: no list of sets; unknown keys and generators, wrong values; a file named twice.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: cannot be read as YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("sets"), list):
        raise UserError(f"{path}: sets: is missing; write a list of sets")
    sets: dict[str, SetConfig] = {}
    problems: list[str] = []
    for i, entry in enumerate(content["sets"]):
        where = f"{path}: sets[{i}]"
        try:
            name, config = _read_entry(entry, where)
        except UserError as error:
            problems += error.problems
            continue
        if name in sets:
            problems.append(f"{where}: file: {name} is there already; write another name")
        sets[name] = config
    if problems:
        raise UserError(*problems)
    return sets


def write_sets(recipe: Path) -> list[Path]:
    """Write every set of a recipe into the folder of its name; the files written."""
    sets, folder = read_recipe(recipe), recipe.with_suffix("")
    folder.mkdir(exist_ok=True)
    written = []
    for name, config in sets.items():
        path = folder / f"{name}.jsonl"
        path.write_text(make_set(config, f"{recipe}: {name}"), encoding="utf-8", newline="\n")
        written.append(path)
    return written


def _read_entry(entry: Any, where: str) -> tuple[str, SetConfig]:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: is not a mapping of keys to values; write {{name: ..., ...}}")
    given = {str(key): value for key, value in entry.items()}
    if "name" not in given:
        raise UserError(f"{where}: name: is missing; write one of {', '.join(GENERATORS)}")
    name = given.pop("name")
    file = given.pop("file", name)
    config = read_set(name, given, where)
    if not isinstance(file, str) or not file or Path(file).name != file:
        raise UserError(f"{where}: file: {file!r}; write a name, without folder and ending")
    return file, config


def main(arguments: list[str]) -> int:
    """The command; its exit status."""
    if len(arguments) != 1:
        print("write one recipe: python eval/generated.py eval/generated.yaml")
        return 2
    try:
        for path in write_sets(Path(arguments[0])):
            print(path)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
