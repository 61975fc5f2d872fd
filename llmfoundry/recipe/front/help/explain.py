"""What `--help` prints: the script's docstring, flags, groups; or what a key means.

A key's meaning is the string under its field in the schema, read from the source, of a key that a
section has from its base class there. Its choices are those that its type declares.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.front.argv import FLAGS, CommandLine
from llmfoundry.recipe.front.help.hints import unknown_key
from llmfoundry.recipe.front.paths import (
    find_recipe,
    group_options,
    recipe_name,
    search_folders,
    shipped,
    show,
)
from llmfoundry.recipe.front.typed import dump, hint_of, item_of, keys, options, section_of, to_dict
from llmfoundry.recipe.values.bounds import Choice, rules_of

WIDEST = 98


def explain(recipe_type: type, command: CommandLine, help: str) -> str:
    """The text for `--help`, `RECIPE --help` or `--help KEY`."""
    if command.topic is not None:
        return "\n".join(_topic(recipe_type, command.topic))
    recipe = None if command.recipe is None else find_recipe(command.recipe)
    parts = [help.strip()]
    if recipe is not None:
        parts.append(f"{command.recipe}:\n{textwrap.indent(_header(recipe), '  ')}")
    parts.append(_table("Flags", FLAGS))
    groups = group_options(search_folders(recipe), recipe_type)
    if groups:
        choices = {group: ", ".join(names) for group, names in groups.items()}
        parts.append(_table("Groups (group=option replaces the recipe's choice)", choices))
    if "run_name" in keys(recipe_type):
        recipes = [f"  {recipe_name(path)}" for path in shipped(recipe_type)]
        parts.append("\n".join(["Recipes", *recipes]))
    source = show(Path(inspect.getfile(recipe_type)))
    parts.append(
        f"Keys (--help KEY explains one, or all of a section; source: {source})\n"
        + _indented(", ".join(keys(recipe_type)), "  ")
    )
    return "\n\n".join(part for part in parts if part)


@functools.cache
def docstrings(schema: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line, by the key that users write.

    A class's own string comes before that of a base class.
    """
    found: dict[str, str] = {}
    for holder in reversed([c for c in inspect.getmro(schema) if dataclasses.is_dataclass(c)]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(holder)))
        body = tree.body[0].body  # type: ignore[attr-defined]
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                name = ast.unparse(field.target).rstrip("_")
                found[name] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _topic(recipe_type: type, key: str) -> Iterator[str]:
    """A key and its meaning, or all keys of a section."""
    hint = hint_of(recipe_type, key)
    parent, _, name = key.rpartition(".")
    if hint is None:
        raise UserError(*(problem.line for problem in unknown_key(recipe_type, key)))
    section, prefix = section_of(hint), f"{key}."
    if section is None:
        holder = section_of(hint_of(recipe_type, parent)) if parent else recipe_type
        if holder is not None:  # else the name of an item, such as a stream's
            yield from _field(holder, name, f"{parent}." if parent else "")
        section, prefix = item_of(hint), f"{key}{_item(hint)}."
        if section is None:
            return
    yield f"{key}: {' '.join((inspect.getdoc(section) or '').split())}"
    for name in keys(section):
        yield from _field(section, name, prefix)


def _item(hint: Any) -> str:
    """How the items of a list or a mapping of sections are named: [N] or .NAME."""
    is_list = any(typing.get_origin(option) is list for option in options(hint))
    return "[N]" if is_list else ".NAME"


def _field(schema: type, name: str, prefix: str) -> Iterator[str]:
    hint = keys(schema)[name]
    section, item = section_of(hint), item_of(hint)
    if section is not None:
        yield f"  {prefix}{name}  (section, {len(keys(section))} keys)"
    elif item is not None:
        yield f"  {prefix}{name}{_item(hint)}  (section, {len(keys(item))} keys)"
    else:
        kinds = " | ".join(
            str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
            for kind in options(hint)
        ).replace("typing.", "")
        default = dump({name: to_dict(schema())[name]}).partition(": ")[2].strip()
        yield f"  {prefix}{name}: {kinds.replace('NoneType', 'null')} = {default}"
    yield _indented(docstrings(schema).get(name, ""), " " * 6)
    choice = choice_of(schema, name)
    if choice is not None:
        for option, meaning in choice.meanings().items():
            yield _indented(f"{option}: {meaning}", " " * 6)
        yield _indented(f"choices: {choice.listed()}", " " * 6)


def choice_of(schema: type, name: str) -> Choice | None:
    """What the text at a key of a section may be; None where any text is one."""
    rules = {field.rstrip("_"): rules for field, rules in rules_of(schema).items()}
    return next((rule for rule in rules[name] if isinstance(rule, Choice)), None)


def _indented(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _width() -> int:
    """Characters of a line: a terminal's, and no more than can be read."""
    if not sys.stdout.isatty():
        return WIDEST
    return min(WIDEST, shutil.get_terminal_size().columns)


def _header(recipe: Path) -> str:
    """The comment at the head of a recipe's file."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    header = []
    for line in lines:
        if not line.startswith("#"):
            break
        header.append(line.removeprefix("#").removeprefix(" ").rstrip())
    return "\n".join(header)


def _table(title: str, rows: dict[str, str]) -> str:
    width = max(map(len, rows)) + 4
    lines = [_indented(text, " " * width).lstrip() for text in rows.values()]
    named = (f"  {name:<{width - 2}}{text}" for name, text in zip(rows, lines, strict=True))
    return "\n".join([title, *named])
