"""Conversion of a row of one of the four formats to documents of prompt and answer segments.

`prepare_rows` calls `example_or_error` after `reader` and before the encoder. `loss_mask` renders
conversations. A conversation is checked before the chat template renders it, so that errors name
the message: at least two messages, known roles, the assistant last. The template decides whether
it accepts an unusual order of roles. If it accepts the order, `check_shown` checks that the
rendered text contains every message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from llmfoundry.bounded import OutOfBounds
from llmfoundry.data.preparation.bad_rows import WrongFormatError
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
LONGEST = 1024  # messages: each answer is located by rendering all messages before it
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
    """A converted row.

    Attributes:
        documents: one document; two for a preference, chosen first; one per answer for a
            conversation that is split.
        key: text that decides whether the row is held out: that of the whole row, or the prompt
            alone if answers are compared.
        contents: message contents of a rendered row.
        unread: keys of its messages that neither this module nor the template reads, as
            messages[].key.
        warnings: parts that the template leaves out, and likely mistakes.
    """

    documents: tuple[SegmentedText, ...]
    key: str
    contents: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def example_of(row: Mapping[str, Any], form: str, options: ExampleOptions) -> Example:
    """Convert a row to documents.

    Args:
        row: column values by name.
        form: name of the format, a key of `_FORMATS`.
        options: chat template and parts in the loss.

    Raises:
        EmptyAnswerError: an answer of a conversation is empty.
        ValueError: the row does not have the format, or the template rejects it.
    """
    example = _FORMATS[form](row, options)

    # collect warnings: unread keys, JSON in a text column, parts that the template leaves out
    columns = {name: _messages_in(row, name) for name in _CONVERSATIONS}
    unread = {
        f"{name}[].{key}"
        for name, messages in columns.items()
        for key in keys_not_read(messages, options.names)
    }
    has_chat_text = any(_spells_chat(row.get(name)) for name in _TEXTS)
    warnings = [SPELLS_CHAT] if has_chat_text else []
    rendered = [d for d in example.documents if d.rendered]
    if rendered:
        text = "".join(piece.text for document in rendered for piece in document.pieces)
        messages = [m for name in columns for m in plain_messages(columns[name], name=name)]
        tools = _template_inputs(row).tools or []
        warnings += [f"with {part}" for part in left_out(messages, tools, text)]
        if lacks_argument(messages, tools):
            warnings.append(LACKS_ARGUMENT)
    return replace(example, unread=tuple(sorted(unread)), warnings=tuple(warnings))


def _messages_in(row: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the messages of a column; none if it holds text."""
    value = row.get(name)
    messages = value if name in _TEXTS else from_json(value)
    return messages if is_messages(messages) else []


def example_or_error(
    form: str, options: ExampleOptions, row: Mapping[str, Any]
) -> Example | Exception:
    """Convert a row with `example_of`; return the error of a bad row instead of raising it."""
    try:
        return example_of(row, form, options)
    except (UserError, ValueError, RecursionError) as error:
        return error


def of_each(
    make: Callable[[Mapping[str, Any]], Example | Exception], rows: Sequence[Mapping[str, Any]]
) -> list[Example | Exception]:
    """Return the result of `make` for each row."""
    return [make(row) for row in rows]


def _prompt_response(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    prompt = column_of(row, "prompt")
    columns = [name for name in ("response", "completion") if row.get(name) is not None]
    if len(columns) != 1:
        reason = "has both response and completion" if columns else "no column 'response'"
        raise ValueError(f"{reason}; a row has one of response and completion")
    (column,) = columns
    answer = row[column]
    documents = _prompt_and_answer(prompt, answer, column, options, _template_inputs(row))
    return Example(tuple(documents), _key([prompt, answer]), _contents(prompt, answer))


def _chat(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    messages = conversation(column_of(row, "messages"))
    inputs = _template_inputs(row)
    documents = _render(messages, inputs, options, "messages")
    key: list[Any] = [messages, inputs.tools]
    if inputs.variables:
        key.append(inputs.variables)
    return Example(tuple(documents), _key(key), _contents(messages))


def _preference(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    columns = (row.get("prompt"), column_of(row, "chosen"), column_of(row, "rejected"))
    chosen = _compared(row, "chosen", options)
    rejected = _compared(row, "rejected", options)
    prompt = chosen.prompt
    if prompt != rejected.prompt:
        raise ValueError("chosen and rejected differ before their last answer; they share a prompt")
    if chosen.pieces[len(prompt)].text == rejected.pieces[len(prompt)].text:
        raise ValueError("chosen and rejected are the same answer; nothing can be preferred")
    pair = (replace(chosen, side=1), replace(rejected, side=-1))
    return Example(pair, "".join(piece.text for piece in prompt), _contents(*columns))


def _unpaired(row: Mapping[str, Any], options: ExampleOptions) -> Example:
    label = column_of(row, "label")
    if isinstance(label, str) and label.lower() in ("true", "false"):
        label = label.lower() == "true"
    if isinstance(label, str) and label in ("0", "1"):
        label = int(label)
    if label not in (True, False):  # 1 and 0 too
        raise WrongFormatError(
            f"label is {label!r}; write true or false", "label is no truth value"
        )
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


def _template_inputs(row: Mapping[str, Any]) -> TemplateInputs:
    """Return the tools and variables that a row passes to the chat template."""
    variables = variables_of(row.get("chat_template_kwargs"))
    tools = variables.pop("tools", None) or row.get("tools")
    return TemplateInputs(tools_of(tools), variables)


def _compared(row: Mapping[str, Any], name: str, options: ExampleOptions) -> SegmentedText:
    """Return a prompt with an answer whose last turn alone is in the loss."""
    options = replace(options, last_only=True, prompts=False)
    answer, inputs = column_of(row, name), _template_inputs(row)
    (document,) = _prompt_and_answer(row.get("prompt"), answer, name, options, inputs)
    return document


def _prompt_and_answer(
    prompt: Any, answer: Any, name: str, options: ExampleOptions, inputs: TemplateInputs
) -> list[SegmentedText]:
    """Convert a prompt and its answer to documents.

    Args:
        prompt: text or messages; None if `answer` is the complete conversation.
        answer: text, the messages after the prompt, or the complete conversation.
        name: column of the answer, for errors.
        options: chat template and parts in the loss.
        inputs: tools and variables of the template.
    """
    # both are text: no template
    if not is_messages(answer):
        if prompt is None:
            raise ValueError("no column 'prompt'")
        if is_messages(prompt):
            raise ValueError(f"prompt is messages, and {name} is {kind(answer)}; write both alike")
        for column, value in (("prompt", prompt), (name, answer)):
            if not isinstance(value, str):
                raise ValueError(f"{column} holds {kind(value)}, not text")
            if half := half_a_pair(value):
                raise WrongFormatError(f"{column} {half}; correct it", "half a surrogate pair")
        return [SegmentedText((Segment(prompt, False), Segment(answer, True)), rendered=False)]

    # the answer is messages: prepend the prompt unless the answer begins with it
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
    return _render(conversation(messages, name=name), inputs, options, name)


def _render(
    messages: Messages, inputs: TemplateInputs, options: ExampleOptions, name: str
) -> list[SegmentedText]:
    """Render a conversation with the chat template.

    Raises:
        EmptyAnswerError: an answer in the loss is empty.
        ValueError: the template rejects the order of the roles, or leaves out a message.
    """
    check_answers(messages, last_only=options.last_only)
    shown = for_template(messages, options.names)
    try:
        documents = conversation_documents(shown, inputs, options)
    except UserError as error:
        unusual = unusual_order(messages, name)
        if options.chat is None or unusual is None or isinstance(error, OutOfBounds):
            raise
        raise ValueError(f"{unusual}; {error}") from error

    # check that the text contains every message before the last answer in the loss
    in_loss = [n for n, m in enumerate(shown) if m["role"] == "assistant" and m.get("weight", 1)]
    context = shown[: in_loss[-1]] if in_loss else shown
    text = "".join(piece.text for document in documents for piece in document.pieces)
    check_shown(context, text, name)
    return documents


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a column that the format requires.

    Raises:
        WrongFormatError: the row lacks it.
    """
    if row.get(name) is None:
        no = f"no column {name!r}"
        raise WrongFormatError(f"{no}; it has {', '.join(row) or 'none'}", no)
    return row[name]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _contents(*values: Any) -> tuple[str, ...]:
    """Return the contents of all messages in `values`."""
    contents: list[str] = []
    for value in values:
        if is_messages(value):
            messages = plain_messages(value, name="")
            contents += [message["content"] for message in messages if "content" in message]
    return tuple(contents)


def conversation(value: Any, *, name: str = "messages") -> list[dict[str, Any]]:
    """Return the messages of a conversation, with text contents and without null entries.

    Args:
        value: value of the column: a list, or a list as JSON text, as tables often store it.
        name: name of the column, for errors.

    Raises:
        ValueError: the value is not a conversation that ends with the assistant.
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
    """Describe the first message in an order that some templates reject; None if there is none."""
    before = None
    for n, message in enumerate(messages):
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            return f"{name}[{n}] is {role}{f' after {before}' if before else ', the first'}"
        before = role
    return None


def for_template(messages: Sequence[Mapping[str, Any]], reads: Callable[[str], bool]) -> Messages:
    """Return messages with the keys and roles that the template reads.

    Args:
        messages: messages of a conversation.
        reads: tells whether the template reads a key or a role.
    """
    known = [{k: v for k, v in m.items() if k in KEYS or reads(k)} for m in messages]
    if not reads("developer"):
        return [m | {"role": "system"} if m["role"] == "developer" else m for m in known]
    return known


class EmptyAnswerError(ValueError):
    """Conversation with an empty answer, which would train the model to answer nothing."""


def check_answers(messages: Sequence[Mapping[str, Any]], *, last_only: bool) -> None:
    """Reject empty answers in the loss.

    Raises:
        EmptyAnswerError: an answer has no content, tool call or reasoning.
    """
    for message in messages[-1:] if last_only else messages:
        if message["role"] == "assistant" and message.get("weight", 1) != 0:
            parts = [message.get(name) for name in ("content", "tool_calls", *REASONING)]
            if not any(part.strip() if isinstance(part, str) else part for part in parts):
                raise EmptyAnswerError("an answer is empty")


def check_shown(messages: Sequence[Mapping[str, Any]], text: str, name: str) -> None:
    """Reject a conversation if the rendered text lacks a system, developer or user message.

    Raises:
        ValueError: a message is missing.
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
    """Return the kinds of content that a rendered text lacks, such as reasoning or tool calls."""
    shown = {name: True for name in ("reasoning", "tool calls", "tool results", "tools")}
    for message in messages:
        content = message.get("content", "")
        # reasoning has a key of its own, or is inline between <think> and </think>
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
    """Return whether a tool call lacks a required argument.

    Arrow structs cause this: they store a missing argument as null, and nulls are dropped.
    """
    # required arguments by tool
    required: dict[str, list[Any]] = {}
    for function in (tool.get("function", tool) for tool in tools):
        parameters = function.get("parameters")
        names = parameters.get("required") if isinstance(parameters, Mapping) else None
        names = names if isinstance(names, list) else []
        required[str(function.get("name"))] = [name for name in names if isinstance(name, str)]

    # compare with every call
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    for call in calls:
        function = call.get("function", call)
        arguments = call_arguments(function)
        names = arguments if isinstance(arguments, Mapping) else {}
        if any(name not in names for name in required.get(function["name"], ())):
            return True
    return False


def _is_in(part: Any, text: str) -> bool:
    """Return whether a text contains a stripped part, literally or with JSON escapes."""
    part = part.strip() if isinstance(part, str) else ""
    if part in text:
        return True
    in_json = (json.dumps(part, ensure_ascii=escaped)[1:-1] for escaped in (False, True))
    return any(escaped_part in text for escaped_part in in_json)


def keys_not_read(messages: Sequence[Any], reads: Callable[[str], bool]) -> set[str]:
    """Return the message keys that neither this module nor the template reads."""
    keys = {str(name) for m in messages if isinstance(m, Mapping) for name in m}
    return {name for name in keys if name not in KEYS and not reads(name)}


def plain_messages(value: Sequence[Any], *, name: str) -> list[dict[str, Any]]:
    """Check each message of a part of a conversation; the order of roles is not checked."""
    return [_message(m, f"{name}[{n}]") for n, m in enumerate(value)]


def is_messages(value: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether a column holds a list of messages; JSON text does not count."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _spells_chat(value: Any) -> bool:
    """Return whether a text is a JSON list of messages, which is probably meant as messages."""
    entries = from_json(value) if isinstance(value, str) else None
    return isinstance(entries, list) and bool(entries) and all(map(_is_message, entries))


def tools_of(value: Any) -> list[dict[str, Any]] | None:
    """Return the functions that an assistant may call, as JSON schemas.

    Args:
        value: list of schemas, or that list as JSON text.

    Raises:
        ValueError: the value is neither.
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
    """Return the template variables of a row, such as enable_thinking.

    Args:
        value: object, or that object as JSON text.

    Raises:
        ValueError: the value is neither, or sets a variable that the row's messages decide.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not value:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"chat_template_kwargs holds {kind(value)}, not an object")
    variables = {str(name): entry for name, entry in value.items()}
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            raise ValueError(f"chat_template_kwargs sets {name}, which the row decides; remove it")
    return variables


def from_json(value: Any) -> Any:
    """Parse a text that is a JSON list of objects; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(parsed, list) and all(isinstance(entry, dict) for entry in parsed):
            return parsed
    return value


def kind(value: Any) -> str:
    """Return the name of a value's type, for errors."""
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false"}
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")


def _message(value: Any, where: str) -> dict[str, Any]:
    """Check a message; return it without null entries and with its content as text."""
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
        raise WrongFormatError(why, f"{where}.role is not known")
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
            raise WrongFormatError(f"{where}.tool_calls[{n}]: {error}", no) from error
    message["tool_calls"] = calls


def _check_weight(message: dict[str, Any], where: str) -> None:
    weight = message.get("weight")
    if weight is None:
        return
    if message["role"] != "assistant":
        raise ValueError(f"{where}.weight is on a message of {message['role']}, never learned")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise WrongFormatError(
            f"{where}.weight is {weight!r}; write a number", "weight is no number"
        )
    if not 0 <= weight <= 1000:  # so it is finite
        why = f"{where}.weight is {str(weight)[:20]}; write a number from 0 to 1000"
        raise WrongFormatError(why, "weight is out of bounds")


def _content(value: Any, where: str) -> str:
    """Return a text content, or the joined texts of a list of parts {type: text}."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
        raise ValueError(f"{where} has a part that is not text; only text is learned")
    raise ValueError(f"{where} holds {kind(value)}, not text")
