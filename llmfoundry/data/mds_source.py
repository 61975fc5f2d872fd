"""MDS columns as sources: `MDSTokens`, rows of ids; `MDSTexts`, documents to be tokenized.

Samples are read as views of memory-mapped shards. A few shards are open at a time, and those are
pinned in the cache of fetched files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from llmfoundry.data.fetch.shard_files import ShardFolder
from llmfoundry.data.make_batch import Row
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.mds.shard import MDSShard
from llmfoundry.errors import UserError

_OPEN_SHARDS = 64  # of a process; a block of 2**18 rows of 2,048 tokens is in 33 shards of 64 MiB


class MDSColumn:
    """One column of all samples of an MDS dataset.

    Attributes:
        index: of its shards.
        name: of the column.
    """

    def __init__(self, folder: ShardFolder, index: MDSIndex, name: str) -> None:
        self.index, self.name = index, name
        self._folder = folder
        self._begins: list[int] = [0, *np.cumsum(index.sizes).tolist()]
        self._open: OrderedDict[int, _Open] = OrderedDict()  # the least recently read first

    def read(self, row: int) -> Any:
        """The value of sample number `row`; of bytes and arrays a view.

        Raises:
            UserError: the shard cannot be had, or is damaged.
        """
        n, place = self.place(row)
        shard = self._open.get(n) or self._map(n)
        self._open.move_to_end(n)
        return shard.read(place)

    def place(self, row: int) -> tuple[int, int]:
        """The number of a sample's shard, and its own in it."""
        shard = bisect_right(self._begins, row) - 1
        return shard, row - self._begins[shard]

    def where(self, row: int) -> str:
        """The file and the sample in it, for messages."""
        shard, place = self.place(row)
        return f"{self.index.names[shard]}, sample {place:,}"

    def prefetch(self, shards: Iterator[int]) -> None:
        """Fetch these shards next, in this order, but for those that are open."""
        unopened = (shard for shard in shards if shard not in self._open)
        self._folder.prefetch(self.index.spec(shard) for shard in unopened)

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        while self._open:
            self._open.popitem()[1].pins.close()
        self._folder.close()

    def _map(self, n: int) -> _Open:
        with ExitStack() as stack:
            path = stack.enter_context(self._folder.pin(self.index.spec(n)))
            read = MDSShard(path, self.index, n).reader(self.name)
            found = self._open[n] = _Open(read, stack.pop_all())
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].pins.close()
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


@dataclass(frozen=True)
class _Open:
    read: Callable[[int], Any]
    pins: ExitStack


class _Samples:
    """What rows and documents of a column have alike."""

    def __init__(self, name: str, column: MDSColumn) -> None:
        self.name, self._column = name, column
        self.sizes = column.index.sizes
        self.n_rows = int(self.sizes.sum())
        self.fingerprint = column.index.fingerprint
        self.n_bytes = int(column.index.raw_bytes.sum())

    def where(self, row: int) -> str:
        """The file and the sample in it, for messages."""
        return self._column.where(row)

    def prefetch(self, shards: Iterator[int]) -> None:
        """Fetch these shards next, in this order."""
        self._column.prefetch(shards)

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        self._column.close()


class MDSTokens(_Samples):
    """Rows out of a column of ids: a sample is a row, cut or filled up to its length.

    Attributes:
        name: of the stream.
        n_rows: samples.
        sizes: (shards,) int64, samples of each shard.
        fingerprint: of the samples.
        n_bytes: of their files.
    """

    def __init__(
        self,
        name: str,
        column: MDSColumn,
        *,
        seq_len: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        dtype: str = "int64",
    ) -> None:
        """Make rows of a column.

        Args:
            name: of the stream.
            column: of arrays, or of bytes.
            seq_len: T, tokens of a row.
            eos_id: the id that ends a document; in place of `bos_id`.
            bos_id: the id that begins one. Without either a row is one document.
            dtype: of the integers in a column of bytes.
        """
        assert eos_id is None or bos_id is None
        super().__init__(name, column)
        self._seq_len = seq_len
        self._mark, self._after = (eos_id, 1) if bos_id is None else (bos_id, 0)
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def ids(self, row: int) -> np.ndarray:
        """All ids of a sample.

        Raises:
            UserError: the shard cannot be had, or its column does not hold integers.
        """
        value = self._column.read(row)
        if isinstance(value, np.ndarray):
            if value.dtype.kind in "iu":
                return value if value.ndim == 1 else value.reshape(-1)
            raise self._wrong(row, f"holds {value.dtype}; ids are whole numbers")
        if len(value) % self._dtype.itemsize:
            raise self._wrong(
                row, f"holds {len(value)} bytes, not a whole number of {self._dtype.name};"
                " write data.token_encoding_type as the data were encoded"
            )  # fmt: skip
        return np.frombuffer(value, self._dtype)

    def row(self, row: int) -> Row:
        """Row number `row`.

        Raises:
            UserError: the shard cannot be had, or its column does not hold integers.
        """
        return self.cut(row, self._seq_len)

    def cut(self, row: int, seq_len: int) -> Row:
        """Row number `row`, of up to `seq_len` tokens."""
        ids = self.ids(row)
        fitting = ids if len(ids) <= seq_len + 1 else ids[: seq_len + 1]
        if self._mark is None:
            size = min(len(fitting), seq_len)
            return Row(fitting, [size] if size else [], len(ids) - len(fitting))
        return Row(fitting, self._lengths(fitting[:seq_len]), len(ids) - len(fitting))

    def _lengths(self, ids: np.ndarray) -> list[int]:
        marks = (ids == self._mark).nonzero()[0]
        borders = [0, *(marks + self._after).tolist(), len(ids)]
        return [after - before for before, after in pairwise(borders) if after > before]

    def _wrong(self, row: int, what: str) -> UserError:
        return UserError(f"{self.where(row)}: column {self._column.name} {what}")


class MDSTexts(_Samples):
    """Documents out of a column of texts.

    Attributes:
        name: of the stream.
        n_rows: documents.
        sizes: (shards,) int64, documents of each shard.
        fingerprint: of the documents.
        n_bytes: of their files.
    """

    def text(self, row: int) -> str:
        """Document number `row`.

        Raises:
            UserError: the shard cannot be had.
        """
        return self._column.read(row)
