"""What `--help` prints: the script's docstring, flags, groups; or what a key means.

A key's meaning is the string under its field in the schema, read from the source.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from pathlib import Path

from llmfoundry.errors import UserError
from llmfoundry.recipe.argv import FLAGS, CommandLine
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.paths import (
    YAMLS,
    find_recipe,
    group_options,
    search_folders,
    show,
)
from llmfoundry.recipe.typed import dump, hint_of, keys, options, section_of, to_dict


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
        recipes = [f"  {show(path)}" for path in sorted(YAMLS.glob("*.yaml"))]
        parts.append("\n".join(["Recipes", *recipes]))
    source = show(Path(inspect.getfile(recipe_type)))
    parts.append(
        f"Keys (--help KEY explains one, or all of a section; source: {source})\n"
        + textwrap.fill(
            ", ".join(keys(recipe_type)), 98, initial_indent="  ", subsequent_indent="  "
        )
    )
    return "\n\n".join(part for part in parts if part)


def docstrings(schema: type) -> dict[str, str]:
    """The string under each field of a dataclass, on one line, by the key that users write."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(schema)))
    body = tree.body[0].body  # type: ignore[attr-defined]
    found: dict[str, str] = {}
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
        parent_section = section_of(hint_of(recipe_type, parent)) if parent else recipe_type
        near = nearest(name, keys(parent_section)) if parent_section else ""
        raise UserError(f"unknown key '{key}'{near}")
    section = section_of(hint)
    if section is None:
        holder = section_of(hint_of(recipe_type, parent)) if parent else recipe_type
        assert holder is not None
        yield from _field(holder, name, f"{parent}." if parent else "")
        return
    yield f"{key}: {inspect.getdoc(section)}"
    for name in keys(section):
        yield from _field(section, name, f"{key}.")


def _field(schema: type, name: str, prefix: str) -> Iterator[str]:
    hint = keys(schema)[name]
    section = section_of(hint)
    if section is not None:
        yield f"  {prefix}{name}  (section, {len(keys(section))} keys)"
    else:
        kinds = " | ".join(getattr(kind, "__name__", str(kind)) for kind in options(hint))
        default = dump({name: to_dict(schema())[name]}).partition(": ")[2].strip()
        yield f"  {prefix}{name}: {kinds.replace('NoneType', 'null')} = {default}"
    text = docstrings(schema).get(name, "")
    yield textwrap.fill(text, 98, initial_indent="      ", subsequent_indent="      ")


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
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows.items())])
