"""`MDSShard` and `MDSWriter`: mosaicml-streaming's shards, read where they lie and written.

The data sources open a shard when they first need a sample of it. The file is mapped, not read: a
`bytes` or `ndarray` value is a view of the map and costs no copy. What the index, the offsets and
the columns' sizes say is compared, so a file that was cut short is an error with its place. The
preparation writes: shards come out as they fill, and `index.json` last, so a folder without one was
not finished.

Layout, little-endian: u32 N; u32 offsets[N + 1] from the file's start; JSON of the columns; the
samples. A sample: u32 size of each column whose values differ in size, then the columns' values.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from llmfoundry.data.file_spec import INDEX
from llmfoundry.data.mds import codecs
from llmfoundry.data.mds.codecs import (
    CODING_ERRORS,
    Encoding,
    check_algorithm,
    digest,
    find_encoding,
)
from llmfoundry.data.mds.index import Columns, MDSIndex
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, open_guarded

__all__ = ["MDSIndex", "MDSShard", "MDSWriter"]

_unpack_pair = struct.Struct("<2I").unpack_from
_LONGEST = (1 << 32) - 1  # offsets are u32
_SIZE = re.compile(r"([0-9]*\.?[0-9]+) ?([kmgt]?b)?", re.IGNORECASE)
_FACTOR = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_OURS = re.compile(r"index\.json|shard\.[0-9]+\.mds.*")


class MDSShard:
    """The samples of one file.

    An object keeps one file descriptor open until it is garbage-collected. Views of its data stay
    valid after that, even if the file is deleted.

    Attributes:
        columns: columns of every sample.
    """

    def __init__(self, path: Path, index: MDSIndex, n: int) -> None:
        """Map the file of shard `n` of `index`."""
        self._path = path
        self._n_samples = int(index.sizes[n])
        self.columns = index.columns(n)
        self._layout = _find_layout(self.columns)
        self._data = self._map(int(index.raw_bytes[n]))
        self._check_offsets()

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._n_samples

    @property
    def first_byte(self) -> int:
        """Return the offset of the first sample; the length of the file if there is none."""
        return int(_unpack_pair(self._data, 0)[1])

    def read(self, row: int, column: str) -> Any:
        """Return the value of a column in sample `row`.

        Returns:
            The value. `bytes` columns give a read-only memoryview and `ndarray` columns a
            read-only array; both are views of the file.
        """
        return self.reader(column)(row)

    def reader(self, column: str) -> Callable[[int], Any]:
        """Return a function that reads a column of a row; faster than `read` for many rows."""
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
        """Return all columns of sample `row`, as returned by `read`."""
        return {name: self.read(row, name) for name in self.columns.names}

    def _map(self, n_bytes: int) -> memoryview:
        try:
            with open_guarded(self._path) as file:
                found = os.fstat(file.fileno()).st_size
                if found != n_bytes or not found:
                    raise self._damaged(f"it has {found:,} bytes, the index specifies {n_bytes:,}")
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError as error:
            raise UserError(f"{self._path}: the shard is missing; copy it again") from error

    def _check_offsets(self) -> None:
        """Check that the samples of the index lie in order within the file.

        The file starts with the number of samples and n + 1 offsets, as u32.

        Raises:
            UserError: they do not.
        """
        n, n_bytes = self._n_samples, len(self._data)
        whole_words = self._data[: n_bytes & ~3]  # a multiple of 4 bytes
        table = np.frombuffer(whole_words, "<u4")[: n + 2].astype(np.int64)
        if len(table) < n + 2 or table[0] != n:
            raise self._damaged(f"it does not hold the {n:,} samples that the index specifies")
        offsets = table[1:]
        if offsets[0] < 4 * (n + 2) or offsets[-1] != n_bytes or (np.diff(offsets) < 0).any():
            raise self._damaged(f"its {n:,} samples do not lie within its {n_bytes:,} bytes")

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self._path}: damaged: {what}; copy it again")


@dataclass(frozen=True)
class _Layout:
    """Layout of the columns in a sample.

    A sample starts with its head, the sizes of the values of variable size. The values follow.

    Attributes:
        head: layout of the head.
        shortest: bytes of a sample whose values of variable size are all empty.
        places: for each column: bytes of the head and of the values of fixed size before it,
            number of values of variable size before it, and its fixed size or None.
        decoders: decoder of each column.
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
    """Return the decoder of an encoding.

    The decoder of an unknown encoding raises an error, so that a shard with such a column can be
    used as long as the column is not read.
    """
    try:
        return find_encoding(encoding).decode
    except ValueError as error:
        return partial(_refuse, reason=str(error))


def _refuse(data: memoryview, *, reason: str) -> Any:
    raise ValueError(reason)


class MDSWriter:
    """Context manager that writes samples to shards, and at the end the index.

    Attributes:
        n_samples: number of samples written so far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        columns: Mapping[str, str],
        compression: str | None = None,
        hashes: Iterable[str] = (),
        size_limit: int | str | None = 1 << 26,
    ) -> None:
        """Begin a dataset.

        Args:
            folder: output folder; created if missing.
            columns: encodings by column name, such as {"tokens": "ndarray:int32"}.
            compression: compression of the shards, such as zstd:3; None: not compressed.
            hashes: hash algorithms for the digests in the index, such as xxh64.
            size_limit: bytes of a shard before compression, or "64mb" (of 1024 x 1024); None or 0
                for one shard. A larger sample gets a shard of its own.
        """
        if not columns:
            raise UserError(f"{folder}: columns: there are none; give each a name and an encoding")
        self._folder = folder
        self._encodings = [(n, _find_encoding(n, columns[n])) for n in sorted(columns)]
        self._config: dict[str, Any] = {
            "version": 2,
            "format": "mds",
            "compression": compression or None,
            "hashes": sorted(set(hashes)),
            "size_limit": _parse_size(size_limit),
            "column_names": [name for name, _ in self._encodings],
            "column_encodings": [columns[name] for name, _ in self._encodings],
            "column_sizes": [encoding.size for _, encoding in self._encodings],
        }
        self._head = struct.Struct(f"<{self._config['column_sizes'].count(None)}I")
        self._suffix = codecs.suffix(compression) if compression else ""
        for algorithm in self._config["hashes"]:
            check_algorithm(algorithm)
        self._config_bytes = json.dumps(self._config, sort_keys=True).encode()
        self._shards: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._n_bytes = self._empty = 8 + len(self._config_bytes)
        self.n_samples = 0
        self._make_folder()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: a value for each column; others are left out.

        A value that is `bytes` already is taken as encoded, whatever the column's encoding.
        """
        encoded = self._encode(sample)
        size = 4 + len(encoded)
        limit = self._config["size_limit"]
        # Before the very first sample this writes an empty shard if that sample is too large, as
        # mosaicml-streaming does: the same samples make the same shards.
        if limit and self._n_bytes + size > limit:
            self._flush()
        self._check_length(self._n_bytes + size)
        self._samples.append(encoded)
        self._n_bytes += size
        self.n_samples += 1

    def finish(self) -> None:
        """Write the last shard, then the index."""
        if self._samples:
            self._flush()
        entries = (json.dumps(shard, sort_keys=True) for shard in self._shards)
        text = '{"shards": [' + ", ".join(entries) + '], "version": 2}'
        atomic_write(self._folder / INDEX, text)

    def __enter__(self) -> MDSWriter:
        """Return the writer; leaving the context calls `finish`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finish; after an error leave no index, which would call half a dataset complete."""
        if kind is None:
            self.finish()

    def _make_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        found = next((p for p in self._folder.iterdir() if _OURS.fullmatch(p.name)), None)
        if found is not None:
            raise UserError(f"{found}: a dataset is there already; delete it or choose a folder")

    def _encode(self, sample: Mapping[str, Any]) -> bytes:
        sizes, values = [], []
        for name, encoding in self._encodings:
            if name not in sample:
                raise UserError(f"sample {self.n_samples}: it has no column {name!r}")
            try:
                value = _encode_value(encoding, sample[name])
            except CODING_ERRORS as error:
                raise UserError(f"sample {self.n_samples}, column {name}: {error}") from error
            if encoding.size is None:
                sizes.append(len(value))
            values.append(value)
        self._check_length(sum(map(len, values)))
        return b"".join((self._head.pack(*sizes), *values))

    def _check_length(self, n_bytes: int) -> None:
        if n_bytes > _LONGEST:
            raise UserError(
                f"sample {self.n_samples}: its shard passes 4 GB, the most that MDS holds; write a"
                " size_limit, or shorter samples"
            )

    def _flush(self) -> None:
        name = f"shard.{len(self._shards):05}.mds"
        raw = self._join()
        entry = {"samples": len(self._samples), "raw_data": self._describe(name, raw)}
        entry |= {"zip_data": None, **self._config}
        if self._suffix:
            name += self._suffix
            raw = codecs.compress(self._config["compression"], raw)
            entry["zip_data"] = self._describe(name, raw)
        (self._folder / name).write_bytes(raw)
        self._shards.append(entry)
        self._samples = []
        self._n_bytes = self._empty

    def _join(self) -> bytes:
        """The shard of the samples that wait."""
        n = len(self._samples)
        sizes = [4 * (n + 2) + len(self._config_bytes), *map(len, self._samples)]
        table = np.concatenate(([n], np.cumsum(sizes))).astype("<u4")
        return b"".join((table.tobytes(), self._config_bytes, *self._samples))

    def _describe(self, name: str, data: bytes) -> dict[str, Any]:
        hashes = {algorithm: digest(algorithm, [data]) for algorithm in self._config["hashes"]}
        return {"basename": name, "bytes": len(data), "hashes": hashes}


def _find_encoding(column: str, name: str) -> Encoding:
    try:
        return find_encoding(name)
    except ValueError as error:
        raise UserError(f"columns: {column}: {error}") from error


def _encode_value(encoding: Encoding, value: Any) -> bytes:
    if not isinstance(value, bytes):
        return encoding.encode(value)
    if encoding.size is not None and len(value) != encoding.size:
        raise ValueError(f"{len(value)} bytes, not {encoding.size}")
    encoding.decode(memoryview(value))  # what is written has to be readable
    return value


def _parse_size(size: int | str | None) -> int | None:
    if not size:
        return None
    match = _SIZE.fullmatch(str(size).strip())
    n_bytes = int(float(match[1]) * _FACTOR[(match[2] or "").lower()]) if match else 0
    if not 0 < n_bytes <= _LONGEST:
        raise UserError(f"size_limit: {size!r}; write bytes, or 64mb; below 4 GB, the most of MDS")
    return n_bytes
