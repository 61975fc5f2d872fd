"""`TokenWriter`: documents' ids to shard files that `TokenDataset` reads; called by the tasks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry.data.mds.checksums import digest
from llmfoundry.data.token_rows import Shard


@dataclass
class TokenWriter:
    """Writes part of a stream: `FOLDER/PART/shard.00000.tokens` …; `shards` says what.

    A shard is in memory until it is whole, so that files appear with their hashes known.
    """

    folder: Path
    part: str
    dtype: np.dtype[Any]
    shard_bytes: int
    hashes: tuple[str, ...]
    shards: list[Shard] = field(default_factory=list)
    _data: bytearray = field(default_factory=bytearray)
    _starts: array[int] = field(default_factory=lambda: array("I"))
    _n_ids: int = 0
    _n_bytes: int = 0

    def add(self, ids: list[int], *, n_bytes: int, starts_document: bool) -> None:
        """Append ids that stand for `n_bytes` of text; a shard that is full is ended."""
        if starts_document:
            self._starts.append(self._n_ids)
        self._n_bytes += n_bytes
        tokens = np.array(ids, self.dtype)
        limit = max(1, self.shard_bytes // self.dtype.itemsize)
        while len(tokens):
            now = tokens[: limit - self._n_ids]
            self._data += now.tobytes()
            self._n_ids += len(now)
            tokens = tokens[len(now) :]
            if self._n_ids == limit:
                self._end_shard()

    def finish(self) -> list[Shard]:
        """Write what is left; every shard."""
        if self._n_ids:
            self._end_shard()
        return self.shards

    def __enter__(self) -> TokenWriter:
        """To be left by `finish`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()

    def _end_shard(self) -> None:
        self._data += bytes(-len(self._data) % 4) + np.array(self._starts, "<u4").tobytes()
        name = f"{self.part}/shard.{len(self.shards):05}.tokens"
        whole = memoryview(self._data)
        hashes = {algorithm: digest(algorithm, [whole]) for algorithm in self.hashes}
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._data)
        shard = Shard(name, self._n_ids, len(self._starts), self._n_bytes, hashes)
        self.shards.append(shard)
        self._data, self._starts, self._n_ids, self._n_bytes = bytearray(), array("I"), 0, 0
