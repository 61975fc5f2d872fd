"""`TokenDataset`: a prepared token stream, cut into rows for training or validation.

Made by `prepare`, read by the loader and the gauntlet. The stream is every document as
`<eos> t1 … tn`, one after another, in flat memory-mapped files; a row is a slice of it, so opening
costs nothing and memory stays constant whatever the size.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry.errors import UserError


@dataclass(frozen=True)
class Shard:
    """One flat file of the stream.

    Attributes:
        file: its name.
        n_tokens: ids in it.
        crc32: of its bytes.
    """

    file: str
    n_tokens: int
    crc32: int


@dataclass(frozen=True)
class StreamIndex:
    """What a stream holds; the JSON beside it.

    Attributes:
        name: train or validation; its files begin with it.
        dtype: of the ids in the files, little-endian: <u2 or <u4.
        shard_tokens: ids in each shard but the last.
        n_documents: documents.
        n_tokens: ids, the `<eos>` of each document included.
        n_bytes: UTF-8 bytes of the documents' text.
        shards: in order.
    """

    name: str
    dtype: str
    shard_tokens: int
    n_documents: int
    n_tokens: int
    n_bytes: int
    shards: tuple[Shard, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> StreamIndex:
        """From JSON."""
        return cls(**{**facts, "shards": tuple(Shard(**shard) for shard in facts["shards"])})


class TokenDataset:
    """A token stream on disk.

    Attributes:
        index: its counts and files.
    """

    def __init__(self, folder: Path, index: StreamIndex) -> None:
        """Open a stream.

        Raises:
            UserError: a file is missing or has another size than the index says.
        """
        self._folder = folder
        self.index = index
        self._shards = [self._map(shard) for shard in index.shards]
        self._starts = self._map_starts()

    @property
    def n_tokens(self) -> int:
        """Ids in the stream, the `<eos>` of each document included."""
        return self.index.n_tokens

    @property
    def n_documents(self) -> int:
        """Documents in the stream."""
        return self.index.n_documents

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents' text."""
        return self.index.n_bytes

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the ids, wherever they are kept: a resumed run must find the same."""
        facts = [self.n_documents, *((s.n_tokens, s.crc32) for s in self.index.shards)]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Rows of `seq_len` tokens that each have a label; with `partial` the last may be short."""
        labelled = max(0, self.n_tokens - 1)
        return -(-labelled // seq_len) if partial else labelled // seq_len

    def row(self, row: int, seq_len: int) -> tuple[np.ndarray, list[int]]:
        """Tokens and documents of row number `row`.

        Returns:
            (T + 1,) int64, the row's T tokens and the label of the last, T being `seq_len` or, in
            a partial last row, what is left; and the lengths of the documents, whose sum is T. A
            document that began in an earlier row counts from this row's first token.
        """
        start = row * seq_len
        tokens = self._slice(start, min(start + seq_len + 1, self.n_tokens))
        assert len(tokens) > 1, f"no row {row} of {seq_len} tokens"
        stop = start + len(tokens) - 1
        # Keys of the index's own type: others would convert, that is read, the whole file.
        first, last = np.searchsorted(self._starts, np.array([start + 1, stop], np.int64))
        bounds = [start, *self._starts[first:last].tolist(), stop]
        return tokens, [after - before for before, after in pairwise(bounds)]

    def texts(self) -> list[str]:
        """The documents' exact texts, in order; kept for validation streams only."""
        with texts_file(self._folder, self.index.name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def verify(self) -> None:
        """Read everything and compare checksums.

        Raises:
            UserError: a shard's bytes have changed since they were written.
        """
        for shard, ids in zip(self.index.shards, self._shards, strict=True):
            if zlib.crc32(ids.data) != shard.crc32:
                raise self._damaged(shard.file, "its bytes have changed")

    def _slice(self, start: int, stop: int) -> np.ndarray:
        """Ids start … stop - 1, across shard borders, int64."""
        size = self.index.shard_tokens
        parts = [
            self._shards[n][max(0, start - n * size) : stop - n * size]
            for n in range(start // size, -(-stop // size))
        ]
        return np.concatenate(parts).astype(np.int64)

    def _map(self, shard: Shard) -> np.ndarray:
        path, dtype = self._folder / shard.file, np.dtype(self.index.dtype)
        if not path.is_file():
            raise self._damaged(shard.file, "it is missing")
        expected, found = shard.n_tokens * dtype.itemsize, path.stat().st_size
        if found != expected:
            raise self._damaged(shard.file, f"it has {found:,} bytes, not {expected:,}")
        return np.asarray(np.memmap(path, dtype, mode="r"))

    def _map_starts(self) -> np.ndarray:
        path = starts_file(self._folder, self.index.name)
        try:
            starts = np.asarray(np.load(path, mmap_mode="r"))
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(path.name, str(error)) from error
        if len(starts) != self.n_documents:
            raise self._damaged(path.name, f"it has {len(starts)} of {self.n_documents} entries")
        return starts

    def _damaged(self, file: str, why: str) -> UserError:
        return UserError(
            f"{self._folder / file}: prepared tokens are damaged: {why};"
            f" delete {self._folder}, it will be made again"
        )


def starts_file(folder: Path, name: str) -> Path:
    """Where each document of a stream starts: (n_documents,) int64."""
    return folder / f"{name}.starts.npy"


def texts_file(folder: Path, name: str) -> Path:
    """The texts of a stream's documents, each line a JSON string."""
    return folder / f"{name}.texts.jsonl"
