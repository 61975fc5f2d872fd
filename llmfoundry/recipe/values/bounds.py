"""What the numbers, paths and choices of a recipe may be, declared in the types of its fields.

`lr: Annotated[float, Range(above=0)]` is all that a section writes: its `check` begins with
`out_of_bounds`, which looks at every field, and `--help` lists a field's choices. Where a field
declares nothing, a number is finite and fits its machine type, so that no value can hang a check,
overflow or eat a machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.values.checks import not_a_choice
from llmfoundry.recipe.values.choices import ChoiceTable, Entry

MOST_INT = 2**63 - 1
MOST_FLOAT = 3e38  # what fp32 holds
LONGEST_NAME, LONGEST_PATH = 255, 2048  # bytes; Linux takes 4096, of which what we add is a part


_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # what neither a file nor JSON can hold


@dataclass(frozen=True)
class Range:
    """What a number may be; unset ends are those of its machine type."""

    least: float | None = None
    most: float | None = None
    why: str = ""
    """Of `most`: what a greater value would do."""
    above: float | None = None
    below: float | None = None
    infinite: bool = False
    """Whether infinity is a value too."""

    def problem(self, value: float) -> str | None:
        """Why `value` is not in the range, and what to write; None where it is."""
        if isinstance(value, float) and not math.isfinite(value):
            return None if self.infinite and value > 0 else f"{value} is not a finite number"
        if (self.least, self.below) == (0, 1) and not 0 <= value < 1:
            return f"{value} is not a fraction; write a number from 0 up to, not including, 1"
        if self.least is not None and value < self.least:
            return f"{value} is too small; write {self.least} or more"
        if self.above is not None and value <= self.above:
            return f"{value} must be greater than {self.above}"
        if self.below is not None and value >= self.below:
            return f"{value} must be less than {self.below}"
        widest = MOST_INT if isinstance(value, int) else MOST_FLOAT
        most = widest if self.most is None else self.most
        if value > most or value < -widest:
            ending = f": {self.why}" if self.why else ""
            word, end = ("large", f"{most} or less") if value > most else ("small", f"{-widest}")
            return f"{value} is too {word}; write {end}{ending}"
        return None


ANY = Range()
FRACTION = Range(0, below=1)
POSITIVE = Range(above=0)

# What several fields share; each says beside it what it counts.
LENGTH = "positions are exact up to there"
ROWS = Range(1, 2**24, "the rows of a step are listed in memory")
PROCESSES = "each is a process of this machine"
TOKENS = Range(1, 2**24, LENGTH)
MOST_LAYERS = 4096  # each is made; the deepest published transformer has 1,000
WIDTH = Range(1, 2**22, "no device holds a wider matrix")
NEW_TOKENS = Range(1, 2**20, "keys and values of each are kept in memory")
TEMPERATURE = Range(0, 1e6)
TOP_P = Range(above=0, most=1, why="it is a probability")


@dataclass(frozen=True)
class TextRule:
    """Marks a text that must have some form."""

    problem: Callable[[str], str | None]
    """Why a text has not, and what to write; None where it has."""


@dataclass(frozen=True)
class Choice:
    """Marks a text that is one of a few."""

    options: Collection[str]
    """A `ChoiceTable` among them, to which plugins may still add."""
    other: str = ""
    """What else the field takes, for people: `a number of rows`."""
    form: re.Pattern[str] | None = None
    """Of other texts that it takes."""
    reasons: Mapping[str, str] | None = None
    """Of texts that others' recipes have: why it is not taken, and what to write."""

    def problem(self, value: str) -> str | None:
        """Why `value` is not one of them, and what to write; None where it is."""
        if value in self.options or (self.form is not None and self.form.fullmatch(value)):
            return None
        if self.reasons is not None and value in self.reasons:
            return f"{value} {self.reasons[value]}"
        if isinstance(self.options, ChoiceTable):
            return self.options.refusal(value, other=self.other)
        return not_a_choice(value, [*self.options], other=self.other)

    def listed(self) -> str:
        """All of them, for people."""
        return ", ".join(self.options) + (f", or {self.other}" if self.other else "")

    def meanings(self) -> dict[str, str]:
        """What those of a table mean, as far as their entries say so."""
        entries = self.options.items() if isinstance(self.options, ChoiceTable) else ()
        named = ((name, entry) for name, entry in entries if isinstance(entry, Entry))
        return {name: entry.meaning for name, entry in named if entry.meaning}


def choice(
    options: Iterable[str],
    other: str = "",
    form: re.Pattern[str] | None = None,
    *,
    reasons: Mapping[str, str] | None = None,
) -> Choice:
    """A `Choice` of the names in a table."""
    names = options if isinstance(options, ChoiceTable) else tuple(options)
    return Choice(names, other, form, reasons)


ANY_TEXT = re.compile(".*", re.DOTALL)
CHAT_TEMPLATES = (
    "chatml", "llama3", "zephyr", "mpt", "qwen2.5", "qwen3", "phi3", "phi3.5", "gemma", "gemma3",
    "mistral", "deepseek-v3", "deepseek-r1", "glm4", "gpt-oss",
)  # fmt: skip
CHAT_TEMPLATE = choice(CHAT_TEMPLATES, "a Jinja file", ANY_TEXT)
AUTO_ROWS = choice(("auto",), "a number of rows")


def _path_problem(value: str) -> str | None:
    if not value.strip():
        return "is empty; write a path"
    if value.startswith("~") and os.path.expanduser(value) == value:
        return f"{value}: there is no such user; write the whole path"
    size = len(os.fsencode(value))
    names = () if "://" in value else (len(os.fsencode(name)) for name in value.split("/"))
    if size > LONGEST_PATH or max(names, default=0) > LONGEST_NAME:
        return f"{value!r} is too long for a path ({size} bytes)"
    return None


def _run_name_problem(value: str) -> str | None:
    names = value.split("/")
    if any(name in ("", ".", "..") or name.startswith("-") for name in names):
        return (
            f"{value!r} cannot name a folder below runs/; write a name such as lr-1e-3 or"
            " sizes/small, and another place as save_folder"
        )
    if not value.isprintable():
        return f"{value!r} has characters that cannot be shown; write others"
    return _path_problem(value)


PATH = TextRule(_path_problem)
"""Marks what the file system is asked for, or the address of a store."""
RUN_NAME = TextRule(_run_name_problem)


def out_of_bounds(key: str, section: Any) -> Generator[str, None, bool]:
    """Lines for a section's own values that its types do not allow; returns whether there are any.

    A check begins with `if (yield from out_of_bounds(key, self)): return` where what follows
    computes with them.
    """
    found = False
    for name, field in Schema.of(section.__class__).keys.items():
        given, rules = getattr(section, field.field), field.rules
        if isinstance(given, dict):  # the long form of a choice, which its section checks
            rules = tuple(rule for rule in rules if not isinstance(rule, Choice))
        for dotted, value in leaves(name, given):
            problem = _problem(value, rules)
            if problem is not None:
                found = True
                yield f"{key}{dotted}: {problem}"
    return found


def _problem(value: Any, rules: tuple[Any, ...]) -> str | None:
    if isinstance(value, str):
        if _NO_TEXT.search(value):
            return "has a NUL character or half of a surrogate pair; write text"
        texts = (rule.problem(value) for rule in rules if isinstance(rule, TextRule | Choice))
        return next((problem for problem in texts if problem is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return next((rule for rule in rules if isinstance(rule, Range)), ANY).problem(value)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A field's values, those in its lists and mappings each by itself; sections have no say."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(f"{name}[{index}]", item)
    elif isinstance(value, dict):
        for part, item in value.items():
            yield name, part
            yield from leaves(f"{name}.{part}", item)
    else:
        yield name, value
