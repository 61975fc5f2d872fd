"""For each generator a solver that reads a row as a model would and computes what is right.

None of them shares a method with its generator: brackets are cancelled in pairs instead of stacked,
orders are tried out one after the other, common subsequences are enumerated, expressions are given
to Python. A solver returns those of a row's options that are right, which must be the gold one.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]


def question(row: Row) -> str:
    return row.get("query", row.get("context", row.get("continuation")))


def options(row: Row) -> list[str]:
    """Choices, or contexts, or the one answer that is to be written."""
    free = [row.get("continuation", row.get("answer"))]
    return row.get("choices", row.get("context_options", free))


def gold(row: Row) -> str:
    return options(row)[row.get("gold", 0)]


def equal_to(row: Row, answer: Any) -> list[str]:
    return [option for option in options(row) if option == str(answer)]


# ------------------------------------------------------------------ numbers


def by_python(row: Row) -> list[str]:
    """What Python says of the text before `=` or `==`, with its double quotes."""
    value = eval(question(row).rstrip("="))
    return equal_to(row, str(value).replace("'", '"'))


def by_reading_a_story(row: Row) -> list[str]:
    """Keeps everybody's account; every step of the chain of thought must be true as well."""
    owned: dict[str, int] = {}
    *sentences, asked = re.findall(r"[^.?]+[.?]", question(row))
    for sentence in map(str.strip, sentences):
        who, rest = sentence.rstrip(".").split(" ", 1)
        numbers = [int(n) for n in re.findall(r"\d+", rest)]
        if rest.startswith("has "):
            owned[who] = numbers[0]
        elif " packs of " in rest:
            owned[who] += numbers[0] * numbers[1]
        elif rest.endswith(" more"):
            owned[who] += numbers[0]
        else:
            assert rest.startswith(("loses", "sells", "gives away"))
            owned[who] -= numbers[0]
        assert owned[who] >= 0
    steps = re.fullmatch(r"(?:(.+?) = (-?\d+)\. ?)+", row["chain_of_thought"])
    assert steps is not None and steps[2] == row["answer"]
    for left, right in re.findall(r"([^.=]+) = (\d+)\.", row["chain_of_thought"]):
        assert eval(left) == int(right)
    match = re.fullmatch(r" How many \w+ does (\w+) have now\?", asked)
    assert match is not None
    return equal_to(row, owned[match[1]])


def by_substitution(row: Row) -> list[str]:
    """Replaces an application to two numbers by its value until one number is left."""
    *definitions, last = question(row).split("\n")
    text = last.removesuffix(" =")
    formulas = dict(re.fullmatch(r"a (.) b = (.+)", line).groups() for line in definitions)
    application = re.compile(r"\(?(-?\d+) ([@#$&~^]) (-?\d+)\)?")
    while match := application.search(text):
        value = eval(formulas[match[2]], {"a": int(match[1]), "b": int(match[3])})
        text = text[: match.start()] + str(value) + text[match.end() :]
    return equal_to(row, int(text))


# ------------------------------------------------------------------ brackets


def by_parsing(row: Row) -> list[str]:
    """The closings that make the line Python, or begin to: one more bracket may be missing."""

    def is_python(text: str) -> bool:
        try:
            ast.parse(text)
        except SyntaxError:
            return False
        return True

    return [
        option
        for option in options(row)
        if any(is_python(question(row) + option + more) for more in ("", ")", "]", "}"))
    ]


def cancelled(word: str) -> str:
    """What is left of a word without spaces when adjacent letters that match have gone."""
    while (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", word)) != word:
        word = shorter
    return word


def by_cancelling(row: Row) -> list[str]:
    """The mirror image of what is left of the question."""
    left = cancelled(question(row).replace(" ", ""))
    assert left and not set(left) & set(")]}>")
    return equal_to(row, " ".join(left[::-1].translate(str.maketrans("([{<", ")]}>"))))


def by_cancelling_all(row: Row) -> list[str]:
    word = question(row).replace(" ", "")
    return equal_to(row, "invalid" if cancelled(word) else "valid")


# ------------------------------------------------------------------ sequences


def by_enumeration(row: Row) -> list[str]:
    """Length of the longest text that both sets of subsequences hold."""
    a, b = (line.replace(" ", "") for line in question(row).split("\n"))
    for length in range(min(len(a), len(b)), -1, -1):
        if set(itertools.combinations(a, length)) & set(itertools.combinations(b, length)):
            return equal_to(row, length)
    raise AssertionError("the empty text is common to all")


def by_first_line(row: Row) -> list[str]:
    first, second, third = question(row).split("\n")
    assert first == second
    return [option for option in options(row) if f'{third}{option}"]' == first]


def by_obeying(row: Row) -> list[str]:
    """Says what it is asked to, word by word."""

    def obey(text: str) -> Iterator[str]:
        if text.endswith("; all of that twice"):
            inner = text.removesuffix("; all of that twice")
            yield from [*obey(inner), *obey(inner)]
            return
        for order in text.split(", then "):
            match = re.fullmatch(
                r"say ([a-z ]+?)( backwards)? (\d) times(?: with (\w+) after each)?", order
            )
            assert match is not None, order
            words = match[1].split()
            for _ in range(int(match[3])):
                yield from reversed(words) if match[2] else words
                yield from [match[4]] if match[4] else []

    return equal_to(row, " ".join(obey(question(row))))


def by_execution(row: Row) -> list[str]:
    *lines, last = question(row).split("\n")
    variables: dict[str, Any] = {}
    exec("\n".join(lines), variables)
    assert len(variables) == len(lines) + 1, "two assignments of one name"  # and __builtins__
    name = last.removeprefix("assert ").removesuffix(" ==")
    return equal_to(row, variables[name])


# ------------------------------------------------------------------ texts

_ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]


def place_of(text: str, n: int) -> int:
    """0 for first, leftmost and oldest."""
    words = text.removeprefix("the ").split()
    if words[0] in ("last", "rightmost", "youngest"):
        return n - 1
    return 0 if words[0] in ("leftmost", "oldest") else _ORDINALS.index(words[0])


def by_trying_all_orders(row: Row) -> list[str]:
    """Exactly one order of the things may agree with all sentences."""
    head, *clues, asked = re.findall(r"[^.?]+(?=[.?])", question(row))
    head = re.sub(r"On a shelf are books in | ran a race| are of different ages", "", head)
    things = re.split(r", | and ", head)
    n = len(things)
    assert sorted(things) == sorted(row["choices"])
    thing, place = r"(?:The )?(\w+)(?: book)?", r"(.+)"
    patterns: list[tuple[str, Callable[[Any, str, str], bool]]] = [
        (rf"{thing} finished just before (\w+)", lambda at, x, y: at[y] - at[x] == 1),
        (rf"{thing} is just left of the (\w+) book", lambda at, x, y: at[y] - at[x] == 1),
        (
            rf"{thing} comes just before (\w+) in age, the oldest first",
            lambda at, x, y: at[y] - at[x] == 1,
        ),
        (rf"{thing} finished before (\w+)", lambda at, x, y: at[x] < at[y]),
        (rf"{thing} is left of the (\w+) book", lambda at, x, y: at[x] < at[y]),
        (rf"{thing} is older than (\w+)", lambda at, x, y: at[x] < at[y]),
        (rf"{thing} (?:did not finish|is not) {place}", lambda at, x, y: at[x] != place_of(y, n)),
        (rf"{thing} (?:finished|is) {place}", lambda at, x, y: at[x] == place_of(y, n)),
    ]
    read = []
    for clue in map(str.strip, clues):
        matches = ((re.fullmatch(pattern, clue), holds) for pattern, holds in patterns)
        match, holds = next((m, holds) for m, holds in matches if m is not None)
        read.append((holds, match[1], match[2]))
    agreeing = []
    for order in itertools.permutations(things):
        at = {name: i for i, name in enumerate(order)}
        if all(holds(at, x, y) for holds, x, y in read):
            agreeing.append(order)
    assert len(agreeing) == 1
    match = re.fullmatch(r" (?:Who finished|Which book is|Who is) (.+)", asked)
    assert match is not None
    return equal_to(row, agreeing[0][place_of(match[1], n)])


def by_looking_up(row: Row) -> list[str]:
    """The letter before the colour that is named, or that the object has."""
    text = question(row)
    letters = {colour: letter for letter, colour in re.findall(r"^([A-Z])\. (\w+)$", text, re.M)}
    facts = dict(re.findall(r"^The (\w+) is (\w+)\.$", text, re.M))
    match = re.search(r"^Which (?:is (\w+)|colour is the (\w+))\?$", text, re.M)
    assert match is not None and len(letters) == len(row["choices"])
    assert len(set(facts.values())) == len(facts) and set(facts.values()) <= set(letters)
    return equal_to(row, letters[match[1] or facts[match[2]]])


_OF_PEOPLE = ("felt hungry", "wanted to sleep", "knew the answer", "had no time", "smiled")
_OF_THINGS = ("made of wood", "had a hole", "weighed too much", "empty", "fell apart")
_NOT_INTO = r"The (\w+) (?:did not fit into|could not be put into|did not go into) the (\w+)"
_DOERS = {
    "thanked": ("had got help", "had been saved"),
    "followed": ("did not know the way",),
    "taught": ("knew more", "was an expert"),
    "woke": ("was already up", "had got up early"),
    "woken": ("was already up", "had got up early"),
    "carried": ("was strong",),
    "blamed": ("had been cheated",),
}


def by_knowing_the_words(row: Row) -> list[str]:
    """Number, kind, size or part in the deed decide whom the ending suits."""
    sentences = {text.split(" because ")[0] for text in row["context_options"]}
    (sentence,) = sentences
    by_name = {text.split(" because ")[1]: text for text in row["context_options"]}
    ending = row["continuation"]
    if " looked at " in sentence:
        plural = ending.startswith("were ")
        return [text for name, text in by_name.items() if name.endswith("s") == plural]
    if match := re.fullmatch(_NOT_INTO, sentence):
        too_large = ending.split()[-1] in ("big", "large", "wide", "long")
        return [by_name[f"the {match[1] if too_large else match[2]}"]]
    if ending.startswith(_OF_PEOPLE) or ending.endswith(_OF_THINGS):
        person = sentence.split(" ")[1]
        of_person = ending.startswith(_OF_PEOPLE)
        return [text for name, text in by_name.items() if (name == f"the {person}") == of_person]
    first, *verb, second = sentence.split()
    doer = second if verb[-1] == "by" else first
    doing = ending in _DOERS[verb[1] if verb[-1] == "by" else verb[0]]
    return [text for name, text in by_name.items() if (name == doer) == doing]


SOLVERS: dict[str, Callable[[Row], list[str]]] = {
    "arithmetic": by_python,
    "arithmetic_choice": by_python,
    "remainder": by_python,
    "word_problem": by_reading_a_story,
    "operators": by_substitution,
    "brackets": by_parsing,
    "brackets_completion": by_parsing,
    "dyck": by_cancelling,
    "dyck_validity": by_cancelling_all,
    "lcs_length": by_enumeration,
    "deduction": by_trying_all_orders,
    "repeat_copy": by_obeying,
    "reversing": by_python,
    "sorting": by_python,
    "copying": by_first_line,
    "key_value": by_execution,
    "colour_letters": by_looking_up,
    "pronouns": by_knowing_the_words,
}


def parsed(text: str) -> list[Row]:
    """The rows of a jsonl text."""
    return [json.loads(line) for line in text.splitlines()]
