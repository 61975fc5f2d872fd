"""Generated evaluation sets: seeded rows in LLM Foundry's schemas, answers right by construction.

`python -m llmfoundry.gauntlet.generate eval/generated.yaml` writes one jsonl file for each set of
that recipe into the folder beside it, eval/generated/; the same recipe gives the same bytes. The
texts look like Python sources, so that a model trained on the interpreter's own can score.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest

CHOICES = 4
MAX_LEVEL = 5  # the lists of names and of bracket orders end there
CLOSERS = {"(": ")", "[": "]", "{": "}"}
NAMES = (
    *("args", "count", "data", "field", "file", "group", "index", "items", "key", "line"),
    *("name", "node", "parser", "path", "result", "size", "text", "token", "value", "width"),
)


@dataclass(frozen=True)
class SetConfig:
    """One set of a recipe."""

    name: str
    """Which generator; also the file's name."""
    seed: int
    """Decides every draw."""
    rows: int
    """Number of rows, all different."""
    level: int
    """Difficulty from 1: more operators, deeper brackets, longer lists."""


@dataclass(frozen=True)
class _Item:
    """A question, its answer, and wrong answers where it is multiple choice."""

    question: str
    answer: str
    wrong: tuple[str, ...] = ()


def read_recipe(path: Path) -> list[SetConfig]:
    """The sets of a recipe.

    Raises:
        UserError: unknown or missing keys, unknown generators, numbers below 1.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("sets"), list):
        raise UserError(f"{path}: sets: is missing; write a list of sets")
    problems = [
        problem
        for i, entry in enumerate(content["sets"])
        for problem in _check_set(f"{path}: sets[{i}]", entry)
    ]
    if problems:
        raise UserError(*problems)
    sets = [SetConfig(**entry) for entry in content["sets"]]
    names = [config.name for config in sets]
    if repeats := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{path}: sets: {min(repeats)} is there more than once; each has one file")
    return sets


def make_set(config: SetConfig) -> str:
    """The text of a set's jsonl file.

    Raises:
        UserError: more rows than the level has different questions.
    """
    rng = random.Random(config.seed)
    items: dict[str, _Item] = {}
    for _ in range(100 * config.rows):
        item = GENERATORS[config.name](rng, config.level)
        items.setdefault(item.question, item)
        if len(items) == config.rows:
            break
    else:
        raise UserError(
            f"sets: {config.name}: rows: {config.rows}, but level {config.level} gave only"
            f" {len(items)} different questions; write less, or a higher level"
        )
    order = list(range(config.rows))
    rng.shuffle(order)
    rows = [_row(item, i) for item, i in zip(items.values(), order, strict=True)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_sets(recipe: Path) -> list[Path]:
    """Write every set of a recipe into the folder of its name; the files written."""
    folder = recipe.with_suffix("")
    folder.mkdir(exist_ok=True)
    written = []
    for config in read_recipe(recipe):
        path = folder / f"{config.name}.jsonl"
        path.write_text(make_set(config), encoding="utf-8", newline="\n")
        written.append(path)
    return written


def _check_set(where: str, entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"{where}: is not a mapping of keys to values"
        return
    keys = [f.name for f in fields(SetConfig)]
    for key in entry:
        if key not in keys:
            yield f"{where}: unknown key '{key}'{nearest(str(key), keys)} (keys: {', '.join(keys)})"
    for key in keys:
        if key not in entry:
            yield f"{where}: {key}: is missing"
        elif key == "name" and entry[key] not in GENERATORS:
            hint = nearest(str(entry[key]), GENERATORS)
            yield f"{where}: name: {entry[key]!r} is unknown{hint} ({', '.join(GENERATORS)})"
        elif key != "name" and (type(entry[key]) is not int or entry[key] < 1):
            yield f"{where}: {key}: {entry[key]!r}; write a whole number above 0"
        elif key == "level" and entry[key] > MAX_LEVEL:
            yield f"{where}: level: {entry[key]}; write {MAX_LEVEL} or less"


def _row(item: _Item, number: int) -> dict[str, Any]:
    if not item.wrong:
        return {"context": item.question, "continuation": item.answer}
    gold = number % (len(item.wrong) + 1)  # no index is more often right than another
    choices = [*item.wrong[:gold], item.answer, *item.wrong[gold:]]
    return {"query": item.question, "choices": choices, "gold": gold}


def _arithmetic(rng: random.Random, level: int) -> _Item:
    """`3 + 4 =`: as many operators as digits in an operand; a single difference is not negative."""
    numbers = [rng.randrange(10**level) for _ in range(level + 1)]
    operators = [rng.choice("+-") for _ in range(level)]
    if operators == ["-"]:
        numbers.sort(reverse=True)
    total, text = numbers[0], str(numbers[0])
    for operator, number in zip(operators, numbers[1:], strict=True):
        total += number if operator == "+" else -number
        text += f" {operator} {number}"
    return _Item(f"{text} =", str(total))


def _arithmetic_choice(rng: random.Random, level: int) -> _Item:
    """The same with three wrong numbers close by, negative only where the right one is."""
    item = _arithmetic(rng, level)
    total = int(item.answer)
    near = [total + step for step in (-10, -2, -1, 1, 2, 10) if total < 0 or total + step >= 0]
    return _Item(item.question, item.answer, tuple(map(str, rng.sample(near, CHOICES - 1))))


def _brackets(rng: random.Random, level: int) -> _Item:
    """Level 1, `print(items[1` → `]`: which of three brackets comes next?

    From level 2 on all open brackets are to be closed, `])`; wrong are other orders of them first.
    """
    item = _brackets_completion(rng, level)
    closers = "".join(CLOSERS.values())
    if level == 1:
        closed, right = rng.choice([("", item.answer[0]), tuple(item.answer)])
        return _Item(item.question + closed, right, tuple(closers.replace(right, "")))
    wrong = {"".join(p) for p in itertools.product(closers, repeat=len(item.answer))}
    wrong -= {item.answer}
    orders = sorted(closing for closing in wrong if sorted(closing) == sorted(item.answer))
    others = sorted(wrong.difference(orders))
    rng.shuffle(orders)
    rng.shuffle(others)
    return _Item(item.question, item.answer, tuple([*orders, *others][: CHOICES - 1]))


def _brackets_completion(rng: random.Random, level: int) -> _Item:
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
        closing = CLOSERS[opener[-1]] + closing
    key = f'"{rng.choice(NAMES)}": ' if closing.startswith("}") else ""
    return _Item(text + key + _atom(rng, level), closing)


def _atom(rng: random.Random, level: int) -> str:
    """A value; from level 2 on some contain brackets that are closed already."""
    name, number = rng.choice(NAMES), rng.randrange(10)
    closed = (f"{name}[{number}]", f"len({name})") if level > 1 else ()
    return rng.choice((name, str(number), *closed))


def _copying(rng: random.Random, level: int) -> _Item:
    """A list of level + 2 words, twice, and once more but for its last word."""
    name, *words = rng.sample(NAMES, level + 3)
    quoted = [f'"{word}"' for word in words]
    line = f"{name} = [{', '.join(quoted)}]"
    start = line.removesuffix(f" {quoted[-1]}]")
    return _Item(f"{line}\n{line}\n{start}", f"{quoted[-1]}]")


def _key_value(rng: random.Random, level: int) -> _Item:
    """Some assignments (level + 3) and a question for one of them; wrong are the others' values."""
    names = rng.sample(NAMES, level + 3)
    values = rng.sample(range(10, 100), level + 3)
    asked = rng.randrange(len(names))
    lines = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    others = [str(value) for i, value in enumerate(values) if i != asked]
    question = "\n".join([*lines, f"assert {names[asked]} =="])
    return _Item(question, str(values[asked]), tuple(rng.sample(others, CHOICES - 1)))


GENERATORS: dict[str, Callable[[random.Random, int], _Item]] = {
    "arithmetic": _arithmetic,
    "arithmetic_choice": _arithmetic_choice,
    "brackets": _brackets,
    "brackets_completion": _brackets_completion,
    "copying": _copying,
    "key_value": _key_value,
}


if __name__ == "__main__":
    for written in write_sets(Path(sys.argv[1])):
        print(written)
