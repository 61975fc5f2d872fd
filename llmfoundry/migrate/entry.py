"""Entries of the table of LLM Foundry settings, and the result of migrating one setting.

`llm_foundry.py` has the table of `FoundryKey` entries. If a user writes such a key in a recipe,
`recipe/unknown_keys.py` prints `write` and `why` of its entry. `migration.py` calls
`FoundryKey.taken` to convert the value of each setting in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from llmfoundry.recipe.unknown_keys import OtherToolKey, rank_of


class MigrationStatus(Enum):
    """Result of the migration of a setting."""

    KEPT = "kept"
    RENAMED = "renamed"
    CHANGED = "meaning changed"
    IDLE = "without effect"
    REFUSED = "not possible"


@dataclass(frozen=True)
class MigratedSetting:
    """A setting of LLM Foundry, converted to recipe keys.

    Attributes:
        values: recipe values by dotted key.
        why: explanation for the report. Without values, it is the only text of the report.
        verdict: status; None: "kept" if the key and the value are the same, else "renamed".
    """

    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    verdict: MigrationStatus | None = None


def changed(why: str, **values: Any) -> MigratedSetting:
    """Return values whose meaning differs from LLM Foundry; `__` in a keyword stands for a dot."""
    return MigratedSetting(
        {name.replace("__", "."): value for name, value in values.items()}, why, CHANGED
    )


def idle(why: str) -> MigratedSetting:
    """Return the result of a setting that has no effect here."""
    return MigratedSetting({}, why, MigrationStatus.IDLE)


def refused(why: str, **values: Any) -> MigratedSetting:
    """Return the result of a setting that does not exist here.

    `values` may contain placeholders (MISSING) that the user has to fill in; `__` in a keyword
    stands for a dot.
    """
    return MigratedSetting(
        {k.replace("__", "."): v for k, v in values.items()}, why, MigrationStatus.REFUSED
    )


CHANGED = MigrationStatus.CHANGED
MISSING = "???"
"""A value that a recipe cannot be loaded without, as OmegaConf writes it."""


class ForeignConfig:
    """Settings of an LLM Foundry file with resolved interpolations.

    Attributes:
        values: all settings.
        kind: script that the migrated recipe is for: "train", "finetune" or "eval".
        path: path of the file.
        here: section of the setting that is being migrated.
        key: dotted key of that setting.
        name: last part of `key`.
        index: index of that setting in a list, or 0.
    """

    def __init__(self, values: dict[str, Any], kind: str, path: Path | None = None) -> None:
        self.values, self.kind, self.path = values, kind, path
        self.here: dict[str, Any] = {}
        self.key = self.name = ""
        self.index = 0

    @property
    def trains(self) -> bool:
        """Return whether the migrated recipe is for train.py or finetune.py."""
        return self.kind in ("train", "finetune")

    def get(self, dotted: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or `default` if it is missing or null."""
        at: Any = self.values
        for name in dotted.split("."):
            at = at.get(name) if isinstance(at, dict) else None
        return default if at is None else at

    def beside(self, name: str) -> Path | None:
        """Find a file that a value names, in the folder of this file or above it."""
        if self.path is None:
            return None
        for folder in self.path.absolute().parents:
            if os.path.isfile(folder / name):
                return folder / name
        return None

    def has(self, dotted: str) -> bool:
        """Return whether the file has a dotted key, possibly without a value."""
        *above, name = dotted.split(".")
        section = self.get(".".join(above)) if above else self.values
        return isinstance(section, dict) and name in section


Take = Callable[[Any, ForeignConfig], MigratedSetting]
ODD = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Exceptions that a converter may raise for a value of an unexpected type."""
NO_DEFAULT = object()


@dataclass(frozen=True)
class FoundryKey(OtherToolKey):
    """One or more keys of LLM Foundry with the same meaning here, and how to migrate their values.

    Attributes:
        take: converts the value; None: the value is kept, under the key in `write`.
        is_changed: the meaning differs, as `why` explains. Only for entries without `take`.
        default: LLM Foundry's default, if ours is different.
        when: whether `default` applies to a file; None: it applies to files that have its section.
    """

    take: Take | None = None
    is_changed: bool = False
    default: Any = NO_DEFAULT
    when: Callable[[ForeignConfig], bool] | None = None

    def is_default_of(self, theirs: ForeignConfig, otherwise: bool) -> bool:
        """Return whether `default` applies to a file; `otherwise` is the result without `when`."""
        try:
            return otherwise if self.when is None else self.when(theirs)
        except ODD:
            return False

    def taken(self, key: str, value: Any, theirs: ForeignConfig) -> MigratedSetting:
        """Convert the `value` of a dotted `key`; an invalid value is refused."""
        try:
            return self._taken(key, value, theirs)
        except ODD:
            return refused("is no value that it can have; correct it there, or remove it")

    def _taken(self, key: str, value: Any, theirs: ForeignConfig) -> MigratedSetting:
        """Convert a value with `take`, or as `write` and `why` describe."""
        if self.take is not None:
            return self.take(value, theirs)
        if not self.write:
            return idle(self.why.removesuffix("; remove it"))
        if value is None:
            return idle("has no value")
        # `write` is KEY=<example>UNIT for a value, and has no example for a section
        example = re.search("<.*?>([a-z]*)", self.write)
        if example is None:
            return idle("is empty") if value in ({}, []) else refused("has its settings below it")
        values = {self._filled(key): f"{value}{example[1]}" if example[1] else value}
        why, verdict = (self.why, CHANGED) if self.is_changed else ("", None)
        return MigratedSetting(values, why, verdict)

    def _filled(self, key: str) -> str:
        """Return the key in `write`, with its stars replaced by the matching parts of `key`."""
        # match the key with the best of the patterns
        pattern = max(self.words.split(), key=lambda word: rank_of(word, key))
        names, parts = pattern.split("."), key.split(".")
        matches = [part for name, part in zip(names, parts, strict=False) if name == "*"]
        # a star at the end matches all remaining parts
        if names[-1] == "*":
            matches = [*matches[: names.count("*") - 1], ".".join(parts[len(names) - 1 :])]
        remaining = iter(matches)
        return ".".join(next(remaining) if n == "*" else n for n in self.key.split("."))
