"""Sequences to batches: `Row` is one sequence, `Rows.batch` makes tokens, labels and layout.

A `Stream` of `sources.py` returns a `Row` for each sample. The loader collects the B rows of a
microbatch with `Rows.fill`, and `Rows.batch` turns them into the `Batch` that one step reads. The
one idea: everything up to `Rows.batch` stays in numpy and copies each id once, because this work
is done for every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from llmfoundry.ops.packed_layout import IGNORE, Answers, Batch, PackedLayout


class Row(NamedTuple):
    """One row of training.

    Attributes:
        ids: (n,) of any integer type, n at most T + 1: the row's first tokens, and, behind T of
            them, the label of the last. May be a view of a file.
        lengths: of its documents, in order; of all as one where they are not kept apart. Their sum
            is how many of `ids` are read, T at most; what is missing to T is padding.
        dropped: ids of the sample that did not fit.
        weights: (n,) fp32, what each of `ids` counts where it is the label, 0: it is not learned;
            None: each counts 1, over the borders of documents too.
        sides: of preference rows, for each document: 1 chosen or desirable, -1 rejected or
            undesirable, 0 neither. A pair is two adjacent rows, the chosen one first, with their
            prompt in each; the learned ids of a document are its answer.
        references: (k, D) fp32, the reference model's log-probabilities of its D documents'
            answers: each with its own prompt, then (k = 2) each prompt with the answer of the
            document before it, the first with the last's.
    """

    ids: np.ndarray
    lengths: list[int]
    dropped: int = 0
    weights: np.ndarray | None = None
    sides: list[int] | None = None
    references: np.ndarray | None = None


@dataclass(frozen=True)
class Rows:
    """B rows of T tokens.

    Attributes:
        ids: (B, T + 1), where a row is short filled up with `eos_id`; of a type as narrow as the
            rows'.
        lengths: of each row's documents; padding is a document of its own, the last.
        labelled: tokens of each row that have a label: its first ones.
        padded: tokens of each row that are padding: its last ones.
        dropped: ids that did not fit.
        eos_id: the end of text.
        weights: (B, T) fp32, what each label counts; None: every label of every row counts 1.
        sides: of each row's documents, padding included; None: no row has any.
        references: (B, k, D) fp32, as in `Row`, 0 where a row has none; None: no row has any.
    """

    ids: np.ndarray
    lengths: list[list[int]]
    labelled: list[int]
    padded: list[int]
    dropped: int
    eos_id: int
    weights: np.ndarray | None = None
    sides: list[list[int]] | None = None
    references: np.ndarray | None = None

    @classmethod
    def fill(cls, rows: Sequence[Row], seq_len: int, eos_id: int) -> Rows:
        """Copy rows into one array."""
        dtype = _shared_dtype(frozenset(row.ids.dtype for row in rows), eos_id)
        ids = np.empty((len(rows), seq_len + 1), dtype)
        lengths, labelled, padded = [], [], []
        for n, row in enumerate(rows):
            size, padding = len(row.ids), seq_len - sum(row.lengths)
            ids[n, :size] = row.ids
            if size <= seq_len:
                ids[n, size:] = eos_id
            lengths.append([*row.lengths, padding] if padding else row.lengths)
            labelled.append(max(0, size - 1))
            padded.append(padding)
        return cls(
            ids,
            lengths,
            labelled,
            padded,
            sum(row.dropped for row in rows),
            eos_id,
            _weights(rows, seq_len),
            _sides(rows, lengths),
            _references(rows),
        )

    def outside(self, vocab_size: int) -> int | None:
        """The first row with an id that is negative or no less than `vocab_size`."""
        unsigned = self.ids.view(f"u{self.ids.itemsize}")  # negative ones are the largest there
        if unsigned.max(initial=0) < vocab_size:
            return None
        return int(np.flatnonzero((unsigned >= vocab_size).any(1))[0])

    def narrow(self) -> Rows:
        """The same in at most four bytes an id; all must be below 2**31."""
        return replace(self, ids=self.ids.astype(np.int32)) if self.ids.itemsize > 4 else self

    def batch(self, *, with_layout: bool) -> Batch:
        """Tokens and labels; without the layout a row is one document."""
        tokens, labels = self.ids[:, :-1].astype(np.int64), self.ids[:, 1:].astype(np.int64)
        seq_len = tokens.shape[1]
        for n, labelled in enumerate(self.labelled):
            if labelled < seq_len:
                labels[n, labelled:] = IGNORE
                tokens[n, seq_len - self.padded[n] :] = self.eos_id
        layout = _layout(self.lengths, seq_len, self.padded) if with_layout else None
        weights = None
        if self.weights is not None:
            labels[self.weights == 0] = IGNORE
            if self.weights.max(initial=0) != 1 or np.any(self.weights % 1):
                weights = torch.from_numpy(self.weights)
        found = torch.from_numpy(labels)
        answers = None if self.sides is None else self._answers(labels != IGNORE)
        return Batch(torch.from_numpy(tokens), found, layout, weights, answers)

    def _answers(self, learned: np.ndarray) -> Answers:
        """Their sides and places; `learned` (B, T): whether the id after each is learned."""
        assert self.sides is not None
        width = max(map(len, self.lengths))
        side = np.zeros((len(self.sides), width), np.int64)
        for row, sides in zip(side, self.sides, strict=True):
            row[: len(sides)] = sides
        rows = zip(self.lengths, learned, strict=True)
        begins = tuple(tuple(_answer_begins(lengths, where)) for lengths, where in rows)
        known: list[torch.Tensor | None] = [None, None]
        if self.references is not None:
            padding = width - self.references.shape[2]
            padded = np.pad(self.references, ((0, 0), (0, 0), (0, padding)))
            known[: padded.shape[1]] = torch.from_numpy(padded).unbind(1)
        return Answers(torch.from_numpy(side), begins, *known)


def _weights(rows: Sequence[Row], seq_len: int) -> np.ndarray | None:
    """(B, T) fp32 of the rows' labels; None where no row weighs its own."""
    if all(row.weights is None for row in rows):
        return None
    weights = np.zeros((len(rows), seq_len), np.float32)
    for n, row in enumerate(rows):
        labels = len(row.ids) - 1
        if labels > 0:
            weights[n, :labels] = 1 if row.weights is None else row.weights[1:]
    return weights


def _sides(rows: Sequence[Row], lengths: list[list[int]]) -> list[list[int]] | None:
    """Of each row's documents and its padding; None where no row has any."""
    if all(row.sides is None for row in rows):
        return None
    sides = []
    for row, of_row in zip(rows, lengths, strict=True):
        given = row.sides or []
        assert len(given) in (0, len(row.lengths)), "each document has a side, or none has"
        sides.append([*given, *[0] * (len(of_row) - len(given))])
    return sides


def _references(rows: Sequence[Row]) -> np.ndarray | None:
    """(B, k, D) fp32; None where no row has any."""
    given = [row.references for row in rows]
    shapes = [np.shape(values) for values in given if values is not None]
    if not shapes:
        return None
    references = np.zeros((len(rows), *np.max(shapes, axis=0)), np.float32)
    for own, values in zip(references, given, strict=True):
        if values is not None:
            own[: values.shape[0], : values.shape[1]] = values
    return references


def _answer_begins(lengths: list[int], learned: np.ndarray) -> Iterator[int]:
    """Of each document of a row the place of its first learned id; its end where none is."""
    begin = 0
    for length in lengths:
        # the id at place i is the label at i - 1; the first of a document follows nothing there
        found = np.flatnonzero(learned[begin : begin + length - 1])
        yield begin + (int(found[0]) + 1 if len(found) else length)
        begin += length


@lru_cache(maxsize=64)
def _shared_dtype(kinds: frozenset[np.dtype[Any]], eos_id: int) -> np.dtype[Any]:
    """The narrowest integer type that holds what all of these do, and `eos_id`."""
    dtype = np.result_type(*kinds, np.min_scalar_type(eos_id))
    return dtype if dtype.kind in "iu" else np.dtype(np.int64)  # of uint64 with signed ones


def _layout(lengths: list[list[int]], seq_len: int, padded: list[int]) -> PackedLayout:
    """Return `PackedLayout.from_lengths` in vectorized form: every step needs one layout."""
    flat = np.array(list(chain.from_iterable(lengths)))
    numbers = np.array(list(chain.from_iterable(range(len(row)) for row in lengths)), np.int32)
    begins = np.cumsum(flat) - flat
    shape = (len(lengths), seq_len)
    positions = _places(len(lengths) * seq_len) - np.repeat(begins, flat)
    return PackedLayout(
        torch.from_numpy(positions.reshape(shape)),
        torch.from_numpy(np.repeat(numbers, flat).reshape(shape)),
        tuple(map(tuple, lengths)),
        tuple(padded),
    )


@lru_cache(maxsize=4)
def _places(n: int) -> np.ndarray:
    return np.arange(n)
