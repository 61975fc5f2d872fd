"""`PackedStream`: texts that are tokenized on the way and packed into rows.

The loader reads it like any stream. Which documents a row is made of is a pure function of its
number: the rows of a run are taken in groups, and each group has a fixed number of documents, the
next ones of the order, which are laid one after another, with the tokenizer's special tokens around
each, over the group's rows.
What does not fit is dropped, what is missing is padding, and both are counted; so the number of
documents of a group decides which of the two is more.

A process that reads some rows of a group tokenizes all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from llmfoundry.data.batch import Row
from llmfoundry.data.order import Order
from llmfoundry.data.sources import MDSTexts, check_fingerprint, check_order, order_state
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError

_LARGEST_GROUP = 8
_PROBE = 512  # documents whose length says how many a group gets


@dataclass(frozen=True)
class PackingRatio:
    """How documents become rows.

    Attributes:
        rows: of a group.
        documents: of a group.
    """

    rows: int
    documents: int

    @classmethod
    def of_ratio(cls, ratio: float, batch_size: int) -> PackingRatio:
        """A group of `ratio` documents a row; a global batch has a whole number of groups."""
        rows = group_rows(batch_size)
        return cls(rows, max(1, round(rows * ratio)))


def group_rows(batch_size: int) -> int:
    """Rows of a group: the largest divisor of the global batch up to 8."""
    return next(n for n in range(_LARGEST_GROUP, 0, -1) if batch_size % n == 0)


@dataclass(frozen=True)
class Probe:
    """Statistics of the first documents of an order.

    Attributes:
        packing: that drops about as much as it pads.
        bytes_per_token: of the text.
        sizes: (documents,) int64, their tokens.
    """

    packing: PackingRatio
    bytes_per_token: float
    sizes: np.ndarray


def probe(
    texts: MDSTexts, order: Order, tokenizer: Tokenizer, *, seq_len: int, batch_size: int
) -> Probe:
    """Tokenize the first documents of an order."""
    rows = order.at(np.arange(min(_PROBE, texts.n_rows))).tolist()
    documents = [texts.text(row) for row in rows]
    sizes = np.array([len(ids) for ids in tokenizer.encode_documents(documents)])
    group = group_rows(batch_size)
    room = group * seq_len  # a longer document is cut, and counts as what is left of it
    packing = PackingRatio(group, max(1, round(room / float(np.minimum(sizes, room).mean()))))
    n_bytes = sum(len(document.encode()) for document in documents)
    return Probe(packing, n_bytes / int(sizes.sum()), sizes)


def cut_share(sizes: np.ndarray, packing: PackingRatio, seq_len: int) -> float:
    """Share of the tokens of documents of these sizes that do not fit their groups' rows."""
    groups = [sizes[n : n + packing.documents] for n in range(0, len(sizes), packing.documents)]
    whole = [group.sum() for group in groups if len(group) == packing.documents or len(groups) == 1]
    over = sum(max(0, int(n) - packing.rows * seq_len - 1) for n in whole)
    return over / int(sum(whole))


def pack_texts(documents: Sequence[Sequence[int]], *, rows: int, seq_len: int) -> list[Row]:
    """Lay documents, special tokens around them included, one after another over rows of T tokens.

    Row j is ids j * T … j * T + T of what they are together, as in a token stream.
    """
    starts = np.cumsum([0, *map(len, documents)])
    room = rows * seq_len + 1
    ids = np.fromiter(chain.from_iterable(documents), np.int64, int(starts[-1]))
    dropped = max(0, len(ids) - room)
    ids = ids[:room]
    packed = []
    for start in range(0, rows * seq_len, seq_len):
        part = ids[start : start + seq_len + 1]
        stop = start + min(len(part), seq_len)
        first, last = np.searchsorted(starts, (start + 1, stop))
        bounds = [start, *starts[first:last].tolist(), stop]
        lengths = [after - before for before, after in pairwise(bounds)] if len(part) else []
        packed.append(Row(part, lengths))
    packed[-1] = packed[-1]._replace(dropped=dropped)
    return packed


class PackedStream:
    """Rows of documents in their order.

    Attributes:
        name: in the recipe.
        packing: how documents become rows.
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
        """Fix what every row holds.

        Args:
            texts: the documents.
            tokenizer: what to encode with.
            order: of the documents.
            packing: how they become rows.
            seq_len: T, tokens of a row.
            exact: the recipe asks for this packing, and an earlier one must have been the same.
        """
        self.texts, self.name = texts, texts.name
        self._tokenizer, self._seq_len = tokenizer, seq_len
        self._order, self.packing, self._exact = order, packing, exact
        self._groups: dict[int, list[Row]] = {}

    @property
    def n_rows(self) -> int:
        """Rows of an epoch, about."""
        return max(1, self.texts.n_rows * self.packing.rows // self.packing.documents)

    def locate(self, samples: np.ndarray) -> np.ndarray:
        """Samples have no place of their own: they are made of several documents."""
        return samples

    def read(self, place: int) -> Row:
        """Sample number `place`."""
        group, row = divmod(place, self.packing.rows)
        return self._group(group)[row]

    def where(self, place: int) -> str:
        """The shard and place of the first document of a sample's group, for messages."""
        first = place // self.packing.rows * self.packing.documents
        return self.texts.where(int(self._order.at(np.array([first]))[0]))

    def prefetch(self, sample: int) -> None:
        """Fetch next what this and the following samples need."""
        first = sample // self.packing.rows * self.packing.documents
        self.texts.prefetch(self._order.shards(first))

    def state(self) -> dict[str, Any]:
        """What decides which rows the samples are, as JSON."""
        packing = {"packing": asdict(self.packing)}
        return {"fingerprint": self.texts.fingerprint, **order_state(self._order), **packing}

    def resume(self, state: dict[str, Any], *, allow_changed: bool) -> None:
        """Go on with the samples that an earlier `state` describes, packed as they were."""
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
        """Let go of open shards; reading opens them again."""
        self.texts.close()

    def _group(self, number: int) -> list[Row]:
        """The rows of a group; the last one is kept, as batches of mixtures may divide it."""
        groups = self._groups
        if number not in groups:
            n = self.packing.documents
            rows = self._order.rows(number * n, n).tolist()
            ids = self._tokenizer.encode_documents([self.texts.text(row) for row in rows])
            made = pack_texts(ids, rows=self.packing.rows, seq_len=self._seq_len)
            self._groups = groups = {number: made}
        return groups[number]
