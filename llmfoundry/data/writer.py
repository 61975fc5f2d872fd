"""`StreamWriter`: a token stream to files that `TokenDataset` opens; called by `prepare`."""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from llmfoundry.data.tokens import Shard, StreamIndex, starts_file, texts_file


@dataclass
class StreamWriter:
    """Writes one stream's shards and document starts; `index` says what was written."""

    folder: Path
    name: str
    dtype: np.dtype[Any]
    shard_bytes: int
    n_tokens: int = 0
    n_bytes: int = 0
    _starts: array[int] = field(default_factory=lambda: array("q"))
    _shards: list[Shard] = field(default_factory=list)
    _file: BinaryIO | None = None
    _crc32: int = 0

    @property
    def index(self) -> StreamIndex:
        """What was written; whole after the `with` block."""
        return StreamIndex(
            name=self.name,
            dtype=self.dtype.str,
            shard_tokens=self._shard_tokens,
            n_documents=len(self._starts),
            n_tokens=self.n_tokens,
            n_bytes=self.n_bytes,
            shards=tuple(self._shards),
        )

    def add(self, ids: list[int], *, n_bytes: int, starts_document: bool) -> None:
        """Append ids that stand for `n_bytes` of text."""
        if starts_document:
            self._starts.append(self.n_tokens)
        self.n_bytes += n_bytes
        tokens = np.array(ids, self.dtype)
        while len(tokens):
            room = self._shard_tokens - self.n_tokens % self._shard_tokens
            self._write(tokens[:room])
            tokens = tokens[room:]

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_shard()
        with starts_file(self.folder, self.name).open("wb") as file:
            np.save(file, np.array(self._starts, np.int64))
            sync(file)

    @property
    def _shard_tokens(self) -> int:
        return max(1, self.shard_bytes // self.dtype.itemsize)

    def _write(self, tokens: np.ndarray) -> None:
        if self._file is None:
            self._file = self._shard_path().open("wb")
        data = tokens.tobytes()
        self._file.write(data)
        self._crc32 = zlib.crc32(data, self._crc32)
        self.n_tokens += len(tokens)
        if self.n_tokens % self._shard_tokens == 0:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._file is None:
            return
        sync(self._file)
        self._file.close()
        size = self.n_tokens - len(self._shards) * self._shard_tokens
        self._shards.append(Shard(self._shard_path().name, size, self._crc32))
        self._file, self._crc32 = None, 0

    def _shard_path(self) -> Path:
        return self.folder / f"{self.name}.{len(self._shards):05}.bin"


@contextmanager
def text_writer(folder: Path) -> Iterator[Callable[[str], None]]:
    """A function that keeps the text of a held-out document."""
    with texts_file(folder, "validation").open("w", encoding="utf-8") as file:
        yield lambda text: print(json.dumps(text), file=file)
        sync(file)


def sync(file: IO[Any]) -> None:
    """To the disk, before the rename that declares the folder whole."""
    file.flush()
    os.fsync(file.fileno())
