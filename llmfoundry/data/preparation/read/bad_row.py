"""`BadRow`: a row that cannot be used, where the rest of its file can.

Raised by readers of rows, and by what makes supervised rows of them. Whoever reads a corpus passes
a function that gets it; the default raises it, which ends the reading at the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llmfoundry.errors import UserError


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
