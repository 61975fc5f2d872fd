"""The meaning of `key=value`, `group=option` and `~key`, in Hydra's grammar.

`split` returns the options of groups and the values of keys. Two rules differ from Hydra's. First,
the schema defines which keys exist, so a leading `+` has no effect. Second, a text field takes
everything after `=` literally (`prompt=Well, why (not)?`), except that surrounding quotes are
dropped and null is null. The same holds for a list of texts that is written as one text and is
invalid in the grammar (`data.paths=my file (1).jsonl`).
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.schema import Key, Schema

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_SPECIAL = re.compile(r"([\\()\[\]{}:=, \t])")  # characters of Hydra's grammar
DEFAULT = object()
LONGEST = 20_000
"""Characters that are read with the grammar; more belong into a file."""


def split(
    overrides: Sequence[str], schema: Schema, groups: dict[str, list[str]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the options of groups and the values of keys; the last override of a key counts.

    The value DEFAULT stands for the schema's default (written `~key`).

    Raises:
        UserError: with a line for each override that cannot be parsed.
    """
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for override in overrides:
        key, text = key_and_text(override)
        if override.startswith("~"):
            values[key] = DEFAULT
        elif key in groups and text != "null" and not text.startswith("{"):
            chosen[key] = text
        else:
            try:
                values[key] = _value(key, text, schema.find(key))
            except UserError as error:
                problems += error.problems
    if problems:
        raise UserError(*problems)
    return chosen, values


def key_and_text(override: str) -> tuple[str, str]:
    """Return `("model.n_layers", "4")` for `+model.n_layers=4`.

    Raises:
        UserError: it has no key, or no `=`.
    """
    key, equals, text = override.lstrip("+").partition("=")
    if override.startswith("~"):
        key = key[1:]
        if not key or equals:
            raise UserError(f"'{override}' is not a setting; write ~key to give it its default")
    elif not key or not equals:
        raise UserError(f"'{override}' is not a setting; write key=value")
    return key.strip(), text


def as_list(words: Sequence[str]) -> str:
    """Return words as the value of a key that takes a list of texts."""
    return "[" + ",".join(map(_quoted, words)) + "]"


def _quoted(text: str) -> str:
    """Return a text in quotes; the grammar reads backslashes as such, except before a quote."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", escaped) + "'"


def _value(key: str, text: str, declared: Key | None) -> Any:
    is_text = declared is not None and {*declared.types} <= {str, types.NoneType}
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_text and text != "null" and not quoted:
        return text
    parsed = parse_value(text)
    if parsed is not None and not parsed.is_sweep_override():
        return parsed.value()
    is_texts = declared is not None and list[str] in declared.types
    if is_text or (parsed is None and is_texts and not text.startswith("[")):
        return text
    if parsed is None and is_texts and (texts := _plain_texts(text)):
        return texts
    if parsed is None and is_texts:
        raise UserError(f'{key}={text}: cannot be read; quote its texts, {key}=\'["...","..."]\'')
    if parsed is None:
        raise UserError(f"{key}={text}: cannot be read; quote a text as {key}='\"...\"'")
    raise UserError(f"{key}={text}: several values; add -m to run each, or write a list, [{text}]")


def _plain_texts(text: str) -> list[str]:
    """Return the items of a list of texts without quotes, such as [A,sw/lr=0.01].

    The result is empty if quotes or brackets delimit the items, which is left to the grammar.
    """
    entries = [entry.strip() for entry in text[1:-1].split(",")]
    is_plain = text[-1:] == "]" and not any(mark in text[1:-1] for mark in "[]{}'\"\\")
    return entries if is_plain and all(entries) and len(text) <= LONGEST else []


def parse_value(text: str) -> Override | None:
    """Parse a value with Hydra's grammar; return None if it is invalid.

    Raises:
        UserError: a sweep is inside a list, where Hydra would not run it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if len(text) > LONGEST:
        return None
    try:
        parsed = OverridesParser.create().parse_override(f"key={text}")
    except (HydraException, ValueError, RecursionError):  # the last of numbers and lists too long
        return None
    inside = getattr(parsed._value, "list", parsed._value)  # a,b is a sweep of its own
    if isinstance(inside, list | dict) and _holds_sweep(inside):
        raise UserError(f"{text}: a range() or interval() among other values; write its values")
    return parsed


def _holds_sweep(value: Any) -> bool:
    from hydra.core.override_parser.types import Sweep

    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Sweep) or any(map(_holds_sweep, inner))


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return overrides, as a command line has them, of Python values by dotted key.

    A text is taken as the command line takes it, so that it may choose a group (`model: mpt-125m`)
    or be a number. Numbers, booleans, None, lists and mappings keep their type. Paths and objects
    with a folder, such as a `Run`, become its path.

    Raises:
        UserError: with a line for each value that no recipe can hold.
    """
    words, problems = list[str](), list[str]()
    for key, value in values.items():
        try:
            plain = os.fspath(value) if isinstance(value, os.PathLike) else value
            words.append(f"{key}={plain if isinstance(plain, str) else _in_grammar(plain)}")
        except TypeError:
            kind = type(value).__name__
            problems.append(f"{key}: {value!r} is of type {kind}; write a number, text or list")
    if problems:
        raise UserError(*problems)
    return words


def _in_grammar(value: Any) -> str:
    """Return a value in Hydra's grammar, texts in quotes.

    Raises:
        TypeError: the grammar has no such value.
    """
    if hasattr(value, "item") and not getattr(value, "ndim", 0):  # a number of NumPy or PyTorch
        value = value.item()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        return _quoted(os.fspath(value))
    if isinstance(value, Mapping):
        names = [_SPECIAL.sub(r"\\\1", str(name)) for name in value]  # which take no quotes
        items = [f"{n}: {_in_grammar(item)}" for n, item in zip(names, value.values(), strict=True)]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, Sequence | set | frozenset):
        return "[" + ", ".join(_in_grammar(item) for item in value) + "]"
    raise TypeError
