"""`instruction_rows`: generated chats as rows of supervised data, in three formats.

`data.supervised` reads them as the source `instructions`, and `gauntlet.generated.chats` draws
exchanges for its tasks. The idea: a row is a pure function of task, seed, split and number, and its
split is decided by a hash of what is asked. So no question of the splits `held_out` and `lengths`
is ever in `train`, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.data.instructions import answer_formats, knowledge, lists, sums, tools
from llmfoundry.data.instructions.exchange import LENGTHS, UNSEEN_LENGTHS, Exchange, Message
from llmfoundry.errors import UserError
from llmfoundry.recipe.values.checks import nearest

HELD_OUT = 0.1
"""Share of all questions that are never in training."""
SPLITS = ("train", "held_out", "lengths")
"""train; held_out: other questions of the same kind; lengths: lists of a length never trained."""
FORMATS = ("chat", "preference", "unpaired")

LIST_TASKS: dict[str, Callable[[random.Random, Sequence[int]], Exchange]] = {
    "reverse": lists.reverse,
    "sort": lists.sort,
    "largest": lists.largest,
    "count": lists.word_count,
    "nth": lists.nth,
}
OTHER_TASKS: dict[str, Callable[[random.Random], Exchange]] = {
    "recall": knowledge.recall,
    "arithmetic": sums.two_digit_sum,
    "json": answer_formats.json_object,
    "upper": answer_formats.upper,
    "repeat": answer_formats.repeat,
    "constraints": answer_formats.constraints,
    "tool_call": tools.tool_call,
    "world": knowledge.world,
}
TASKS = (*LIST_TASKS, *OTHER_TASKS)

_OPENINGS = ("Sure!", "Good question.", "Let me see.", "Of course, I can do that.")
_CLOSINGS = ("I hope that this helps.", "Is there anything else?", "That is the answer, I think.")


def instruction_rows(
    tasks: Sequence[str],
    n: int,
    *,
    seed: int,
    format: str = "chat",
    split: str = "train",
    key: str = "data.",
) -> Iterator[dict[str, Any]]:
    """Rows of the tasks, interleaved.

    Args:
        tasks: names in `TASKS`; none: all.
        n: number of rows; equal ones may be among them where a task has few questions.
        seed: decides every draw.
        format: chat gives {"messages"}; preference {"prompt", "chosen", "rejected"}, the latter
            wrong or rambling; unpaired {"prompt", "completion", "label"}, every other one right.
            Where tools may be called, also {"tools"}.
        split: train, held_out or lengths; the latter has only tasks on lists.
        key: what begins the line of an error.

    Raises:
        UserError: a task, format or split that there is not.
    """
    names = check_tasks(tasks, split=split, key=key)
    if format not in FORMATS:
        raise UserError(
            f"{key}format: {format}{nearest(format, FORMATS)}; instructions are"
            f" {', '.join(FORMATS)}"
        )
    for number in range(n):
        yield instruction_row(
            names[number % len(names)], number // len(names), seed=seed, format=format, split=split
        )


def check_tasks(tasks: Sequence[str], *, split: str = "train", key: str = "data.") -> list[str]:
    """The tasks' names, or those of all; see `instruction_rows` for what is raised."""
    if split not in SPLITS:
        raise UserError(f"{key}split: {split}{nearest(split, SPLITS)}; write {', '.join(SPLITS)}")
    known = tuple(LIST_TASKS) if split == "lengths" else TASKS
    wrong = [
        f"{key}tasks: {name!r} is not a task{nearest(str(name), known)} ({', '.join(known)})"
        for name in tasks
        if name not in known
    ]
    wrong += [f"{key}tasks: {name!r} is there twice; write it once" for name in _repeated(tasks)]
    if wrong:
        raise UserError(*wrong)
    return list(tasks) or list(known)


def instruction_row(
    task: str, number: int, *, seed: int, format: str, split: str = "train"
) -> dict[str, Any]:
    """Row `number` of a task."""
    exchange = draw_exchange(task, number, seed=seed, split=split)
    row = _WRITERS[format](exchange, number, random.Random(f"answers {task} {seed} {number}"))
    if exchange.tools:
        row["tools"] = [dict(tool) for tool in exchange.tools]
    return row


def draw_exchange(task: str, number: int, *, seed: int, split: str = "train") -> Exchange:
    """Exchange `number` of a task; the first of its draws that is of the split."""
    attempt = 0
    while True:
        rng = random.Random(f"{task} {seed} {split} {number} {attempt}")
        if task in LIST_TASKS:
            exchange = LIST_TASKS[task](rng, UNSEEN_LENGTHS if split == "lengths" else LENGTHS)
        else:
            exchange = OTHER_TASKS[task](rng)
        if split == "lengths" or is_held_out(exchange) == (split == "held_out"):
            return exchange
        attempt += 1


def is_held_out(exchange: Exchange) -> bool:
    """Whether training never asks this; decided by all that is asked, and by nothing else."""
    asked = json.dumps([exchange.messages, exchange.tools], sort_keys=True)
    digest = hashlib.blake2b(asked.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT * 2**64


def right_message(exchange: Exchange) -> Message:
    """The assistant's right answer."""
    return _message(exchange.answer, exchange.call)


def _chat(exchange: Exchange, number: int, rng: random.Random) -> dict[str, Any]:
    return {"messages": [*_copies(exchange.messages), right_message(exchange)]}


def _preference(exchange: Exchange, number: int, rng: random.Random) -> dict[str, Any]:
    return {
        "prompt": _copies(exchange.messages),
        "chosen": [right_message(exchange)],
        "rejected": [_worse(exchange, rng)],
    }


def _unpaired(exchange: Exchange, number: int, rng: random.Random) -> dict[str, Any]:
    label = number % 2 == 0
    answer = right_message(exchange) if label else _worse(exchange, rng)
    return {"prompt": _copies(exchange.messages), "completion": [answer], "label": label}


_WRITERS = {"chat": _chat, "preference": _preference, "unpaired": _unpaired}


def _worse(exchange: Exchange, rng: random.Random) -> Message:
    """A wrong answer, or as often the right one inside of talk that nobody asked for."""
    if rng.random() < 0.5 or exchange.call is not None:
        return _message(exchange.wrong, exchange.wrong_call)
    talk = (rng.choice(_OPENINGS), exchange.answer, rng.choice(_CLOSINGS))
    return _message(" ".join(talk), None)


def _message(content: str, call: Mapping[str, Any] | None) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if call is not None:
        message["tool_calls"] = [{"type": "function", "function": dict(call)}]
    return message


def _copies(messages: Sequence[Message]) -> list[Message]:
    return [dict(message) for message in messages]


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if list(names).count(name) > 1]
