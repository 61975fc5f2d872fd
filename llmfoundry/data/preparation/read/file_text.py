"""`FileText`: the documents of files, here and at URLs, and how files are cut; see `corpus`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.preparation.read.bad_row import OnBadRow, raise_bad_row
from llmfoundry.data.preparation.read.inputs import find_files
from llmfoundry.data.preparation.read.open_files import Input, InputFile
from llmfoundry.data.preparation.read.readers import (
    FileRow,
    code_of,
    read_file,
    row_groups,
    suffix_of,
)
from llmfoundry.data.preparation.read.spans import Span
from llmfoundry.recipe.data import DataConfig, n_bytes


class FileText:
    """The documents of a list of files.

    Attributes:
        files: in order.
        ignored: files of other kinds that lie in the named folders.

    Raises:
        UserError: a path that does not exist, is of no readable kind, or is named twice.
    """

    def __init__(self, config: DataConfig) -> None:
        self.files, self.ignored = find_files(config)
        self._column = config.text_column or "text"
        self._longest = n_bytes(config.max_row_size)
        self._options = FetchOptions.from_config(config)

    def facts(self) -> list[Any]:
        """Paths, sizes and times; and the code of plugins that read them."""
        codes = {code_of(file.name) for file in self.files} - {""}
        return [*([file.name, file.size, file.stamp] for file in self.files), *sorted(codes)]

    def spans(self, longest: int | None) -> list[Span]:
        """Lines can be cut anywhere, parquet between row groups; compressed files, CSV not."""
        return [span for n, file in enumerate(self.files) for span in self._cut(n, file, longest)]

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, FileRow | int | None, str]]:
        """Yield (file, row, text).

        Raises:
            UserError: something cannot be read.
        """
        name = self.files[span.source].name
        for row, text in read_file(self.input(span, seen, on_bad_row), self._column):
            yield name, row, text

    def input(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow = raise_bad_row
    ) -> Input:
        """The bytes of a span."""
        return Input(
            file=self.files[span.source],
            start=span.start,
            stop=span.stop,
            n_bytes=span.n_bytes or 0,
            longest=self._longest,
            seen=seen,
            options=self._options,
            on_bad_row=on_bad_row,
        )

    def _cut(self, number: int, file: InputFile, longest: int | None) -> Iterator[Span]:
        suffix, size = suffix_of(file.name), file.size
        whole = Span(number, n_bytes=size)
        if longest is None or size <= longest or suffix not in (".jsonl", ".parquet"):
            yield whole
        elif suffix == ".jsonl":
            parts = -(-size // longest)
            for start, stop in pairwise(size * n // parts for n in range(parts + 1)):
                yield Span(number, start, stop, stop - start)
        else:
            groups = row_groups(self.input(whole, lambda n_bytes: None))
            yield from _cut_row_groups(number, groups, longest)


def _cut_row_groups(number: int, sizes: list[int], longest: int) -> Iterator[Span]:
    """Row groups of these sizes in runs of at most `longest` bytes, or one each."""
    ends = list(accumulate(sizes, initial=0))
    start = 0
    for stop in range(1, len(ends)):
        if stop == len(sizes) or ends[stop + 1] - ends[start] > longest:
            yield Span(number, start, stop, ends[stop] - ends[start])
            start = stop
