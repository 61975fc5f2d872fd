"""What the last word of a command line can become: the shell's completion.

The shell asks through the console command, which calls a script with `--complete` and the words so
far; nothing is read but names, so that Tab answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmfoundry.cli.command_line import FLAGS, CommandLine, parse
from llmfoundry.errors import UserError
from llmfoundry.recipe.paths import (
    find_recipe,
    group_options,
    recipe_name,
    search_folders,
    shipped,
)
from llmfoundry.recipe.schema import Choice, Schema


def complete(
    recipe_type: type[Any] | Callable[[CommandLine], type[Any]], words: Sequence[str]
) -> list[str]:
    """The words that the last of `words` can become; one that ends with `=`, `.` or `/` is open."""
    *before, current = words or [""]
    command = _understood(before)
    try:
        chosen = recipe_type if isinstance(recipe_type, type) else recipe_type(command)
    except UserError:
        return []
    schema = Schema.of(chosen)
    key, equals, text = current.partition("=")
    if current.startswith("-"):
        found = [flag.split()[0] for flag in FLAGS]
    elif equals:
        found = [f"{key}={value}" for value in _values(schema, command, key, text)]
    else:
        found = [*_first(schema, command, current)]
        found += _keys(schema, current, "--help" in command.flags)
    return sorted({word for word in found if word.startswith(current)})


def _understood(words: Sequence[str]) -> CommandLine:
    """What can be read of the words before; the rest does not matter to what may follow."""
    command = CommandLine()
    for word in words:
        try:
            read = parse(["--cfg", "job"] if word == "--cfg" else [word])
        except UserError:
            continue
        command.recipe = command.recipe or read.recipe
        command.overrides += read.overrides
        command.flags |= read.flags
    return command


def _first(schema: Schema, command: CommandLine, current: str) -> Iterator[str]:
    """The word without a key, if there is none yet: a recipe, a file, or the folder of a run."""
    if command.recipe is not None and not hasattr(schema.cls, "FOLDERS_KEY"):
        return
    if "run_name" in schema.keys:
        yield from (recipe_name(path) for path in shipped(schema))
        yield from _paths(current, (".yaml", ".yml"))
    elif hasattr(schema.cls, "FOLDER_KEY") or hasattr(schema.cls, "FOLDERS_KEY"):
        yield from (path for path in _paths(current) if path.endswith("/"))
    elif getattr(schema.cls, "FILE_KEY", None) is not None:
        yield from _paths(current, (".yaml", ".yml"))


def _keys(schema: Schema, current: str, as_topics: bool) -> Iterator[str]:
    """The keys of the section that `current` is in, as settings or as topics of --help."""
    parent, dot, _ = current.rpartition(".")
    above = schema.find(parent) if dot else None
    section = schema if not dot else above.section if above is not None else None
    if section is None:
        return
    groups = () if dot else group_options(search_folders(None), schema)
    for name, key in section.keys.items():
        is_section = key.section is not None
        if as_topics or not is_section or name in groups:
            yield f"{parent}{dot}{name}" + "=" * (not as_topics)
        if is_section:
            yield f"{parent}{dot}{name}."


def _values(schema: Schema, command: CommandLine, key: str, text: str) -> Iterator[str]:
    """What `key` may be: choices, true and false, or paths that begin with `text`."""
    try:
        recipe = None if command.recipe is None else find_recipe(command.recipe)
    except UserError:
        recipe = None
    groups = group_options(search_folders(recipe), schema)
    if key in groups:
        yield from groups[key]
        return
    found = schema.find(key)
    if found is None or not found.owners:  # or an item of a list or a mapping
        return
    choice = found.rule(Choice)
    if choice is not None:
        yield from choice.options
    elif bool in found.types:
        yield from ("true", "false")
    elif str in found.types:
        yield from _paths(text)


def _paths(text: str, suffixes: tuple[str, ...] = ("",)) -> Iterator[str]:
    """Files and folders whose path begins with `text`."""
    folder, slash, name = text.rpartition("/")
    try:
        entries = list(os.scandir(Path(f"{folder}{slash}").expanduser()))
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if not hidden and (entry.is_dir() or entry.name.endswith(suffixes)):
            yield f"{folder}{slash}{entry.name}" + "/" * entry.is_dir()
