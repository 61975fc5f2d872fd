"""Held-out text for the validation loss, read in order, each token predicted once over all ranks.

`builders/data.py` opens it, the evaluation of the training loop reads `validation_batches`, and the
gauntlet reads the texts. `HeldOut` is the interface, and the other classes implement it for each
source. The `TokenDataset` of a prepared corpus satisfies it directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from llmfoundry.data.batch import SequenceBatch, TrainingSequence
from llmfoundry.data.sources import MDSTexts, MDSTokens
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.text_packing import pack_texts
from llmfoundry.data.token_shards import TokenDataset
from llmfoundry.ops.packed_layout import Batch


class HeldOut(Protocol):
    """Text to evaluate on."""

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text; for MDS shards, the size of their samples."""

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Return the number of sequences of `seq_len` tokens, each of which has a label.

        With `partial` a shorter last sequence counts too.
        """

    def row(self, row: int, seq_len: int) -> tuple[Any, ...]:
        """Return the fields of a `TrainingSequence`, at least ids and document lengths."""

    def texts(self) -> list[str]:
        """Return the documents."""


class TokenShards:
    """Token shards. If they were written without texts, the texts are decoded from the tokens."""

    def __init__(self, dataset: TokenDataset, tokenizer: Tokenizer) -> None:
        self.dataset, self._tokenizer = dataset, tokenizer
        self.n_rows, self.row = dataset.n_rows, dataset.row

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return self.dataset.n_bytes

    def texts(self) -> list[str]:
        """Return the stored texts of the documents or, without them, the decoded tokens."""
        dataset = self.dataset
        if dataset.index.texts or not dataset.n_documents:
            return dataset.texts()
        ids, lengths = dataset.row(0, dataset.n_tokens - 1)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        n_before, n_after = map(len, (self._tokenizer.document_start, self._tokenizer.document_end))
        texts = (part[n_before : len(part) - n_after].tolist() for part in parts)
        return [self._tokenizer.decode(ids) for ids in texts]


class MDSRows:
    """Sequences of an MDS column of token ids."""

    def __init__(self, source: MDSTokens, tokenizer: Tokenizer) -> None:
        self.source, self._tokenizer = source, tokenizer
        self.n_bytes = source.n_bytes

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Return the number of samples: each is one sequence."""
        return self.source.n_rows

    def row(self, row: int, seq_len: int) -> tuple[np.ndarray, list[int]]:
        """Return the ids of a sample, truncated to `seq_len`, and its document lengths."""
        sequence = self.source.cut(row, seq_len)
        return sequence.ids, sequence.lengths

    def texts(self) -> list[str]:
        """Return the decoded samples."""
        rows = range(self.source.n_rows)
        return [self._tokenizer.decode(self.source.ids(row).tolist()) for row in rows]


class MDSDocuments:
    """Documents of an MDS column of texts, tokenized at the first evaluation."""

    def __init__(self, source: MDSTexts, tokenizer: Tokenizer) -> None:
        self._source, self._tokenizer = source, tokenizer
        self.n_bytes = source.n_bytes
        self._rows: dict[int, list[TrainingSequence]] = {}  # by seq_len

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Return the number of sequences of the concatenated documents."""
        return len(self._packed(seq_len))

    def row(self, row: int, seq_len: int) -> tuple[np.ndarray, list[int]]:
        """Return the ids and the document lengths of a sequence."""
        sequence = self._packed(seq_len)[row]
        return sequence.ids, sequence.lengths

    def texts(self) -> list[str]:
        """Return the documents."""
        return [self._source.text(row) for row in range(self._source.n_rows)]

    def _packed(self, seq_len: int) -> list[TrainingSequence]:
        if seq_len not in self._rows:
            documents = self._tokenizer.encode_documents(self.texts())
            rows = -(-(sum(map(len, documents)) - 1) // seq_len)
            self._rows = {seq_len: pack_texts(documents, rows=rows, seq_len=seq_len)}
        return self._rows[seq_len]


class WrappedHeldOut:
    """Held-out data to whose sequences a subclass adds something; all else is the data's own.

    Attributes:
        held_out: the wrapped data.
    """

    def __init__(self, held_out: HeldOut) -> None:
        """Wrap held-out data."""
        self.held_out = held_out
        self.n_rows, self.texts = held_out.n_rows, held_out.texts

    @property
    def n_bytes(self) -> int:
        """Bytes of the wrapped data."""
        return self.held_out.n_bytes

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the wrapped data."""
        return getattr(self.held_out, name)


class Chain:
    """Several held-out texts in order. A sequence never spans two of them."""

    def __init__(self, parts: Sequence[HeldOut]) -> None:
        self.parts = tuple(parts)

    @property
    def n_bytes(self) -> int:
        """Total size of all parts."""
        return sum(part.n_bytes for part in self.parts)

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Return the total number of sequences."""
        return sum(part.n_rows(seq_len, partial=partial) for part in self.parts)

    def row(self, row: int, seq_len: int) -> tuple[Any, ...]:
        """Return sequence number `row`, counted over all parts."""
        for part in self.parts:
            n_rows = part.n_rows(seq_len, partial=True)
            if row < n_rows:
                return part.row(row, seq_len)
            row -= n_rows
        raise AssertionError("no such row")

    def texts(self) -> list[str]:
        """Return the documents of all parts."""
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
    """Yield this rank's batches of the held-out text, in order.

    Every token is predicted once over all ranks. Every rank yields the same number of batches of
    the same size, because evaluation has collectives. Short and missing sequences are padded with
    `eos_id`, as a separate document with IGNORE labels.

    Args:
        held_out: the text.
        seq_len: T, tokens per sequence.
        batch_size: maximum number of sequences in a batch of one rank.
        eos_id: padding token.
        data_rank: data-parallel rank of this process.
        data_size: number of data-parallel ranks.
        max_rows: read only this many sequences, from the first; None: all.
        attend_across_documents: omit the layout, so that a sequence is one document.
    """
    n_rows = held_out.n_rows(seq_len, partial=True)
    n_rows = n_rows if max_rows is None else min(n_rows, max_rows)
    size = min(batch_size, -(-n_rows // data_size))  # sequences per batch of one rank
    first = data_rank * size
    for start in range(first, n_rows + first, max(1, size * data_size)):
        stop = min(start + size, n_rows)
        rows = [TrainingSequence(*held_out.row(row, seq_len)) for row in range(start, stop)]
        # fill up with empty sequences
        if len(rows) < size:
            template = rows[0] if rows else TrainingSequence(*held_out.row(0, seq_len))
            rows += [_without_tokens(template)] * (size - len(rows))
        yield SequenceBatch.fill(rows, seq_len, eos_id).batch(
            with_layout=not attend_across_documents
        )


def _without_tokens(row: TrainingSequence) -> TrainingSequence:
    """Return an empty sequence with the same optional fields as `row`.

    All ranks must have the same fields, because they take part in the same collectives.
    """
    return row._replace(
        ids=row.ids[:0],
        lengths=[],
        dropped=0,
        weights=None if row.weights is None else row.weights[:0],
        sides=None if row.sides is None else [],
        references=None if row.references is None else row.references[:, :0],
        teacher=row.teacher and (row.teacher[0][:0], row.teacher[1][:0]),
    )
