"""Held-out text: its kinds, read in order, each token predicted once over all ranks.

`builders/data.py` opens it, the loop's evaluation reads its batches, the gauntlet its texts. The
`TokenDataset` of a prepared corpus is a kind of it, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from llmfoundry.data.batch import Row, Rows
from llmfoundry.data.sources import MDSTexts, MDSTokens
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.text_packing import pack_texts
from llmfoundry.data.token_shards import TokenDataset
from llmfoundry.ops.packed_layout import Batch


class HeldOut(Protocol):
    """Text to measure on."""

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text; of MDS shards, the size of their samples."""

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Rows of T tokens that each have a label; with `partial` the last may be short."""

    def row(self, row: int, seq_len: int) -> tuple[Any, ...]:
        """A row's ids and the lengths of its documents, and what else a `Row` may have."""

    def texts(self) -> list[str]:
        """The documents."""


class TokenShards:
    """Token shards whose texts may not have been kept."""

    def __init__(self, dataset: TokenDataset, tokenizer: Tokenizer) -> None:
        self._dataset, self._tokenizer = dataset, tokenizer
        self.n_rows, self.row = dataset.n_rows, dataset.row

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return self._dataset.n_bytes

    def texts(self) -> list[str]:
        """The documents, as they were read if that was kept, else as their tokens spell them."""
        dataset = self._dataset
        if dataset.index.texts or not dataset.n_documents:
            return dataset.texts()
        ids, lengths = dataset.row(0, dataset.n_tokens - 1)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        n_before, n_after = map(len, (self._tokenizer.document_start, self._tokenizer.document_end))
        texts = (part[n_before : len(part) - n_after].tolist() for part in parts)
        return [self._tokenizer.decode(ids) for ids in texts]


class MDSRows:
    """The rows of an MDS column of ids."""

    def __init__(self, source: MDSTokens, tokenizer: Tokenizer) -> None:
        self._source, self._tokenizer = source, tokenizer
        self.n_bytes = source.n_bytes

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Samples."""
        return self._source.n_rows

    def row(self, row: int, seq_len: int) -> tuple[np.ndarray, list[int]]:
        """A sample's ids and the lengths of its documents."""
        found = self._source.cut(row, seq_len)
        return found.ids, found.lengths

    def texts(self) -> list[str]:
        """The samples, as their tokens spell them."""
        rows = range(self._source.n_rows)
        return [self._tokenizer.decode(self._source.ids(row).tolist()) for row in rows]


class MDSDocuments:
    """The documents of an MDS column of texts, tokenized when first measured on."""

    def __init__(self, source: MDSTexts, tokenizer: Tokenizer) -> None:
        self._source, self._tokenizer = source, tokenizer
        self.n_bytes = source.n_bytes
        self._rows: dict[int, list[Row]] = {}  # by seq_len

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Rows of all documents laid one after another."""
        return len(self._packed(seq_len))

    def row(self, row: int, seq_len: int) -> tuple[np.ndarray, list[int]]:
        """A row's ids and the lengths of its documents."""
        found = self._packed(seq_len)[row]
        return found.ids, found.lengths

    def texts(self) -> list[str]:
        """The documents."""
        return [self._source.text(row) for row in range(self._source.n_rows)]

    def _packed(self, seq_len: int) -> list[Row]:
        if seq_len not in self._rows:
            documents = self._tokenizer.encode_documents(self.texts())
            rows = -(-(sum(map(len, documents)) - 1) // seq_len)
            self._rows = {seq_len: pack_texts(documents, rows=rows, seq_len=seq_len)}
        return self._rows[seq_len]


class Chain:
    """Several, one after another; a row holds text of one of them."""

    def __init__(self, parts: Sequence[HeldOut]) -> None:
        self.parts = tuple(parts)

    @property
    def n_bytes(self) -> int:
        """Of all."""
        return sum(part.n_bytes for part in self.parts)

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Of all."""
        return sum(part.n_rows(seq_len, partial=partial) for part in self.parts)

    def row(self, row: int, seq_len: int) -> tuple[Any, ...]:
        """A row of one of them."""
        for part in self.parts:
            n_rows = part.n_rows(seq_len, partial=True)
            if row < n_rows:
                return part.row(row, seq_len)
            row -= n_rows
        raise AssertionError("no such row")

    def texts(self) -> list[str]:
        """Of all."""
        return [text for part in self.parts for text in part.texts()]


def validation_batches(
    held_out: HeldOut,
    *,
    seq_len: int,
    batch_size: int,
    eos_id: int,
    data_rank: int = 0,
    data_size: int = 1,
    max_rows: int | None = None,
    attend_across_documents: bool = False,
) -> Iterator[Batch]:
    """The held-out rows in order, every token predicted once over all ranks.

    Every rank gets as many batches of as many rows: short and missing rows are filled up with
    `eos_id`, in a document of their own, and IGNORE labels.

    Args:
        held_out: the text.
        seq_len: T, tokens of a row.
        batch_size: rows of a batch of one rank, at most.
        eos_id: what to fill up with.
        data_rank: among the processes that read different rows.
        data_size: their number.
        max_rows: read these rows only, from the first; None: all.
        attend_across_documents: leave out the layout.
    """
    n_rows = held_out.n_rows(seq_len, partial=True)
    n_rows = n_rows if max_rows is None else min(n_rows, max_rows)
    share = min(batch_size, -(-n_rows // data_size))
    for start in range(data_rank * share, n_rows + data_rank * share, max(1, share * data_size)):
        rows = [
            Row(*held_out.row(row, seq_len)) for row in range(start, min(start + share, n_rows))
        ]
        if len(rows) < share:
            kind = rows[0] if rows else Row(*held_out.row(0, seq_len))
            rows += [_without_tokens(kind)] * (share - len(rows))
        yield Rows.fill(rows, seq_len, eos_id).batch(with_layout=not attend_across_documents)


def _without_tokens(row: Row) -> Row:
    """An empty row that brings what rows of its kind bring: all processes must ask alike."""
    return row._replace(
        ids=row.ids[:0],
        lengths=[],
        dropped=0,
        weights=None if row.weights is None else row.weights[:0],
        sides=None if row.sides is None else [],
        references=None if row.references is None else row.references[:, :0],
    )
