"""Rows of a task: one question with its possible answers, read from LLM Foundry's jsonl schemas.

`Gauntlet` calls `read_rows`. The idea: a language_modeling row is a question with a single answer,
so that prompts, tokens and scores have one form for both task types.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.tasks import TaskConfig
from llmfoundry.recipe.checks import nearest

_SHOWN = 10  # problems of one file that are listed before the rest is only counted


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        context: the question's text.
        choices: its possible answers; exactly one in language_modeling.
        gold: index of the right one.
        place: file and line, for messages.
    """

    context: str
    choices: tuple[str, ...]
    gold: int
    place: str

    @property
    def answer(self) -> str:
        """The right choice."""
        return self.choices[self.gold]


def read_rows(path: Path, task: TaskConfig) -> list[Row]:
    """All rows of a jsonl file.

    Raises:
        UserError: the file and line of every row that is not of the task's schema.
    """
    rows: list[Row] = []
    problems: list[str] = []
    read = ROW_READERS[task.icl_task_type]
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text ({error}); convert it") from error
    if lines == [""]:
        raise UserError(f"{path}: has no rows; task {task.label} needs at least one")
    for number, line in enumerate(lines, start=1):
        place = f"{path}:{number}"
        try:
            rows.append(read(_parse(line), place, task.strip_dataset))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        problems[_SHOWN:] = [f"{path}: {more} more rows are not {task.icl_task_type} rows either"]
    if problems:
        raise UserError(*problems)
    return rows


def chance(rows: list[Row]) -> float:
    """Accuracy of guessing: the mean of 1/choices; 0 where the answer is written freely."""
    return sum(1 / len(r.choices) for r in rows if len(r.choices) > 1) / len(rows)


def majority(rows: list[Row]) -> float:
    """Accuracy of the best constant answer: an index, or a text where it is written freely."""
    answers = Counter(str(r.gold) if len(r.choices) > 1 else r.answer for r in rows)
    return answers.most_common(1)[0][1] / len(rows)


def _parse(line: str) -> dict[str, Any]:
    if not line.strip():
        raise ValueError("is empty; remove the line")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError('is not a row; write {"field": value, ...}')
    return row


def _language_modeling(row: dict[str, Any], place: str, strip: bool) -> Row:
    context, continuation = _text(row, "context", strip), _text(row, "continuation", strip)
    if not continuation:
        raise ValueError("field 'continuation' is empty; write the text to predict")
    return Row(context, (continuation,), 0, place)


def _multiple_choice(row: dict[str, Any], place: str, strip: bool) -> Row:
    query, choices, gold = _text(row, "query", strip), _field(row, "choices"), _field(row, "gold")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError("field 'choices' is not a list of two texts or more")
    if not all(isinstance(c, str) and (c.strip() if strip else c) for c in choices):
        raise ValueError("field 'choices' holds something that is not a text, or is empty")
    if type(gold) is not int or not 0 <= gold < len(choices):
        raise ValueError(f"field 'gold' is {gold!r}; write an index from 0 to {len(choices) - 1}")
    return Row(query, tuple(c.strip() if strip else c for c in choices), gold, place)


ROW_READERS: dict[str, Callable[[dict[str, Any], str, bool], Row]] = {
    "language_modeling": _language_modeling,
    "multiple_choice": _multiple_choice,
}


def _text(row: dict[str, Any], name: str, strip: bool) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"field '{name}' is {value!r}; write a text")
    return value.strip() if strip else value


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"has no field '{name}'{nearest(name, row)} (fields: {', '.join(row)})")
    return row[name]
