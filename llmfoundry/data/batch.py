"""Conversion of training sequences to batches with tokens, labels and layout.

A `Stream` of `sources.py` returns a `TrainingSequence` for each sample. The loader collects the B
rows of a microbatch with `SequenceBatch.fill`, and `SequenceBatch.batch` turns them into the
`Batch` that one step reads. The one idea: everything up to `SequenceBatch.batch` stays in numpy and
copies each id once, because this work is done for every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from llmfoundry.ops.packed_layout import (
    IGNORE,
    AnswerDocuments,
    Batch,
    PackedLayout,
    TeacherTokens,
)

TeacherRows: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Token ids (n, k) of an unsigned type, and their log-probabilities (n, k) in fp16."""


class TrainingSequence(NamedTuple):
    """One training sequence.

    Attributes:
        ids: (n,) of any integer type, n <= T + 1: the tokens, and the label of the last token if
            there are T of them. May be a view of a memory-mapped file.
        lengths: tokens of each document, in order; one entry if the documents are not separated.
            Their sum is the number of `ids` that are input tokens, at most T. The rest of the T
            positions is padding.
        dropped: number of ids of the sample that did not fit.
        weights: (n,) fp32, the loss weight of each of `ids` as a label; 0: not in the loss. None:
            every weight is 1, also that of a label which starts the next document.
        sides: preference data only, for each document: 1 chosen or desirable, -1 rejected or
            undesirable, 0 neither. A pair is two adjacent documents, chosen first, which both
            contain the prompt. The ids of a document that are in the loss are its answer.
        references: (k, D) fp32, the reference model's log-probabilities of the answers of D
            documents. Index 0: each answer after its own prompt. Index 1, if k = 2: the answer of
            the previous document after each prompt (of the last document after the first prompt).
        teacher: the teacher's tokens at each label, (n - 1, k); None: no teacher.
    """

    ids: np.ndarray
    lengths: list[int]
    dropped: int = 0
    weights: np.ndarray | None = None
    sides: list[int] | None = None
    references: np.ndarray | None = None
    teacher: TeacherRows | None = None


@dataclass(frozen=True)
class SequenceBatch:
    """A batch of B sequences of T tokens, in the compact form that workers send.

    Attributes:
        ids: (B, T + 1), padded with `eos_id`, in the narrowest integer type that holds the ids.
        lengths: tokens of each document of each sequence. Padding is one more, the last document.
        labelled: number of tokens of each sequence that have a label; these are the first ones.
        padded: number of padding tokens of each sequence; these are the last ones.
        dropped: number of ids that did not fit.
        eos_id: end-of-text token.
        weights: (B, T) fp32, the loss weight of each label; None: every weight is 1.
        sides: as in `TrainingSequence`, with 0 for the padding; None if no sequence has sides.
        references: (B, k, D) fp32, as in `TrainingSequence`, 0 for a sequence without; None if no
            sequence has references.
        teacher: (B, T, k) each, 0 where there is no label; None: no teacher.
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
    teacher: TeacherRows | None = None

    @classmethod
    def fill(cls, rows: Sequence[TrainingSequence], seq_len: int, eos_id: int) -> SequenceBatch:
        """Copy B sequences into one padded array."""
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
            _teacher(rows, seq_len),
        )

    def outside(self, vocab_size: int) -> int | None:
        """Return the index of the first sequence with an id outside 0 … vocab_size - 1, or None."""
        unsigned = self.ids.view(f"u{self.ids.itemsize}")  # negative ids become the largest ones
        if unsigned.max(initial=0) < vocab_size:
            return None
        return int(np.flatnonzero((unsigned >= vocab_size).any(1))[0])

    def narrow(self) -> SequenceBatch:
        """Return these sequences with at most four bytes per id. All ids must be below 2**31."""
        return replace(self, ids=self.ids.astype(np.int32)) if self.ids.itemsize > 4 else self

    def batch(self, *, with_layout: bool) -> Batch:
        """Return tokens and labels, each (B, T) int64, with loss weights and layout.

        Without the layout a sequence is one document.
        """
        # shift by one: the label of a token is the next id
        tokens, labels = self.ids[:, :-1].astype(np.int64), self.ids[:, 1:].astype(np.int64)
        seq_len = tokens.shape[1]
        for n, labelled in enumerate(self.labelled):
            if labelled < seq_len:
                labels[n, labelled:] = IGNORE
                tokens[n, seq_len - self.padded[n] :] = self.eos_id
        layout = _layout(self.lengths, seq_len, self.padded) if with_layout else None

        # a weight of 0 ignores the label; weights of 0 and 1 alone need no tensor
        weights = None
        if self.weights is not None:
            labels[self.weights == 0] = IGNORE
            if self.weights.max(initial=0) != 1 or np.any(self.weights % 1):
                weights = torch.from_numpy(self.weights)
        answers = None if self.sides is None else self._answers(labels != IGNORE)
        teacher = None
        if self.teacher is not None:
            ids, log_probs = self.teacher
            teacher = TeacherTokens(
                torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(log_probs)
            )
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            layout,
            weights,
            answers,
            teacher,
        )

    def _answers(self, in_loss: np.ndarray) -> AnswerDocuments:
        """Return the sides, starts and reference log-probabilities of the answers.

        Args:
            in_loss: (B, T) bool, whether the label of each token is in the loss.
        """
        assert self.sides is not None
        n_documents = max(map(len, self.lengths))
        padded_sides = np.zeros((len(self.sides), n_documents), np.int64)
        for row, sides in zip(padded_sides, self.sides, strict=True):
            row[: len(sides)] = sides

        begins = []
        for lengths, mask in zip(self.lengths, in_loss, strict=True):
            begins.append(tuple(_answer_begins(lengths, mask)))

        references: list[torch.Tensor | None] = [None, None]
        if self.references is not None:
            padding = n_documents - self.references.shape[2]
            padded = np.pad(self.references, ((0, 0), (0, 0), (0, padding)))
            references[: padded.shape[1]] = torch.from_numpy(padded).unbind(1)
        return AnswerDocuments(torch.from_numpy(padded_sides), tuple(begins), *references)


def _weights(rows: Sequence[TrainingSequence], seq_len: int) -> np.ndarray | None:
    """Return the loss weights of the labels, (B, T) fp32; None if no row has weights."""
    if all(row.weights is None for row in rows):
        return None
    weights = np.zeros((len(rows), seq_len), np.float32)
    for n, row in enumerate(rows):
        labels = len(row.ids) - 1
        if labels > 0:
            weights[n, :labels] = 1 if row.weights is None else row.weights[1:]
    return weights


def _sides(rows: Sequence[TrainingSequence], lengths: list[list[int]]) -> list[list[int]] | None:
    """Return the sides of all documents, padding included; None if no row has sides."""
    if all(row.sides is None for row in rows):
        return None
    sides = []
    for row, row_lengths in zip(rows, lengths, strict=True):
        row_sides = row.sides or []
        assert len(row_sides) in (0, len(row.lengths)), "each document has a side, or none has"
        n_padding = len(row_lengths) - len(row_sides)
        sides.append([*row_sides, *[0] * n_padding])
    return sides


def _references(rows: Sequence[TrainingSequence]) -> np.ndarray | None:
    """Return the reference log-probabilities (B, k, D) fp32, padded with 0; None without any."""
    row_references = [row.references for row in rows]
    shapes = [np.shape(values) for values in row_references if values is not None]
    if not shapes:
        return None
    references = np.zeros((len(rows), *np.max(shapes, axis=0)), np.float32)
    for padded, values in zip(references, row_references, strict=True):
        if values is not None:
            padded[: values.shape[0], : values.shape[1]] = values
    return references


def _teacher(rows: Sequence[TrainingSequence], seq_len: int) -> TeacherRows | None:
    """Return the teacher's tokens (B, T, k) of all rows; None if no row has them."""
    taught = [(n, row.teacher) for n, row in enumerate(rows) if row.teacher is not None]
    if not taught:
        return None
    assert len(taught) == len(rows), "every stream has a teacher, or none has"
    shape = (len(rows), seq_len, max(values[0].shape[1] for _, values in taught))
    ids = np.zeros(shape, np.result_type(*(values[0].dtype for _, values in taught)))
    log_probs = np.zeros(shape, np.float16)
    for n, values in taught:
        ids[n, : len(values[0])] = values[0]
        log_probs[n, : len(values[1])] = values[1]
    return ids, log_probs


def _answer_begins(lengths: list[int], in_loss: np.ndarray) -> Iterator[int]:
    """Yield the index of each document's first id in the loss; its end if it has none."""
    begin = 0
    for length in lengths:
        # The id at index i is the label of i - 1. A document's last label starts the next document.
        labels = np.flatnonzero(in_loss[begin : begin + length - 1])
        yield begin + (int(labels[0]) + 1 if len(labels) else length)
        begin += length


@lru_cache(maxsize=64)
def _shared_dtype(dtypes: frozenset[np.dtype[Any]], eos_id: int) -> np.dtype[Any]:
    """Return the narrowest integer type that holds the values of all `dtypes`, and `eos_id`."""
    dtype = np.result_type(*dtypes, np.min_scalar_type(eos_id))
    # numpy promotes uint64 with a signed type to float64
    return dtype if dtype.kind in "iu" else np.dtype(np.int64)


def _layout(lengths: list[list[int]], seq_len: int, padded: list[int]) -> PackedLayout:
    """Return `PackedLayout.from_lengths` in vectorized form: every step needs one layout."""
    flat = np.array(list(chain.from_iterable(lengths)))
    numbers = np.array(list(chain.from_iterable(range(len(row)) for row in lengths)), np.int32)
    begins = np.cumsum(flat) - flat
    shape = (len(lengths), seq_len)
    positions = _arange(len(lengths) * seq_len) - np.repeat(begins, flat)
    return PackedLayout(
        torch.from_numpy(positions.reshape(shape)),
        torch.from_numpy(np.repeat(numbers, flat).reshape(shape)),
        tuple(map(tuple, lengths)),
        tuple(padded),
    )


@lru_cache(maxsize=4)
def _arange(n: int) -> np.ndarray:
    return np.arange(n)
