"""Text of `--help`: docstring, flags and groups of a script, or the explanation of a key.

Entry points: `help_text`, and `unknown_flag` for the error about an unknown flag. Both read the
schema of the recipe.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

from llmfoundry.cli.command_line import FLAGS, SETTINGS, CommandLine
from llmfoundry.command_text import as_called
from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import (
    find_recipe,
    group_options,
    recipe_name,
    search_folders,
    shipped,
    show,
)
from llmfoundry.recipe.schema import Choice, Key, Schema
from llmfoundry.recipe.typed import dump
from llmfoundry.recipe.unknown_keys import hint_for, unknown_key

WIDEST = 98
_NOTE = re.compile(r"(?<=\S)  +(?=\S)")  # between a command and its note


def help_text(schema: Schema, command: CommandLine, help: str) -> str:
    """Return the text of `--help`, `RECIPE --help` or `--help KEY`."""
    if command.topic is not None:
        return "\n".join(_topic(schema, command.topic))
    recipe = None if command.recipe is None else find_recipe(command.recipe)
    parts = [_fitted(as_called(help.strip()))]
    if recipe is not None:
        parts.append(f"{command.recipe}:\n{textwrap.indent(_header(recipe), '  ')}")
    parts += [_table("Settings", SETTINGS), _table("Flags", FLAGS)]
    groups = group_options(search_folders(recipe), schema)
    if groups:
        choices = {group: ", ".join(names) for group, names in groups.items()}
        parts.append(_table("Groups", choices))
    if "run_name" in schema.keys:
        recipes = [f"  {recipe_name(path)}" for path in shipped(schema)]
        parts.append("\n".join(["Recipes", *recipes]))
    source = show(Path(inspect.getfile(schema.cls)))
    parts.append(
        _indented(f"Keys (--help KEY explains one, or all of a section; source: {source})\n", "")
        + "\n"
        + _indented(", ".join(schema.keys), "  ")
    )
    return "\n\n".join(part for part in parts if part)


def unknown_flag(schema: Schema, argument: str, following: str | None = None) -> str:
    """Return the error for an unknown flag.

    Args:
        schema: schema of the recipe.
        argument: the flag, `--name` or `--name=value`.
        following: the next word, which may be its value.
    """
    name, equals, value_after_equals = argument.lstrip("-").partition("=")
    key = name.replace("-", "_")
    value = value_after_equals if equals else following
    suggestion = hint_for(schema, key, value)
    if schema.find(key) is not None:
        suggestion = f"; settings have no dashes: {key}={'VALUE' if value is None else value}"
    elif not suggestion:
        suggestion = nearest(argument, FLAG_WORDS)
    if not suggestion and equals:
        suggestion = f"; settings have no dashes: {argument.lstrip('-')}"
    return f"unknown flag '{argument}'{suggestion} (flags: {', '.join(FLAGS)})"


FLAG_WORDS = [*(flag.split()[0] for flag in FLAGS), "--multirun"]


def _topic(schema: Schema, dotted: str) -> Iterator[str]:
    """Yield the lines about a key, or about all keys of a section.

    Raises:
        UserError: there is no such key.
    """
    key = schema.find(dotted)
    if key is None:
        raise UserError(*(problem.line for problem in unknown_key(schema, dotted)))
    section, prefix = key.section, f"{dotted}."
    if section is None:
        if key.owners:  # not the name of an item, such as a stream
            yield from _key(key, dotted)
        section, prefix = key.item, f"{dotted}{item_name(key)}."
        if section is None:
            return
    yield f"{dotted}: {section.meaning}"
    for below in section.keys.values():
        yield from _key(below, f"{prefix}{below.name}")


def item_name(key: Key) -> str:
    """Return the notation for items of a list ([N]) or mapping (.NAME) of sections."""
    is_list = any(typing.get_origin(option) is list for option in key.types)
    return "[N]" if is_list else ".NAME"


def _key(key: Key, dotted: str) -> Iterator[str]:
    if key.section is not None:
        yield f"  {dotted}  (section, {len(key.section.keys)} keys)"
    elif key.item is not None:
        yield f"  {dotted}{item_name(key)}  (section, {len(key.item.keys)} keys)"
    else:
        yield f"  {dotted}: {type_text(key)} = {default_text(key)}"
    yield _indented(key.explanation(dotted), " " * 6)
    choice = key.rule(Choice)
    if choice is not None:
        for option, meaning in choice.meanings().items():
            yield _indented(f"{option}: {meaning}", " " * 6)
        yield _indented(f"choices: {choice.listed()}", " " * 6)


def type_text(key: Key) -> str:
    """Return the types of a key's value, such as `int | null`."""
    kinds = (
        str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
        for kind in key.types
    )
    return " | ".join(kinds).replace("typing.", "").replace("NoneType", "null")


def default_text(key: Key) -> str:
    """Return the default of a key as YAML on one line."""
    return dump({key.name: key.default}).partition(": ")[2].strip()


def _indented(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _fitted(help: str) -> str:
    """Wrap the docstring of a script to the width of the terminal."""
    return "\n\n".join(map(_fitted_paragraph, help.split("\n\n")))


def _fitted_paragraph(text: str) -> str:
    lines = text.splitlines()
    if max(map(len, lines)) <= _width():
        return text
    if not text.startswith(" "):
        return _indented(text, "")
    return "\n".join(map(_fitted_command, lines))


def _fitted_command(line: str) -> str:
    """Wrap an indented command with a note; the note of a long command goes below it."""
    command, *note = _NOTE.split(line.rstrip(), maxsplit=1)
    if len(command) > _width():
        indent = command[: len(command) - len(command.lstrip())]
        fitted = textwrap.wrap(
            command, _width() - 2, subsequent_indent=2 * indent, break_on_hyphens=False
        )
        command = " \\\n".join(fitted)
    last = command.rpartition("\n")[2]
    if note and len(last) + len(note[0]) + 4 > _width():
        return f"{command}\n        # {note[0]}"
    return "  # ".join([command, *note])


def _width() -> int:
    """Return the width of the terminal, at most WIDEST."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return WIDEST
    return min(WIDEST, shutil.get_terminal_size().columns)


def _header(recipe: Path) -> str:
    """Return the comment at the head of a recipe's file."""
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
    table = (f"  {name:<{width - 2}}{text}" for name, text in zip(rows, lines, strict=True))
    return "\n".join([title, *table])
