"""`Span`: a part of a corpus that can be read by itself; what every kind of source is cut into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from llmfoundry.data.preparation.read.bad_row import OnBadRow
from llmfoundry.data.preparation.read.open_files import InputFile


@dataclass(frozen=True)
class Span:
    """A part of a corpus that can be read by itself.

    Attributes:
        source: number of its file; 0 for a dataset.
        start: byte, row group, row, or shard, where it begins.
        stop: where it ends; None: with the file.
        n_bytes: of input, for progress and balance; None: unknown.
    """

    source: int
    start: int = 0
    stop: int | None = None
    n_bytes: int | None = None


class TextSource(Protocol):
    """A kind of source.

    Attributes:
        files: the files that it reads, in order; empty for a dataset.
        ignored: files of other kinds that lie in the named folders.
    """

    files: list[InputFile]
    ignored: int

    def facts(self) -> list[Any]:
        """What names its content without reading it."""

    def spans(self, longest: int | None) -> list[Span]:
        """All of it in parts, in order, of about `longest` bytes at most where that is possible."""

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, Any, str]]:
        """Yield (source, row or None, text).

        `seen` gets the bytes of input on the way, `on_bad_row` each row that cannot be read.
        """
