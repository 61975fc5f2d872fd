"""Puts a recipe together from its schema's defaults, groups, its file and the command line.

`load.py` calls it. Values stay untyped here, and every value's origin can be asked for, so that an
error can name file and line.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmfoundry.errors import UserError
from llmfoundry.masking import MASK, masked_keys
from llmfoundry.recipe.front.defaults import YamlSource, parts
from llmfoundry.recipe.front.grammar import DEFAULT, split
from llmfoundry.recipe.front.paths import group_options, search_folders, show
from llmfoundry.recipe.front.typed import to_dict
from llmfoundry.recipe.schema import Schema

_MOST_TEXT = 1 << 20  # characters, as of a recipe's file
_NAMED = re.compile(r"\$\{(\.*[A-Za-z_][\w.\[\]]*)\}")


@dataclass
class Composed:
    """The untyped recipe, interpolations still in place, and where its values come from."""

    config: DictConfig
    sources: list[YamlSource]
    overridden: list[str]

    def where(self, key: str) -> str:
        """The prefix `file:line: ` of the file that decided `key`; "" for the command line."""
        key = key.split("[")[0]
        for given in self.overridden:
            if f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}."):
                return ""
        for source in reversed(self.sources):
            line = source.line_of(key)
            if line is not None:
                return f"{show(source.path)}:{line}: "
        return ""

    def raw(self) -> dict[str, Any]:
        """Plain values as written."""
        values = OmegaConf.to_container(self.config)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}

    def resolved(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Plain values with interpolations replaced, and a line for each key without a value.

        A key has none whose interpolation leads nowhere, or whose secret was not saved. It is left
        out of the values.

        Raises:
            UserError: an interpolation leads back to itself.
        """
        pending: dict[str, str] = {}
        self._check_growth()
        try:
            values = self._resolve(self.config, "", pending)
        except RecursionError:
            raise UserError("an interpolation ${...} here leads back to itself") from None
        for key in masked_keys(values):
            pending[key] = (
                f"{self.where(key)}{key}: has {MASK} where a secret was not saved; write"
                " ${oc.env:NAME} there, and set the variable NAME"
            )
        return _without(values, pending), pending

    def _check_growth(self) -> None:
        """Before anything is replaced: interpolations that double each other have no end.

        Raises:
            UserError: what they make is too long.
        """
        sizes: dict[tuple[str, ...], int] = {}
        raw = self.raw()

        def size(place: tuple[str, ...], value: Any) -> int:
            if place not in sizes:
                sizes[place] = 1  # of one that leads back to itself, which is told later
                named = _NAMED.findall(value) if isinstance(value, str) else []
                parts = [(*place, name) for name in _names(value)]
                parts += [_named_place(name, place) for name in named]
                found = [(part, _at(raw, part)) for part in parts]
                sizes[place] = len(str(value)) if not _names(value) else 1
                sizes[place] += sum(size(part, at) for part, at in found if at is not None)
            return sizes[place]

        for key, value in raw.items():
            if size((key,), value) > _MOST_TEXT:
                raise UserError(
                    f"{self.where(key)}{key}: its interpolations make more than {_MOST_TEXT:,}"
                    " characters; write the text out"
                )

    def _resolve(self, node: Any, key: str, pending: dict[str, str]) -> Any:
        if not isinstance(node, DictConfig | ListConfig):
            return node
        is_list = isinstance(node, ListConfig)
        plain: dict[Any, Any] = {}
        names: list[Any] = [*range(len(node))] if is_list else [*node]
        for name in names:
            dotted = f"{key}[{name}]" if is_list else f"{key}.{name}".lstrip(".")
            try:
                value = "???" if OmegaConf.is_missing(node, name) else node[name]
                plain[name] = self._resolve(value, dotted, pending)
            except OmegaConfBaseException as error:
                pending[dotted] = _explain(error, dotted, self.where(dotted))
        return list(plain.values()) if is_list else plain


def _names(value: Any) -> list[str]:
    """The names of what a section or a list holds."""
    if isinstance(value, dict):
        return [str(name) for name in value]
    return [str(i) for i in range(len(value))] if isinstance(value, list) else []


def _named_place(name: str, place: tuple[str, ...]) -> tuple[str, ...]:
    """Where `${name}`, written at `place`, leads: a dot in front is the section that it is in."""
    plain = name.lstrip(".")
    up = len(name) - len(plain)
    parts = tuple(part for part in re.split(r"[.\[\]]+", plain) if part)
    return (*place[:-up], *parts) if up else parts


def value_at(raw: Any, key: str) -> Any:
    """What is at a dotted key of plain values; None where there is nothing."""
    return _at(raw, tuple(key.split(".")))


def _at(raw: Any, place: tuple[str, ...]) -> Any:
    """What is at a place; None where there is nothing."""
    for name in place:
        if isinstance(raw, list):
            raw = raw[int(name)] if name.isdecimal() and int(name) < len(raw) else None
        else:
            raw = raw.get(name) if isinstance(raw, dict) else None
    return raw


def compose(schema: Schema, recipe: Path | None, overrides: Sequence[str] = ()) -> Composed:
    """Merge schema defaults, the files that take part, and `overrides`, in this order.

    A group chosen on the command line takes the place of the recipe's choice in its defaults list;
    a recipe without that choice (a flat one) has its whole section replaced.

    Raises:
        UserError: a file or an override cannot be read, or a group has no such option.
    """
    folders = search_folders(recipe)
    options = group_options(folders, schema)
    groups, values = split(overrides, schema, options)
    sources, added = parts(recipe, groups, options, folders)
    defaults = to_dict(schema.cls())
    merged = copy.deepcopy(defaults)
    for source in sources:
        if source.package in added:
            merged[source.package] = copy.deepcopy(defaults[source.package])
        _merge(merged, source.load())
    try:
        config = OmegaConf.create(merged)
        for key, value in values.items():
            _set(config, key, value, defaults)
    except OmegaConfBaseException as error:
        raise UserError(_explain(error, str(error.full_key), "")) from error
    except RecursionError:
        raise UserError("a value is nested too deep; flatten it") from None
    return Composed(config, sources, list(values))


def _set(config: DictConfig, key: str, value: Any, defaults: dict[str, Any]) -> None:
    """Write an override's value, or the schema's own, into `config`."""
    try:
        value = OmegaConf.select(OmegaConf.create(defaults), key) if value is DEFAULT else value
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except OmegaConfBaseException:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        # OmegaConf's for keys that lead into a list or a number
        raise UserError(f"{key}: is not a key; write a list or a section whole") from error


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Write `values` into `into`: sections are merged, all else is replaced."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _without(value: Any, keys: Mapping[str, str], key: str = "") -> Any:
    """Plain values but for those at the dotted `keys`."""
    if isinstance(value, dict):
        parts = {name: f"{key}.{name}".lstrip(".") for name in value}
        return {
            str(name): _without(value[name], keys, part)
            for name, part in parts.items()
            if part not in keys
        }
    if isinstance(value, list):
        kept = [i for i in range(len(value)) if f"{key}[{i}]" not in keys]
        return [_without(value[i], keys, f"{key}[{i}]") for i in kept]
    return value


def _explain(error: OmegaConfBaseException, key: str, where: str) -> str:
    why = str(error.msg or error).splitlines()[0]
    return f"{where}{key}: {why}; write \\${{ for a literal ${{"
