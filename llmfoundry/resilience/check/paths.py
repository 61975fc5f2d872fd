"""Every path that a recipe names, with its key, and whether a run writes there. Pure.

The idea: the schema knows which keys are paths (their type says so), so a new key is checked here
without being named here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry.recipe.front.paths import ROOT
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.values.bounds import PATH, leaves
from llmfoundry.resilience.check.host import NamedPath

WRITTEN = ("save_folder", "save_local_folder", "output", "cache_folder", "local")
"""Last parts of the keys of which a run writes the value."""


def recipe_paths(recipe: Any) -> list[NamedPath]:
    """Paths of this machine, each once, in the recipe's order; URLs are a store's business."""
    found: dict[str, NamedPath] = {}
    for key, value in _named("", recipe):
        path = value.removeprefix("file://")
        if not path.strip() or "://" in path or path.startswith(("hf:", "chat:")):
            continue
        is_written = key.rpartition(".")[2] in WRITTEN
        known = found.get(path)
        if known is None or (is_written and not known.is_written):
            found[path] = NamedPath(key, _located(path), is_written)
    return list(found.values())


def _named(key: str, section: Any) -> Iterator[tuple[str, str]]:
    """The values of keys that are paths, by dotted key."""
    for name, field in Schema.of(section.__class__).keys.items():
        value = getattr(section, field.field)
        if hasattr(value, "__dataclass_fields__"):
            yield from _named(f"{key}{name}.", value)
        elif PATH in field.rules:
            for dotted, leaf in leaves(name, value):
                if isinstance(leaf, str):
                    yield key + dotted, leaf
        elif field.item is not None and value:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for label, item in items:
                if hasattr(item, "__dataclass_fields__"):
                    part = f"{name}.{label}" if isinstance(value, dict) else f"{name}[{label}]"
                    yield from _named(f"{key}{part}.", item)


def _located(path: str) -> str:
    """As written where it is there from the working folder, else where a shipped file lies.

    A pattern, `texts/**/*.txt`, stands for the folder that it begins at.
    """
    before = Path(path)
    while any(sign in str(before) for sign in "*?[") and before != before.parent:
        before = before.parent
    expanded = before.expanduser()
    if not before.is_absolute() and not expanded.exists() and (ROOT / before).exists():
        return str(ROOT / before)
    return str(before)
