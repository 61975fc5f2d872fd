"""A row of one of the four formats to documents: pieces of text, each prompt or answer.

Called by `prepare_rows`, between `reader` and the encoder; `loss_mask` renders conversations. What
a conversation must be is checked before a template sees it, so that errors name the message: at
least two messages, known roles, the assistant last. Other orders than a system message, the user,
then in turn are the template's to take or refuse: where it takes them, `check_shown` sees to it
that it leaves nothing out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from llmfoundry.bounded import OutOfBounds
from llmfoundry.data.preparation.bad_rows import NotOfFormat
from llmfoundry.data.supervised.loss_mask import (
    ExampleOptions,
    Messages,
    Segment,
    SegmentedText,
    TemplateInputs,
    conversation_documents,
)
from llmfoundry.data.text.chat_template import call_arguments, half_a_pair
from llmfoundry.errors import UserError

_TEXTS = ("prompt", "response", "completion", "chosen", "rejected")  # or messages
_CONVERSATIONS = ("messages", *_TEXTS)
ROLES = ("system", "developer", "user", "assistant", "tool")
_PROMPTING = ("system", "developer", "user")
REASONING = ("reasoning_content", "reasoning", "thinking")
KEYS = ("role", "content", "weight", "name", "tool_calls", "tool_call_id", *REASONING)
SPELLS_CHAT = "with a text that spells messages in JSON"
LACKS_ARGUMENT = "with a tool call that lacks an argument which its tool requires"
LONGEST = 1024  # messages: each answer is found by rendering all that lies before it
_MAY_FOLLOW = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


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
        told: what to say of it: what the template does not show, and what may be meant otherwise.
    """

    documents: tuple[SegmentedText, ...]
    key: str
    contents: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    told: tuple[str, ...] = ()


def example_of(row: Mapping[str, Any], form: str, options: ExampleOptions) -> Example:
    """The documents of a row.

    Raises:
        EmptyAnswerError: of a conversation an answer is empty.
        ValueError: the row is not of the format, or the template does not fit; says why.
    """
    example = _FORMATS[form](row, options)
    columns = {name: _messages_in(row, name) for name in _CONVERSATIONS}
    unread = {
        f"{name}[].{key}"
        for name, messages in columns.items()
        for key in keys_not_read(messages, options.names)
    }
    told = [SPELLS_CHAT] if any(_spells_chat(row.get(name)) for name in _TEXTS) else []
    rendered = [d for d in example.documents if d.rendered]
    if rendered:
        text = "".join(piece.text for document in rendered for piece in document.pieces)
        messages = [m for name in columns for m in plain_messages(columns[name], name=name)]
        tools = _asked(row).tools or []
        told += [f"with {what}" for what in left_out(messages, tools, text)]
        told += [LACKS_ARGUMENT] if lacks_argument(messages, tools) else []
    return replace(example, unread=tuple(sorted(unread)), told=tuple(told))


def _messages_in(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The messages of a column; none where it holds a text."""
    value = row.get(name)
    messages = value if name in _TEXTS else from_json(value)
    return messages if is_messages(messages) else []


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
    prompt = column_of(row, "prompt")
    given = [name for name in ("response", "completion") if row.get(name) is not None]
    if len(given) != 1:
        reason = "has both response and completion" if given else "no column 'response'"
        raise ValueError(f"{reason}; a row has one of response and completion")
    answer = row[given[0]]
    documents = _answered(prompt, answer, given[0], options, _asked(row))
    return Example(tuple(documents), _key([prompt, answer]), _contents(prompt, answer))


def _chat(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    messages, asked = conversation(column_of(row, "messages")), _asked(row)
    documents = _rendered(messages, asked, options, "messages")
    key = [messages, asked.tools, *([asked.variables] if asked.variables else [])]
    return Example(tuple(documents), _key(key), _contents(messages))


def _preference(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    chosen, rejected = column_of(row, "chosen"), column_of(row, "rejected")
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
    label = column_of(row, "label")
    if isinstance(label, str) and label.lower() in ("true", "false"):
        label = label.lower() == "true"
    if isinstance(label, str) and label in ("0", "1"):
        label = int(label)
    if label not in (True, False):  # 1 and 0 too
        raise NotOfFormat(f"label is {label!r}; write true or false", "label is no truth value")
    column_of(row, "prompt")
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
    (found,) = _answered(row.get("prompt"), column_of(row, name), name, options, _asked(row))
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
            if half := half_a_pair(value):
                raise NotOfFormat(f"{column} {half}; correct it", "half a surrogate pair")
        return [SegmentedText((Segment(prompt, False), Segment(answer, True)), rendered=False)]
    messages = plain_messages(answer, name=name)
    if messages and messages[0]["role"] in ("assistant", "tool"):
        if prompt is None:
            raise ValueError(f"{name} begins with the assistant, and there is no column 'prompt'")
        before = prompt if is_messages(prompt) else [{"role": "user", "content": prompt}]
        messages = [*plain_messages(before, name="prompt"), *messages]
    elif is_messages(prompt):
        before = plain_messages(prompt, name="prompt")
        if messages[: len(before)] != before:
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


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """A column that a row of the format has."""
    if row.get(name) is None:
        no = f"no column {name!r}"
        raise NotOfFormat(f"{no}; it has {', '.join(row) or 'none'}", no)
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


def conversation(value: Any, *, name: str = "messages") -> list[dict[str, Any]]:
    """Messages with text as content, null entries left out.

    Args:
        value: as read; a JSON text of a list too, which is how tables often hold it.
        name: of the column, for messages.

    Raises:
        ValueError: it is not a conversation that ends with the assistant; says why.
    """
    value = from_json(value)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{name} holds {kind(value)}, not a list of messages")
    if len(value) > LONGEST:
        raise ValueError(f"{name} has {len(value):,} messages, more than {LONGEST:,}; divide it")
    messages = [_message(m, f"{name}[{n}]") for n, m in enumerate(value)]
    if len(messages) < 2:
        raise ValueError(f"{name} has {len(messages)} messages; a conversation has at least two")
    last = messages[-1]["role"]
    if last != "assistant":
        raise ValueError(f"{name} ends with {last}; the last message must be the assistant's")
    return messages


def unusual_order(messages: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """The first message that is not in the order that every template takes; None: all are."""
    before = None
    for n, message in enumerate(messages):
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            return f"{name}[{n}] is {role}{f' after {before}' if before else ', the first'}"
        before = role
    return None


def for_template(messages: Sequence[Mapping[str, Any]], reads: Callable[[str], bool]) -> Messages:
    """Messages with the keys and roles that a template knows."""
    known = [{k: v for k, v in m.items() if k in KEYS or reads(k)} for m in messages]
    if not reads("developer"):
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in known]
    return known


class EmptyAnswerError(ValueError):
    """A conversation with an answer of nothing, which would teach the model to say nothing."""


def check_answers(messages: Sequence[Mapping[str, Any]], *, last_only: bool) -> None:
    """Refuse answers that are learned and empty.

    Raises:
        EmptyAnswerError: there is one without content, calls and reasoning.
    """
    for message in messages[-1:] if last_only else messages:
        if message["role"] == "assistant" and message.get("weight", 1) != 0:
            said = [message.get(name) for name in ("content", "tool_calls", *REASONING)]
            if not any(part.strip() if isinstance(part, str) else part for part in said):
                raise EmptyAnswerError("an answer is empty")


def check_shown(messages: Sequence[Mapping[str, Any]], text: str, name: str) -> None:
    """Refuse a conversation of which the template leaves out a part of what the model is asked.

    Raises:
        ValueError: naming the message.
    """
    for n, message in enumerate(messages):
        role, content = message["role"], message.get("content", "").strip()
        if role in _PROMPTING and content not in text:
            raise ValueError(
                f"the chat template leaves out {name}[{n}], a message of {role}; write another"
                " tokenizer.chat_template, or correct the row"
            )


def left_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str
) -> list[str]:
    """What a rendered text does not show of messages and tools, such as reasoning."""
    shown = {name: True for name in ("reasoning", "tool calls", "tool results", "tools")}
    for message in messages:
        content = message.get("content", "")
        inline = content.partition("</think>")
        thoughts = inline[0].rpartition("<think>")[2] if inline[1] else ""
        thoughts = next((message[name] for name in REASONING if message.get(name)), thoughts)
        shown["reasoning"] &= _is_in(thoughts, text)
        for call in message.get("tool_calls", ()):
            shown["tool calls"] &= _is_in(call.get("function", call)["name"], text)
        shown["tool results"] &= message["role"] != "tool" or _is_in(content, text)
    for tool in tools:
        shown["tools"] &= _is_in(tool.get("function", tool).get("name", ""), text)
    return [name for name, is_shown in shown.items() if not is_shown]


def lacks_argument(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether a call lacks what its tool requires, as where a struct of Arrow held it as null."""
    required: dict[str, list[Any]] = {}
    for function in (tool.get("function", tool) for tool in tools):
        parameters = function.get("parameters")
        names = parameters.get("required") if isinstance(parameters, Mapping) else None
        names = names if isinstance(names, list) else []
        required[str(function.get("name"))] = [name for name in names if isinstance(name, str)]
    for function in (c.get("function", c) for m in messages for c in m.get("tool_calls", ())):
        arguments = call_arguments(function)
        there = arguments if isinstance(arguments, Mapping) else {}
        if any(name not in there for name in required.get(function["name"], ())):
            return True
    return False


def _is_in(part: Any, text: str) -> bool:
    """Whether a text has a part, as it is or in JSON, without the white space around it."""
    part = part.strip() if isinstance(part, str) else ""
    return part in text or any(
        json.dumps(part, ensure_ascii=escaped)[1:-1] in text for escaped in (False, True)
    )


def keys_not_read(messages: Sequence[Any], reads: Callable[[str], bool]) -> set[str]:
    """The keys of messages that neither we nor the template read."""
    found = {str(name) for m in messages if isinstance(m, Mapping) for name in m}
    return {name for name in found if name not in KEYS and not reads(name)}


def plain_messages(value: Sequence[Any], *, name: str) -> list[dict[str, Any]]:
    """Messages in any order, each checked alone: parts of a conversation."""
    return [_message(m, f"{name}[{n}]") for n, m in enumerate(value)]


def is_messages(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a column holds messages; a text is text, whatever it spells."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _spells_chat(value: Any) -> bool:
    """Whether a text spells messages in JSON, which a table may have meant."""
    found = from_json(value) if isinstance(value, str) else None
    return isinstance(found, list) and bool(found) and all(map(_is_message, found))


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """The functions that an assistant may call: JSON schemas, or a JSON text of them.

    Raises:
        ValueError: it holds something else.
    """
    value = from_json(value)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"tools holds {kind(value)}, not a list of JSON schemas")
    for n, tool in enumerate(value):
        if not isinstance(function := tool.get("function", tool), dict):
            raise ValueError(f"tools[{n}].function holds {kind(function)}, not a JSON schema")
    return value


def variables_of(value: Any) -> dict[str, Any]:
    """What a row gives its template to read, such as enable_thinking; also a JSON text of it.

    Raises:
        ValueError: it holds something else, or sets what the row itself gives.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"chat_template_kwargs holds {kind(value)}, not an object")
    found = {str(name): entry for name, entry in value.items()}
    for name in ("messages", "add_generation_prompt"):
        if name in found:
            raise ValueError(f"chat_template_kwargs sets {name}, which the row decides; remove it")
    return found


def from_json(value: Any) -> Any:
    """The list that a text spells in JSON; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
            return found
    return value


def kind(value: Any) -> str:
    """What to call a value in a message."""
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} holds {kind(value)}, not an object with role and content")
    message = {str(name): entry for name, entry in value.items() if entry is not None}
    role = message.get("role")
    if role is None and "from" in message and "value" in message:
        raise ValueError(
            f"{where} has from and value; write data.format=sharegpt, which reads them of"
            " conversations (another column: data.columns={conversations: theirs})"
        )
    if role not in ROLES:
        why = f"{where}.role is {role!r}; roles are {', '.join(ROLES)}"
        raise NotOfFormat(why, f"{where}.role is not known")
    _check_calls(message, where)
    if "content" not in message and "tool_calls" not in message:
        raise ValueError(f"{where} has no content")
    if "content" in message:
        message["content"] = _content(message["content"], f"{where}.content")
    _check_weight(message, where)
    return message


def _is_message(value: Mapping[str, Any]) -> bool:
    return "role" in value and ("content" in value or "tool_calls" in value)


def _check_calls(message: dict[str, Any], where: str) -> None:
    calls = from_json(message.get("tool_calls"))
    if not calls:
        message.pop("tool_calls", None)
        return
    if message["role"] != "assistant":
        raise ValueError(f"{where}.tool_calls is on a message of {message['role']}")
    if not isinstance(calls, list):
        raise ValueError(f"{where}.tool_calls holds {kind(calls)}, not a list")
    for n, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}.tool_calls[{n}] names no function")
        if "arguments" not in function:
            raise ValueError(f"{where}.tool_calls[{n}] has no arguments")
        try:
            call_arguments(function)
        except ValueError as error:
            no = "the arguments of a tool call are no JSON object"
            raise NotOfFormat(f"{where}.tool_calls[{n}]: {error}", no) from error
    message["tool_calls"] = calls


def _check_weight(message: dict[str, Any], where: str) -> None:
    weight = message.get("weight")
    if weight is None:
        return
    if message["role"] != "assistant":
        raise ValueError(f"{where}.weight is on a message of {message['role']}, never learned")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise NotOfFormat(f"{where}.weight is {weight!r}; write a number", "weight is no number")
    if not 0 <= weight <= 1000:  # so it is finite
        why = f"{where}.weight is {str(weight)[:20]}; write a number from 0 to 1000"
        raise NotOfFormat(why, "weight is out of bounds")


def _content(value: Any, where: str) -> str:
    """A text, or the texts of parts {type: text}."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        raise ValueError(f"{where} has a part that is not text; only text is learned")
    raise ValueError(f"{where} holds {kind(value)}, not text")
