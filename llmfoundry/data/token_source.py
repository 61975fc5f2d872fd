"""`TokenSource`: the rows of a token stream, for the loader; `TokenDataset` reads them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from llmfoundry.data.fetch.shard_files import ShardFolder
from llmfoundry.data.make_batch import Row
from llmfoundry.data.token_rows import TokenDataset


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
