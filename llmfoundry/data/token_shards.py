"""Pre-tokenized shards: `TokenWriter` writes them, `TokenDataset` reads sequences from them.

The data preparation writes token shards, and the loader and the gauntlet read them, from a local
folder or a URL. The documents, each with its tokenizer's special tokens, are concatenated to one
token stream, which is stored in flat files. A sequence is a slice of the stream and may span files.
The files are memory-mapped when first read, so a dataset opens at once and needs constant memory.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from llmfoundry.data.file_spec import INDEX, named_twice, wrong_name
from llmfoundry.data.mds.codecs import digest
from llmfoundry.data.shard_cache.shard_folder import FileSpec, ShardFolder
from llmfoundry.errors import UserError, one_line

FORMAT, VERSION = "llmfoundry-tokens", 2
_OPEN_SHARDS = 64  # mapped at a time; a map costs a file handle and addresses, not memory


_Short = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Long = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_TOTALS = ("n_documents", "n_tokens", "n_bytes")


@dataclass(frozen=True)
class TokenShard:
    """One file of the stream: token ids, then the offsets at which documents start, as uint32.

    Attributes:
        file: path relative to the folder of the index.
        n_tokens: number of ids in the file.
        n_documents: number of documents that start in the file.
        n_bytes: UTF-8 bytes of the text in the file.
        hashes: hashes of the file, by algorithm.
    """

    file: str
    n_tokens: _Short
    n_documents: _Short
    n_bytes: _Long
    hashes: dict[str, str] = field(default_factory=dict)

    def spec(self, dtype: np.dtype[Any]) -> FileSpec:
        """Return the name, size and hashes of the file, to fetch and check it."""
        size = starts_offset(self, dtype) + 4 * self.n_documents
        return FileSpec(self.file, size, tuple(sorted(self.hashes.items())))


@dataclass(frozen=True)
class StreamIndex:
    """Index of a token stream, stored as index.json next to its shards.

    Attributes:
        dtype: little-endian integer type of the ids in the files: <u2 or <u4.
        eos_id: token at the start of each document: end of text, or the tokenizer's BOS token.
        tokenizer: fingerprint of the tokenizer.
        shards: shards in order.
        texts: files with the texts of the documents, in order; stored for held-out text only.
        sample: hash of sampled content if hashes are missing (`shard_index`); "" without a sample.
    """

    dtype: str
    eos_id: int
    tokenizer: str
    shards: tuple[TokenShard, ...]
    texts: tuple[str, ...] = ()
    sample: str = ""

    @cached_property
    def n_documents(self) -> int:
        """Documents in the stream."""
        return sum(shard.n_documents for shard in self.shards)

    @cached_property
    def n_tokens(self) -> int:
        """Ids in the stream, those around each document included."""
        return sum(shard.n_tokens for shard in self.shards)

    @cached_property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents' text."""
        return sum(shard.n_bytes for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the ids, wherever they are kept: a resumed run must find the same.

        The sample of the content, if there is one, follows after a colon.
        """
        facts = [[s.n_tokens, s.n_documents, sorted(s.hashes.items())] for s in self.shards]
        return ":".join(filter(None, (_hash([self.dtype, facts]), self.sample)))

    @cached_property
    def digest(self) -> str:
        """Hash of the contents of this index."""
        return _hash(self.to_dict())

    is_packed = False  # no file is kept compressed

    @property
    def n_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @cached_property
    def unhashed(self) -> list[int]:
        """Shards without a hash."""
        return [n for n, shard in enumerate(self.shards) if not shard.hashes]

    def spec(self, n: int) -> FileSpec:
        """Return the name, size and hashes of shard `n`."""
        return self.shards[n].spec(np.dtype(self.dtype))

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of index.json."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        facts = {name: value for name, value in asdict(self).items() if name != "sample"}
        return {"format": FORMAT, "version": VERSION, **totals, **facts}

    @classmethod
    def read(cls, folder: ShardFolder) -> StreamIndex:
        """Read the index of a folder."""
        return cls.from_bytes(folder.read(INDEX), source=INDEX)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> StreamIndex:
        """Decode and check an index.

        Args:
            data: contents of the file.
            source: name of the file, for error messages.

        Raises:
            UserError: the file is not a valid index of token shards of this version.
        """
        where = ""
        try:
            head = _decode_head(data)
            if head.format != FORMAT:
                raise UserError(
                    f"{source}: is not an index of token shards (format: {head.format!r})"
                )
            if head.version != VERSION:
                raise UserError(
                    f"{source}: token shards of version {head.version}; this program reads"
                    f" {VERSION}; prepare the text again"
                )
            found, shards = _decode_index(data), []
            for n, entry in enumerate(found.shards):
                where = f"shard {n} "
                shards.append(_checked(_decode_shard(entry)))
            where = ""
            index = cls(found.dtype, found.eos_id, found.tokenizer, tuple(shards), found.texts)
            _check_whole(index, found)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
            what = f"{where}is damaged: {one_line(error)}"
            raise UserError(f"{source}: {what}; prepare the text again") from error
        return index


class _Head(msgspec.Struct):
    format: Any = None
    version: Any = None


class _Index(msgspec.Struct):
    """Contents of index.json. Shards stay undecoded, so that an error can name the shard."""

    dtype: Literal["<u2", "<u4"]
    eos_id: _Short
    tokenizer: str
    shards: list[msgspec.Raw]
    n_documents: int
    n_tokens: int
    n_bytes: int
    texts: tuple[str, ...] = ()


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_index = msgspec.json.Decoder(_Index).decode
_decode_shard = msgspec.json.Decoder(TokenShard).decode


def _checked(shard: TokenShard) -> TokenShard:
    wrong = wrong_name(shard.file)
    if wrong is not None:
        raise ValueError(f"file: {wrong}")
    if shard.n_documents > shard.n_tokens:
        raise ValueError(f"n_documents: {shard.n_documents}, of {shard.n_tokens} tokens")
    return shard


def _check_whole(index: StreamIndex, found: _Index) -> None:
    for name in _TOTALS:
        if getattr(found, name) != getattr(index, name):
            raise ValueError(
                f"{name}: {getattr(found, name)}, its shards' are {getattr(index, name)}"
            )
    twice = named_twice([shard.file for shard in index.shards])
    if twice is not None:
        raise ValueError(f"file: that of shard {twice[1]} is that of shard {twice[0]}, too")
    for name in index.texts:
        if (wrong := wrong_name(name)) is not None:
            raise ValueError(f"texts: {wrong}")


def _hash(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


class TokenDataset:
    """Reader of a token stream.

    Shards are memory-mapped when first read. A dataset can be pickled, and each process then opens
    the shards for itself.

    Attributes:
        folder: folder of the shards.
        index: counts and files of the stream.
    """

    def __init__(self, folder: ShardFolder, index: StreamIndex) -> None:
        self.index = index
        self.folder = folder
        self._dtype = np.dtype(index.dtype)
        sizes = [shard.n_tokens for shard in index.shards]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._borders: list[int] = self._bounds.tolist()  # bisect is 10x faster for a single key
        self._open: OrderedDict[int, _Map] = OrderedDict()  # least recently used first

    @property
    def n_tokens(self) -> int:
        """Ids in the stream, those around each document included."""
        return self.index.n_tokens

    @property
    def n_documents(self) -> int:
        """Documents in the stream."""
        return self.index.n_documents

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents' text."""
        return self.index.n_bytes

    @property
    def fingerprint(self) -> str:
        """A hash of the ids, wherever they are kept: a resumed run must find the same."""
        return self.index.fingerprint

    def n_rows(self, seq_len: int, *, partial: bool = False) -> int:
        """Return the number of sequences of `seq_len` tokens, each of which has a label.

        With `partial` a shorter last sequence counts too.
        """
        labelled = max(0, self.n_tokens - 1)
        return -(-labelled // seq_len) if partial else labelled // seq_len

    def row_sizes(self, seq_len: int) -> np.ndarray:
        """Return the full sequences that begin in each shard, (shards,) int64; the sum is `n_rows`.

        Args:
            seq_len: T, tokens per sequence.
        """
        starts_before = -(-self._bounds // seq_len)  # sequences that begin before each border
        return np.diff(np.minimum(starts_before, self.n_rows(seq_len)))

    def row(self, row: int, seq_len: int, *, apart: bool = True) -> tuple[np.ndarray, list[int]]:
        """Return the ids and the document lengths of sequence number `row`.

        Args:
            row: number of the sequence.
            seq_len: tokens per sequence.
            apart: whether to separate documents; otherwise the sequence is one document.

        Returns:
            The T tokens and the label of the last one, (T + 1,) in the type of the files, usually a
            view of a file. T is `seq_len`, or less in a partial last sequence. Then the lengths of
            the documents, with sum T. A document that starts in an earlier sequence counts from the
            first token of this one.
        """
        start = row * seq_len
        stop = min(start + seq_len, self.n_tokens - 1)
        assert 0 <= start < stop, f"no row {row} of {seq_len} tokens"
        n, high = bisect_right(self._borders, start) - 1, start
        first = self._borders[n]
        # fast path: one document in one shard
        if not apart and stop < self._borders[n + 1]:
            return self._shard(n).ids[start - first : stop + 1 - first], [stop - start]

        # collect the ids and the document starts from every shard that the sequence spans
        parts, bounds = [], [start]
        while high <= stop:
            first, low = self._borders[n], high
            high = min(stop + 1, self._borders[n + 1])
            shard = self._shard(n)
            parts.append(shard.ids[low - first : high - first])
            if apart:
                # The start of the sequence is in `bounds` already. A document that starts at the
                # last label belongs to the next sequence.
                starts = shard.starts_between(max(low, start + 1) - first, min(high, stop) - first)
                bounds += [first + place for place in starts]
            n += 1
        bounds.append(stop)
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return ids, [after - before for before, after in pairwise(bounds)]

    def specs(self) -> list[FileSpec]:
        """Return the name, size and hashes of each shard."""
        return [self.index.spec(n) for n in range(self.index.n_shards)]

    def texts(self) -> list[str]:
        """Return the exact texts of the documents, in order; stored for held-out text only."""
        files = (self.folder.read(name).decode() for name in self.index.texts)
        return [json.loads(line) for file in files for line in file.splitlines()]

    def verify(self) -> None:
        """Read all shards and raise a `UserError` if a checksum differs from the index."""
        for shard in self.index.shards:
            with self.folder.pin(shard.spec(self._dtype)) as path:
                for algorithm, expected in shard.hashes.items():
                    if (actual := digest(algorithm, _chunks(path))) != expected:
                        raise UserError(
                            f"{path}: is damaged: its {algorithm} is {actual}, not {expected}"
                        )

    def close(self) -> None:
        """Close the open shards. A later read opens them again."""
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _shard(self, n: int) -> _Map:
        # atomic dictionary operations only: several threads may read, and a fork may interrupt them
        shard = self._open.pop(n, None) or self._map(n)
        self._open[n] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _map(self, n: int) -> _Map:
        shard = self.index.shards[n]
        # A map remains valid after its file is deleted, so the cache may evict an open shard.
        with self.folder.pin(shard.spec(self._dtype)) as path:
            data = np.asarray(np.memmap(path, np.uint8, mode="r"))
        size, offset = shard.n_tokens * self._dtype.itemsize, starts_offset(shard, self._dtype)
        return _Map(data[:size].view(self._dtype), data[offset:].view("<u4"))


@dataclass(frozen=True)
class _Map:
    """A memory-mapped shard.

    Attributes:
        ids: (n_tokens,), view of the file.
        starts: (n_documents,) uint32, offsets in `ids` at which documents start.
    """

    ids: np.ndarray
    starts: np.ndarray

    def starts_between(self, low: int, high: int) -> list[int]:
        """Return the document starts in low … high - 1."""
        # Keys of another type would make numpy convert, and so read, all of `starts`.
        keys = np.array((low, max(low, high)), self.starts.dtype)
        first, last = self.starts.searchsorted(keys).tolist()
        return self.starts[first:last].tolist()


def starts_offset(shard: TokenShard, dtype: np.dtype[Any]) -> int:
    """Return the byte offset of the document starts: the first multiple of 4 after the ids."""
    return -(-shard.n_tokens * dtype.itemsize // 4) * 4


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


@dataclass
class TokenWriter:
    """Writer of one part of a token stream: `FOLDER/PART/shard.00000.tokens` and so on.

    A shard is buffered in memory and written when it is full, so that its hashes are known when the
    file appears. `shards` describes the files written so far.
    """

    folder: Path
    part: str
    dtype: np.dtype[Any]
    shard_bytes: int
    hashes: tuple[str, ...]
    shards: list[TokenShard] = field(default_factory=list)
    _data: bytearray = field(default_factory=bytearray)
    _starts: array[int] = field(default_factory=lambda: array("I"))
    _n_ids: int = 0
    _n_bytes: int = 0

    def add(self, ids: list[int], *, n_bytes: int, starts_document: bool) -> None:
        """Append the ids of `n_bytes` of text, and write each shard that is full."""
        if starts_document:
            self._starts.append(self._n_ids)
        self._n_bytes += n_bytes
        tokens = np.array(ids, self.dtype)
        limit = max(1, self.shard_bytes // self.dtype.itemsize)
        while len(tokens):
            fitting = tokens[: limit - self._n_ids]
            self._data += fitting.tobytes()
            self._n_ids += len(fitting)
            tokens = tokens[len(fitting) :]
            if self._n_ids == limit:
                self._write_shard()

    def finish(self) -> list[TokenShard]:
        """Write the last shard and return all shards."""
        if self._n_ids:
            self._write_shard()
        return self.shards

    def __enter__(self) -> TokenWriter:
        """Return the writer. Leaving the context calls `finish`, unless an error occurred."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.finish()

    def _write_shard(self) -> None:
        self._data += bytes(-len(self._data) % 4) + np.array(self._starts, "<u4").tobytes()
        name = f"{self.part}/shard.{len(self.shards):05}.tokens"
        content = memoryview(self._data)
        hashes = {algorithm: digest(algorithm, [content]) for algorithm in self.hashes}
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._data)
        shard = TokenShard(name, self._n_ids, len(self._starts), self._n_bytes, hashes)
        self.shards.append(shard)
        self._data, self._starts, self._n_ids, self._n_bytes = bytearray(), array("I"), 0, 0
