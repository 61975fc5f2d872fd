"""From rows to tokens: worked examples, prompt texts, and what is to be scored.

`Gauntlet` calls `questions`. Tokenisation rule ("native"): context and answer are encoded as one
text, as the model saw text in training, after the `<eos>` that every document starts with. The
answer's tokens begin where this encoding leaves that of the context alone; the choices of a
question share the earliest such place, so that all are scored after the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.rows import Row
from llmfoundry.gauntlet.tasks import TaskConfig

if TYPE_CHECKING:
    from llmfoundry.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """One forward pass's worth of work.

    Attributes:
        tokens: what the model reads: `<eos>`, context, answer without its last token.
        targets: the answer's tokens; the last len(targets) places of `tokens` predict them.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A row as the model meets it: a request for each choice.

    Attributes:
        requests: one for each choice; exactly one in language_modeling.
        gold: index of the right one.
        truncated: the start of the context was cut off to fit into the model's window.
        place: file and line of the row.
    """

    requests: tuple[Request, ...]
    gold: int
    truncated: bool
    place: str


def questions(
    rows: list[Row],
    task: TaskConfig,
    shots: int,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    max_rows: int | None = None,
) -> list[Question]:
    """The first `max_rows` rows, tokenised; worked examples are drawn from all rows.

    Args:
        rows: all rows of the task.
        task: its delimiters and seed.
        shots: number of worked examples.
        tokenizer: encodes without special tokens.
        seq_len: longest input in tokens; longer contexts lose their start.
        max_rows: unset: all rows.

    Raises:
        UserError: too few rows to draw examples from; an answer longer than seq_len.
    """
    asked = rows[:max_rows]
    contexts = [prompt(rows, i, task, shots) for i in range(len(asked))]
    heads = tokenizer.encode_batch(contexts)
    wholes = tokenizer.encode_batch(
        [text + choice for text, row in zip(contexts, asked, strict=True) for choice in row.choices]
    )
    result, at = [], 0
    for row, head in zip(asked, heads, strict=True):
        choices = wholes[at : at + len(row.choices)]
        at += len(row.choices)
        result.append(_question(row, head, choices, tokenizer.eos_id, seq_len))
    return result


def prompt(rows: list[Row], index: int, task: TaskConfig, shots: int) -> str:
    """All text before the answer to rows[index], delimiter included."""
    text = task.prompt_string
    for example in [*_examples(rows, index, task, shots), None]:
        if text:
            text += task.example_delimiter
        context = rows[index].context if example is None else example.context
        text += task.question_prelimiter + context + task.continuation_delimiter
        text += "" if example is None else example.answer
    return text


def _examples(rows: list[Row], index: int, task: TaskConfig, shots: int) -> list[Row]:
    """The task's fixed examples; one that is the question itself gives way to a spare."""
    if shots >= len(rows):
        raise UserError(
            f"{task.label}: num_fewshot: {shots}, but there are {len(rows)} rows, one of which is"
            f" the question; write {len(rows) - 1} or less"
        )
    drawn = random.Random(task.fewshot_random_seed).sample(range(len(rows)), shots + 1)
    return [rows[i] for i in drawn if i != index][:shots]


def _question(
    row: Row, head: Sequence[int], wholes: Sequence[Sequence[int]], eos_id: int, seq_len: int
) -> Question:
    """Split, cut and wrap the token lists of one row's choices."""
    split = min(_common_prefix(head, whole) for whole in wholes)
    longest = max(len(whole) for whole in wholes)
    if longest - split > seq_len:
        raise UserError(
            f"{row.place}: an answer has {longest - split} tokens, but max_seq_len is {seq_len};"
            " raise max_seq_len or remove the row"
        )
    cut = max(0, longest - seq_len)  # of all choices, so that they follow the same context
    requests = []
    for whole in wholes:
        if len(whole) <= split:
            raise UserError(f"{row.place}: a choice adds no token to the context; write a text")
        tokens = (eos_id, *whole[cut:-1])
        requests.append(Request(tokens, tuple(whole[split:])))
    return Question(tuple(requests), row.gold, cut > 0, row.place)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists share at their starts."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
