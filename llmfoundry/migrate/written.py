"""Texts of a migration: the recipe with its comments, the gauntlet file, and the report.

`cli/commands/migrate.py` prints and writes them. Each setting of the foreign file has one line in
the report. A comment of the recipe says where a meaning changed.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from llmfoundry.migrate.entry import MigrationStatus
from llmfoundry.migrate.migration import Migration, SettingReport, nested_values
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.typed import dump

WIDTH = 100
_LONGEST = 60  # characters of a value in a line of the report
WRITTEN_OUT = "written out"


def recipe_text(result: Migration, name: str) -> str:
    """Return the YAML of the recipe, with the sections in their usual order.

    Args:
        result: result of the migration.
        name: name of the recipe file, for the launch command.
    """
    assert result.recipe_type is not None
    # header and general comments
    comments = _comments(result)
    lines = [*_header(result, name)]
    for comment in comments.pop("", []):
        lines += _wrapped(comment, "")

    # sections with their comments
    sections = _sorted(nested_values(result), Schema.of(result.recipe_type))
    for section, value in sections.items():
        lines += _lines(section, value, section, comments, "")

    # settings without a counterpart
    refused_settings = [line for line in result.lines if line.verdict is MigrationStatus.REFUSED]
    if refused_settings:
        lines += ["", "# Not possible here:"]
        for line in refused_settings:
            lines += _wrapped(f"{line.key}: {line.taken.why}", "")
    return "\n".join([*lines, ""])


def _sorted(values: dict[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Sort sections and their keys in the order of the schema."""
    if schema is None:
        return values
    order = ["defaults", *schema.keys]
    ordered = {}
    for name in sorted(values, key=order.index):
        value = values[name]
        if isinstance(value, dict):
            value = _sorted(value, None if name == "defaults" else schema.keys[name].section)
        ordered[name] = value
    return ordered


def gauntlet_text(result: Migration, name: str) -> str:
    """Return the YAML of the gauntlet file."""
    head = f"# Tasks and categories of {result.source.path.name}, from LLM Foundry.\n"
    run = f"#   python scripts/eval.py checkpoint=runs/NAME eval.gauntlet={name}\n"
    order = sorted(result.gauntlet, key=("definitions", "icl_tasks", "eval_gauntlet").index)
    values = {key: result.gauntlet[key] for key in order}
    return head + run + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=WIDTH)


def _header(result: Migration, name: str) -> list[str]:
    """Return the comment at the top of the recipe: its origin and its launch command."""
    files = result.source.path.name
    if result.source.recipe is not None:
        files += f" and {result.source.recipe.name}"
    origin = f"From LLM Foundry's {files}, by scripts/migrate.py."
    return [*_wrapped(origin, ""), f"#   python scripts/{result.source.kind}.py {name}"]


def _comments(result: Migration) -> dict[str, list[str]]:
    """Return the comments on each recipe key; the key "" has comments without a recipe key."""
    comments: dict[str, list[str]] = {}
    for line in result.lines:
        key = next(iter(line.taken.values), "")
        if (
            key
            and line.is_default
            and line.verdict not in (MigrationStatus.CHANGED, MigrationStatus.REFUSED)
        ):
            comments.setdefault(key, []).append("LLM Foundry's own default")
        elif key and line.verdict in (MigrationStatus.CHANGED, MigrationStatus.REFUSED):
            comments.setdefault(key, []).append(f"{line.key}: {line.taken.why}")
        elif line.verdict is MigrationStatus.CHANGED:
            comments.setdefault("", []).append(f"{line.key}: {line.taken.why}")
    return comments


def _lines(
    name: str, value: Any, key: str, comments: dict[str, list[str]], indent: str
) -> Iterator[str]:
    """Yield the YAML lines of a key and everything below it, preceded by its comments."""
    if isinstance(value, dict) and value and key != "defaults":
        yield f"{indent}{name}:"
        for inner, item in value.items():
            yield from _lines(str(inner), item, f"{key}.{inner}", comments, f"{indent}  ")
        return
    for comment in comments.get(key, []):
        yield from _wrapped(comment, indent)
    text = dump({name: value}).rstrip("\n")
    yield from (f"{indent}{line}" for line in text.splitlines())


def _wrapped(text: str, indent: str) -> list[str]:
    """Return a text as wrapped comment lines."""
    begin = f"{indent}# "
    plain = " ".join(text.split())
    return textwrap.wrap(
        plain, WIDTH, initial_indent=begin, subsequent_indent=begin, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def report(result: Migration) -> Iterator[str]:
    """Yield a line for each setting, then the number of settings of each status."""
    for line in result.lines:
        is_written = line.is_default and line.verdict is not MigrationStatus.REFUSED
        word = WRITTEN_OUT if is_written else line.verdict.value
        yield f"{word:<15} {_line_text(line)}"
    counts = Counter(line.verdict for line in result.lines if not line.is_default)
    added = sum(line.is_default for line in result.lines)
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in MigrationStatus]
    yield f"{sum(counts.values())} settings: {', '.join(parts)}; {added} {WRITTEN_OUT}"


def _line_text(line: SettingReport) -> str:
    """Return the line of a setting in the report, without its status."""
    ours = ", ".join(f"{key}: {_short(value)}" for key, value in line.taken.values.items())
    why = f" ({line.taken.why})" if line.taken.why and ours else line.taken.why
    if line.is_default:
        return f"{ours}{why or f' (their default of {line.key})'}"
    setting = f"{line.key}: {_short(line.value)}"
    if line.verdict is MigrationStatus.KEPT:
        return setting + why
    return f"{setting} -> {ours}{why}" if ours else f"{setting}: {why}"


def _short(value: Any) -> str:
    """Return a value as YAML in one line, truncated."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = " ".join(text.removesuffix("...\n").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
