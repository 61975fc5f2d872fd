"""Errors about single rows, and their counts.

Readers of rows and the conversion of supervised rows raise a `BadRow`. Callers that read a corpus
pass a function that handles it. By default it is raised, which stops reading at the first bad row.
`prepare_rows` counts bad rows by mistake instead (`BadRows`), in memory that does not grow with
their number. `data.supervised.bad_rows` then decides whether they are an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.errors import UserError

_PLACES = 3  # locations stored per kind
_KINDS = 40  # kinds counted separately; a terminal shows 50 lines
MOST_NAMES = 1000  # names of unread columns and keys that are counted
_LONGEST = 400  # characters of a reason
OTHER = "other mistakes"
_INDEX, _NUMBER = re.compile(r"\[\d+\]"), re.compile(r"\d[\d,]*")


class BadRow(UserError):
    """A row cannot be used.

    Attributes:
        where: file and line.
        why: the mistake and what to write instead.
        kind: name of the mistake, equal for all rows with it; by default `why`.
    """

    def __init__(self, where: object, why: str, kind: str | None = None) -> None:
        self.where, self.why, self.kind = str(where), why, why if kind is None else kind
        super().__init__(f"{self.where}: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.why, self.kind)


def too_long(where: object, most: int) -> BadRow:
    """Return the error for a row that is longer than `data.max_row_size`."""
    why = f"is longer than {most:,} bytes; divide it, or write a larger data.max_row_size"
    return BadRow(where, why, "is longer than data.max_row_size")


OnBadRow = Callable[[BadRow], None]


def raise_bad_row(error: BadRow) -> None:
    """Raise the error, which stops reading."""
    raise error


def text_of_row(on_bad_row: OnBadRow, make: Callable[..., str], *args: Any) -> str:
    """Return the text that `make` returns for a row; "" for a bad row, passed to `on_bad_row`."""
    try:
        return make(*args)
    except BadRow as error:
        on_bad_row(error)
        return ""


def shortened(text: str) -> str:
    """Make a text from a row fit for a message: shorten it and escape unprintable characters."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class WrongFormatError(ValueError):
    """A row does not have its format; the text of the error contains values of the row.

    Attributes:
        kind: name of the mistake without these values, equal for all rows with it.
    """

    def __init__(self, why: str, kind: str) -> None:
        super().__init__(why)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind)


def bad_row(where: object, error: ValueError) -> BadRow:
    """Return a BadRow with the text and kind of `error`."""
    return BadRow(where, str(error), error.kind if isinstance(error, WrongFormatError) else None)


class BadRowsError(UserError):
    """Rows of a source cannot be used, and the recipe makes this an error."""


@dataclass
class BadRowGroup:
    """Rows with the same mistake.

    Attributes:
        why: error of the first row.
        count: number of rows.
        places: file and line of the first few rows.
    """

    why: str
    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, count: int, places: list[str]) -> None:
        """Add rows that come after the counted ones."""
        self.count += count
        self.places += places[: _PLACES - len(self.places)]


@dataclass
class BadRows:
    """Counts of the bad rows of a source or of a part of it.

    Attributes:
        kinds: groups by name of the mistake, with numbers replaced.
    """

    kinds: dict[str, BadRowGroup] = field(default_factory=dict)

    def __call__(self, error: BadRow) -> None:
        """Count a row."""
        kind = _NUMBER.sub("N", _INDEX.sub("[]", shortened(error.kind)))
        self._count(kind, shortened(error.why), 1, [error.where])

    def add(self, others: BadRows) -> None:
        """Add the counts of the next part."""
        for name, kind in others.kinds.items():
            self._count(name, kind.why, kind.count, kind.places)

    @property
    def count(self) -> int:
        """Return the number of bad rows."""
        return sum(kind.count for kind in self.kinds.values())

    def check(self, key: str, rows: int, which: str = "") -> None:
        """Raise one error for all bad rows, if there are any.

        Args:
            key: recipe key of the source.
            rows: number of rows that were read.
            which: which rows these are, if they are not all: "the first ".

        Raises:
            BadRowsError: one line per kind, the most frequent first.
        """
        kinds, drop = self._by_count(), "data.supervised.bad_rows: drop"
        if self.count == 1:
            raise BadRowsError(f"{kinds[0].places[0]}: {kinds[0].why} (or leave it out: {drop})")
        if kinds:
            many = f", for {len(kinds)} reasons" if len(kinds) > 1 else ""
            raise BadRowsError(
                f"{key}: {self.count:,} of {which}{rows:,} rows cannot be used{many};"
                f" correct them, or leave them out: {drop}",
                *(f"{kind.places[0]}: {kind.why}{_others(kind)}" for kind in kinds),
            )

    def lines(self) -> Iterator[str]:
        """Yield a line per kind, the most frequent first: count, reason, first locations."""
        for kind in self._by_count():
            rows = "1 row" if kind.count == 1 else f"{kind.count:,} rows"
            yield f"{rows} dropped: {kind.why} (the first: {', '.join(_shortened(kind.places))})"

    def _by_count(self) -> list[BadRowGroup]:
        return sorted(self.kinds.values(), key=lambda kind: -kind.count)

    def _count(self, name: str, why: str, count: int, places: list[str]) -> None:
        if name not in self.kinds and len(self.kinds) >= _KINDS:
            name, why = OTHER, OTHER
        self.kinds.setdefault(name, BadRowGroup(why)).add(count, places)


def _others(kind: BadRowGroup) -> str:
    if kind.count == 1:
        return ""
    rest = kind.count - len(kind.places)
    more = f" and {rest:,} more" if rest else ""
    return f" ({kind.count:,} rows; also {', '.join(_shortened(kind.places)[1:])}{more})"


def _shortened(places: list[str]) -> list[str]:
    """Shorten locations in the file of the first one to their line, as `:12`."""
    file = places[0].rpartition(":")[0]
    return [places[0], *(p.removeprefix(file) if file else p for p in places[1:])]
