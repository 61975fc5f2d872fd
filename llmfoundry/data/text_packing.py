"""Online tokenization and packing: `PackedStream` reads MDS texts as training sequences.

The loader reads a `PackedStream` like any other stream. The documents of a sequence are a pure
function of its sample number. Sequences are numbered in groups, and every group has the same number
of documents, which are consecutive in the stream's order. They are concatenated, each with the
tokenizer's special tokens, and split into the sequences of the group. Tokens that do not fit are
dropped, missing tokens are padding, and both are counted. More documents per group mean more
dropped tokens and less padding.

A process that reads one sequence of a group tokenizes the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from llmfoundry.data.batch import TrainingSequence
from llmfoundry.data.order import Order
from llmfoundry.data.sources import MDSTexts, check_fingerprint, check_order, order_state
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

_LARGEST_GROUP = 8
_PROBE = 512  # documents whose lengths determine the number of documents per group


@dataclass(frozen=True)
class PackingRatio:
    """Number of documents that are packed into a group of sequences.

    Attributes:
        rows: sequences per group.
        documents: documents per group.
    """

    rows: int
    documents: int

    @classmethod
    def of_ratio(cls, ratio: float, batch_size: int) -> PackingRatio:
        """Return the packing of `ratio` documents per sequence for this global batch size."""
        rows = group_rows(batch_size)
        return cls(rows, max(1, round(rows * ratio)))


def group_rows(batch_size: int) -> int:
    """Return the sequences per group: the largest divisor of the global batch size up to 8."""
    return next(n for n in range(_LARGEST_GROUP, 0, -1) if batch_size % n == 0)


@dataclass(frozen=True)
class PackingProbe:
    """Statistics of the first documents of an order.

    Attributes:
        packing: packing that drops about as many tokens as it pads.
        bytes_per_token: UTF-8 bytes of text per token.
        sizes: (documents,) int64, tokens of each document.
    """

    packing: PackingRatio
    bytes_per_token: float
    sizes: np.ndarray


def probe(
    texts: MDSTexts, order: Order, tokenizer: Tokenizer, *, seq_len: int, batch_size: int
) -> PackingProbe:
    """Tokenize the first documents of an order and compute their statistics."""
    rows = order.at(np.arange(min(_PROBE, texts.n_rows))).tolist()
    documents = [texts.text(row) for row in rows]
    sizes = np.array([len(ids) for ids in tokenizer.encode_documents(documents)])
    # a document longer than a group is truncated, so it counts as one group's tokens
    group_size = group_rows(batch_size)
    group_tokens = group_size * seq_len
    mean_size = float(np.minimum(sizes, group_tokens).mean())
    packing = PackingRatio(group_size, max(1, round(group_tokens / mean_size)))
    n_bytes = sum(len(document.encode()) for document in documents)
    return PackingProbe(packing, n_bytes / int(sizes.sum()), sizes)


def cut_share(sizes: np.ndarray, packing: PackingRatio, seq_len: int) -> float:
    """Return the fraction of the tokens of documents of these sizes that packing drops."""
    n = packing.documents
    groups = [sizes[start : start + n] for start in range(0, len(sizes), n)]
    # a partial last group would underestimate the dropped tokens
    group_tokens = [group.sum() for group in groups if len(group) == n or len(groups) == 1]
    capacity = packing.rows * seq_len + 1
    dropped = sum(max(0, int(tokens) - capacity) for tokens in group_tokens)
    return dropped / int(sum(group_tokens))


def pack_texts(
    documents: Sequence[Sequence[int]], *, rows: int, seq_len: int
) -> list[TrainingSequence]:
    """Concatenate documents and split them into sequences of T tokens.

    Sequence j has the ids j * T … j * T + T of the concatenation, as in a token stream.

    Args:
        documents: token ids of each document, with special tokens.
        rows: number of sequences.
        seq_len: T, tokens per sequence.
    """
    # concatenate, and drop the tokens that do not fit
    starts = np.cumsum([0, *map(len, documents)])
    room = rows * seq_len + 1
    ids = np.fromiter(chain.from_iterable(documents), np.int64, int(starts[-1]))
    dropped = max(0, len(ids) - room)
    ids = ids[:room]

    # split into sequences, with the lengths of the documents in each
    packed = []
    for start in range(0, rows * seq_len, seq_len):
        part = ids[start : start + seq_len + 1]
        stop = start + min(len(part), seq_len)
        first, last = np.searchsorted(starts, (start + 1, stop))
        bounds = [start, *starts[first:last].tolist(), stop]
        lengths = [after - before for before, after in pairwise(bounds)] if len(part) else []
        packed.append(TrainingSequence(part, lengths))
    packed[-1] = packed[-1]._replace(dropped=dropped)
    return packed


class PackedStream:
    """Stream of sequences that are packed from documents in a given order.

    Attributes:
        name: name in the recipe.
        packing: number of documents per group of sequences.
    """

    def __init__(
        self,
        texts: MDSTexts,
        tokenizer: Tokenizer,
        order: Order,
        packing: PackingRatio,
        *,
        seq_len: int,
        exact: bool = False,
    ) -> None:
        """Determine the contents of every sequence.

        Args:
            texts: the documents.
            tokenizer: encodes the documents.
            order: order of the documents.
            packing: number of documents per group of sequences.
            seq_len: T, tokens per sequence.
            exact: whether the recipe sets the packing, so that a checkpoint with another packing is
                an error. Otherwise the packing of the checkpoint is used.
        """
        self.texts, self.name = texts, texts.name
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._order, self.packing, self._exact = order, packing, exact
        self._groups: dict[int, list[TrainingSequence]] = {}

    @property
    def n_rows(self) -> int:
        """Approximate number of sequences per epoch."""
        return max(1, self.texts.n_rows * self.packing.rows // self.packing.documents)

    def locate(self, samples: np.ndarray) -> np.ndarray:
        """Return the sample numbers unchanged: a sample has several documents, so no one place."""
        return samples

    def read(self, place: int) -> TrainingSequence:
        """Return sample number `place`."""
        group, row = divmod(place, self.packing.rows)
        return self._group(group)[row]

    def where(self, place: int) -> str:
        """Return the location of the first document of a sample's group, for error messages."""
        first = place // self.packing.rows * self.packing.documents
        return self.texts.where(int(self._order.at(np.array([first]))[0]))

    def prefetch(self, sample: int) -> None:
        """Start to fetch the shards that this and the following samples need."""
        first = sample // self.packing.rows * self.packing.documents
        self.texts.prefetch(self._order.shards(first))

    def state(self) -> dict[str, Any]:
        """Return all that determines the sequence of a sample number, as JSON."""
        packing = {"packing": asdict(self.packing)}
        return {"fingerprint": self.texts.fingerprint, **order_state(self._order), **packing}

    def resume(self, state: dict[str, Any], *, allow_changed: bool) -> None:
        """Continue the stream that `state` describes, with the same packing."""
        check_fingerprint(self.name, state, self.texts.fingerprint, allow_changed=allow_changed)
        check_order(self._order, state)
        before = PackingRatio(**state["packing"])
        if self._exact and before != self.packing:
            raise UserError(
                f"data.packing_ratio: the checkpoint's rows were packed with"
                f" {before.documents / before.rows:g}; write that, or auto"
            )
        self.packing, self._groups = before, {}

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        self.texts.close()

    def _group(self, number: int) -> list[TrainingSequence]:
        """Return the sequences of a group.

        The last group is cached, because a batch of a mixture may end within a group.
        """
        groups = self._groups
        if number not in groups:
            n = self.packing.documents
            rows = self._order.rows(number * n, n).tolist()
            ids = self._tokenizer.encode_documents([self.texts.text(row) for row in rows])
            packed = pack_texts(ids, rows=self.packing.rows, seq_len=self._seq_len)
            self._groups = groups = {number: packed}
        return groups[number]
