"""Conversion of input rows to one of the four formats of supervised data.

Entry point: `RowReader`, which the worker processes of `prepare_rows` call for every row. It
applies `columns` and `preprocess` of the recipe, and the formats of published data sets. Every
error names the row. If LLM Foundry registers a function for a published data set, prompts and
answers are split where that function splits them, line breaks included, so that a run of LLM
Foundry can be repeated here.
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

from llmfoundry.data.preparation.bad_rows import MOST_NAMES, BadRow, bad_row, shortened
from llmfoundry.data.supervised.formats import column_of, from_json
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
"""Columns that identify a format."""
Preprocess = Callable[[dict[str, Any]], Any]
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def format_of_row(row: Mapping[str, Any]) -> str | None:
    """Return the format that the columns of a row identify; None if none or several match."""
    matches = [f for f, names in _TOLD_BY.items() if all(row.get(n) is not None for n in names)]
    return matches[0] if len(matches) == 1 else None


class RowReader:
    """Converts the rows of a source to its format.

    Attributes:
        format: prompt_response, chat, preference or unpaired.
        unread: number of rows with each column that is not read, by the name of the column.
    """

    def __init__(self, key: str, source: SourceConfig) -> None:
        """Import the function of `preprocess`. `key` is the recipe key of `source`."""
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
        """Return the row in the columns of the format; None if `preprocess` skips it.

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
        """Count columns and keys of messages that are not read, up to a limit of names."""
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
        """Return all settings that determine the converted rows, as JSON."""
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
        """Return a hash of the function's source file, which detects a changed function."""
        code = getattr(self._function, "__code__", None)
        if code is None or not Path(code.co_filename).is_file():
            return ""
        content = Path(code.co_filename).read_bytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()


def _named(error: Exception) -> str:
    """Return an exception of a user's code in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


Row = Mapping[str, Any]


def _alpaca(row: Row) -> dict[str, Any]:
    """Convert tatsu-lab/alpaca: instruction, input and output, or one text with all three."""
    if "instruction" not in row and "text" in row:
        parts = _text(row, "text").split("### Response:")
        if len(parts) != 2:
            raise ValueError(f"text has {len(parts) - 1} times '### Response:', not once")
        return {"prompt": f"{parts[0]}### Response:", "response": parts[1]}
    instruction, given = _text(row, "instruction"), _text_if_any(row, "input")
    form = _ALPACA_INPUT if given else _ALPACA
    prompt = form.format(instruction=instruction, input=given)
    return {"prompt": prompt, "response": "\n" + _text(row, "output")}


def _dolly(row: Row) -> dict[str, Any]:
    """Convert databricks_dolly_15k of HuggingFaceH4 (input, output) or Databricks.

    The columns of Databricks are context and response.
    """
    theirs = ("context", "response") if "response" in row else ("input", "output")
    instruction, given = _text(row, "instruction"), _text_if_any(row, theirs[0])
    whole = f"{instruction}\n{given}" if given else instruction
    prompt = _ALPACA.format(instruction=whole) + "\n"
    return {"prompt": prompt, "response": _text(row, theirs[1])}


def _inputs_targets(row: Row) -> dict[str, Any]:
    """Convert P3 and FLAN of Muennighoff.

    A space separates prompt and response, unless there is white space already.
    """
    names = ("inputs", "targets")
    if "inputs_pretokenized" in row:
        names = ("inputs_pretokenized", "targets_pretokenized")
    prompt, response = (_text(row, name) for name in names)
    space = (" ", "\n", "\t")
    if not (prompt.endswith(space) or response.startswith(space)):
        response = " " + response
    return {"prompt": prompt, "response": response}


def _sharegpt(row: Row) -> dict[str, Any]:
    """Convert conversations of {from, value}, as in ShareGPT and OpenHermes."""
    turns = from_json(column_of(row, "conversations"))
    if not isinstance(turns, list):
        raise ValueError("conversations is not a list")
    messages = []
    for n, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
            raise ValueError(f"conversations[{n}] lacks from or value")
        role = turn["from"]
        role = _ROLES.get(role, role) if isinstance(role, str) else role
        message = {"role": role, "content": turn["value"]}
        more = {k: v for k, v in turn.items() if k not in ("from", "value", "role", "content")}
        messages.append(message | more)
    return {"messages": messages, **{k: row.get(k) for k in ("tools", "chat_template_kwargs")}}


def _stackmathqa(row: Row) -> dict[str, Any]:
    """Convert math-ai/StackMathQA: Q and A."""
    question, answer = _text(row, "Q"), _text(row, "A")
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _numina(row: Row) -> dict[str, Any]:
    """Convert AI-MO/NuminaMath-CoT: read the messages, not the problem and its solution."""
    return {"messages": column_of(row, "messages")}


PUBLISHED: dict[str, Callable[[Row], dict[str, Any]]] = {
    "alpaca": _alpaca,
    "dolly": _dolly,
    "p3": _inputs_targets,
    "flan": _inputs_targets,
    "openhermes": _sharegpt,
    "sharegpt": _sharegpt,
    "stackmathqa": _stackmathqa,
    "numina": _numina,
}
"""Converters by name. `recipe.source.MAPPINGS` has the format and columns of each."""


def _text_if_any(row: Row, name: str) -> str:
    return "" if row.get(name) is None else _text(row, name)


def _text(row: Row, name: str) -> str:
    value = column_of(row, name)
    if not isinstance(value, str):
        raise ValueError(f"{name} holds a {type(value).__name__}, not text")
    return value
