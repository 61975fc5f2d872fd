"""Generated sets: which generators there are, their settings, and rows in LLM Foundry's schemas.

`sources` calls `generated_rows` for a task's address, such as generated://key_value?pairs=1000, and
`gauntlet.generate` calls `make_set` for a file. The same settings give the same rows on every
machine. Right answers are at each place among the choices equally often.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.tasks.generated import (
    arithmetic,
    brackets,
    deduction,
    letters,
    operators,
    pronouns,
    recall,
    sequences,
)
from llmfoundry.gauntlet.tasks.generated.items import CHOICES, MAX_LEVEL, Item
from llmfoundry.recipe.values.checks import nearest

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
    "arithmetic": Generator(arithmetic.arithmetic, _LM, ("spaces",)),
    "arithmetic_choice": Generator(arithmetic.arithmetic_choice, _MC, ("spaces",)),
    "remainder": Generator(arithmetic.remainder, _LM),
    "word_problem": Generator(arithmetic.word_problem, "generation_task_with_answers"),
    "operators": Generator(operators.operators, _LM),
    "brackets": Generator(brackets.brackets, _MC),
    "brackets_completion": Generator(brackets.brackets_completion, _LM),
    "dyck": Generator(brackets.dyck, _LM),
    "dyck_validity": Generator(brackets.dyck_validity, _MC),
    "lcs_length": Generator(sequences.lcs_length, _MC),
    "deduction": Generator(deduction.deduction, _MC),
    "repeat_copy": Generator(sequences.repeat_copy, _LM),
    "reversing": Generator(sequences.reversing, _LM),
    "sorting": Generator(sequences.sorting, _LM),
    "copying": Generator(sequences.copying, _LM),
    "key_value": Generator(recall.key_value, _MC, ("pairs", "chars", "position")),
    "colour_letters": Generator(letters.colour_letters, _MC),
    "pronouns": Generator(pronouns.pronouns, "schema"),
}

_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "spaces": ("true or false", lambda value: isinstance(value, bool)),
    "pairs": (
        f"a whole number from {CHOICES} to {recall.MAX_PAIRS}",
        lambda value: type(value) is int and CHOICES <= value <= recall.MAX_PAIRS,
    ),
    "chars": (
        f"a whole number from {recall.MIN_CHARS} to {recall.MAX_CHARS}",
        lambda value: type(value) is int and recall.MIN_CHARS <= value <= recall.MAX_CHARS,
    ),
    "position": ("any, begin, middle or end", lambda value: value in recall.POSITIONS),
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
