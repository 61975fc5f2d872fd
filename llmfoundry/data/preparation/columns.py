"""What a document is of a row's columns: the text of one, or the JSON of several.

Readers of rows call `pick` for each row and `check_columns` for a file. What is wrong with one row
is a `BadRow`, which ends the reading or is counted, as the caller's `on_bad_row` decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from llmfoundry.data.preparation.bad_rows import (
    BadRow,
    OnBadRow,
    WrongFormatError,
    raise_bad_row,
    shortened,
    text_of_row,
)
from llmfoundry.errors import UserError, one_line

ROW = "*"
"""As `text_column`: a document is the JSON object of all columns of a row, whichever they are."""
_SHOWN = 500  # characters of a file's column names


def columns_of(text_column: str) -> list[tuple[str, str]]:
    """The columns to read and whether each is `str` or `json`: of `a`, `a,` or `a,b:json`.

    A column alone is a document. With a comma a document is the JSON object of its columns, which
    `prepare.columns` asks for and takes apart again.
    """
    parts = (part.partition(":") for part in text_column.removesuffix(",").split(","))
    return [(name, kind or "str") for name, _, kind in parts]


def keeps_columns(text_column: str | None) -> bool:
    """Whether a document is the JSON object of a row, or of some of its columns."""
    return text_column is not None and (
        text_column == ROW or text_column != columns_of(text_column)[0][0]
    )


def read_columns(text_column: str) -> list[str] | None:
    """The names of the columns to read; None: all."""
    return None if text_column == ROW else [name for name, _ in columns_of(text_column)]


def check_columns(where: object, text_column: str, names: Collection[str]) -> None:
    """Refuse a file that lacks a column, or has it twice."""
    if text_column == ROW:
        twice = [n for n in names if isinstance(names, list) and names.count(n) > 1]
        if twice:
            raise UserError(f"{where}: has the column {twice[0]!r} more than once; rename one")
        return
    for name, _ in columns_of(text_column):
        if name not in names:
            raise UserError(f"{where}: {no_column(name, list(names))}")
        if isinstance(names, list) and names.count(name) > 1:  # a row of JSON has a name once
            raise UserError(f"{where}: has the column {name!r} more than once; rename the others")


def pick(where: object, text_column: str, row: Mapping[str, Any]) -> str:
    """The text of one row, or the JSON of its columns; `str(where)` is what errors begin with."""
    if text_column == ROW:
        return row_text(where, row)
    columns = columns_of(text_column)
    check_columns(where, text_column, row)
    if text_column == columns[0][0]:
        return as_text(where, text_column, row[text_column])
    values = {n: as_text(where, n, row[n]) if kind == "str" else row[n] for n, kind in columns}
    try:
        return json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(where, f"{error}; correct the row or the columns named") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of JSON rows: `json` itself takes a key's last value in silence.

    Raises:
        WrongFormatError: a key stands twice in an object, as pyarrow and `datasets` refuse it.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        why = f"an object has the key {shortened(twice)!r} twice; remove one"
        raise WrongFormatError(why, "an object has a key twice")
    return found


def row_text(where: object, row: Mapping[str, Any]) -> str:
    """The JSON of a whole row; what JSON does not know, such as a date, is written as text."""
    try:
        return json.dumps(row, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(where, f"{error}; correct the row") from error


def arrow_texts(
    where: str,
    first: int,
    text_column: str,
    batch: Any,
    on_bad_row: OnBadRow = raise_bad_row,
) -> Iterator[str]:
    """The texts of a pyarrow batch or table whose first row is number `first`.

    Raises:
        BadRow: a value is null, no string, or not UTF-8; unless `on_bad_row` does otherwise.
    """
    columns = [(field.name, _from_arrow(field.type)) for field in batch.schema]
    for number, values in enumerate(zip(*batch.columns, strict=True), start=first):
        place = f"{where} {number}"
        yield text_of_row(on_bad_row, _arrow_text, place, columns, values, text_column)


Convert = Callable[[Any], Any]


def _arrow_text(
    where: str, columns: list[tuple[str, Convert]], values: tuple[Any, ...], text_column: str
) -> str:
    try:
        pairs = zip(columns, values, strict=True)
        row = {name: convert(value.as_py()) for (name, convert), value in pairs}
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8: {error.reason}"
        raise BadRow(where, why, "not UTF-8") from error
    except Exception as error:  # what values Python has no like of raise, by their types
        raise BadRow(where, f"cannot be read: {one_line(error)}; correct it") from error
    return pick(where, text_column, row)


@lru_cache(256)
def _from_arrow(kind: Any) -> Convert:
    """The function that makes of a value of this Arrow type what a line of JSON would hold.

    A struct forces each of its keys on every object, so that null stands for a missing key there.
    Arrow's JSON texts, maps and lists add nothing: a null in them was written.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":  # as `datasets` keeps mixed types
        return partial(_unless_null, json.loads)
    if types.is_struct(kind):
        fields = {field.name: _from_arrow(field.type) for field in kind}
        return partial(_unless_null, partial(_object, fields))
    if types.is_map(kind):
        return partial(_unless_null, partial(_mapping, _from_arrow(kind.item_type)))
    if types.is_nested(kind) and not types.is_union(kind):  # a list of some kind
        return partial(_unless_null, partial(_list, _from_arrow(kind.value_type)))
    return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


def _unless_null(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _object(fields: Mapping[str, Convert], value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name](entry) for name, entry in value.items() if entry is not None}


def _mapping(convert: Convert, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {key: convert(entry) for key, entry in pairs}


def _list(convert: Convert, entries: list[Any]) -> list[Any]:
    return entries if convert is _as_it_is else [convert(entry) for entry in entries]


def as_text(where: object, text_column: str, value: Any) -> str:
    """Return the value of a text column.

    Raises:
        BadRow: the value is not text.
    """
    if isinstance(value, str):
        return value
    raise BadRow(
        where,
        f"{text_column!r} holds {kind_of(value)}, not text;"
        " correct the row or choose another data.text_column",
    )


def no_column(text_column: str, names: list[str]) -> str:
    """Return the message for a missing column, with the names of the existing columns."""
    choices = " ".join(", ".join(names).split())  # on one line
    if len(choices) > _SHOWN:
        choices = f"{choices[:_SHOWN]} …"
    return f"no column {text_column!r}; set data.text_column to one of: {choices}"


def kind_of(value: Any) -> str:
    """Return the description of a value that is not text, for messages."""
    return "null" if value is None else f"a value of type {type(value).__name__}"
