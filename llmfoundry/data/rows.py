"""`Row`: what a source gives; `Rows`: some of them in one array, which becomes a `Batch`.

The loader and the validation reader fill `Rows`. Worker processes hand them on as they are: one
array of narrow ids travels faster than all that can be computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.ops.layout import Layout


class Row(NamedTuple):
    """One row of training.

    Attributes:
        ids: (n,) of any integer type, n at most T + 1: the row's first tokens, and, behind T of
            them, the label of the last. May be a view of a file.
        lengths: of its documents, in order; of all as one where they are not kept apart. Their sum
            is how many of `ids` are read, T at most; what is missing to T is padding.
        dropped: ids of the sample that did not fit.
    """

    ids: np.ndarray
    lengths: list[int]
    dropped: int = 0


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
    """

    ids: np.ndarray
    lengths: list[list[int]]
    labelled: list[int]
    padded: list[int]
    dropped: int
    eos_id: int

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
        return cls(ids, lengths, labelled, padded, sum(row.dropped for row in rows), eos_id)

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
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), layout)


@lru_cache(maxsize=64)
def _shared_dtype(kinds: frozenset[np.dtype[Any]], eos_id: int) -> np.dtype[Any]:
    """The narrowest integer type that holds what all of these do, and `eos_id`."""
    dtype = np.result_type(*kinds, np.min_scalar_type(eos_id))
    return dtype if dtype.kind in "iu" else np.dtype(np.int64)  # of uint64 with signed ones


def _layout(lengths: list[list[int]], seq_len: int, padded: list[int]) -> Layout:
    """`Layout.from_lengths` in a few vectorised steps, because every step needs one."""
    flat = np.array(list(chain.from_iterable(lengths)))
    numbers = np.array(list(chain.from_iterable(range(len(row)) for row in lengths)), np.int32)
    begins = np.cumsum(flat) - flat
    shape = (len(lengths), seq_len)
    positions = _places(len(lengths) * seq_len) - np.repeat(begins, flat)
    return Layout(
        torch.from_numpy(positions.reshape(shape)),
        torch.from_numpy(np.repeat(numbers, flat).reshape(shape)),
        tuple(map(tuple, lengths)),
        tuple(padded),
    )


@lru_cache(maxsize=4)
def _places(n: int) -> np.ndarray:
    return np.arange(n)
