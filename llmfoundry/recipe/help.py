"""What a user is shown: the text of `--help`, completion, nearest keys.

In place of a key or a flag that does not exist, in this order: the key of that name elsewhere in
the recipe; what the word of another tool means (`other_tools/`), if that key exists here; a key
that is really near. None of them: no guess, which would mislead. `--help` prints the script's
docstring, flags and groups, or what a key means; all of it is the schema's. The shell asks for
completions through the console command, which calls a script with `--complete` and the words so
far; nothing is read but names, so that Tab answers at once.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.checks import nearest, nearest_option
from llmfoundry.recipe.command_line import FLAGS, SETTINGS, CommandLine, as_called, parse
from llmfoundry.recipe.other_tools.entry import Other
from llmfoundry.recipe.other_tools.table import named
from llmfoundry.recipe.paths import (
    find_recipe,
    group_options,
    recipe_name,
    search_folders,
    shipped,
    show,
)
from llmfoundry.recipe.schema import Choice, Key, Schema
from llmfoundry.recipe.typed import Problem, dump, flat

MOST_PLACES = 3  # of one name, that are listed
LONGEST = 60  # characters of a value that is put into a hint


def unknown_key(schema: Schema, key: str, value: Any = None) -> list[Problem]:
    """What to say of `key`, which a recipe does not have, or of each key below it.

    Args:
        schema: the whole recipe's.
        key: dotted.
        value: given for it; None: not known.
    """
    if isinstance(value, dict) and value:
        below = [(f"{key}.{name}", item) for name, item in flat(value)]
        if any(_suggestion(schema, name, item, alone=False) for name, item in below):
            return [_problem(schema, name, item) for name, item in below]
    return [_problem(schema, key, value)]


def unknown_flag(schema: Schema, argument: str, following: str | None = None) -> str:
    """What to say of a flag, `--name` or `--name=value`, and the word that follows it."""
    name, equals, value = argument.lstrip("-").partition("=")
    key, given = name.replace("-", "_"), value if equals else following
    suggestion = _suggestion(schema, key, given)
    if schema.find(key) is not None:
        suggestion = f"; settings have no dashes: {key}={'VALUE' if given is None else given}"
    elif not suggestion:
        suggestion = nearest(argument, FLAG_WORDS)
    if not suggestion and equals:
        suggestion = f"; settings have no dashes: {argument.lstrip('-')}"
    return f"unknown flag '{argument}'{suggestion} (flags: {', '.join(FLAGS)})"


FLAG_WORDS = [*(flag.split()[0] for flag in FLAGS), "--multirun"]


def _problem(schema: Schema, key: str, value: Any) -> Problem:
    return Problem(key, _suggestion(schema, key, value), is_unknown=True)


def _suggestion(schema: Schema, key: str, value: Any, *, alone: bool = True) -> str:
    """The clause that says what to write; "" where nothing is near. `alone`: guess it as well."""
    head, _, name = key.partition(".")
    if head == "variables":
        return _variable(schema, name, value)
    name = key.rpartition(".")[2]
    other = _other(schema, key.lower())
    other = other or (_other(schema, name.lower()) if alone else None)
    if not alone:
        return "" if other is None else _say(schema, other, value)
    is_whole = other is not None and any("." in word for word in other.words.split())
    places = [k for k, _ in schema.walk() if k.endswith(f".{name}")]
    if other is None or (places and other.key not in places and not is_whole):
        found = _near(schema, key, places)
        if found:
            return found
    return "" if other is None else _say(schema, other, value)


def _variable(schema: Schema, name: str, value: Any) -> str:
    """What to do with LLM Foundry's `variables.NAME`, which interpolations take."""
    taken = f"${{variables.{name or 'NAME'}}}"
    other = _other(schema, name.lower())
    ours = name if name in schema.keys else other.key if other is not None else ""
    if not ours:
        return f"; write its value where {taken} stands"
    said = f"{ours}={value}" if _fits(value) else ours
    return f"; write {said}, and ${{{ours}}} where {taken} stands"


def _near(schema: Schema, key: str, places: list[str]) -> str:
    parent, _, name = key.rpartition(".")
    above = schema.find(parent) if parent else None
    section = (above.section or above.item) if above is not None else None
    own = (section.keys if section is not None else {}) if parent else schema.keys
    if places and nearest_option(name, [n for n in own if n == name]) is None:
        fewest = min(place.count(".") for place in places)
        shown = [place for place in places if place.count(".") == fewest][:MOST_PLACES]
        return "; did you mean " + " or ".join(f"'{place}'" for place in shown) + "?"
    return nearest(name, own)


def _other(schema: Schema, word: str) -> Other | None:
    """What another tool's word means: the first that this recipe has, else for another script."""
    found = [other for other in named(word) if other.write or other.why]
    here = (o for o in found if not o.write or schema.find(o.key) is not None)
    return next(here, next((o for o in found if o.script), None))


def _say(schema: Schema, other: Other, value: Any) -> str:
    """The clause for another tool's setting: with its value where ours takes it."""
    if not other.write:
        return f"; {other.why}"
    text = "" if value is None else str(value)
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
    """The typed value as our setting takes it, or else the example; with its unit."""
    if isinstance(value, bool):
        return str(value).lower() if example in ("true", "false") else example
    if isinstance(value, list) and value and all(map(_fits, value)):
        return f"[{','.join(map(str, value))}]"
    text = str(value)
    rule = None if (found := schema.find(key)) is None else found.rule(Choice)
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
    """Whether a value can be put into a hint as it stands."""
    text = "" if value is None else str(value)
    is_plain = bool(text) and len(text) <= LONGEST and text.isprintable()
    return is_plain and not {*text} & set(" '\"[]{}$")


WIDEST = 98
_NOTE = re.compile(r"(?<=\S)  +(?=\S)")  # between a command and what it is for


def help_text(schema: Schema, command: CommandLine, help: str) -> str:
    """The text for `--help`, `RECIPE --help` or `--help KEY`."""
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


def _topic(schema: Schema, dotted: str) -> Iterator[str]:
    """A key and its meaning, or all keys of a section."""
    key = schema.find(dotted)
    if key is None:
        raise UserError(*(problem.line for problem in unknown_key(schema, dotted)))
    section, prefix = key.section, f"{dotted}."
    if section is None:
        if key.owners:  # else the name of an item, such as a stream's
            yield from _key(key, dotted)
        section, prefix = key.item, f"{dotted}{item_name(key)}."
        if section is None:
            return
    yield f"{dotted}: {section.meaning}"
    for below in section.keys.values():
        yield from _key(below, f"{prefix}{below.name}")


def item_name(key: Key) -> str:
    """How the items of a list or a mapping of sections are named: [N] or .NAME."""
    is_list = any(typing.get_origin(option) is list for option in key.types)
    return "[N]" if is_list else ".NAME"


def _key(key: Key, dotted: str) -> Iterator[str]:
    if key.section is not None:
        yield f"  {dotted}  (section, {len(key.section.keys)} keys)"
    elif key.item is not None:
        yield f"  {dotted}{item_name(key)}  (section, {len(key.item.keys)} keys)"
    else:
        yield f"  {dotted}: {type_text(key)} = {default_text(key)}"
    yield _indented(key.meaning, " " * 6)
    choice = key.rule(Choice)
    if choice is not None:
        for option, meaning in choice.meanings().items():
            yield _indented(f"{option}: {meaning}", " " * 6)
        yield _indented(f"choices: {choice.listed()}", " " * 6)


def type_text(key: Key) -> str:
    """The types of its value, as users write them: `int | null`."""
    kinds = (
        str(kind) if typing.get_args(kind) else getattr(kind, "__name__", str(kind))
        for kind in key.types
    )
    return " | ".join(kinds).replace("typing.", "").replace("NoneType", "null")


def default_text(key: Key) -> str:
    """Its default, as YAML has it on one line."""
    return dump({key.name: key.default}).partition(": ")[2].strip()


def _indented(text: str, indent: str) -> str:
    return textwrap.fill(
        text, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def _fitted(help: str) -> str:
    """A script's docstring in a terminal's width: paragraphs filled, notes below long commands."""
    return "\n\n".join(map(_fitted_paragraph, help.split("\n\n")))


def _fitted_paragraph(text: str) -> str:
    lines = text.splitlines()
    if max(map(len, lines)) <= _width():
        return text
    if not text.startswith(" "):
        return _indented(text, "")
    return "\n".join(map(_fitted_command, lines))


def _fitted_command(line: str) -> str:
    """An indented command, and behind it what it is for."""
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
    """Characters of a line: a terminal's, and no more than can be read."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
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
