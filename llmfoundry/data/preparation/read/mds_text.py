"""`MDSText`: the documents of MDS shards with a column of text, to be prepared as another form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

from llmfoundry.data.fetch.shard_files import FetchOptions, ShardFolder
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.mds.shard import MDSShard
from llmfoundry.data.preparation.read.bad_row import OnBadRow, text_of_row
from llmfoundry.data.preparation.read.open_files import InputFile
from llmfoundry.data.preparation.read.readers import ROW, as_text, no_column, row_text
from llmfoundry.data.preparation.read.spans import Span
from llmfoundry.data.shard_index import read_index, with_sample
from llmfoundry.data.token_rows import StreamIndex
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig


class MDSText:
    """The values of one column, in the shards' order."""

    def __init__(self, config: DataConfig) -> None:
        self.files: list[InputFile] = []
        self.ignored = 0
        self._column = config.text_column or "text"
        remote, local = (_below(place, config.split) for place in (config.remote, config.local))
        self._folder = ShardFolder.open(remote, local, FetchOptions.from_config(config))

    def facts(self) -> list[Any]:
        """The contents of its index."""
        return [self._index.fingerprint, self._column]

    def spans(self, longest: int | None) -> list[Span]:
        """Its shards."""
        sizes = self._index.raw_bytes.tolist()
        return [Span(0, n, n + 1, size) for n, size in enumerate(sizes)]

    def read(
        self, span: Span, seen: Callable[[int], None], on_bad_row: OnBadRow
    ) -> Iterator[tuple[str, int, str]]:
        """Yield (shard, sample, text).

        Raises:
            UserError: a shard cannot be had, or has no such column of text.
        """
        name = self._index.names[span.start]
        columns = self._index.columns(span.start).names
        if self._column not in (*columns, ROW):
            raise UserError(f"{name}: {no_column(self._column, list(columns))}")
        with self._folder.pin(self._index.spec(span.start)) as path:
            shard = MDSShard(path, self._index, span.start)
            for row in range(len(shard)):
                where = f"{name}:{row}"
                text = text_of_row(on_bad_row, self._text, shard, where, row, columns)
                seen(len(text))
                yield name, row, text

    def _text(self, shard: MDSShard, where: str, row: int, columns: Iterable[str]) -> str:
        if self._column == ROW:
            return row_text(where, {column: shard.read(row, column) for column in columns})
        return as_text(where, self._column, shard.read(row, self._column))

    @cached_property
    def _index(self) -> MDSIndex:
        index = read_index(self._folder)
        if isinstance(index, StreamIndex):
            raise UserError(
                "data.remote: its token shards hold no text to prepare; name MDS shards with a"
                " column of text"
            )
        return with_sample(self._folder, index)


def _below(place: str | None, split: str | None) -> str | None:
    return place if place is None or split is None else f"{place.rstrip('/')}/{split}"
