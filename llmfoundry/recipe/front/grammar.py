"""Reads `key=value`, `group=option` and `~key` with Hydra's grammar, and the lists of a sweep.

Two rules differ from Hydra's. The schema alone says which keys exist, so a leading `+` changes
nothing. And a text field takes all that follows `=` as it stands (`prompt=Well, why (not)?`);
quotes around the whole are dropped, and null is null. So does a list of texts that is written as
one text, which the grammar cannot read (`data.paths=my file (1).jsonl`).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.schema import Key, Schema

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

DEFAULT = object()
LONGEST = 20_000
"""Characters that are read with the grammar; more belong into a file."""
MOST_POINTS = 10_000
"""Runs of a sweep."""


def split(
    overrides: Sequence[str], schema: Schema, groups: dict[str, list[str]]
) -> tuple[dict[str, str], dict[str, Any]]:
    """The groups' options and the keys' values in `overrides`; the last of a key counts.

    The value DEFAULT asks for the schema's own (written `~key`).

    Raises:
        UserError: an override cannot be read; all such are named.
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
    """`("model.n_layers", "4")` of `+model.n_layers=4`.

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


def choices(override: str, groups: dict[str, list[str]]) -> list[str]:
    """The overrides that `key=a,b` or `key=range(1,4)` stands for in a sweep; itself, if only one.

    Raises:
        UserError: it is a kind of sweep that has no end.
    """
    from hydra.core.override_parser.types import Glob, RangeSweep
    from hydra.errors import HydraException

    key, text = key_and_text(override)
    parsed = None if override.startswith("~") else _parse(text)
    if parsed is None or not parsed.is_sweep_override():
        return [override]
    swept = parsed._value
    if isinstance(swept, RangeSweep) and swept.step:
        start, stop = float(swept.start or 0), float(swept.stop or 0)
        if not abs(stop - start) <= MOST_POINTS * abs(swept.step):
            raise UserError(f"{override}: has more than {MOST_POINTS:,} points; write fewer")
    if isinstance(swept, Glob):
        return [f"{key}={option}" for option in parsed._value.filter(groups.get(key, []))]
    try:
        return [f"{key}={element}" for element in parsed.sweep_string_iterator()]
    except HydraException as error:
        raise UserError(f"{override}: cannot be listed; write {key}=a,b or a range()") from error


def _value(key: str, text: str, declared: Key | None) -> Any:
    is_text = declared is not None and {*declared.types} <= {str, types.NoneType}
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_text and text != "null" and not quoted:
        return text
    parsed = _parse(text)
    if parsed is not None and not parsed.is_sweep_override():
        return parsed.value()
    is_texts = declared is not None and list[str] in declared.types
    if is_text or (parsed is None and is_texts and not text.startswith("[")):
        return text
    if parsed is None:
        raise UserError(f"{key}={text}: cannot be read; quote a text as {key}='\"...\"'")
    raise UserError(f"{key}={text}: several values; add -m to run each, or write a list, [{text}]")


def _parse(text: str) -> Override | None:
    """The value as Hydra's grammar reads it; None where it does not."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if len(text) > LONGEST:
        return None
    try:
        return OverridesParser.create().parse_override(f"key={text}")
    except (HydraException, ValueError, RecursionError):  # the last of numbers and lists too long
        return None
