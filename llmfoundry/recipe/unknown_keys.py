"""The error line for an unknown key, with a suggestion.

`unknown_key` suggests, in this order: the key of that name elsewhere in the recipe; the key with
the meaning of another tool's key; a key with a similar name. Otherwise it suggests nothing, because
a bad guess misleads. The keys of other tools are registered by the command line (`register`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from llmfoundry.recipe.checks import nearest, nearest_option
from llmfoundry.recipe.not_supported import NOT_SUPPORTED
from llmfoundry.recipe.paths import group_options, search_folders
from llmfoundry.recipe.schema import Choice, Schema
from llmfoundry.recipe.typed import Problem, flat

MOST_PLACES = 3  # keys of one name that are listed
LONGEST = 60  # characters of a value in a hint


@dataclass(frozen=True)
class OtherToolKey:
    """Keys of other tools that have one meaning here."""

    words: str
    """The keys, without leading dashes and with underscores for other dashes; with their section if
    the word alone has another meaning. `*` stands for any name, and at the end for everything
    below, or nothing."""
    write: str = ""
    """Our setting. <x> stands for the value that was typed, and is the example without one."""
    why: str = ""
    """A remark; the whole message if there is nothing to write."""
    off: str = ""
    """Our setting if the value is false, no or off; unset: there is nothing to write."""
    script: str = ""
    """The script with the key, if other scripts lack it."""

    @property
    def key(self) -> str:
        """The dotted key that `write` sets; "" if there is none."""
        return self.write.partition("=")[0]

    def rank(self, key: str) -> int:
        """Return how exactly the words match `key`: 0 for no match, most for the same word."""
        return max(rank_of(word, key) for word in self.words.split())


def rank_of(word: str, key: str) -> int:
    """Return how exactly a word, which may contain stars, matches a dotted key."""
    if word == key:
        return 1000
    names, parts = word.split("."), key.split(".")
    ends_open = names[-1] == "*"
    if "*" not in names or len(parts) < len(names) - ends_open:
        return 0
    if not ends_open and len(parts) != len(names):
        return 0
    pairs = zip(names, parts, strict=False)
    if not all(name in ("*", part) for name, part in pairs):
        return 0
    return 2 * sum(name != "*" for name in names) + (not ends_open)


K = TypeVar("K", bound=OtherToolKey)
_keys: list[OtherToolKey] = []
_file_hints: list[Callable[[dict[str, Any]], str | None]] = []


def register(
    keys: Iterable[OtherToolKey], file_hint: Callable[[dict[str, Any]], str | None]
) -> None:
    """Register the keys and files of other tools.

    Args:
        keys: the first match is suggested.
        file_hint: returns the hint for the values of a file, with {file} for its path; None if the
            file
            is not another tool's.
    """
    _keys[:] = keys
    _file_hints[:] = [file_hint]


def other_tools_file(values: dict[str, Any]) -> str | None:
    """Return the hint for the values of another tool's file; None if they are ours."""
    hints = (hint(values) for hint in _file_hints)
    return next((hint for hint in hints if hint is not None), None)


def named(key: str, table: Iterable[K]) -> list[K]:
    """Return the entries that match a key, the most exact match first."""
    matches = [other for other in table if other.rank(key) > 0]
    return sorted(matches, key=lambda other: other.rank(key), reverse=True)


def unknown_key(schema: Schema, key: str, value: Any = None) -> list[Problem]:
    """Return the problem of an unknown key, or of each key below it.

    Args:
        schema: the schema of the recipe.
        key: the dotted key.
        value: its value; None: unknown.
    """
    if isinstance(value, dict) and value:
        below = [(f"{key}.{name}", item) for name, item in flat(value)]
        if any(
            hint_for(schema, name, item, alone=False) or _is_missing(name) for name, item in below
        ):
            return [_problem(schema, name, item) for name, item in below]
    return [_problem(schema, key, value)]


def _is_missing(key: str) -> bool:
    """Return whether the last word of a key names something that is not supported here."""
    matches = named(_spelled(key.rpartition(".")[2]), _keys)
    return bool(matches) and matches[0].why.startswith("not supported")


def _spelled(key: str) -> str:
    """Return a key as the table spells it."""
    return key.lower().replace("-", "_")


def _problem(schema: Schema, key: str, value: Any) -> Problem:
    return Problem(key, hint_for(schema, key, value), is_unknown=True)


def hint_for(schema: Schema, key: str, value: Any, *, alone: bool = True) -> str:
    """Return the clause with a suggestion, or "". `alone`: also guess by the last word."""
    head, _, name = key.partition(".")
    if head == "variables":
        return _variable(schema, name, value)
    name = key.rpartition(".")[2]
    other = _other(schema, _spelled(key))
    other = other or (_other(schema, _spelled(name)) if alone else None)
    if not alone:
        return "" if other is None else _say(schema, other, value)
    is_whole = other is not None and any("." in word for word in other.words.split())
    places = [k for k, _ in schema.walk() if k.endswith(f".{name}")]
    if other is None or (places and other.key not in places and not is_whole):
        suggestion = _near(schema, key, places)
        if suggestion:
            return suggestion
    return "" if other is None else _say(schema, other, value)


def _variable(schema: Schema, name: str, value: Any) -> str:
    """Return the hint for LLM Foundry's `variables.NAME`, which is used in interpolations."""
    interpolation = f"${{variables.{name or 'NAME'}}}"
    other = _other(schema, name.lower())
    ours = name if name in schema.keys else other.key if other is not None else ""
    if not ours:
        return f"; write its value where {interpolation} stands"
    setting = f"{ours}={value}" if _fits(value) else ours
    return f"; write {setting}, and ${{{ours}}} where {interpolation} stands"


def _near(schema: Schema, key: str, places: list[str]) -> str:
    parent, _, name = key.rpartition(".")
    above = schema.find(parent) if parent else None
    section = (above.section or above.item) if above is not None else None
    own_keys = (section.keys if section is not None else {}) if parent else schema.keys
    if places and nearest_option(name, [n for n in own_keys if n == name]) is None:
        fewest = min(place.count(".") for place in places)
        shown = [place for place in places if place.count(".") == fewest][:MOST_PLACES]
        return "; did you mean " + " or ".join(f"'{place}'" for place in shown) + "?"
    return nearest(name, own_keys)


def _other(schema: Schema, word: str) -> OtherToolKey | None:
    """Return the meaning of another tool's key: in this recipe first, else in another script."""
    matches = [other for other in named(word, _keys) if other.write or other.why]
    here = (o for o in matches if not o.write or schema.find(o.key) is not None)
    return next(here, next((o for o in matches if o.script), None))


def _say(schema: Schema, other: OtherToolKey, value: Any) -> str:
    """Return the clause for another tool's key, with its value if ours accepts it."""
    if not other.write:
        return f"; {other.why}"
    text = "" if value is None else str(value)
    if text.lower() in NOT_SUPPORTED:
        return f"; {NOT_SUPPORTED[text.lower()]}"
    where = "" if schema.find(other.key) is not None else f" with scripts/{other.script}.py"
    why = f" ({other.why})" if other.why else ""
    example = re.sub("<(.*?)>", r"\1", other.write)
    takes_bool = re.search("<(true|false)>", other.write) is not None
    if text.lower() in ("false", "no", "off", "none") and not takes_bool:
        if other.off:
            return f"; write {other.off}{where}"
        return f"; remove it: off unless you write {example}{where}"
    if re.fullmatch(r"-[\d.]+", text):
        return f"; remove it: {text} is no value here, and {other.key} has its default{where}"
    written = re.sub(
        "<(.*?)>([a-z]*)", lambda m: _carried(schema, other.key, m[1], m[2], value), other.write
    )
    written = written.replace("[[", "[").replace("]]", "]")  # a list in the place of one of it
    return f"; write {written}{where}{why}"


def _carried(schema: Schema, key: str, example: str, unit: str, value: Any) -> str:
    """Return the value as our key accepts it, or else the example, with its unit."""
    if isinstance(value, bool):
        return str(value).lower() if example in ("true", "false") else example
    if isinstance(value, list) and value and all(map(_fits, value)):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    rule = None if (own_key := schema.find(key)) is None else own_key.rule(Choice)
    groups = group_options(search_folders(None), schema)
    options = groups.get(key) or (rule.options if rule is not None else ())
    if options and text not in options:
        begun = [option for option in options if text.lower().startswith(option)]
        nearest = nearest_option(text, options)
        is_free = rule is not None and rule.other
        return nearest or (begun[0] if begun else text if is_free and _fits(value) else example)
    if unit and not re.fullmatch(r"[\d.]+(e[+-]?\d+)?", text):
        return example + unit
    return (text if _fits(value) else example) + unit


def _fits(value: Any) -> bool:
    """Return whether a value can be part of a hint."""
    text = "" if value is None else str(value)
    is_plain = bool(text) and len(text) <= LONGEST and text.isprintable()
    return is_plain and not {*text} & set(" '\"[]{}$")
