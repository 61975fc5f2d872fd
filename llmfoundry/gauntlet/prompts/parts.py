"""What prompts are made of in both modes: the text of a worked example, the length of an answer.

`prompts` (native) and `foundry_prompts` call this. Worked examples and answers read the same in
both modes; what differs is which examples, and how text becomes tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskRow
from llmfoundry.gauntlet.tasks.gauntlet_file import TaskConfig

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

_AFTER_REASONING = 10  # tokens beyond the longest answer: LLM Foundry's _MAX_ANSWER_BUFFER_LENGTH


def families(rows: Sequence[TaskRow], task: TaskConfig) -> list[list[int]]:
    """Indices of rows that give each other worked examples: a category's, or all."""
    groups: dict[str | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.category if task.has_categories else None, []).append(i)
    return list(groups.values())


def generates(task: TaskConfig) -> bool:
    """Whether the model writes answers, rather than giving them probabilities."""
    return task.icl_task_type == "generation_task_with_answers"


def reasons(rows: Sequence[TaskRow]) -> bool:
    """Whether answers follow a chain of thought: in LLM Foundry, whether the file has the field."""
    return any(row.chain_of_thought for row in rows)


def answers(row: TaskRow, task: TaskConfig, *, reasoned: bool) -> tuple[str, ...]:
    """What may follow the question: every choice; in generation, the answer as it is to be written.

    Args:
        row: the question.
        task: its cot_delimiter.
        reasoned: what `reasons` says of all rows.
    """
    if not generates(task):
        return row.choices
    return (_written(row, row.choices[0], task, reasoned),)


def right_context(row: TaskRow) -> str:
    """The question of a worked example; in schema, the context that makes sense."""
    return row.contexts[row.gold] if len(row.contexts) > 1 else row.contexts[0]


def right_answer(row: TaskRow, task: TaskConfig, *, reasoned: bool) -> str:
    """The answer of a worked example."""
    texts = answers(row, task, reasoned=reasoned)
    return texts[row.gold] if len(texts) > 1 else texts[0]


def max_new_tokens(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    tokenizer: Tokenizer,
    *,
    room: int,
    n_special: int = 0,
    lead: str = "",
) -> int:
    """Tokens that an answer may have, by LLM Foundry's rule unless the task says.

    The longest of all rows' accepted answers with its chain of thought, and ten more if there is a
    `cot_delimiter` to be written.

    Args:
        rows: all rows, asked or not, so that a subset is asked as the whole would be.
        task: max_new_tokens and cot_delimiter.
        tokenizer: encodes without special tokens.
        room: tokens that question and answer may have.
        n_special: tokens that the tokenizer puts around a text, which LLM Foundry counts.
        lead: what is to be written before an answer.

    Raises:
        UserError: an answer would leave no room for a question.
    """
    longest = task.max_new_tokens
    if longest is None:
        reasoned = reasons(rows)
        texts = [
            lead + _written(row, alias, task, reasoned)
            for row in rows
            for alias in dict.fromkeys((row.choices[0], *row.aliases))
        ]
        longest = n_special + max(map(len, tokenizer.encode_batch(texts)))
        longest += _AFTER_REASONING if task.cot_delimiter else 0
    if longest >= room:
        raise UserError(
            f"{task.label}: an answer may take {longest} tokens (its max_new_tokens, else by its"
            f" longest answer), but {room} are left for a question and its answer; write"
            " eval.icl_generate=false, which scores right answers and writes none, a smaller"
            " max_new_tokens for the task, or a larger eval.icl_seq_len if the model reads more"
        )
    return longest


def check_answer(row: TaskRow, lengths: Iterable[int], room: int) -> None:
    """Compare the tokens of a row's answers with the room for them.

    Raises:
        UserError: one is empty, or does not fit even with nothing before it.
    """
    lengths = list(lengths)
    if min(lengths) < 1:
        raise UserError(f"{row.place}: an answer adds no token to the question; write a text")
    if max(lengths) > room:
        raise UserError(
            f"{row.place}: an answer has {max(lengths)} tokens, but max_seq_len leaves {room};"
            " write a larger eval.icl_seq_len if the model reads more, or remove the row"
        )


def _written(row: TaskRow, answer: str, task: TaskConfig, reasoned: bool) -> str:
    return f"{row.chain_of_thought}{task.cot_delimiter}{answer}" if reasoned else answer
