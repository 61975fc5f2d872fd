"""Reads a file of LLM Foundry's: training, fine-tuning, evaluation, tasks, or MCLI's around one.

`walk.py` goes through the leaves. OmegaConf reads it, as LLM Foundry does, once the strict reader
has found it bounded; an interpolation that leads nowhere is reported, with what was meant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llmfoundry.errors import UserError, one_line
from llmfoundry.recipe.front.compose import Composed, ValueSources
from llmfoundry.recipe.front.paths import show
from llmfoundry.recipe.front.yamlfile import read_yaml, yaml_problem
from llmfoundry.recipe.other_tools.commands import MOUNTED, calls
from llmfoundry.recipe.other_tools.foreign import FOUNDRY, is_mcli, kind_of, tool_of

Place = tuple[str | int, ...]
_NAMED = re.compile(r"\$\{([\w.]+)\}")
_RESOLVER = re.compile(r"(?<!\\)\$\{(?=[\w.]+:)")  # ${oc.env:NAME}, which stays as it is
_PARAMETERS = "parameters"


@dataclass(frozen=True)
class Leaf:
    """A setting: a value, an empty section, or a list of values.

    Attributes:
        shown: its dotted key in the file, as a report names it.
        key: what the table knows it by, list numbers as names.
        place: where it stands in `values` of its file.
        value: interpolations resolved.
        why: what is wrong with its interpolation; empty: nothing.
    """

    shown: str
    key: str
    place: Place
    value: Any
    why: str = ""


@dataclass
class Source:
    """A file, read.

    Attributes:
        path: of it.
        kind: the script of ours that the result is for, or gauntlet; empty: there is no recipe.
        values: the recipe's, resolved.
        leaves: all of them, in the file's order, those around the recipe too.
        named: dotted keys that interpolations take.
        tool: whose it is.
        recipe: the other file that an MCLI file's command starts; None: it is in the file.
    """

    path: Path
    kind: str
    values: dict[str, Any]
    leaves: list[Leaf]
    named: set[str] = field(default_factory=set)
    recipe: Path | None = None
    tool: str = FOUNDRY


def read_theirs(path: Path) -> Source:
    """Read and resolve a file.

    Raises:
        UserError: it cannot be read, or is none of LLM Foundry's.
    """
    raw = _load(path)
    around: list[Leaf] = []
    recipe, prefix = None, ""
    if is_mcli(raw):
        outside = {key: value for key, value in raw.items() if key != _PARAMETERS}
        around = [Leaf(s, f"mcli.{_key(p)}", p, v) for s, p, v in leaves_of(outside)]
        raw, recipe = _within(path, raw)
        prefix = "" if recipe is not None else f"{_PARAMETERS}."
    kind = kind_of(raw) or ("" if around else None)
    if kind is None:
        raise UserError(
            f"{show(path)}: is no file of LLM Foundry's for training, fine-tuning, evaluation,"
            " tasks or MCLI, and none of axolotl's: it has no train_loader, models, icl_tasks,"
            " parameters or base_model"
        )
    values, pending = _resolved(raw)
    inside = [
        Leaf(f"{prefix}{shown}", _key(place), place, value, pending.get(shown, ""))
        for shown, place, value in leaves_of(values)
    ]
    named = {name for text in _texts(raw) for name in _NAMED.findall(text)}
    tool = tool_of(raw)
    return Source(path, kind, values, [*around, *inside], named, recipe, tool)


def _load(path: Path) -> dict[str, Any]:
    """As LLM Foundry reads it, within the bounds of a recipe."""
    read_yaml(path)
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(yaml_problem(error, path)) from error
    if not isinstance(values, dict):
        raise UserError(f"{show(path)}: holds no keys; a recipe is lines of `key: value`")
    return {str(key): value for key, value in values.items()}


def _within(path: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], Path | None]:
    """The recipe that an MCLI file runs: its parameters, or a file with what the command changes.

    Raises:
        UserError: the command names a file that is not beside this one.
    """
    parameters = raw.get(_PARAMETERS) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{show(path)}: {_PARAMETERS}: is no section; it holds a recipe's keys")
    if parameters:
        return {str(key): value for key, value in parameters.items()}, None
    for name, words in calls(str(raw.get("command", ""))):
        file = next((word for word in words if word.endswith((".yaml", ".yml"))), MOUNTED)
        if name not in ("train", "eval") or file == MOUNTED:
            continue
        found = _beside(path, file)
        if found is None:
            raise UserError(
                f"{show(path)}: command: {file} is not there; write the path of that file in place"
                " of this one, or put this one into its clone of LLM Foundry"
            )
        theirs, changed = _load(found), [word for word in words if "=" in word[1:]]
        try:
            changes = OmegaConf.from_dotlist(changed)
            merged = OmegaConf.to_container(OmegaConf.merge(theirs, changes))
        except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
            raise UserError(
                f"{show(path)}: command: {' '.join(changed)} cannot be read: {one_line(error)}"
            ) from error
        assert isinstance(merged, dict)
        return {str(key): value for key, value in merged.items()}, found
    return {}, None


def _beside(path: Path, name: str) -> Path | None:
    """A file that a command names, from a folder above the MCLI file's or its scripts/."""
    for folder in path.absolute().parents:
        for place in (folder / name, folder / "scripts" / name):
            if os.path.isfile(place):
                return place
    return None


def _resolved(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Values, and for each key whose interpolation leads nowhere what was taken in its place.

    LLM Foundry stops at such a file; where `variables` has the name, that was meant.
    """
    variables = raw["variables"] if isinstance(raw.get("variables"), dict) else {}
    config = OmegaConf.create(_keep_resolvers(raw))
    wrong: dict[str, str] = {}
    values, pending = Composed(config, ValueSources([], [])).resolved()
    for shown, place, text in leaves_of(raw):
        if shown not in pending:
            continue
        names = _NAMED.findall(str(text))
        meant = variables.get(names[0]) if len(names) == 1 else None
        wrong[shown] = f"{text} leads nowhere, at which LLM Foundry stops"
        if meant is not None:
            wrong[shown] += f"; variables.{names[0]} is taken"
        put(values, place, meant)
    return values, wrong


def _keep_resolvers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _keep_resolvers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_keep_resolvers(item) for item in value]
    return _RESOLVER.sub(r"\\${", value) if isinstance(value, str) else value


def leaves_of(values: Any, place: Place = ()) -> Iterator[tuple[str, Place, Any]]:
    """Every setting of nested values: its dotted key, its place, and its value."""
    is_list = isinstance(values, list)
    items: Any = enumerate(values) if is_list else values.items()
    for name, value in items:
        at = (*place, name)
        is_nested = isinstance(value, dict) or (
            isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
        )
        if is_nested and value:
            yield from leaves_of(value, at)
        else:
            yield _shown(at), at, value


def _shown(place: Place) -> str:
    return "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in place).lstrip(".")


def _key(place: Place) -> str:
    return ".".join(map(str, place))


def _texts(values: Any) -> Iterator[str]:
    return (str(value) for _, _, value in leaves_of(values) if isinstance(value, str | list))


def put(values: Any, place: Place, value: Any) -> None:
    """Write a value at a place of nested sections and lists, which are made on the way."""
    *above, last = place
    for name, following in zip(above, place[1:], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(values, list):
            assert isinstance(name, int)
            values.extend({} for _ in range(name + 1 - len(values)))
            values = values[name]
        else:
            if not isinstance(values.get(name), type(empty)):
                values[name] = empty
            values = values[name]
    if isinstance(values, list):
        assert isinstance(last, int)
        values.extend(None for _ in range(last + 1 - len(values)))
    values[last] = value
