r"""Joint tokenization of questions and answers, with a common prefix encoded once.

Entry point: `encode_joint`, which the prompt modes call. A model is trained on complete texts, in
which one token may contain the end of a question and the start of its answer. Each answer is
therefore encoded together with its question. The tokens of the question alone only show where the
answer begins. The modes also share the functions below it: text of a few-shot example, maximal
length of an answer.
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

_FAR = 32  # characters: more than the lookahead of any tokenizer's pattern of words
_NEAR = 200  # characters before that which are searched for a place to split the text
# Frequent ends of words: between two words, or at a line end next to a letter or a digit.
_BREAK = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=[^\W_])(?=\n)|(?<=\S\n)(?=[^\W_])")
_AFTER_REASONING = 10  # tokens beyond the longest answer: _MAX_ANSWER_BUFFER_LENGTH of LLM Foundry


@dataclass(frozen=True)
class JointEncoding:
    """Tokens of a question, alone and with each of its answers.

    Attributes:
        text: the question and all text before it, without white space that belongs to the answer.
        head: tokens of `text`.
        wholes: tokens of `text`, white space and answer, for each answer.
        border: number of tokens in each of `wholes` that belong to the question.
        stripped: tokens of the question without trailing white space. Their number is the border
            in lm-evaluation-harness.
    """

    text: str
    head: list[int]
    wholes: list[list[int]]
    border: int
    stripped: list[int]


class SpecialTokenReader:
    """Adapter of a tokenizer that parses special tokens in a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer whose `encode` may treat special tokens as ordinary characters."""
        self.encode, self.encode_batch = tokenizer.encode_chat, tokenizer.encode_chat_batch


Encoder = Tokenizer | SpecialTokenReader


def encode_joint(
    before: str, questions: Sequence[tuple[str, Sequence[str]]], tokenizer: Encoder
) -> list[JointEncoding]:
    """Encode questions that follow the same text.

    Args:
        before: text that all questions follow, such as few-shot examples.
        questions: each question, with its trailing delimiter, and its answers.
        tokenizer: encodes without special tokens.
    """
    # trailing white space belongs to the answer, also if it comes before an empty question
    end = before[len(before.rstrip()) :]
    before = before.removesuffix(end)
    questions = [(end + question, answers) for question, answers in questions]
    texts = [question.rstrip() for question, _ in questions]
    spaces = [question[len(text) :] for (question, _), text in zip(questions, texts, strict=True)]

    # encode the common text and each question once, up to a safe place to split
    (shared,) = _split([before], tokenizer)
    splits = _split([shared.rest + text for text in texts], tokenizer)

    # encode the rest of each question with each answer, all in one call
    endings = []
    for split, space, (_, answers) in zip(splits, spaces, questions, strict=True):
        endings += [split.rest + space + answer for answer in answers]
    encoded_endings = iter(tokenizer.encode_batch(endings))

    # join
    result = []
    for split, text, space, (_, answers) in zip(splits, texts, spaces, questions, strict=True):
        wholes = [shared.fixed + split.fixed + next(encoded_endings) for _ in answers]
        stripped = shared.fixed + split.tokens
        joint = _joint(before + text, stripped, wholes, stripped)
        # if the border is inside a token, try the question with its white space
        if joint.border < len(joint.head) and space:
            head = shared.fixed + split.fixed + tokenizer.encode(split.rest + space)
            with_space = _joint(before + text + space, head, wholes, stripped)
            joint = with_space if with_space.border == len(head) else joint
        result.append(joint)
    return result


def _joint(
    text: str, head: list[int], wholes: list[list[int]], stripped: list[int]
) -> JointEncoding:
    r"""Find the border between a question and its answers.

    lm-evaluation-harness assigns white space at the end of a question to the answer. If the
    question alone has n tokens, its answer begins after n tokens. That rule fails if the border is
    inside a token. If that token joins question and white space (":\n"), it belongs to the
    question, as in the harness (`encode_joint` tries this). Otherwise (":)") the token is
    predicted, too. All answers are then scored from that token on, so that they follow the same
    tokens.
    """
    border = min(common_prefix(head, whole) for whole in wholes)
    return JointEncoding(text, head, wholes, border, stripped)


@dataclass(frozen=True)
class _Split:
    """Text that is continued in several ways.

    Attributes:
        tokens: tokens of the text alone.
        fixed: the first of these tokens, with which every continuation begins.
        rest: the text after `fixed`.
    """

    tokens: list[int]
    fixed: list[int]
    rest: str


def _split(texts: list[str], tokenizer: Encoder) -> list[_Split]:
    """Split each text at a place before which every continuation has the same tokens.

    This is exact. Tokens are parts of words, and a pattern finds words from left to right, with a
    lookahead of one word at most. Take the last characters of a text, at least _FAR of them. If
    the tokens of the text end with the tokens of these characters alone, a word begins there,
    whatever follows. If they do not (some tokenizers mark the start of a text), the text is not
    split.
    """
    positions = [_split_position(text) for text in texts]
    rests = [text[position:] for text, position in zip(texts, positions, strict=True)]
    encoded_texts = tokenizer.encode_batch(texts)
    encoded_rests = tokenizer.encode_batch(rests)
    result = []
    for i, text in enumerate(texts):
        tokens, ending = encoded_texts[i], encoded_rests[i]
        n = len(tokens) - len(ending)
        if positions[i] > 0 and tokens[n:] == ending:
            result.append(_Split(tokens, tokens[:n], rests[i]))
        else:
            result.append(_Split(tokens, [], text))
    return result


def _split_position(text: str) -> int:
    """Return the last end of a word at least _FAR characters before the end; 0 if there is none."""
    limit = len(text.rstrip()) - _FAR
    if limit <= 0:
        return 0
    matches = _BREAK.finditer(text, max(0, limit - _NEAR))
    return max((match.start() for match in matches if match.start() <= limit), default=0)


def families(rows: Sequence[TaskRow], task: TaskConfig) -> list[list[int]]:
    """Group the indices of rows that are few-shot examples of each other: by category, or all."""
    groups: dict[str | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(row.category if task.has_categories else None, []).append(i)
    return list(groups.values())


def reasons(rows: Sequence[TaskRow]) -> bool:
    """Return whether answers follow a chain of thought: as in LLM Foundry, if any row has one."""
    return any(row.chain_of_thought for row in rows)


def right_context(row: TaskRow) -> str:
    """Return the question of a few-shot example; for schema tasks, the correct context."""
    return row.contexts[row.gold] if len(row.contexts) > 1 else row.contexts[0]


def right_answer(row: TaskRow, task: TaskConfig, *, reasoned: bool) -> str:
    """Return the answer of a few-shot example."""
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
    """Return the maximal length of an answer in tokens: that of the task, else LLM Foundry's rule.

    The rule: the longest accepted answer of all rows with its chain of thought, and ten tokens more
    if the task has a `cot_delimiter`.

    Args:
        rows: all rows, so that the length does not depend on the subset in use.
        task: max_new_tokens and cot_delimiter.
        tokenizer: encodes without special tokens.
        room: maximal number of tokens of question and answer.
        n_special: tokens that the tokenizer adds around a text, which LLM Foundry counts.
        lead: text that is generated before an answer.

    Raises:
        UserError: an answer would leave no room for a question.
    """
    longest = task.max_new_tokens
    if longest is None:
        reasoned = reasons(rows)
        texts = []
        for row in rows:
            for alias in dict.fromkeys((row.choices[0], *row.aliases)):
                texts.append(lead + with_reasoning(row, alias, task, reasoned))
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
    """Return why the answers of a row cannot be scored; "" if they can.

    Args:
        lengths: numbers of tokens of the answers.
        room: maximal number of tokens of an answer with nothing before it.
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
