"""Questions as conversations: messages, rendered by a chat template, and the tokens of that.

`prompts` calls `chat_joints` in place of its own texts. What becomes a message, which delimiters
stay and where an answer begins are lm-evaluation-harness's rules (0.4.13: apply_chat_template,
fewshot_as_multiturn, system_instruction, gen_prefix), so that a task gives the same requests there.
Rows that are conversations themselves, which the harness does not have, are put as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.gauntlet.prompts.encode import (
    JointEncoding,
    SpecialTokenReader,
    encode_joint,
    reasons,
    right_answer,
)
from llmfoundry.gauntlet.prompts.encode import right_context as right
from llmfoundry.gauntlet.questions import Chat, PromptSettings, TaskConfig, TaskRow
from llmfoundry.gauntlet.task_types import type_of
from llmfoundry.inference.requests import common_prefix

Message = Mapping[str, Any]


def check_chat(
    rows: Sequence[TaskRow], task: TaskConfig, shots: int, settings: PromptSettings
) -> None:
    """Whether rows can be put as conversations, before any text is made.

    Raises:
        UserError: there is no template, or what is asked for there is not.
    """
    if settings.chat is None:
        raise UserError(
            f"eval.icl_chat_template: rows of {task.label} are conversations, and the model has no"
            " chat template, or it is none; write zephyr, which fits any tokenizer, chatml, llama3,"
            " mpt or a Jinja file"
        )
    if settings.prompts == "foundry":
        raise UserError(
            "eval.icl_prompts: foundry knows no conversations; write native or harness, or"
            " eval.icl_chat_template=none"
        )
    if shots and any(row.messages for row in rows):
        raise UserError(
            f"{task.label}: num_fewshot: {shots}, but its rows are whole conversations; write [0]"
        )


def chat_joints(
    rows: Sequence[TaskRow],
    task: TaskConfig,
    examples: Mapping[int, tuple[int, ...]],
    tokenizer: SpecialTokenReader,
    chat: Chat,
) -> Iterator[tuple[int, list[JointEncoding]]]:
    r"""Each row of `examples` under each of its contexts, in the tokens of the rendered text.

    By zephyr: `<|user|>\n3 + 3 is<|endoftext|>\n<|assistant|>|\n6`.
    """
    reasoned = reasons(rows)
    asked: list[tuple[str, Sequence[str]]] = []
    for i, its in examples.items():
        for context in rows[i].contexts:
            messages = chat_messages(
                rows[i], context, [rows[j] for j in its], task, chat, reasoned=reasoned
            )
            text = prompt_text(messages, rows[i], chat)
            asked.append((text, _answers(rows[i], task, messages, text, chat, reasoned=reasoned)))
    if type_of(task).generates:
        joints = iter(_written(asked, tokenizer))
    else:
        joints = iter(encode_joint("", asked, tokenizer))
    for i in examples:
        yield i, [next(joints) for _ in rows[i].contexts]


def chat_messages(
    row: TaskRow,
    context: str,
    examples: Sequence[TaskRow],
    task: TaskConfig,
    chat: Chat,
    *,
    reasoned: bool,
) -> list[Message]:
    """The messages up to the answer, whose beginning is not among them.

    Args:
        row: the question.
        context: which of its contexts.
        examples: worked ones, before it.
        task: its prompt_string goes to the system's message; its delimiters stand between worked
            examples that share the user's message, and nowhere else.
        chat: see there.
        reasoned: whether answers follow a chain of thought.
    """
    if row.messages:
        has_own = row.messages[0]["role"] == "system"
        system = [] if has_own or not chat.system else [_say("system", chat.system)]
        return [*system, *row.messages]
    instruction = _delimited(chat.system, task.prompt_string, task.example_delimiter)
    system = [_say("system", instruction)] if instruction else []
    turns: list[tuple[str, str]] = []
    for example in examples:
        answer = right_answer(example, task, reasoned=reasoned)
        turns.append(
            (
                task.question_prelimiter + right(example),
                _delimited(chat.prefix, answer, " "),
            )
        )
    question = task.question_prelimiter + context
    if chat.multiturn:
        for user, answer in turns:
            system += [_say("user", user), _say("assistant", answer)]
        return [*system, _say("user", question)]
    shown = ""
    for user, answer in turns:
        apart = not chat.prefix or _touch(user, chat.prefix)
        shown += user + (task.continuation_delimiter if apart else "")
        shown += answer + task.example_delimiter
    return [*system, _say("user", shown + question)]


def prompt_text(messages: Sequence[Message], row: TaskRow, chat: Chat) -> str:
    """What the model reads: up to where its answer, or the rest of it, begins.

    A prefix is rendered as an answer that has not ended, by the rule of transformers'
    continue_final_message.
    """
    tools = list(row.tools) or None
    if not chat.prefix:
        return chat.template.render(messages, add_generation_prompt=True, tools=tools)
    text = chat.template.render([*messages, _say("assistant", chat.prefix)], tools=tools)
    at = text.rfind(chat.prefix.strip())
    if at < 0:
        raise UserError(
            f"eval.icl_gen_prefix: {chat.prefix!r} does not stand in what the chat template makes"
            " of an answer; remove it"
        )
    whole = chat.prefix.lstrip()
    kept = whole if text[at : at + len(whole)] == whole else whole.strip()
    return text[: at + len(kept)]


def lead_of(task: TaskConfig, chat: Chat) -> str:
    """What stands between a prefix and the answer; nothing where there is no prefix."""
    if chat.prefix and not chat.prefix[-1].isspace():
        return task.continuation_delimiter
    return ""


def _answers(
    row: TaskRow,
    task: TaskConfig,
    messages: Sequence[Message],
    prompt: str,
    chat: Chat,
    *,
    reasoned: bool,
) -> list[str]:
    """What may follow a prompt; a call of a tool as the template writes it."""
    if not row.reply:
        lead = lead_of(task, chat)
        return [lead + text for text in type_of(task).write(row, task, reasoned)]
    whole = chat.template.render([*messages, row.reply], tools=list(row.tools) or None)
    rest = whole.removeprefix(prompt)
    if len(rest) == len(whole):  # a template that writes an answer otherwise than it begins one
        return list(row.choices)
    rest = rest.split(chat.end_of_turn)[0] if chat.end_of_turn else rest
    return [rest.rstrip() or row.choices[0]]


def _written(
    asked: Sequence[tuple[str, Sequence[str]]], tokenizer: SpecialTokenReader
) -> Iterator[JointEncoding]:
    """Of prompts that are continued: read to their very end, white space with it."""
    heads = tokenizer.encode_batch([text for text, _ in asked])
    wholes = tokenizer.encode_batch([text + answer for text, (answer,) in asked])
    for (text, _), head, whole in zip(asked, heads, wholes, strict=True):
        border = common_prefix(head, whole)
        yield JointEncoding(text, head, [whole], border, head[:border])


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _delimited(before: str, after: str, delimiter: str) -> str:
    """Both, with the delimiter between them where no white space is."""
    if not before or not after:
        return before or after
    return before + (delimiter if _touch(before, after) else "") + after


def _touch(before: str, after: str) -> bool:
    """Whether two texts would stand together without white space between them."""
    return bool(before) and not (before[-1].isspace() or after[0].isspace())
