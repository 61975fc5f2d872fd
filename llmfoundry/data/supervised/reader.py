"""`RowReader`: a row as a file or a user's function gives it, to one of the four formats.

Called by `prepare` for every row, in its processes. The recipe's `columns`, `preprocess` and the
published formats are applied here; whatever goes wrong names the row.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from llmfoundry.data.preparation.read.bad_row import BadRow
from llmfoundry.data.supervised.bad_rows import MOST_NAMES, bad_row, shortened
from llmfoundry.data.supervised.mappings import PUBLISHED
from llmfoundry.errors import UserError
from llmfoundry.recipe.source import COLUMNS, MAPPINGS, SourceConfig

_NEEDED = {
    "prompt_response": ("prompt",),  # and response or completion
    "chat": ("messages",),
    "preference": ("chosen", "rejected"),  # which may bring their prompt
    "unpaired": ("prompt", "completion", "label"),
}
_TOLD_BY = {
    "preference": ("chosen", "rejected"),
    "sharegpt": ("conversations",),
    "chat": ("messages",),
    "unpaired": ("prompt", "completion", "label"),
    "prompt_response": ("prompt", "response"),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "context", "response"),
}
"""Columns that only rows of a format have."""
Preprocess = Callable[[dict[str, Any]], Any]


def format_of_row(row: Mapping[str, Any]) -> str | None:
    """The format that a row's columns show; None: none or several."""
    found = [f for f, names in _TOLD_BY.items() if all(row.get(n) is not None for n in names)]
    return found[0] if len(found) == 1 else None


class RowReader:
    """Brings the rows of a source to its format.

    Attributes:
        format: prompt_response, chat, preference or unpaired.
        unread: rows that have a column that is not read, by its name.
    """

    def __init__(self, key: str, source: SourceConfig) -> None:
        """Read rows of `source`, which the recipe calls `key`.

        Raises:
            UserError: its preprocess function cannot be found.
        """
        self._key = key
        self._columns, self._preprocess = dict(source.columns), source.preprocess
        self._name = source.format
        self._published = PUBLISHED.get(source.format)
        self.format = MAPPINGS[source.format][0] if self._published else source.format
        self._read = source.columns_read
        self.unread: Counter[str] = Counter()
        if self._preprocess is not None:
            _ = self._function

    def __call__(self, where: object, row: dict[str, Any]) -> dict[str, Any] | None:
        """The row in the format's own columns; None: the recipe's function leaves it out.

        Args:
            where: file and row, for messages.
            row: as read.

        Raises:
            BadRow: a column is missing, or the function fails.
        """
        if self._preprocess is not None:
            return self._preprocessed(where, row)
        for ours, theirs in self._columns.items():
            if theirs not in row:
                no = f"no column {theirs!r}, which {self._key}.columns.{ours} names"
                raise BadRow(where, f"{no}; it has {', '.join(map(str, row)) or 'none'}", no)
        taken = set(self._columns.values())
        renamed = {name: value for name, value in row.items() if name not in taken}
        renamed |= {ours: row[theirs] for ours, theirs in self._columns.items()}
        unread = [name for name in renamed if name not in self._read]
        if self._published is None:
            self._check_columns(where, renamed)
            self.note_unread(unread)
            return {name: value for name, value in renamed.items() if name not in unread}
        try:
            made = self._published(renamed)
            self.note_unread(unread)
            return made
        except ValueError as error:
            found, fitting = bad_row(where, error), format_of_row(row)
            is_other = fitting is not None and not (self._columns or fitting == self._name)
            what = f"write {self._key}.format={fitting}, or " if is_other else ""
            why = f"{found.why}; {what}correct it, or {self._key}.columns"
            raise BadRow(where, why, found.kind) from error

    def note_unread(self, names: Iterable[str]) -> None:
        """Count columns and keys of messages; of very many names the first ones."""
        for name in map(shortened, names):
            if name in self.unread or len(self.unread) < MOST_NAMES:
                self.unread[name] += 1

    def _check_columns(self, where: object, row: dict[str, Any]) -> None:
        for name in _NEEDED[self.format]:
            if row.get(name) is None:
                has, no, fitting = (
                    ", ".join(row) or "none",
                    f"no column {name!r}",
                    format_of_row(row),
                )
                what = f"write {self._key}.columns, as in {{{name}: theirs}}"
                if fitting not in (None, self._name) and not self._columns:
                    what = f"write {self._key}.format={fitting}"
                raise BadRow(where, f"{no}; it has {has}; {what}, or correct the row", no)

    def facts(self) -> list[Any]:
        """What decides its rows beside the input, as JSON."""
        code = "" if self._preprocess is None else self._code_hash()
        return [self.format, self._published and self._published.__name__,
                sorted(self._columns.items()), self._preprocess, code]  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_function"}

    def _preprocessed(self, where: object, row: dict[str, Any]) -> dict[str, Any] | None:
        key = f"{self._key}.preprocess"
        try:
            made = self._function(row)
        except Exception as error:  # a user's function may raise anything
            raise BadRow(
                where,
                f"{key}: {self._preprocess} raised {_named(error)};"
                " correct the function, or return None for a row to leave out",
                f"{key}: raised {type(error).__name__}",
            ) from error
        if made is None:
            return None
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise BadRow(
                where,
                f"{key}: {self._preprocess} returned {type(made).__name__}; return a dict"
                f" with {', '.join(COLUMNS[self.format])}, or None",
            )
        unknown = [name for name in made if name not in COLUMNS[self.format]]
        if unknown:
            raise BadRow(
                where,
                f"{key}: {self._preprocess} returned the key {unknown[0]!r}; rows of"
                f" {self.format} have {', '.join(COLUMNS[self.format])}",
            )
        return dict(made)

    @cached_property
    def _function(self) -> Preprocess:
        assert self._preprocess is not None
        module, _, name = self._preprocess.rpartition(":")
        function = getattr(self._module(module), name, None)
        if not callable(function):
            raise UserError(
                f"{self._key}.preprocess: {module} has no function {name!r}; write"
                " module:function or file.py:function"
            )
        return function

    def _module(self, name: str) -> ModuleType:
        key = f"{self._key}.preprocess"
        try:
            if name.endswith(".py"):
                path = Path(name).expanduser()
                spec = importlib.util.spec_from_file_location(path.stem, path)
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            return importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            raise UserError(
                f"{key}: cannot import {name!r}: {_named(error)}; write module:function or"
                " file.py:function"
            ) from error

    def _code_hash(self) -> str:
        """Of the file that the function is in: a changed one makes other rows."""
        path = Path(self._function.__code__.co_filename) if self._has_code() else None
        if path is None or not path.is_file():
            return ""
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()

    def _has_code(self) -> bool:
        return hasattr(self._function, "__code__")


def _named(error: Exception) -> str:
    """What a user's own code raised, as a part of a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
