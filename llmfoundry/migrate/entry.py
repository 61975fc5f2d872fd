"""An entry of the table of LLM Foundry's settings, and what becomes of a setting by it.

`llm_foundry.py` has the entries. `recipe/unknown_keys.py` shows `write` and `why` to who typed such
a word; `migration.py` asks `take` for the value that a whole file's setting has here.
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
    """What became of a setting."""

    KEPT = "kept"
    RENAMED = "renamed"
    CHANGED = "meaning changed"
    IDLE = "without effect"
    REFUSED = "not possible"


@dataclass(frozen=True)
class MigratedSetting:
    """A setting of theirs, in ours.

    Attributes:
        values: by dotted key.
        why: what to know about it; of what has no effect or is not possible, all there is to say.
        verdict: unset: kept where the key is the same, else renamed.
    """

    values: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    verdict: MigrationStatus | None = None


def changed(why: str, **values: Any) -> MigratedSetting:
    """Values that are not quite what theirs are; `__` in a name stands for the dot."""
    return MigratedSetting(
        {name.replace("__", "."): value for name, value in values.items()}, why, CHANGED
    )


def idle(why: str) -> MigratedSetting:
    """Nothing to write."""
    return MigratedSetting({}, why, MigrationStatus.IDLE)


def refused(why: str, **values: Any) -> MigratedSetting:
    """What there is not here; `values` may mark what the user has to fill in."""
    return MigratedSetting(
        {k.replace("__", "."): v for k, v in values.items()}, why, MigrationStatus.REFUSED
    )


CHANGED = MigrationStatus.CHANGED
MISSING = "???"
"""A value that a recipe cannot be loaded without, as OmegaConf writes it."""


class ForeignConfig:
    """A whole file of another tool, interpolations resolved."""

    def __init__(self, values: dict[str, Any], kind: str, path: Path | None = None) -> None:
        """`kind` is the script of ours that the result is for: train, finetune or eval."""
        self.values, self.kind, self.path = values, kind, path
        self.here: dict[str, Any] = {}
        """The section that holds the setting which is looked at."""
        self.key = self.name = ""
        """Its dotted key, and its own name in the section."""
        self.index = 0
        """Its number in a list, of a setting in one."""

    @property
    def trains(self) -> bool:
        """Whether the result is for train.py or finetune.py."""
        return self.kind in ("train", "finetune")

    def get(self, dotted: str, default: Any = None) -> Any:
        """What is at a dotted key; `default` where there is nothing, or null."""
        at: Any = self.values
        for name in dotted.split("."):
            at = at.get(name) if isinstance(at, dict) else None
        return default if at is None else at

    def beside(self, name: str) -> Path | None:
        """A file that a value names, from the file's folder or one above it; None: not there."""
        folders = [] if self.path is None else [*self.path.absolute().parents]
        found = (folder / name for folder in folders)
        return next((path for path in found if os.path.isfile(path)), None)

    def has(self, dotted: str) -> bool:
        """Whether a dotted key stands there, perhaps without a value."""
        *above, name = dotted.split(".")
        section = self.get(".".join(above)) if above else self.values
        return isinstance(section, dict) and name in section


Take = Callable[[Any, ForeignConfig], MigratedSetting]
ODD = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What comes of values of another kind than a setting has."""
NO_DEFAULT = object()


@dataclass(frozen=True)
class FoundryKey(OtherToolKey):
    """Words of LLM Foundry's that mean one thing here, and what becomes of their values."""

    take: Take | None = None
    """Of a whole file: what its value is here; unset: the same, at `write`'s key."""
    is_changed: bool = False
    """`why` says how the meaning differs, of a whole file's setting without `take`."""
    default: Any = NO_DEFAULT
    """What their tool takes where a file is silent, if we would take another."""
    when: Callable[[ForeignConfig], bool] | None = None
    """Of which files `default` is true; unset: of those that have its section."""

    def is_default_of(self, theirs: ForeignConfig, otherwise: bool) -> bool:
        """Whether `default` is true of a file; without `when` as `otherwise` says."""
        try:
            return otherwise if self.when is None else self.when(theirs)
        except ODD:
            return False

    def taken(self, key: str, value: Any, theirs: ForeignConfig) -> MigratedSetting:
        """What a file's `value` at dotted `key` is here; of a value that cannot be, a refusal."""
        try:
            return self._taken(key, value, theirs)
        except ODD:
            return refused("is no value that it can have; correct it there, or remove it")

    def _taken(self, key: str, value: Any, theirs: ForeignConfig) -> MigratedSetting:
        if self.take is not None:
            return self.take(value, theirs)
        if not self.write:
            return idle(self.why.removesuffix("; remove it"))
        if value is None:
            return idle("has no value")
        example = re.search("<.*?>([a-z]*)", self.write)
        if example is None:  # a section's
            return idle("is empty") if value in ({}, []) else refused("has its settings below it")
        values = {self._filled(key): f"{value}{example[1]}" if example[1] else value}
        why, verdict = (self.why, CHANGED) if self.is_changed else ("", None)
        return MigratedSetting(values, why, verdict)

    def _filled(self, key: str) -> str:
        """`write`'s key, with what the stars of the word stand for in its own stars."""
        word = max(self.words.split(), key=lambda word: rank_of(word, key))
        names, given = word.split("."), key.split(".")
        starred = [part for name, part in zip(names, given, strict=False) if name == "*"]
        if names[-1] == "*":
            starred = [*starred[: names.count("*") - 1], ".".join(given[len(names) - 1 :])]
        found = iter(starred)
        return ".".join(next(found) if n == "*" else n for n in self.key.split("."))
