"""Rows that cannot be used, where the rest of their file can: `BadRow`; `BadRows` counts them.

Readers of rows raise a `BadRow`, and so does what makes supervised rows of them. Whoever reads a
corpus passes a function that gets it: by default it is raised, which ends the reading at the first
one. `prepare_rows` counts them by what is wrong instead, in memory that does not grow with their
number, and `data.supervised.bad_rows` decides afterwards what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.errors import UserError

_PLACES = 3  # kept of each kind
_KINDS = 40  # kept apart; a terminal shows 50 lines
MOST_NAMES = 1000  # of columns and keys that are not read
_LONGEST = 400  # characters of a reason
OTHER = "other mistakes"
_INDEX, _NUMBER = re.compile(r"\[\d+\]"), re.compile(r"\d[\d,]*")


class BadRow(UserError):
    """One row, its place and what is wrong with it.

    Attributes:
        where: file and line.
        why: what is wrong, and what to write instead.
        kind: equal for rows with the same mistake; `why` where it holds nothing of the row.
    """

    def __init__(self, where: object, why: str, kind: str | None = None) -> None:
        self.where, self.why, self.kind = str(where), why, why if kind is None else kind
        super().__init__(f"{self.where}: {why}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.where, self.why, self.kind)


def too_long(where: object, most: int) -> BadRow:
    """A row of more bytes than `data.max_row_size`."""
    why = f"is longer than {most:,} bytes; divide it, or write a larger data.max_row_size"
    return BadRow(where, why, "is longer than data.max_row_size")


OnBadRow = Callable[[BadRow], None]


def raise_bad_row(error: BadRow) -> None:
    """End the reading."""
    raise error


def text_of_row(on_bad_row: OnBadRow, make: Callable[..., str], *args: Any) -> str:
    """What `make` returns for a row; blank for a bad one, which `on_bad_row` gets."""
    try:
        return make(*args)
    except BadRow as error:
        on_bad_row(error)
        return ""


def shortened(text: str) -> str:
    """A text that may come from a row, as a part of a line: printable, and none of it endless."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class WrongFormatError(ValueError):
    """A row that is not of its format, for a reason that names what the row holds.

    Attributes:
        kind: the reason without it, equal for all rows with the same mistake.
    """

    def __init__(self, why: str, kind: str) -> None:
        super().__init__(why)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.kind)


def bad_row(where: object, error: ValueError) -> BadRow:
    """A row of which `error` says what is wrong."""
    return BadRow(where, str(error), error.kind if isinstance(error, WrongFormatError) else None)


class BadRowsError(UserError):
    """All rows of a source that cannot be used, where the recipe makes this an error."""


@dataclass
class BadRowGroup:
    """Rows with the same mistake.

    Attributes:
        why: what is wrong with the first.
        count: how many they are.
        places: file and line of the first few.
    """

    why: str
    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, count: int, places: list[str]) -> None:
        """Count more of them, which come after those counted."""
        self.count += count
        self.places += places[: _PLACES - len(self.places)]


@dataclass
class BadRows:
    """All of a source, or of a part of it.

    Attributes:
        kinds: by what is wrong, numbers left out.
    """

    kinds: dict[str, BadRowGroup] = field(default_factory=dict)

    def __call__(self, error: BadRow) -> None:
        """Count a row."""
        kind = _NUMBER.sub("N", _INDEX.sub("[]", shortened(error.kind)))
        self._count(kind, shortened(error.why), 1, [error.where])

    def add(self, others: BadRows) -> None:
        """Count those of the part that follows."""
        for name, kind in others.kinds.items():
            self._count(name, kind.why, kind.count, kind.places)

    @property
    def count(self) -> int:
        """How many they are."""
        return sum(kind.count for kind in self.kinds.values())

    def check(self, key: str, rows: int) -> None:
        """Refuse them all at once.

        Raises:
            BadRowsError: there are any; a line for each kind, the most frequent first.
        """
        kinds, drop = self._by_count(), "data.supervised.bad_rows: drop"
        if self.count == 1:
            raise BadRowsError(f"{kinds[0].places[0]}: {kinds[0].why} (or leave it out: {drop})")
        if kinds:
            many = f", for {len(kinds)} reasons" if len(kinds) > 1 else ""
            raise BadRowsError(
                f"{key}: {self.count:,} of {rows:,} rows cannot be used{many}; correct them, or"
                f" leave them out: {drop}",
                *(f"{kind.places[0]}: {kind.why}{_others(kind)}" for kind in kinds),
            )

    def lines(self) -> Iterator[str]:
        """For each kind, the most frequent first: how many, why, and where the first few are."""
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
    """Places of which those in the first one's file have their line alone, as `:12`."""
    file = places[0].rpartition(":")[0]
    return [places[0], *(p.removeprefix(file) if file else p for p in places[1:])]
