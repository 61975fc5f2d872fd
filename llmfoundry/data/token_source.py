"""`TokenSource`: the rows of a token stream, for the loader; `TokenDataset` reads them."""

from __future__ import annotations

import hashlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np

from llmfoundry.data.fetch.shard_files import ShardFolder
from llmfoundry.data.rows import Row
from llmfoundry.data.tokens import TokenDataset


class TokenSource:
    """Rows cut through a token stream: row r is its ids r * T … r * T + T.

    Attributes:
        name: of the stream.
        dataset: what is read.
        n_rows: whole rows.
        sizes: (shards,) int64, rows that begin in each shard.
        fingerprint: of the ids.
        tokens_left_out: after the last whole row.
    """

    def __init__(
        self,
        name: str,
        dataset: TokenDataset,
        seq_len: int,
        folder: ShardFolder | None = None,
        *,
        apart: bool = True,
    ) -> None:
        """Cut a stream into rows.

        Args:
            name: of the stream.
            dataset: its ids.
            seq_len: T, tokens of a row.
            folder: where its shards are fetched ahead; None: they are here.
            apart: documents are kept apart; otherwise a row is one.
        """
        self.name, self.dataset = name, dataset
        self._seq_len, self._folder, self._apart = seq_len, folder, apart
        self.sizes = dataset.row_sizes(seq_len)
        self.n_rows = int(self.sizes.sum())
        self.fingerprint = dataset.fingerprint
        self.tokens_left_out = max(0, dataset.n_tokens - 1 - self.n_rows * seq_len)
        self._specs = dataset.specs()
        self._ends: list[int] = np.cumsum(self.sizes).tolist()
        self._lately: dict[int, None] = {}  # shards read since the last prefetch

    def row(self, row: int) -> Row:
        """Row number `row`.

        Raises:
            UserError: a shard cannot be had, or is damaged.
        """
        self._lately[bisect_right(self._ends, row)] = None
        return Row(*self.dataset.row(row, self._seq_len, apart=self._apart))

    def where(self, row: int) -> str:
        """The file and the row in it, for messages."""
        shard = bisect_right(self._ends, row)
        first = self._ends[shard] - int(self.sizes[shard])
        return f"{self._specs[shard].name}, row {row - first:,}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Fetch these shards next, in this order, but for those that were just read."""
        if self._folder is None:
            return
        lately, self._lately = self._lately, {}
        self._folder.prefetch(self._specs[shard] for shard in shards if shard not in lately)

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        self.dataset.close()
        if self._folder is not None:
            self._folder.close()


def fingerprint_of_version_1(dataset: TokenDataset) -> str:
    """What checkpoints from before data.streams know a stream by; reads all of it.

    A hash of the number of documents, and of the length and CRC-32 of each 256 MiB of ids.
    """
    facts: list[Any] = [dataset.n_documents]
    dtype = np.dtype(dataset.index.dtype)
    per_shard = (256 << 20) // dtype.itemsize
    piece = 1 << 20  # ids at a time; divides a shard
    place, crc, last = 0, 0, max(0, dataset.n_tokens - 1)
    for row in range(dataset.n_rows(piece, partial=True)):
        ids = dataset.row(row, piece)[0].astype(dtype)
        ids = ids if row * piece + len(ids) > last else ids[:-1]  # the label is the next row's
        for part in np.split(ids, [per_shard - place]) if place + len(ids) > per_shard else [ids]:
            crc, place = zlib.crc32(part.tobytes(), crc), place + len(part)
            if place == per_shard:
                facts.append((place, crc))
                place, crc = 0, 0
    if place:
        facts.append((place, crc))
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
