"""What a generator draws: a question with its answer, before it becomes a row of some schema.

Every generator returns an `Item`; `sets` turns items into rows. Also the words that several
generators use: most texts look like Python's sources, so that a model trained on the interpreter's
own can score.
"""

from __future__ import annotations

from dataclasses import dataclass

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
            letters); None: `sets` chooses one.
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
