"""Rows of generated chats, at addresses such as instructions://sort?rows=100&split=held_out.

`sources` calls `chat_rows`. The questions are those of `data.instructions`, which training sets are
made of as well; of the split held_out, and of lengths, none is ever in one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from llmfoundry.data.instructions import Exchange, check_tasks, draw_exchange, right_message
from llmfoundry.errors import UserError
from llmfoundry.recipe.values.checks import nearest

SCHEME = "instructions://"
_DEFAULTS = {"rows": "50", "seed": "1", "split": "held_out"}
_PATIENCE = 2000  # draws without a new question before a task is said to have no more


def chat_rows(uri: str, *, key: str) -> Iterator[dict[str, Any]]:
    """Different rows of one task: {"messages", "answer", "reply", "checks", "tools"}.

    Args:
        uri: a task's name, then rows, seed and split (held_out; lengths; train), with defaults.
        key: where the address is written; begins every line of an error.

    Raises:
        UserError: an unknown task or setting, a wrong value, more rows than there are.
    """
    task, n, seed, split = _read(uri, f"{key}: {uri}: ")
    seen: set[str] = set()
    number = in_vain = 0
    while len(seen) < n:
        exchange = draw_exchange(task, number, seed=seed, split=split)
        number += 1
        asked = json.dumps([exchange.messages, exchange.tools])
        if asked in seen:
            in_vain += 1
            if in_vain == _PATIENCE:
                raise UserError(
                    f"{key}: {uri}: rows: {n}, but {task} has about {len(seen)} questions in"
                    f" {split}; write less"
                )
            continue
        seen.add(asked)
        in_vain = 0
        yield _row(exchange)


def _row(exchange: Exchange) -> dict[str, Any]:
    row: dict[str, Any] = {
        "messages": list(exchange.messages),
        "answer": exchange.answer or json.dumps(exchange.call),
        "reply": right_message(exchange),
        "checks": [dict(check) for check in exchange.checks],
    }
    if exchange.tools:
        row["tools"] = list(exchange.tools)
    return row


def _read(uri: str, where: str) -> tuple[str, int, int, str]:
    task, _, query = uri.removeprefix(SCHEME).partition("?")
    written = parse_qsl(query, keep_blank_values=True)
    given = dict(written)
    problems = [
        f"{where}unknown key '{name}'{nearest(name, _DEFAULTS)} (keys: {', '.join(_DEFAULTS)})"
        for name in given
        if name not in _DEFAULTS
    ]
    if len(given) < len(written):
        problems.append(f"{where}has a setting twice; write each once")
    given = {**_DEFAULTS, **given}
    for name in ("rows", "seed"):
        value = given[name]
        if not (value.isascii() and value.isdecimal() and 0 < int(value) < 10**6):
            problems.append(f"{where}{name}: {value!r}; write a whole number above 0")
    if problems:
        raise UserError(*problems)
    check_tasks([task], split=given["split"], key=where)
    return task, int(given["rows"]), int(given["seed"]), given["split"]
