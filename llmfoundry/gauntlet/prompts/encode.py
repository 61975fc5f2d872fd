r"""Questions and answers as the tokens of one text, with what many texts begin with encoded once.

The prompt modes call `encode_joint`, and share what follows it: the text of a worked example, the
length of an answer. A model was trained on whole texts, in which a token may hold the end of a
question with the start of its answer. So each answer is encoded together with its question, and the
question alone only shows where the answer begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.gauntlet.questions import TaskConfig, TaskRow
from llmfoundry.gauntlet.task_types import type_of, with_reasoning
from llmfoundry.inference.requests import common_prefix

_FAR = 32  # characters: more than any pattern of words looks ahead
_NEAR = 200  # characters before that in which a place to part a text is looked for
# Where words most often end: between two of them, or around a line end beside a letter or a digit.
_BREAK = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=[^\W_])(?=\n)|(?<=\S\n)(?=[^\W_])")
_AFTER_REASONING = 10  # tokens beyond the longest answer: LLM Foundry's _MAX_ANSWER_BUFFER_LENGTH


@dataclass(frozen=True)
class Joint:
    """A question in tokens, alone and with each of its answers.

    Attributes:
        text: the question and all before it, as far as the answers' tokens do not spell it.
        head: tokens of `text`.
        wholes: for each answer the tokens of `text`, white space between, and answer.
        border: how many of them are the question's: the same for all answers.
        stripped: the question's tokens without white space at its end, whose number
            lm-evaluation-harness takes for the border.
    """

    text: str
    head: list[int]
    wholes: list[list[int]]
    border: int
    stripped: list[int]


class SpecialRead:
    """A tokenizer that reads the special tokens which a text spells."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take over a tokenizer, which may read them as characters otherwise."""
        self.encode, self.encode_batch = tokenizer.encode_chat, tokenizer.encode_chat_batch


Encoder = Tokenizer | SpecialRead


def encode_joint(
    before: str, asked: Sequence[tuple[str, Sequence[str]]], tokenizer: Encoder
) -> list[Joint]:
    """Encode questions that follow the same text.

    Args:
        before: what all texts begin with, such as worked examples.
        asked: each question, with the delimiter at its end, and its answers.
        tokenizer: encodes without special tokens.
    """
    # White space at the end of all that precedes an empty question belongs to the answer, too.
    end = before[len(before.rstrip()) :]
    before = before.removesuffix(end)
    asked = [(end + question, answers) for question, answers in asked]
    (shared,) = _part([before], tokenizer)
    texts = [question.rstrip() for question, _ in asked]
    spaces = [question[len(text) :] for (question, _), text in zip(asked, texts, strict=True)]
    parts = _part([shared.rest + text for text in texts], tokenizer)
    endings = tokenizer.encode_batch(
        [
            part.rest + space + answer
            for part, space, (_, answers) in zip(parts, spaces, asked, strict=True)
            for answer in answers
        ]
    )
    at = iter(endings)
    result = []
    for part, text, space, (_, answers) in zip(parts, texts, spaces, asked, strict=True):
        wholes = [shared.fixed + part.fixed + next(at) for _ in answers]
        stripped = shared.fixed + part.tokens
        joint = _joint(before + text, stripped, wholes, stripped)
        if joint.border < len(joint.head) and space:
            head = shared.fixed + part.fixed + tokenizer.encode(part.rest + space)
            spaced = _joint(before + text + space, head, wholes, stripped)
            joint = spaced if spaced.border == len(head) else joint
        result.append(joint)
    return result


def _joint(text: str, head: list[int], wholes: list[list[int]], stripped: list[int]) -> Joint:
    r"""Find the border between a question and its answers, by the harness's rule and beyond it.

    lm-evaluation-harness gives white space at a question's end to the answer, whose tokens are
    those after as many as the question alone has. That fails where the border is inside a token.
    If the token only joins question and white space (":\n"), it is the question's, as with the
    harness: `encode_joint` tries that. Else (":)") it has to be predicted too, and, so that all
    answers are scored after the same tokens, from there on for all of them.
    """
    border = min(common_prefix(head, whole) for whole in wholes)
    return Joint(text, head, wholes, border, stripped)


@dataclass(frozen=True)
class _Parted:
    """A text that others continue.

    Attributes:
        tokens: of the text alone.
        fixed: those of them that begin the tokens of every continuation.
        rest: the text that the other ones spell.
    """

    tokens: list[int]
    fixed: list[int]
    rest: str


def _part(texts: list[str], tokenizer: Encoder) -> list[_Parted]:
    """Find in each text a place up to which its tokens are those of every continuation.

    Exact: tokens are parts of words, and words are found from left to right by a pattern that looks
    ahead to the next word at most. If a text's tokens end with those of its last characters alone,
    _FAR of them or more, then a word begins there, and does so whatever follows. With a tokenizer
    that is found not to part so, as one that marks the start of a text, all is encoded whole.
    """
    places = [_place(text) for text in texts]
    rests = [text[place:] for text, place in zip(texts, places, strict=True)]
    every = zip(
        texts,
        places,
        rests,
        tokenizer.encode_batch(texts),
        tokenizer.encode_batch(rests),
        strict=True,
    )
    result = []
    for text, place, rest, tokens, ending in every:
        n = len(tokens) - len(ending)
        parts = place > 0 and tokens[n:] == ending
        result.append(_Parted(tokens, tokens[:n] if parts else [], rest if parts else text))
    return result


def _place(text: str) -> int:
    """The last break of a text that is _FAR from its end; 0: none."""
    limit = len(text.rstrip()) - _FAR
    if limit <= 0:
        return 0
    found = _BREAK.finditer(text, max(0, limit - _NEAR))
    return max((match.start() for match in found if match.start() <= limit), default=0)


def families(rows: Sequence[TaskRow], task: TaskConfig) -> list[list[int]]:
    """Indices of rows that give each other worked examples: a category's, or all."""
    groups: dict[str | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.category if task.has_categories else None, []).append(i)
    return list(groups.values())


def reasons(rows: Sequence[TaskRow]) -> bool:
    """Whether answers follow a chain of thought: in LLM Foundry, whether the file has the field."""
    return any(row.chain_of_thought for row in rows)


def right_context(row: TaskRow) -> str:
    """The question of a worked example; in schema, the context that makes sense."""
    return row.contexts[row.gold] if len(row.contexts) > 1 else row.contexts[0]


def right_answer(row: TaskRow, task: TaskConfig, *, reasoned: bool) -> str:
    """The answer of a worked example."""
    texts = type_of(task).write(row, task, reasoned)
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
            lead + with_reasoning(row, alias, task, reasoned)
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


def answer_problem(lengths: Iterable[int], room: int) -> str:
    """Why a row's answers of so many tokens cannot be scored; "": they can.

    Args:
        lengths: of its answers.
        room: tokens that an answer may have with nothing before it.
    """
    lengths = list(lengths)
    if min(lengths) < 1:
        return "an answer adds no token to the question; write a text"
    if max(lengths) > room:
        return (
            f"an answer has {max(lengths)} tokens, but max_seq_len leaves {room}; write a larger"
            " eval.icl_seq_len if the model reads more, or remove the row"
        )
    return ""
