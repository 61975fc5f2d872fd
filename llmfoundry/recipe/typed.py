"""Conversion between plain values and typed recipes, by the dataclasses of the schema.

`build` reports all unknown keys and wrong types instead of stopping at the first. A field whose
name ends with an underscore (because Python reserves the word) is written without it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import yaml

from llmfoundry.errors import MOST_LINES, UserError
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.schema import Schema, options, section_of
from llmfoundry.redaction import MASK, hide, public_values

T = TypeVar("T")


class Problem(NamedTuple):
    """A mistake in a recipe: the dotted key, and why it is wrong."""

    key: str
    why: str
    """What is wrong and what to write; for an unknown key, a clause with a similar key."""
    is_unknown: bool = False
    """Whether the key does not exist."""

    @property
    def line(self) -> str:
        """The full message."""
        return (
            f"unknown key '{self.key}'{self.why}" if self.is_unknown else f"{self.key}: {self.why}"
        )


def build(schema: type[T], values: Mapping[Any, Any], problems: list[Problem], key: str = "") -> T:
    """Return a `schema` object with `values`; missing keys have their defaults or are reported.

    Args:
        schema: a dataclass whose fields may be dataclasses. Its `REMOVED` names the keys of earlier
            versions, with what to write instead.
        values: plain values, nested as the schema.
        problems: receives the mistakes; fields with a mistake have their defaults, or None.
        key: dotted prefix of the section, with its last dot.
    """
    keys, removed = Schema.of(schema).keys, getattr(schema, "REMOVED", {})
    arguments: dict[str, Any] = {k.field: None for k in keys.values() if k.required}
    for name, value in values.items():
        dotted = f"{key}{name}"
        if name in removed:
            if value not in (None, False):  # recipes that earlier versions wrote have it off
                problems.append(Problem(dotted, removed[name]))
            continue
        if name not in keys:
            near = nearest(str(name), keys) if len(problems) < MOST_LINES else ""
            problems.append(Problem(dotted, near, is_unknown=True))
            continue
        before = len(problems)
        converted = to_type(keys[name].hint, value, dotted, problems)
        if len(problems) == before:
            arguments[keys[name].field] = converted
    # Required keys that are missing.
    for name in (k.name for k in keys.values() if k.required and k.name not in values):
        why = f"is missing; write {_noun(keys[name].hint)}"
        problems.append(Problem(f"{key}{name}", why))
    return schema(**arguments)


class _Origin(NamedTuple):
    """The data that `remember` stores, and the recipe's values at that time."""

    raw: dict[str, Any]
    loaded: dict[str, Any]
    pending: dict[str, str]
    places: Any = None


def remember(recipe: Any, raw: Mapping[str, Any], pending: Mapping[str, str], places: Any) -> None:
    """Store how a recipe was written, for `as_written`, `require` and `placed`.

    Args:
        recipe: the recipe as it was read.
        raw: its plain values, with interpolations.
        pending: for each dotted key without an available value, the line that says why.
        places: compose.ValueSources, which finds the file and line of a key.
    """
    recipe._origin = _Origin(dict(raw), to_dict(recipe), dict(pending), places)


def keep_origin(recipe: Any, resolved: Any) -> None:
    """Let `as_written` and the others answer for a resolved recipe as for the user's."""
    resolved._origin = _origin(recipe)


def placed(recipe: Any, line: str) -> str:
    """Add the file of a key, and how to remove the key, to a message that asks to remove it."""
    places = _origin(recipe).places
    return line if places is None or "remove it" not in line else str(places.placed(line))


def as_written(recipe: Any) -> dict[str, Any]:
    """Return the recipe's plain values for saving, with interpolations and masked secrets.

    In values that come from no interpolation a `${` is escaped.
    """
    origin = _origin(recipe)
    return public_values(_put_back(to_dict(recipe), origin.loaded, origin.raw))


class Edits(NamedTuple):
    """A recipe's plain values, as far as they are unchanged since `remember` as they were written.

    Attributes:
        values: the values, with interpolations; changed texts have their `${` escaped.
        changed: dotted keys of the changed values.
        places: where the unchanged values come from (compose.ValueSources); None: unknown.
    """

    values: dict[str, Any]
    changed: list[str]
    places: Any


def edits(recipe: Any) -> Edits:
    """Return what a program has changed of a recipe that was read."""
    origin, now = _origin(recipe), to_dict(recipe)
    before, changed = dict(flat(origin.loaded)), list[str]()
    for key, value in flat(now):
        if key not in before or value != before[key]:
            changed.append(key)
    return Edits(_as_read(now, origin.loaded, origin.raw), changed, origin.places)


def _as_read(values: Any, loaded: Any, raw: Any) -> Any:
    """Return `values` with the written form of each that is unchanged."""
    if isinstance(values, dict) and isinstance(raw, dict) and isinstance(loaded, dict):
        pending = {name: value for name, value in raw.items() if name not in loaded}
        kept = {k: _as_read(v, loaded.get(k, _NEW), raw.get(k)) for k, v in values.items()}
        return pending | kept
    is_unchanged = type(values) is type(loaded) and values == loaded
    return raw if is_unchanged else _escape(_of_program(values))


def _of_program(value: Any) -> Any:
    """Return a value that a program has set in the types that YAML has."""
    if isinstance(value, dict):
        return {str(name): _of_program(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_of_program(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and not getattr(value, "ndim", 0):  # a number of NumPy or PyTorch
        return value.item()
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain else repr(value)  # whose type the check reports


_NEW = object()  # in place of the value that a new key had


def unknown_attributes(section: Any, key: str = "") -> Iterator[Problem]:
    """Yield a problem for each attribute of a recipe or section that is none of its fields."""
    keys = Schema.of(type(section)).keys
    own = {declared.field: name for name, declared in keys.items()}
    for attribute, value in vars(section).items():
        if attribute not in own and not attribute.startswith("_"):
            yield Problem(f"{key}{attribute}", nearest(attribute, keys), is_unknown=True)
        elif dataclasses.is_dataclass(value):
            yield from unknown_attributes(value, f"{key}{own[attribute]}.")


def require(recipe: Any, *needed: str) -> None:
    """Refuse a recipe if the value at a `needed` key, or below one, is not available here.

    Raises:
        UserError: a line for each such key: a variable that is not set, or a secret that was not
            saved.
    """
    lines = missing(recipe, *needed)
    if lines:
        raise UserError(*lines)


def missing(recipe: Any, *needed: str) -> list[str]:
    """Return the lines that `require` would raise; without `needed` those of every key."""
    below = re.compile("|".join(rf"{re.escape(key)}(?:[.\[]|$)" for key in needed))
    return [line for key, line in _origin(recipe).pending.items() if below.match(key)]


def notes(recipe: Any) -> list[str]:
    """Return a line for each group of the command line that replaces values of the recipe."""
    places = _origin(recipe).places
    return [] if places is None else list(places.notes)


def know_secrets(recipe: Any) -> None:
    """Register the secrets of a recipe that another process has read, so that they are masked."""
    hide(_origin(recipe).raw)
    hide(to_dict(recipe))


def is_named(recipe: Any) -> bool:
    """Return whether the user set run_name; its default is the name of the file."""
    return _origin(recipe).raw.get("run_name", "") is not None


def _origin(recipe: Any) -> _Origin:
    return getattr(recipe, "_origin", _Origin({}, {}, {}))


def _put_back(values: Any, loaded: Any, raw: Any) -> Any:
    """Return `values` with interpolations restored where the resolved value is unchanged."""
    if isinstance(values, dict) and isinstance(raw, dict) and isinstance(loaded, dict):
        pending = {k: v for k, v in raw.items() if k not in loaded}
        return pending | {k: _put_back(v, loaded.get(k), raw.get(k)) for k, v in values.items()}
    is_reference = "${" in str(raw) or MASK in str(raw)
    return raw if is_reference and values == loaded else _escape(values)


def to_dict(recipe: Any) -> dict[str, Any]:
    """Return the recipe as plain values under the names that users write, in the schema's order."""
    keys = Schema.of(type(recipe)).keys.values()
    return {key.name: _to_plain(getattr(recipe, key.field)) for key in keys}


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {name: _to_plain(item) for name, item in value.items()}
    return [_to_plain(item) for item in value] if isinstance(value, list) else value


def to_yaml(recipe: Any, *, resolve: bool = False) -> str:
    """Return `as_written` as YAML, from which `load` restores the recipe except for secrets.

    With `resolve`, interpolations are replaced by their values.
    """
    return dump(public_values(_escape(to_dict(recipe))) if resolve else as_written(recipe))


def dump(plain: Any) -> str:
    """Return plain values as YAML in their order; interpolations in them are not changed."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def flat(values: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested sections with its dotted key, below `key`."""
    for name, value in values.items():
        dotted = f"{key}.{name}" if key else name
        if isinstance(value, dict) and value:
            yield from flat(value, dotted)
        else:
            yield dotted, value


def _escape(value: Any) -> Any:
    """Return `value` with each `${` in its texts escaped, and backslashes before it doubled."""
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def to_type(hint: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """Return `value` as the type `hint`; append to `problems` if it cannot be converted."""
    allowed = options(hint)
    if value is None and types.NoneType in allowed:
        return None
    if value == "???":
        problems.append(Problem(key, f"is required; write {key}=VALUE"))
        return None
    # A section.
    section = section_of(hint)
    if section is not None:
        if isinstance(value, dict):
            return build(section.cls, value, problems, f"{key}.")
        off = getattr(section.cls, "OFF", None)
        if off is not None and value in (None, False):
            return section.cls(**off)
        why = f"{_show(value)} is not a section; write its keys below it"
        can_be_group = isinstance(value, str) and "[" not in key
        near = f", or `- {key}: {value}` in the defaults list" if can_be_group else ""
        problems.append(Problem(key, why + near))
        return None
    # A list or a mapping.
    kinds = {typing.get_origin(option): typing.get_args(option) for option in allowed}
    scalars = [option for option in allowed if option in _SCALARS]
    if list in kinds and (isinstance(value, list) or not scalars):
        return _convert_list(kinds[list][0], value, key, problems)
    if dict in kinds and (isinstance(value, dict) or not scalars):
        return _convert_dict(kinds[dict][1], value, key, problems)
    # A scalar: the first type that the value can be converted to.
    for scalar in scalars:
        try:
            return _SCALARS[scalar][0](value)
        except (ValueError, TypeError, OverflowError):
            continue
    if isinstance(value, dict) and bool in scalars:  # LLM Foundry's `callbacks: {lr_monitor: {}}`
        problems += [Problem(f"{key}.{name}", "", is_unknown=True) for name in value]
        problems.append(Problem(key, f"{_show(value)} is not true or false; write true"))
        return None
    instead = f"; write {_noun(hint)}, or remove the key" if value is None else ""
    problems.append(Problem(key, f"{_show(value)} is not {_noun(hint)}{instead}"))
    return None


def _noun(hint: Any) -> str:
    """Return a noun for the type `hint`."""
    nouns = {kind: noun for kind, (_, noun) in _SCALARS.items()}
    nouns |= {list: "a list, [...]", dict: "a mapping, {name: ...}"}
    kinds = [typing.get_origin(option) or option for option in options(hint)]
    return " or ".join(nouns[kind] for kind in kinds if kind in nouns)


def _convert_list(hint: Any, value: Any, key: str, problems: list[Problem]) -> list[Any] | None:
    if hint is str and isinstance(value, str) and value:
        value = [value]
    if not isinstance(value, list):
        instead = "[...]" if value in (None, "") else f"[{value}]"
        problems.append(Problem(key, f"{_show(value)} is not a list; write {instead}"))
        return None
    return [to_type(hint, item, f"{key}[{i}]", problems) for i, item in enumerate(value)]


def _convert_dict(hint: Any, value: Any, key: str, problems: list[Problem]) -> dict[str, Any]:
    if not isinstance(value, dict):
        problems.append(Problem(key, f"{_show(value)} is not a mapping; write {{name: ...}}"))
        return {}
    if hint is Any:
        return dict(value)
    return {str(k): to_type(hint, item, f"{key}.{k}", problems) for k, item in value.items()}


def _integer(value: Any) -> int:
    """Return an integer for 4, "4" (from an environment variable) or 1e3, a text in some YAML."""
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, int):
        return value
    number = float(value)
    if number != int(number):
        raise ValueError
    return int(number)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value.replace(".inf", "inf") if isinstance(value, str) else value)


def _boolean(value: Any) -> bool:
    word = str(value).lower()
    if word not in ("true", "yes", "on", "false", "no", "off"):
        raise ValueError
    return word in ("true", "yes", "on")


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


_SCALARS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    int: (_integer, "an integer"),
    float: (_number, "a number"),
    bool: (_boolean, "true or false"),
    str: (_text, "a text"),
}


def _show(value: Any) -> str:
    """Return a value as YAML writes it, a text in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes lists on one line and sections as blocks."""

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        """Write a list as [a, b]."""
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


_Dumper.add_representer(list, _Dumper.represent_list)
