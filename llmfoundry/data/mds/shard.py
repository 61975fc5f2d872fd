"""`MDSShard`: a shard of mosaicml-streaming's format, read where it lies.

The data sources open a shard when they first need a sample of it. The file is mapped, not read: a
`bytes` or `ndarray` value is a view of the map and costs no copy. What the index, the offsets and
the columns' sizes say is compared, so a file that was cut short is an error with its place.

Layout, little-endian: u32 N; u32 offsets[N + 1] from the file's start; JSON of the columns; the
samples. A sample: u32 size of each column whose values differ in size, then the columns' values.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry.data.mds.encodings import CODING_ERRORS, find_encoding
from llmfoundry.data.mds.index import Columns, MDSIndex
from llmfoundry.errors import UserError

__all__ = ["MDSIndex", "MDSShard"]

_unpack_pair = struct.Struct("<2I").unpack_from


class MDSShard:
    """The samples of one file.

    Keeps one descriptor open, so a caller that opens many shards closes those it no longer needs by
    dropping them; views that were handed out stay valid, even if the file is deleted.

    Attributes:
        columns: of every sample.
    """

    def __init__(self, path: Path, index: MDSIndex, n: int) -> None:
        """Map the file of shard `n` of `index`.

        Raises:
            UserError: the file is missing, or is not what the index specifies.
        """
        self._path = path
        self._n_samples = int(index.sizes[n])
        self.columns = index.columns(n)
        self._layout = _find_layout(self.columns)
        self._data = self._map(int(index.raw_bytes[n]))
        self._check_offsets()

    def __len__(self) -> int:
        """Samples."""
        return self._n_samples

    def read(self, row: int, column: str) -> Any:
        """A column's value in sample `row`.

        Returns:
            The value; of `bytes` a read-only memoryview, of `ndarray` a read-only array, both
            views of the file.

        Raises:
            UserError: there is no such column, its encoding is refused, or its bytes are damaged.
        """
        return self.reader(column)(row)

    def reader(self, column: str) -> Callable[[int], Any]:
        """`read` of one column, for many rows: what does not depend on the row is looked up once.

        Raises:
            UserError: there is no such column.
        """
        place = self.columns.position.get(column)
        if place is None:
            names = ", ".join(self.columns.names)
            raise UserError(f"{self._path}: no column {column!r}; it has {names}")
        data, n_samples, layout = self._data, self._n_samples, self._layout
        shortest, unpack_sizes = layout.shortest, layout.head.unpack_from
        (fixed, n_variable, size), decode = layout.places[place], layout.decoders[place]

        def read(row: int) -> Any:
            assert 0 <= row < n_samples, f"no sample {row} of {n_samples}"
            try:
                begin, end = _unpack_pair(data, 4 + 4 * row)
                if end - begin < shortest:
                    raise ValueError(f"damaged: the sample ends after {end - begin} bytes")
                sizes = unpack_sizes(data, begin)
                if shortest + sum(sizes) != end - begin:
                    raise ValueError(
                        f"damaged: its columns' sizes are not the sample's {end - begin} bytes"
                    )
                start = begin + fixed + sum(sizes[:n_variable])
                return decode(data[start : start + (sizes[n_variable] if size is None else size)])
            except CODING_ERRORS as error:
                raise UserError(f"{self._path}: sample {row}, column {column}: {error}") from error

        return read

    def sample(self, row: int) -> dict[str, Any]:
        """All columns of sample `row`, as `read` gives them."""
        return {name: self.read(row, name) for name in self.columns.names}

    def _map(self, n_bytes: int) -> memoryview:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno()).st_size
                if found != n_bytes or not found:
                    raise self._damaged(f"it has {found:,} bytes, the index specifies {n_bytes:,}")
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError as error:
            raise UserError(f"{self._path}: the shard is missing; copy it again") from error

    def _check_offsets(self) -> None:
        """Whether the samples that the index counts lie in order within the file."""
        n, n_bytes = self._n_samples, len(self._data)
        table = np.frombuffer(self._data[: n_bytes & ~3], "<u4")[: n + 2].astype(np.int64)
        if len(table) < n + 2 or table[0] != n:
            raise self._damaged(f"it does not hold the {n:,} samples that the index specifies")
        offsets = table[1:]
        if offsets[0] < 4 * (n + 2) or offsets[-1] != n_bytes or (np.diff(offsets) < 0).any():
            raise self._damaged(f"its {n:,} samples do not lie within its {n_bytes:,} bytes")

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self._path}: damaged: {what}; copy it again")


@dataclass(frozen=True)
class _Layout:
    """Where the columns of a sample lie.

    Attributes:
        head: the sizes that begin it.
        shortest: its bytes if every value of no fixed size is empty.
        places: of each column: bytes before it (the head, values of fixed size), how many values
            of no fixed size are before it, and its size or None.
        decoders: of each column.
    """

    head: struct.Struct
    shortest: int
    places: tuple[tuple[int, int, int | None], ...]
    decoders: tuple[Callable[[memoryview], Any], ...]


@cache
def _find_layout(columns: Columns) -> _Layout:
    head = struct.Struct(f"<{columns.sizes.count(None)}I")
    fixed, n_variable, places = head.size, 0, []
    for size in columns.sizes:
        places.append((fixed, n_variable, size))
        fixed += size or 0
        n_variable += size is None
    decoders = tuple(_find_decoder(encoding) for encoding in columns.encodings)
    return _Layout(head, fixed, tuple(places), decoders)


def _find_decoder(encoding: str) -> Callable[[memoryview], Any]:
    """A column that cannot be read is refused when it is asked for, not when it is there."""
    try:
        return find_encoding(encoding).decode
    except ValueError as error:
        return partial(_refuse, reason=str(error))


def _refuse(data: memoryview, *, reason: str) -> Any:
    raise ValueError(reason)
