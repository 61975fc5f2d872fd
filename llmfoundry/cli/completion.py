"""Shell completion of the last word of a command line.

Entry point: `complete`. The shell calls the console command, which calls a script with `--complete`
and the words so far. Only names are read, so that completion is fast.
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
    """Return the completions of the last word; no space follows those that end with `=`, `.`, `/`.

    Args:
        recipe_type: dataclass of the script's recipe, or a function that chooses it.
        words: words of the command line up to the cursor.
    """
    *before, current = words or [""]
    command = _parsed(before)
    try:
        chosen = recipe_type if isinstance(recipe_type, type) else recipe_type(command)
    except UserError:
        return []
    schema = Schema.of(chosen)
    key, equals, text = current.partition("=")
    if current.startswith("-"):
        candidates = [flag.split()[0] for flag in FLAGS]
    elif equals:
        candidates = [f"{key}={value}" for value in _values(schema, command, key, text)]
    else:
        candidates = [*_first(schema, command, current)]
        candidates += _keys(schema, current, "--help" in command.flags)
    return sorted({word for word in candidates if word.startswith(current)})


def _parsed(words: Sequence[str]) -> CommandLine:
    """Parse the words before the last one; invalid words are ignored."""
    command = CommandLine()
    for word in words:
        try:
            parsed = parse(["--cfg", "job"] if word == "--cfg" else [word])
        except UserError:
            continue
        command.recipe = command.recipe or parsed.recipe
        command.overrides += parsed.overrides
        command.flags |= parsed.flags
    return command


def _first(schema: Schema, command: CommandLine, current: str) -> Iterator[str]:
    """Yield candidates of the path, if there is none yet: a recipe, a file or a run's folder."""
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
    """Yield the keys of the section that `current` is in, as overrides or as topics of --help."""
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
    """Yield values of a key: choices, true and false, or paths that begin with `text`."""
    try:
        recipe = None if command.recipe is None else find_recipe(command.recipe)
    except UserError:
        recipe = None
    groups = group_options(search_folders(recipe), schema)
    if key in groups:
        yield from groups[key]
        return
    schema_key = schema.find(key)
    if schema_key is None or not schema_key.owners:  # unknown, or an item of a list or mapping
        return
    choice = schema_key.rule(Choice)
    if choice is not None:
        yield from choice.options
    elif bool in schema_key.types:
        yield from ("true", "false")
    elif str in schema_key.types:
        yield from _paths(text)


def _paths(text: str, suffixes: tuple[str, ...] = ("",)) -> Iterator[str]:
    """Yield files and folders whose path begins with `text`; folders end with `/`."""
    folder, slash, name = text.rpartition("/")
    try:
        entries = list(os.scandir(Path(f"{folder}{slash}").expanduser()))
    except OSError:
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not name.startswith(".")
        if not hidden and (entry.is_dir() or entry.name.endswith(suffixes)):
            yield f"{folder}{slash}{entry.name}" + "/" * entry.is_dir()
