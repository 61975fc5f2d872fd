"""From rows to questions in tokens: worked examples, prompt texts, and what is to be scored.

`prompts/question_cache.py` calls `questions`. Three modes differ in their prompts' tokens. `native`
gives a model what it met in training here: context and answer as one text after `<eos>`. `harness`
makes of the same texts the tokens that lm-evaluation-harness does. In both the worked examples are
the same for all questions of a task, so that questions share a long prefix, tokenized and run once.
`foundry` reproduces LLM Foundry's texts and tokens (`prompts/foundry.py`).
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
    Joint,
    SpecialRead,
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
    Prompt,
    PromptSettings,
    Question,
    Request,
    TaskConfig,
    TaskRow,
)
from llmfoundry.gauntlet.task_types import type_of

if TYPE_CHECKING:
    from llmfoundry.data.text.tokenizer import Tokenizer

_TOO_MANY = 8  # tokens that an answer in a conversation may have beyond the longest right one


def questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    *,
    keep: Sequence[int] | None = None,
) -> list[Question]:
    """The rows `keep`, in its order, tokenized.

    Args:
        rows: all rows of the task; worked examples are drawn as if all were asked.
        task: its type, delimiters and seed.
        shots: number of worked examples.
        settings: how tasks become prompts.
        keep: indices of the rows to ask; unset: all.

    Raises:
        UserError: too few rows to draw examples from.
    """
    asked = range(len(rows)) if keep is None else keep
    if not asked:
        return []
    settings = settings.of(task)
    if uses_chat(rows, settings.chat):
        check_chat(rows, task, shots, settings)
    else:
        settings = replace(settings, chat=None)
    return MODES[settings.prompts](rows, task, shots, settings, asked)


def uses_chat(rows: Sequence[TaskRow], chat: Chat | None) -> bool:
    """Whether these rows are put as conversations."""
    return any(row.messages for row in rows) or (chat is not None and chat.every_task)


def native_questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    keep: Sequence[int],
) -> list[Question]:
    r"""`questions` with joint tokenization, examples fixed per task, and none cut in the middle.

    `<|endoftext|>2 + 2 is 4\n3 + 3 is| 6`: what is behind the bar is scored, or to be written.

    A question too long for the window loses whole examples from the first, then its start. A chat
    template writes itself what comes before a conversation; where nothing does, the prefix token.
    """
    examples, chat, tokenizer = _examples(rows, task, shots), settings.chat, settings.tokenizer
    start = settings.around.start if chat is None else ()
    n_new = _n_new(rows, task, settings, room=settings.seq_len - len(start))
    prefix = settings.around.prefix
    window = _Window(start, prefix, settings.seq_len, n_new, _stops(task, chat))
    reasoned = reasons(rows)
    done: dict[int, Question] = {}
    waiting = list(dict.fromkeys(keep))
    for dropped in range(shots + 1):
        if not waiting:
            break
        kept = {i: examples[i][dropped:] for i in waiting}
        waiting = []
        for i, joints in _encode(rows, task, kept, tokenizer, chat):
            if window.overflow(joints) and dropped < shots:
                waiting.append(i)
            else:
                texts = type_of(task).write(rows[i], task, reasoned)
                done[i] = window.question(rows[i], joints, texts, dropped, tokenizer)
    return [_spoken(done[i], rows, task, examples[i], chat) for i in keep]


def harness_questions(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    shots: int,
    settings: PromptSettings,
    keep: Sequence[int],
) -> list[Question]:
    r"""`questions` with native's texts, in the tokens of lm-evaluation-harness's HFLM.

    `2 + 2 is 4\n3 + 3 is| 6`, and `<s>` first where the tokenizer puts it.

    Special tokens that a text spells are read. What the tokenizer puts before a text comes first,
    unless the text spells it; where that and the question are nothing, the prefix token. The answer
    is what the whole has more tokens than the question, and follows the tokens of the question
    alone. What is too long loses its start, of each option on its own. Not followed: what a
    tokenizer puts behind a text, which in the harness takes the place of the answer's first token;
    and answers without a token of their own, which stop it: there native's border holds.
    """
    examples, chat, tokenizer = _examples(rows, task, shots), settings.chat, settings.tokenizer
    seq_len, special = settings.seq_len, settings.around
    n_new = _n_new(rows, task, settings, room=seq_len)
    stops, spelled = _stops(task, chat), tokenizer.decode([special.prefix])
    reasoned = reasons(rows)
    done: dict[int, Question] = {}
    asked = {i: examples[i] for i in keep}
    for i, joints in _encode(rows, task, asked, tokenizer, chat, reads_special=True):
        texts = type_of(task).write(rows[i], task, reasoned)
        before = [() if spelled and j.text.startswith(spelled) else special.before for j in joints]
        pairs = [
            pair
            for joint, first in zip(joints, before, strict=True)
            for pair in _harness_pairs(joint, first, special.prefix)
        ]
        if problem := answer_problem([len(answer) for _, answer in pairs], seq_len):
            done[i] = Question(rows[i], (), problem=problem)
            continue
        requests = [
            Request((*context, *answer)[-seq_len - 1 : -1], answer, text)
            for (context, answer), text in zip(pairs, itertools.cycle(texts), strict=False)
        ]
        too_long = any(len(context) + len(answer) > seq_len + 1 for context, answer in pairs)
        prompt = None
        if n_new:
            head = (*before[0], *joints[0].head) or (special.prefix,)
            kept = head[n_new - seq_len :]
            too_long |= len(kept) < len(head)
            text = joints[0].text if len(kept) == len(head) else tokenizer.decode(kept)
            prompt = Prompt(kept, text, stops, n_new)
        done[i] = Question(rows[i], tuple(requests), prompt, 0, too_long)
    return [_spoken(done[i], rows, task, examples[i], chat) for i in keep]


def _harness_pairs(
    joint: Joint, before: tuple[int, ...], prefix: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A question's tokens and an answer's, for each answer; `before`: what comes first."""
    n = len(joint.stripped)
    lost = any(len(whole) <= n for whole in joint.wholes)
    for whole in joint.wholes:
        question = whole[: joint.border] if lost else joint.stripped
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
"""The ways to make prompts; results name the one they were made with."""


@dataclass(frozen=True)
class _Window:
    """What fits into the model.

    Attributes:
        start: tokens before every text, which are never cut.
        prefix: the token where nothing else would be before an answer.
        seq_len: tokens of an input.
        n_new: of which a prompt leaves free; 0 where nothing is generated.
        stops: for prompts.
    """

    start: tuple[int, ...]
    prefix: int
    seq_len: int
    n_new: int
    stops: tuple[str, ...]

    @property
    def room(self) -> int:
        """Tokens of question and answer; the answer's last is not read."""
        return self.seq_len - len(self.start) + 1

    def overflow(self, joints: Sequence[Joint]) -> int:
        """Tokens too many, of the longest option or of the prompt."""
        over = max(len(whole) for joint in joints for whole in joint.wholes) - self.room
        if self.n_new:
            over = max(over, len(self.start) + len(joints[0].head) + self.n_new - self.seq_len)
        return max(0, over)

    def question(
        self,
        row: TaskRow,
        joints: Sequence[Joint],
        texts: Sequence[str],
        dropped: int,
        tokenizer: Tokenizer,
    ) -> Question:
        """Cut the start off where need be, and wrap up.

        Args:
            row: the row.
            joints: of each of its contexts.
            texts: the answers that each of them has.
            dropped: worked examples that have given way.
            tokenizer: spells prompts that are cut.
        """
        options = [(j, whole, t) for j in joints for whole, t in zip(j.wholes, texts, strict=True)]
        lengths = [len(whole) - joint.border for joint, whole, _ in options]
        if problem := answer_problem(lengths, min(self.room, self.seq_len)):
            return Question(row, (), problem=problem)
        over = self.overflow(joints)
        requests = []
        for joint, whole, text in options:
            # Choices lose equally much, to follow the same tokens; contexts differ anyway, and a
            # short one might lose all of itself to a long one.
            cut = min(over, joint.border) if len(joints) == 1 else max(0, len(whole) - self.room)
            first = self.start or (self.prefix,) * (cut == joint.border)
            tokens = (*first, *whole[cut:-1])
            requests.append(Request(tokens, tuple(whole[joint.border :]), text))
        prompt = self._prompt(joints[0], over, tokenizer) if self.n_new else None
        return Question(row, tuple(requests), prompt, dropped, over > 0)

    def _prompt(self, joint: Joint, cut: int, tokenizer: Tokenizer) -> Prompt:
        head = joint.head[cut:]
        text = tokenizer.decode(head) if cut else joint.text
        tokens = (*self.start, *head) or (self.prefix,)
        return Prompt(tokens, text, self.stops, self.n_new)


def _stops(task: TaskConfig, chat: Chat | None) -> tuple[str, ...]:
    """Texts before which an answer ends, the end of its turn among them."""
    turn = "" if chat is None else chat.end_of_turn
    stops = (*task.early_stopping_criteria, turn)
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def _spoken(
    question: Question,
    rows: Sequence[TaskRow],
    task: TaskConfig,
    examples: Sequence[int],
    chat: Chat | None,
) -> Question:
    """The question with its prompt's messages, for a server that has a template of its own."""
    if chat is None or question.prompt is None:
        return question
    row, its = question.row, [rows[j] for j in examples[question.dropped :]]
    messages = chat_messages(row, row.contexts[0], its, task, chat, reasoned=reasons(rows))
    prompt = replace(question.prompt, messages=tuple(messages), tools=row.tools)
    return replace(question, prompt=prompt)


def _n_new(
    rows: Sequence[TaskRow], task: TaskConfig, settings: PromptSettings, *, room: int
) -> int:
    """`max_new_tokens`, 0 where nothing is to be written.

    What the delimiter ends in is left to the model: see joint_tokens. In a conversation there is
    room for the end of the turn, and for a few tokens too many: what writes on after a right answer
    shows.
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
    """Each row's worked examples: its family's; one that is the row again gives way to a spare.

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
        rng = random.Random(task.fewshot_random_seed)
        drawn = rng.sample(family, shots + 1)
        others = [i for i in family if i not in drawn]
        order = [*drawn, *rng.sample(others, len(others))]  # spares, for rows that stand twice
        usual = tuple(drawn[:shots])
        shown = {_content(rows[i]) for i in usual}
        for i in family:
            if _content(rows[i]) not in shown:
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
    """Equal for rows of which one would show the other's answer."""
    return row.contexts, row.choices, row.gold


def _encode(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    examples: Mapping[int, tuple[int, ...]],
    tokenizer: Tokenizer,
    chat: Chat | None,
    *,
    reads_special: bool = False,
) -> Iterator[tuple[int, list[Joint]]]:
    """Each row of `examples` under each context; those with the same examples together.

    With `reads_special` the special tokens that a text spells are read; a template's always are.
    """
    if chat is not None:
        yield from chat_joints(rows, task, examples, SpecialRead(tokenizer), chat)
        return
    encoder = SpecialRead(tokenizer) if reads_special else tokenizer
    reasoned = reasons(rows)
    together: dict[tuple[int, ...], list[int]] = {}
    for i, its in examples.items():
        together.setdefault(its, []).append(i)
    for its, members in together.items():
        before = _preamble([rows[j] for j in its], task, reasoned)
        asked = [
            (_opened(context, task, before), type_of(task).write(rows[i], task, reasoned))
            for i in members
            for context in rows[i].contexts
        ]
        joints = iter(encode_joint(before, asked, encoder))
        for i in members:
            yield i, [next(joints) for _ in rows[i].contexts]


def _preamble(examples: Sequence[TaskRow], task: TaskConfig, reasoned: bool) -> str:
    """The text before a question: prompt string and worked examples."""
    text = task.prompt_string
    for row in examples:
        text += _opened(right_context(row), task, text)
        text += right_answer(row, task, reasoned=reasoned)
    return text


def _opened(context: str, task: TaskConfig, before: str) -> str:
    delimiter = task.example_delimiter if before else ""
    return delimiter + task.question_prelimiter + context + task.continuation_delimiter
