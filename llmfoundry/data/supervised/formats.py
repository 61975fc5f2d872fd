"""A row of one of the four formats to documents: pieces of text, each prompt or answer.

Called by `prepare`, between `reader` and `encode`; `turns` renders conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry.bounded import OutOfBounds
from llmfoundry.data.supervised.bad_rows import NotOfFormat
from llmfoundry.data.supervised.messages import (
    Messages,
    check_answers,
    check_shown,
    conversation,
    for_template,
    is_messages,
    keys_not_read,
    kind,
    left_out,
    plain_messages,
    tools_of,
    unusual_order,
    variables_of,
)
from llmfoundry.data.supervised.turns import (
    ExampleOptions,
    Segment,
    SegmentedText,
    TemplateInputs,
    conversation_documents,
)
from llmfoundry.errors import UserError

_CONVERSATIONS = ("messages", "prompt", "response", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Example:
    """A row.

    Attributes:
        documents: one; of a preference two, the chosen one first; of a conversation that is split
            one for each answer.
        key: what decides whether it is held out: its text, or, of answers that are compared, their
            prompt's.
        contents: what the row itself holds in a rendered text.
        unread: keys of its messages that nothing reads, as messages[].key.
        left_out: what the template does not show: reasoning, tool calls, tool results, tools.
    """

    documents: tuple[SegmentedText, ...]
    key: str
    contents: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def example_of(row: Mapping[str, Any], form: str, options: ExampleOptions) -> Example:
    """The documents of a row.

    Args:
        row: with the columns of its format.
        form: prompt_response, chat, preference or unpaired.
        options: see there.

    Raises:
        EmptyAnswerError: of a conversation an answer is empty.
        ValueError: the row is not of the format, or the template does not fit; says why.
    """
    example = _FORMATS[form](row, options)
    unread = {
        f"{column}[].{key}"
        for column in _CONVERSATIONS
        for key in keys_not_read(row.get(column), options.names)
    }
    found = (messages for column in _CONVERSATIONS if is_messages(messages := row.get(column)))
    rendered = [d for d in example.documents if d.rendered]
    text = "".join(piece.text for document in rendered for piece in document.pieces)
    missing = [] if not rendered else left_out(found, _asked(row).tools, text)
    return replace(example, unread=tuple(sorted(unread)), left_out=tuple(missing))


def example_or_error(
    form: str, options: ExampleOptions, row: Mapping[str, Any]
) -> Example | Exception:
    """`example_of` for one of many rows, of which none ends the others."""
    try:
        return example_of(row, form, options)
    except (UserError, ValueError, RecursionError) as error:
        return error


def of_each(
    make: Callable[[Mapping[str, Any]], Example | Exception], rows: Sequence[Mapping[str, Any]]
) -> list[Example | Exception]:
    """What `make` returns for each row."""
    return [make(row) for row in rows]


def _prompt_response(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    prompt = _column(row, "prompt")
    given = [name for name in ("response", "completion") if row.get(name) is not None]
    if len(given) != 1:
        reason = "has both response and completion" if given else "no column 'response'"
        raise ValueError(f"{reason}; a row has one of response and completion")
    answer = row[given[0]]
    documents = _answered(prompt, answer, given[0], options, _asked(row))
    return Example(tuple(documents), _key([prompt, answer]), _contents(prompt, answer))


def _chat(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    messages, asked = conversation(_column(row, "messages")), _asked(row)
    documents = _rendered(messages, asked, options, "messages")
    key = [messages, asked.tools, *([asked.variables] if asked.variables else [])]
    return Example(tuple(documents), _key(key), _contents(messages))


def _preference(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    chosen, rejected = _column(row, "chosen"), _column(row, "rejected")
    sides = [_compared(row, name, options) for name in ("chosen", "rejected")]
    prompts = [side.prompt for side in sides]
    if prompts[0] != prompts[1]:
        raise ValueError("chosen and rejected differ before their last answer; they share a prompt")
    if sides[0].pieces[len(prompts[0])].text == sides[1].pieces[len(prompts[0])].text:
        raise ValueError("chosen and rejected are the same answer; nothing can be preferred")
    pair = (replace(sides[0], side=1), replace(sides[1], side=-1))
    key = "".join(piece.text for piece in prompts[0])
    return Example(pair, key, _contents(row.get("prompt"), chosen, rejected))


def _unpaired(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    label = _column(row, "label")
    if isinstance(label, str) and label.lower() in ("true", "false"):
        label = label.lower() == "true"
    if isinstance(label, str) and label in ("0", "1"):
        label = int(label)
    if label not in (True, False):  # 1 and 0 too
        raise NotOfFormat(f"label is {label!r}; write true or false", "label is no truth value")
    _column(row, "prompt")
    document = _compared(row, "completion", options)
    key = "".join(piece.text for piece in document.prompt)
    side = replace(document, side=1 if label else -1)
    return Example((side,), key, _contents(row.get("prompt"), row.get("completion")))


_FORMATS: dict[str, Callable[[Mapping[str, Any], ExampleOptions], Example]] = {
    "prompt_response": _prompt_response,
    "chat": _chat,
    "preference": _preference,
    "unpaired": _unpaired,
}


def _asked(row: Mapping[str, Any]) -> TemplateInputs:
    variables = variables_of(row.get("chat_template_kwargs"))
    tools = variables.pop("tools", None) or row.get("tools")
    return TemplateInputs(tools_of(tools), variables)


def _compared(row: Mapping[str, Any], name: str, options: ExampleOptions) -> SegmentedText:
    """A prompt with an answer of which the last turn alone is learned."""
    options = replace(options, last_only=True, prompts=False)
    (found,) = _answered(row.get("prompt"), _column(row, name), name, options, _asked(row))
    return found


def _answered(
    prompt: Any, answer: Any, name: str, options: ExampleOptions, asked: TemplateInputs
) -> list[SegmentedText]:
    """A prompt and its answer: both text, or both messages, or a whole conversation as answer."""
    if not is_messages(answer):
        if prompt is None:
            raise ValueError("no column 'prompt'")
        if is_messages(prompt):
            raise ValueError(f"prompt is messages, and {name} is {kind(answer)}; write both alike")
        for column, value in (("prompt", prompt), (name, answer)):
            if not isinstance(value, str):
                raise ValueError(f"{column} holds {kind(value)}, not text")
        return [SegmentedText((Segment(prompt, False), Segment(answer, True)), rendered=False)]
    messages = plain_messages(answer, name=name)
    if messages and messages[0]["role"] in ("assistant", "tool"):
        if prompt is None:
            raise ValueError(f"{name} begins with the assistant, and there is no column 'prompt'")
        before = prompt if is_messages(prompt) else [{"role": "user", "content": prompt}]
        messages = [*plain_messages(before, name="prompt"), *messages]
    elif is_messages(prompt) and not _begins(messages, plain_messages(prompt, name="prompt")):
        raise ValueError(f"{name} is a whole conversation that does not begin with prompt")
    return _rendered(conversation(messages, name=name), asked, options, name)


def _rendered(
    messages: Messages, asked: TemplateInputs, options: ExampleOptions, name: str
) -> list[SegmentedText]:
    """A conversation by the template, which takes its order and leaves none of it out."""
    check_answers(messages, last_only=options.last_only)
    shown = for_template(messages, options.names)
    try:
        documents = conversation_documents(shown, asked, options)
    except UserError as error:
        unusual = unusual_order(messages, name)
        if options.chat is None or unusual is None or isinstance(error, OutOfBounds):
            raise
        raise ValueError(f"{unusual}; {error}") from error
    learned = [n for n, m in enumerate(shown) if m["role"] == "assistant" and m.get("weight", 1)]
    text = "".join(piece.text for document in documents for piece in document.pieces)
    check_shown(shown[: learned[-1]] if learned else shown, text, name)
    return documents


def _begins(messages: Messages, beginning: Messages) -> bool:
    return messages[: len(beginning)] == beginning


def _column(row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        has, no = ", ".join(row) or "none", f"no column {name!r}"
        raise NotOfFormat(f"{no}; it has {has}", no)
    return row[name]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _contents(*values: Any) -> tuple[str, ...]:
    """The texts of messages."""
    found: list[str] = []
    for value in values:
        if is_messages(value):
            found += [m["content"] for m in plain_messages(value, name="") if "content" in m]
    return tuple(found)
