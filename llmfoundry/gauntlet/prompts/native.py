"""Conversion of task rows to tokenized questions: few-shot examples, prompts and scored answers.

Entry point: `questions`, which `prompts/question_cache.py` calls. Three modes differ in the tokens
of their prompts:

- `native`: as in training here, context and answer are one text after the document start.
- `harness`: the same texts, tokenized as in lm-evaluation-harness.
- `foundry`: texts and tokens of LLM Foundry (`prompts/foundry.py`).

In native and harness mode, all questions of a task have the same few-shot examples. The questions
then share a long prefix, which is tokenized and run once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.prompts.chat import chat_joints, chat_messages, check_chat
from llmfoundry.gauntlet.prompts.encode import (
    JointEncoding,
    SpecialTokenReader,
    answer_problem,
    encode_joint,
    families,
    max_new_tokens,
    reasons,
    right_answer,
    right_context,
)
from llmfoundry.gauntlet.prompts.foundry import foundry_questions
from llmfoundry.gauntlet.questions import (
    Chat,
    GenerationPrompt,
    PromptSettings,
    Question,
    ScoreRequest,
    TaskConfig,
    TaskRow,
)
from llmfoundry.gauntlet.task_types import type_of

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

_TOO_MANY = 8  # tokens that an answer in a conversation may have beyond the longest correct one


def questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    *,
    keep: Sequence[int] | None = None,
) -> list[Question]:
    """Return the tokenized questions of the rows `keep`, in that order.

    Args:
        rows: all rows of the task; few-shot examples are sampled from all of them.
        task: type, delimiters and seed of the task.
        shots: number of few-shot examples.
        settings: prompt mode, tokenizer, chat template and lengths.
        keep: indices of the rows; None: all rows.

    Raises:
        UserError: there are too few rows to sample examples from.
    """
    indices = range(len(rows)) if keep is None else keep
    if not indices:
        return []
    settings = settings.of(task)
    if uses_chat(rows, settings.chat):
        check_chat(rows, task, shots, settings)
    else:
        settings = replace(settings, chat=None)
    return MODES[settings.prompts](rows, task, shots, settings, indices)


def uses_chat(rows: Sequence[TaskRow], chat: Chat | None) -> bool:
    """Return whether the questions of these rows are rendered as conversations."""
    return any(row.messages for row in rows) or (chat is not None and chat.every_task)


def native_questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    keep: Sequence[int],
) -> list[Question]:
    r"""Return questions in native mode: question and answer are tokenized as one text.

    In `<|endoftext|>2 + 2 is 4\n3 + 3 is| 6`, the text after the bar is scored or generated.

    A question that is too long for the window loses complete examples, the first ones first, and
    then its start. A chat template renders the start of a conversation itself. If it renders
    nothing there, the prefix token is used.
    """
    examples, chat, tokenizer = _examples(rows, task, shots), settings.chat, settings.tokenizer
    start = settings.around.start if chat is None else ()
    n_new = _n_new(rows, task, settings, room=settings.seq_len - len(start))
    prefix = settings.around.prefix
    window = _Window(start, prefix, settings.seq_len, n_new, _stops(task, chat))
    reasoned = reasons(rows)
    encoded: dict[int, Question] = {}
    too_long = list(dict.fromkeys(keep))
    # drop one more example in each round, for the questions that did not fit
    for dropped in range(shots + 1):
        if not too_long:
            break
        remaining_examples = {i: examples[i][dropped:] for i in too_long}
        too_long = []
        for i, joints in _encode(rows, task, remaining_examples, tokenizer, chat):
            if window.overflow(joints) and dropped < shots:
                too_long.append(i)
            else:
                texts = type_of(task).write(rows[i], task, reasoned)
                encoded[i] = window.question(rows[i], joints, texts, dropped, tokenizer)
    return [_with_messages(encoded[i], rows, task, examples[i], chat) for i in keep]


def harness_questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    keep: Sequence[int],
) -> list[Question]:
    r"""Return questions in harness mode: the texts of native mode, tokenized as in HFLM.

    `2 + 2 is 4\n3 + 3 is| 6`, after `<s>` if the tokenizer prepends it.

    - Special tokens in a text are parsed.
    - The tokens that the tokenizer prepends come first, unless the text begins with them. If these
      and the question are empty, the prefix token is used.
    - If the question alone has n tokens, the answer is all but the first n tokens of the complete
      text. It follows the tokens of the question alone.
    - An option that is too long loses its start, independently of the other options.

    There are two differences. Tokens that a tokenizer appends are left out, because in the harness
    they displace the first token of the answer. If an answer adds no token to the question, which
    stops the harness, question and answer are split as in native mode.
    """
    examples, chat, tokenizer = _examples(rows, task, shots), settings.chat, settings.tokenizer
    seq_len, special = settings.seq_len, settings.around
    n_new = _n_new(rows, task, settings, room=seq_len)
    stops, prefix_text = _stops(task, chat), tokenizer.decode([special.prefix])
    reasoned = reasons(rows)
    encoded: dict[int, Question] = {}
    examples_of = {i: examples[i] for i in keep}
    for i, joints in _encode(rows, task, examples_of, tokenizer, chat, reads_special=True):
        # tokens of question and answer, for every option
        texts = type_of(task).write(rows[i], task, reasoned)
        firsts: list[tuple[int, ...]] = []  # tokens before each context
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # context and answer
        for joint in joints:
            has_prefix = bool(prefix_text) and joint.text.startswith(prefix_text)
            firsts.append(() if has_prefix else special.before)
            pairs += _harness_pairs(joint, firsts[-1], special.prefix)
        if problem := answer_problem([len(answer) for _, answer in pairs], seq_len):
            encoded[i] = Question(rows[i], (), problem=problem)
            continue

        # requests to score
        requests = [
            ScoreRequest((*context, *answer)[-seq_len - 1 : -1], answer, text)
            for (context, answer), text in zip(pairs, itertools.cycle(texts), strict=False)
        ]
        too_long = any(len(context) + len(answer) > seq_len + 1 for context, answer in pairs)

        # prompt to generate from
        prompt = None
        if n_new:
            head = (*firsts[0], *joints[0].head) or (special.prefix,)
            tokens = head[n_new - seq_len :]
            too_long |= len(tokens) < len(head)
            text = joints[0].text if len(tokens) == len(head) else tokenizer.decode(tokens)
            prompt = GenerationPrompt(tokens, text, stops, n_new)
        encoded[i] = Question(rows[i], tuple(requests), prompt, 0, too_long)
    return [_with_messages(encoded[i], rows, task, examples[i], chat) for i in keep]


def _harness_pairs(
    joint: JointEncoding, before: tuple[int, ...], prefix: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the tokens of question and answer for each answer.

    Args:
        joint: the tokenized question with its answers.
        before: special tokens before the text.
        prefix: token in place of an empty question.
    """
    n = len(joint.stripped)
    adds_no_token = any(len(whole) <= n for whole in joint.wholes)
    for whole in joint.wholes:
        question = whole[: joint.border] if adds_no_token else joint.stripped
        answer = tuple(whole[len(question) :])
        context = (*before, *question)
        if not context and answer[:1] == (prefix,):
            context, answer = answer[:1], answer[1:]
        yield context or (prefix,), answer


MODES: dict[str, Callable[..., list[Question]]] = {
    "native": native_questions,
    "harness": harness_questions,
    "foundry": foundry_questions,
}
"""Prompt modes by name. Results record the name of their mode."""


@dataclass(frozen=True)
class _Window:
    """Limits of the model's input, and conversion of joints to questions within them.

    Attributes:
        start: tokens before every text; they are never cut.
        prefix: token before an answer if no other token is there.
        seq_len: maximal input length in tokens.
        n_new: tokens that a prompt leaves free for generation; 0: nothing is generated.
        stops: stop texts of prompts.
    """

    start: tuple[int, ...]
    prefix: int
    seq_len: int
    n_new: int
    stops: tuple[str, ...]

    @property
    def room(self) -> int:
        """Return the maximal number of tokens of question and answer.

        The last token of the answer is predicted but not read.
        """
        return self.seq_len - len(self.start) + 1

    def overflow(self, joints: Sequence[JointEncoding]) -> int:
        """Return by how many tokens the longest option or the prompt exceeds the limits."""
        longest = max(len(whole) for joint in joints for whole in joint.wholes)
        excess = longest - self.room
        if self.n_new:
            prompt_length = len(self.start) + len(joints[0].head) + self.n_new
            excess = max(excess, prompt_length - self.seq_len)
        return max(0, excess)

    def question(
        self,
        row: TaskRow,
        joints: Sequence[JointEncoding],
        texts: Sequence[str],
        dropped: int,
        tokenizer: Tokenizer,
    ) -> Question:
        """Return the question of a row, with its start cut to fit.

        Args:
            row: the row.
            joints: tokens of each of its contexts with all answers.
            texts: texts of the answers.
            dropped: number of few-shot examples that were dropped.
            tokenizer: decodes prompts that are cut.
        """
        options = [(j, whole, t) for j in joints for whole, t in zip(j.wholes, texts, strict=True)]
        lengths = [len(whole) - joint.border for joint, whole, _ in options]
        if problem := answer_problem(lengths, min(self.room, self.seq_len)):
            return Question(row, (), problem=problem)
        excess = self.overflow(joints)
        requests = []
        for joint, whole, text in options:
            # Answers to one context lose the same number of tokens, so that all follow the same
            # tokens. Several contexts differ anyway, and each loses only what it must: a long one
            # would cost a short one everything.
            is_alone = len(joints) == 1
            cut = min(excess, joint.border) if is_alone else max(0, len(whole) - self.room)
            first = self.start or (self.prefix,) * (cut == joint.border)
            tokens = (*first, *whole[cut:-1])
            requests.append(ScoreRequest(tokens, tuple(whole[joint.border :]), text))
        prompt = self._prompt(joints[0], excess, tokenizer) if self.n_new else None
        return Question(row, tuple(requests), prompt, dropped, excess > 0)

    def _prompt(self, joint: JointEncoding, cut: int, tokenizer: Tokenizer) -> GenerationPrompt:
        head = joint.head[cut:]
        text = tokenizer.decode(head) if cut else joint.text
        tokens = (*self.start, *head) or (self.prefix,)
        return GenerationPrompt(tokens, text, self.stops, self.n_new)


def _stops(task: TaskConfig, chat: Chat | None) -> tuple[str, ...]:
    """Return the stop texts of an answer, including the end of a turn."""
    turn = "" if chat is None else chat.end_of_turn
    stops = (*task.early_stopping_criteria, turn)
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def _with_messages(
    question: Question,
    rows: Sequence[TaskRow],
    task: TaskConfig,
    examples: Sequence[int],
    chat: Chat | None,
) -> Question:
    """Add the messages to the prompt of a question, for a server that applies its own template."""
    if chat is None or question.prompt is None:
        return question
    row, example_rows = question.row, [rows[j] for j in examples[question.dropped :]]
    context, reasoned = row.contexts[0], reasons(rows)
    messages = chat_messages(row, context, example_rows, task, chat, reasoned=reasoned)
    prompt = replace(question.prompt, messages=tuple(messages), tools=row.tools)
    return replace(question, prompt=prompt)


def _n_new(
    rows: Sequence[TaskRow], task: TaskConfig, settings: PromptSettings, *, room: int
) -> int:
    """Return `max_new_tokens` of the task; 0 if nothing is generated.

    White space at the end of the delimiter is generated by the model (see `encode_joint`). In a
    conversation there is room for the end of the turn and for _TOO_MANY more tokens, so that a
    model which continues after a correct answer is detected.
    """
    if not (type_of(task).generates and settings.writes):
        return 0
    tokenizer, chat = settings.tokenizer, settings.chat
    if chat is not None:
        end = len(tokenizer.encode_chat(chat.end_of_turn)) + _TOO_MANY
        return max_new_tokens(rows, task, tokenizer, room=room, n_special=end)
    lead = task.continuation_delimiter[len(task.continuation_delimiter.rstrip()) :]
    return max_new_tokens(rows, task, tokenizer, room=room, lead=lead)


def _examples(rows: Sequence[TaskRow], task: TaskConfig, shots: int) -> list[tuple[int, ...]]:
    """Sample the few-shot examples of each row: the same for all rows of a family.

    An example that equals the row is replaced with a spare one.

    Raises:
        UserError: a family is too small.
    """
    result: list[tuple[int, ...]] = [()] * len(rows)
    for family in families(rows, task) if shots else []:
        if shots >= len(family):
            category = f" of category {rows[family[0]].category}" if task.has_categories else ""
            raise UserError(
                f"{task.label}: num_fewshot: {shots}, but there are {len(family)} rows{category},"
                f" one of which is the question; write {len(family) - 1} or less"
            )
        # examples of the family, then spares in random order, for duplicate rows
        rng = random.Random(task.fewshot_random_seed)
        sampled = rng.sample(family, shots + 1)
        others = [i for i in family if i not in sampled]
        order = [*sampled, *rng.sample(others, len(others))]
        usual = tuple(sampled[:shots])
        usual_contents = {_content(rows[i]) for i in usual}
        for i in family:
            if _content(rows[i]) not in usual_contents:
                result[i] = usual
                continue
            different = (j for j in order if _content(rows[j]) != _content(rows[i]))
            result[i] = tuple(itertools.islice(different, shots))
            if len(result[i]) < shots:
                raise UserError(
                    f"{task.label}: num_fewshot: {shots}, but {len(result[i])} rows differ from"
                    f" {rows[i].place}; write {len(result[i])} or less"
                )
    return result


def _content(row: TaskRow) -> Hashable:
    """Return a key that is equal for rows with the same question and answer."""
    return row.contexts, row.choices, row.gold


def _encode(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    examples: Mapping[int, tuple[int, ...]],
    tokenizer: Tokenizer,
    chat: Chat | None,
    *,
    reads_special: bool = False,
) -> Iterator[tuple[int, list[JointEncoding]]]:
    """Yield each row of `examples` with the tokens of each of its contexts.

    Args:
        rows: all rows of the task.
        task: type and delimiters of the task.
        examples: indices of the few-shot examples, by index of the row. Rows with the same examples
            are encoded together.
        tokenizer: tokenizer of the model.
        chat: chat template; None: plain prompts.
        reads_special: parse special tokens in texts; those of a template are always parsed.
    """
    if chat is not None:
        yield from chat_joints(rows, task, examples, SpecialTokenReader(tokenizer), chat)
        return
    encoder = SpecialTokenReader(tokenizer) if reads_special else tokenizer
    reasoned = reasons(rows)

    # group rows by examples
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, example_indices in examples.items():
        groups.setdefault(example_indices, []).append(i)

    # encode each group after its common text
    for example_indices, members in groups.items():
        before = _preamble([rows[j] for j in example_indices], task, reasoned)
        group_questions = []
        for i in members:
            answers = type_of(task).write(rows[i], task, reasoned)
            for context in rows[i].contexts:
                group_questions.append((_delimited(context, task, before), answers))
        joints = iter(encode_joint(before, group_questions, encoder))
        for i in members:
            yield i, [next(joints) for _ in rows[i].contexts]


def _preamble(examples: Sequence[TaskRow], task: TaskConfig, reasoned: bool) -> str:
    """Return the text before a question: prompt string and few-shot examples."""
    text = task.prompt_string
    for row in examples:
        text += _delimited(right_context(row), task, text)
        text += right_answer(row, task, reasoned=reasoned)
    return text


def _delimited(context: str, task: TaskConfig, before: str) -> str:
    """Return a question with its delimiters; the first one in a text has no example delimiter."""
    delimiter = task.example_delimiter if before else ""
    return delimiter + task.question_prelimiter + context + task.continuation_delimiter
