"""Questions as conversations: messages, rendered by a chat template and tokenized.

Entry point: `chat_joints`, which `prompts/native.py` calls instead of building plain text. The
messages, their delimiters and the start of an answer follow the rules of lm-evaluation-harness
(0.4.13: apply_chat_template, fewshot_as_multiturn, system_instruction, gen_prefix), so that a task
has the same requests there. Rows that are conversations, which the harness does not support, are
rendered as they are.
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
    """Check that rows can be rendered as conversations.

    Raises:
        UserError: there is no template, or the prompt mode or few-shot examples do not allow it.
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
    r"""Yield each row of `examples` with the tokens of each of its contexts.

    With zephyr: `<|user|>\n3 + 3 is<|endoftext|>\n<|assistant|>|\n6`.

    Args:
        rows: all rows of the task.
        task: type and delimiters of the task.
        examples: indices of the few-shot examples, by index of the row.
        tokenizer: parses special tokens.
        chat: chat template and settings.
    """
    # render the prompt and the answers of every context
    reasoned = reasons(rows)
    questions: list[tuple[str, Sequence[str]]] = []
    for i, example_indices in examples.items():
        row, example_rows = rows[i], [rows[j] for j in example_indices]
        for context in row.contexts:
            messages = chat_messages(row, context, example_rows, task, chat, reasoned=reasoned)
            text = prompt_text(messages, row, chat)
            answers = _answers(row, task, messages, text, chat, reasoned=reasoned)
            questions.append((text, answers))

    # tokenize all at once
    if type_of(task).generates:
        joints = iter(_joints_to_generate(questions, tokenizer))
    else:
        joints = iter(encode_joint("", questions, tokenizer))
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
    """Return the messages before the answer.

    Args:
        row: the question.
        context: one of its contexts.
        examples: few-shot examples.
        task: its prompt_string is part of the system message; its delimiters are only used between
            few-shot examples in one user message.
        chat: chat template and settings.
        reasoned: whether answers follow a chain of thought.
    """
    # a row that is a conversation; its own system message takes precedence
    if row.messages:
        has_system = row.messages[0]["role"] == "system"
        system = [] if has_system or not chat.system else [_message("system", chat.system)]
        return [*system, *row.messages]

    # system message, and turns of the examples
    instruction = _delimited(chat.system, task.prompt_string, task.example_delimiter)
    messages = [_message("system", instruction)] if instruction else []
    turns: list[tuple[str, str]] = []
    for example in examples:
        example_question = task.question_prelimiter + right(example)
        answer = right_answer(example, task, reasoned=reasoned)
        turns.append((example_question, _delimited(chat.prefix, answer, " ")))
    question = task.question_prelimiter + context

    # one pair of messages per example, or all examples in one user message
    if chat.multiturn:
        for user, answer in turns:
            messages += [_message("user", user), _message("assistant", answer)]
        return [*messages, _message("user", question)]
    text = ""
    for user, answer in turns:
        needs_delimiter = not chat.prefix or _touch(user, chat.prefix)
        text += user + (task.continuation_delimiter if needs_delimiter else "")
        text += answer + task.example_delimiter
    return [*messages, _message("user", text + question)]


def prompt_text(messages: Sequence[Message], row: TaskRow, chat: Chat) -> str:
    """Return the rendered text before the answer, including the prefix of the answer.

    The prefix is rendered as an answer without an end, as with continue_final_message of
    transformers.

    Raises:
        UserError: the rendered text does not contain the prefix.
    """
    tools = list(row.tools) or None
    if not chat.prefix:
        return chat.template.render(messages, add_generation_prompt=True, tools=tools)
    text = chat.template.render([*messages, _message("assistant", chat.prefix)], tools=tools)
    start = text.rfind(chat.prefix.strip())
    if start < 0:
        raise UserError(
            f"eval.icl_gen_prefix: {chat.prefix!r} does not stand in what the chat template makes"
            " of an answer; remove it"
        )
    # keep trailing white space of the prefix if the template does
    prefix = chat.prefix.lstrip()
    if not text.startswith(prefix, start):
        prefix = prefix.strip()
    return text[: start + len(prefix)]


def lead_of(task: TaskConfig, chat: Chat) -> str:
    """Return the delimiter between the prefix and the rest of the answer; "" without a prefix."""
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
    """Return the answers that may follow a prompt.

    If the row has a reply, such as a tool call, it is rendered by the template.
    """
    if not row.reply:
        lead = lead_of(task, chat)
        return [lead + text for text in type_of(task).write(row, task, reasoned)]
    conversation = chat.template.render([*messages, row.reply], tools=list(row.tools) or None)
    answer = conversation.removeprefix(prompt)
    if len(answer) == len(conversation):  # the conversation does not begin with the prompt
        return list(row.choices)
    answer = answer.split(chat.end_of_turn)[0] if chat.end_of_turn else answer
    return [answer.rstrip() or row.choices[0]]


def _joints_to_generate(
    questions: Sequence[tuple[str, Sequence[str]]], tokenizer: SpecialTokenReader
) -> Iterator[JointEncoding]:
    """Encode prompts to generate from, including their trailing white space, with one answer."""
    heads = tokenizer.encode_batch([text for text, _ in questions])
    wholes = tokenizer.encode_batch([text + answer for text, (answer,) in questions])
    for (text, _), head, whole in zip(questions, heads, wholes, strict=True):
        border = common_prefix(head, whole)
        yield JointEncoding(text, head, [whole], border, head[:border])


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _delimited(before: str, after: str, delimiter: str) -> str:
    """Join two texts, with the delimiter between them unless there is white space."""
    if not before or not after:
        return before or after
    return before + (delimiter if _touch(before, after) else "") + after


def _touch(before: str, after: str) -> bool:
    """Return whether two texts would be joined without white space between them."""
    return bool(before) and not (before[-1].isspace() or after[0].isspace())
