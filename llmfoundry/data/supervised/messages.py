"""What a conversation must be: checked before a template sees it, so that errors name the message.

Called by `formats`. LLM Foundry's rules (at least two messages, known roles, no repeats, the
assistant last) and the order that templates assume: system first, then the user, then in turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmfoundry.recipe.values.checks import nearest

ROLES = ("system", "user", "assistant", "tool")
KEYS = (
    "role",
    "content",
    "weight",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "thinking",
)
LONGEST = 1024  # messages: each answer is found by rendering all that lies before it
_MAY_FOLLOW = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


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
    before = None
    for n, message in enumerate(messages):
        role = message["role"]
        if role not in _MAY_FOLLOW[before]:
            raise ValueError(f"{name}[{n}] is {_out_of_order(role, before)}")
        before = role
    if before != "assistant":
        raise ValueError(f"{name} ends with {before}; the last message must be the assistant's")
    return messages


def plain_messages(value: Any, *, name: str) -> list[dict[str, Any]]:
    """Messages in any order, each checked alone: parts of a conversation."""
    value = from_json(value)
    return [_message(m, f"{name}[{n}]") for n, m in enumerate(value)]


def is_messages(value: Any) -> bool:
    """Whether a column holds messages, not a text.

    A text may spell them in JSON. Other lists in JSON, as answers often are, are text.
    """
    if not isinstance(value, str):
        return isinstance(value, Sequence)
    found = from_json(value)
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
    return [_filled(tool) for tool in value]


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
    for name in message:
        if name not in KEYS:
            raise ValueError(f"{where} has the unknown key {name!r}{nearest(name, KEYS)}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role is {role!r}; roles are {', '.join(ROLES)}")
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
    message["tool_calls"] = [_filled(call) for call in calls]


def _check_weight(message: dict[str, Any], where: str) -> None:
    weight = message.get("weight")
    if weight is None:
        return
    if message["role"] != "assistant":
        raise ValueError(f"{where}.weight is on a message of {message['role']}, never learned")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"{where}.weight is {weight!r}; write a number")
    if not 0 <= weight <= 1000:  # so it is finite
        raise ValueError(f"{where}.weight is {str(weight)[:20]}; write a number from 0 to 1000")


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


def _filled(value: Any) -> Any:
    """Without null entries, which tables give every object that lacks a key another has."""
    if isinstance(value, Mapping):
        return {name: _filled(entry) for name, entry in value.items() if entry is not None}
    return [_filled(entry) for entry in value] if isinstance(value, list) else value


def _out_of_order(role: str, before: str | None) -> str:
    expected = " or ".join(_MAY_FOLLOW[before])
    if before is None:
        return f"{role}; a conversation begins with {expected}"
    return f"{role} after {before}; expected {expected}"
