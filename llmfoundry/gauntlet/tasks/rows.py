"""Rows of a task, in one form for all types, read from LLM Foundry's schemas; facts about them.

`Gauntlet` calls `load_rows` once a task, and `chance`, `majority` and `rows_hash` for the results.
The idea: a row has contexts and choices, and at most one of the two has more than one entry.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmfoundry.data.fetch.file_spec import FetchOptions
from llmfoundry.data.instructions import checks
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskRow
from llmfoundry.gauntlet.tasks.gauntlet_file import TaskConfig
from llmfoundry.gauntlet.tasks.sources import RawRow, read_source
from llmfoundry.gauntlet.tasks.task_reader import BROKEN, is_broken
from llmfoundry.recipe.values.checks import nearest

_SHOWN = 10  # problems of one task that are listed before the rest is only counted

FIELDS = {
    "language_modeling": ("context", "continuation"),
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "generation_task_with_answers": ("context", "answer"),
}
"""What a row of each task type must have."""


def load_rows(
    task: TaskConfig, *, gauntlet_path: Path, fetching: FetchOptions | None = None
) -> list[TaskRow]:
    """All rows of a task whose dataset_uri is anything but heldout://.

    Args:
        task: what to read, and how.
        gauntlet_path: the file that the task is in; relative paths begin beside it.
        fetching: see `read_source`.

    Raises:
        UserError: nothing to read, or the file and line of every row that is not of the task's
            schema, of which ten are shown.
    """
    rows: list[TaskRow] = []
    problems: list[str] = []
    for place, raw in read_source(task, gauntlet_path=gauntlet_path, fetching=fetching):
        try:
            rows.append(_row(raw, place, task))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        line = f"{task.dataset_uri}: {more} more rows are not {task.icl_task_type} rows either"
        problems[_SHOWN:] = [line]
    if problems:
        raise UserError(*problems)
    if not rows:
        raise UserError(f"{task.dataset_uri}: has no rows; task {task.label} needs at least one")
    return rows


_OF_CONVERSATIONS = ("messages", "reply", "tools", "checks")  # newer than kept hashes


def chance(rows: Sequence[TaskRow]) -> float:
    """Accuracy of guessing: the mean of 1/options; 0 where the answer is written freely."""
    return sum(1 / row.n_options for row in rows if row.n_options > 1) / len(rows)


def majority(rows: Sequence[TaskRow]) -> float:
    """Accuracy of the best constant answer: an index, or a text where it is written freely."""
    answers = Counter(row.gold if row.n_options > 1 else row.choices[0] for row in rows)
    return answers.most_common(1)[0][1] / len(rows)


def rows_hash(rows: Sequence[TaskRow]) -> str:
    """32 hexadecimal digits of the rows' content and order, wherever they were read from."""
    names = sorted(f.name for f in dataclasses.fields(TaskRow) if f.name != "place")
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        content = {name: getattr(row, name) for name in names}
        content = {n: v for n, v in content.items() if v or n not in _OF_CONVERSATIONS}
        digest.update(json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n")
    return digest.hexdigest()


def _row(raw: RawRow, place: str, task: TaskConfig) -> TaskRow:
    """A checked row; a ValueError tells what is wrong with it."""
    row = _parse(raw) if isinstance(raw, str) else raw
    if task.strip_dataset:  # as LLM Foundry: texts of the row itself, not those in its lists
        row = {k: v.strip() if isinstance(v, str) else v for k, v in row.items()}
    for name in (*FIELDS[task.icl_task_type], "aliases", "chain_of_thought", "category"):
        value = row.get(name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and is_broken(text):
                raise ValueError(f"field '{name}' is {_short(text)}: it {BROKEN}")
    for name in _OF_CONVERSATIONS:
        if is_broken(json.dumps(row.get(name), ensure_ascii=False)):
            raise ValueError(f"field '{name}' {BROKEN}")
    read = ROW_READERS[task.icl_task_type](row, place)
    if not task.has_categories:
        return read
    return dataclasses.replace(read, category=_filled(row, "category", "its category"))


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError('is not a row; write {"field": value, ...}')
    return row


def _language_modeling(row: Mapping[str, Any], place: str) -> TaskRow:
    context = _text(row, "context")
    return TaskRow((context,), (_filled(row, "continuation", "the text to predict"),), 0, place)


def _multiple_choice(row: Mapping[str, Any], place: str) -> TaskRow:
    query, choices = _text(row, "query"), _options(row, "choices")
    if "" in choices:
        raise ValueError("field 'choices' holds an empty text; write what it is to say")
    return TaskRow((query,), choices, _gold(row, len(choices)), place)


def _schema(row: Mapping[str, Any], place: str) -> TaskRow:
    contexts = _options(row, "context_options")
    answer = _filled(row, "continuation", "the text that follows each context")
    return TaskRow(contexts, (answer,), _gold(row, len(contexts)), place)


def _generation(row: Mapping[str, Any], place: str) -> TaskRow:
    messages = _messages(row)
    context = str(messages[-1]["content"]) if messages else _text(row, "context")
    answer = _filled(row, "answer", "the text to generate")
    given = _texts(row, "aliases") if row.get("aliases") is not None else ()
    thought = _text(row, "chain_of_thought") if row.get("chain_of_thought") is not None else ""
    aliases = tuple(dict.fromkeys([answer, *given]))
    if "checks" in row:
        for problem in checks.problems(row["checks"]):
            raise ValueError(problem)
    return TaskRow(
        (context,),
        (answer,),
        0,
        place,
        aliases=aliases,
        chain_of_thought=thought,
        messages=messages,
        reply=_mapping(row, "reply"),
        tools=tuple(_mappings(row, "tools")),
        checks=tuple(row.get("checks", ())),
    )


def _messages(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """A conversation in place of a context; empty: there is none."""
    messages = _mappings(row, "messages")
    for message in messages:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(
                f"field 'messages' holds {_short(message)}; write role and content of each"
            )
    if messages and (
        messages[-1]["role"] != "user" or not isinstance(messages[-1]["content"], str)
    ):
        raise ValueError("field 'messages': the last is not a text of the user, which is answered")
    if messages and "context" in row:
        raise ValueError("has 'messages' and 'context'; write one of them")
    return tuple(messages)


def _mappings(row: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = row.get(name, [])
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        raise ValueError(f"field '{name}' is {_short(value)}; write a list of mappings")
    return value


def _mapping(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"field '{name}' is {_short(value)}; write a mapping")
    return value


ROW_READERS: dict[str, Callable[[Mapping[str, Any], str], TaskRow]] = {
    "language_modeling": _language_modeling,
    "multiple_choice": _multiple_choice,
    "schema": _schema,
    "generation_task_with_answers": _generation,
}


def _gold(row: Mapping[str, Any], n_options: int) -> int:
    gold = _field(row, "gold")
    if type(gold) is not int or not 0 <= gold < n_options:
        raise ValueError(f"field 'gold' is {gold!r}; write an index from 0 to {n_options - 1}")
    return gold


def _options(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts = _texts(row, name)
    if len(texts) < 2:
        raise ValueError(f"field '{name}' has {len(texts)} texts; write two or more")
    return texts


def _texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = _field(row, name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"field '{name}' is {_short(value)}; write a list of texts")
    return tuple(value)


def _filled(row: Mapping[str, Any], name: str, what: str) -> str:
    text = _text(row, name)
    if not text:
        raise ValueError(f"field '{name}' is empty; write {what}")
    return text


def _text(row: Mapping[str, Any], name: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise ValueError(f"field '{name}' is {_short(value)}; write a text")
    return value


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        other = [kind for kind, needed in FIELDS.items() if row.keys() >= set(needed)]
        other = [] if name == "category" else other
        hint = f"; these are fields of {other[0]}" if other else nearest(name, row)
        raise ValueError(f"has no field '{name}'{hint} (fields: {', '.join(row)})")
    return row[name]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
