"""The result as texts: a recipe with comments where a meaning changed, and the report's lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import yaml

from llmfoundry.recipe.front.typed import dump
from llmfoundry.recipe.migration.walk import Line, Migration, nested_values
from llmfoundry.recipe.other_tools.entry import Verdict
from llmfoundry.recipe.schema import Schema

WIDTH = 100
_LONGEST = 60  # characters of a value in a line of the report
WRITTEN_OUT = "written out"


def recipe_text(result: Migration, name: str) -> str:
    """The recipe's YAML, sections in our order.

    Args:
        result: of the migration.
        name: of the file to write, for the launch line.
    """
    assert result.recipe_type is not None
    comments = _comments(result)
    lines = [*_header(result, name)]
    for comment in comments.pop("", []):
        lines += _wrapped(comment, "")
    plain = _sorted(nested_values(result), Schema.of(result.recipe_type))
    for section, value in plain.items():
        lines += _lines(section, value, section, comments, "")
    left = [line for line in result.lines if line.verdict is Verdict.REFUSED]
    if left:
        lines += ["", "# Not possible here:"]
        for line in left:
            lines += _wrapped(f"{line.key}: {line.taken.why}", "")
    return "\n".join([*lines, ""])


def _sorted(values: dict[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Sections and their keys in our order."""
    if schema is None:
        return values
    order = ["defaults", *schema.keys]
    return {
        name: _sorted(values[name], None if name == "defaults" else schema.keys[name].section)
        if isinstance(values[name], dict)
        else values[name]
        for name in sorted(values, key=order.index)
    }


def gauntlet_text(result: Migration, name: str) -> str:
    """The gauntlet file's YAML."""
    head = f"# Tasks and categories of {result.source.path.name}, from LLM Foundry.\n"
    run = f"#   python scripts/eval.py checkpoint=runs/NAME eval.gauntlet={name}\n"
    order = sorted(result.gauntlet, key=("definitions", "icl_tasks", "eval_gauntlet").index)
    values = {key: result.gauntlet[key] for key in order}
    return head + run + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=WIDTH)


def _header(result: Migration, name: str) -> list[str]:
    of = f" and {result.source.recipe.name}" if result.source.recipe is not None else ""
    what = f"From {result.source.tool}'s {result.source.path.name}{of}, by scripts/migrate.py."
    return [*_wrapped(what, ""), f"#   python scripts/{result.source.kind}.py {name}"]


def _comments(result: Migration) -> dict[str, list[str]]:
    """By key of ours, what to know about it."""
    found: dict[str, list[str]] = {}
    for line in result.lines:
        key = next(iter(line.taken.values), "")
        if key and line.is_default and line.verdict not in (Verdict.CHANGED, Verdict.REFUSED):
            found.setdefault(key, []).append(f"{result.source.tool}'s own default")
        elif key and line.verdict in (Verdict.CHANGED, Verdict.REFUSED):
            found.setdefault(key, []).append(f"{line.key}: {line.taken.why}")
        elif line.verdict is Verdict.CHANGED:
            found.setdefault("", []).append(f"{line.key}: {line.taken.why}")
    return found


def _lines(
    name: str, value: Any, key: str, comments: dict[str, list[str]], indent: str
) -> Iterator[str]:
    """A key and what is below it, comments before."""
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
    begin = f"{indent}# "
    plain = " ".join(text.split())
    return textwrap.wrap(
        plain, WIDTH, initial_indent=begin, subsequent_indent=begin, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def report(result: Migration) -> Iterator[str]:
    """A line for each setting, and how many there are of each kind."""
    for line in result.lines:
        is_written = line.is_default and line.verdict is not Verdict.REFUSED
        word = WRITTEN_OUT if is_written else line.verdict.value
        yield f"{word:<15} {_said(line)}"
    counts = Counter(line.verdict for line in result.lines if not line.is_default)
    added = sum(line.is_default for line in result.lines)
    parts = [f"{counts[verdict]} {verdict.value}" for verdict in Verdict]
    yield f"{sum(counts.values())} settings: {', '.join(parts)}; {added} {WRITTEN_OUT}"


def _said(line: Line) -> str:
    ours = ", ".join(f"{key}: {_short(value)}" for key, value in line.taken.values.items())
    why = f" ({line.taken.why})" if line.taken.why and ours else line.taken.why
    if line.is_default:
        return f"{ours}{why or f' (their default of {line.key})'}"
    said = f"{line.key}: {_short(line.value)}"
    if line.verdict is Verdict.KEPT:
        return said + why
    return f"{said} -> {ours}{why}" if ours else f"{said}: {why}"


def _short(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = " ".join(text.removesuffix("...\n").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
