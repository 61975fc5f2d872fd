"""`TokenDataset`: token shards, here or at a URL, cut into rows; `TokenWriter` writes them.

The preparation writes, the loader and the gauntlet read. The stream is every document, with the
special tokens that its tokenizer puts around it, one after another, over flat files that are
memory-mapped when first read; a row is a slice of it, across their borders, so opening costs
nothing and memory stays constant.
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
class Shard:
    """One file of the stream: its ids, then where in them documents start, as uint32.

    Attributes:
        file: its name below the index' folder.
        n_tokens: ids in it.
        n_documents: documents that start in it.
        n_bytes: UTF-8 bytes of the text that it holds.
        hashes: of its bytes, by algorithm.
    """

    file: str
    n_tokens: _Short
    n_documents: _Short
    n_bytes: _Long
    hashes: dict[str, str] = field(default_factory=dict)

    def spec(self, dtype: np.dtype[Any]) -> FileSpec:
        """What to fetch and check."""
        size = starts_offset(self, dtype) + 4 * self.n_documents
        return FileSpec(self.file, size, tuple(sorted(self.hashes.items())))


@dataclass(frozen=True)
class StreamIndex:
    """What a stream holds; the index.json beside it.

    Attributes:
        dtype: of the ids in the files, little-endian: <u2 or <u4.
        eos_id: begins each document: the end of text, or what the tokenizer puts before a text.
        tokenizer: fingerprint of what made the ids.
        shards: in order.
        texts: files with the documents' texts, in order; kept of held-out text only.
        sample: of the content where hashes are missing (`shard_index`); "" if none was taken.
    """

    dtype: str
    eos_id: int
    tokenizer: str
    shards: tuple[Shard, ...]
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
        """A hash of all that it specifies."""
        return _hash(self.to_dict())

    is_packed = False  # no file is kept compressed

    @property
    def n_shards(self) -> int:
        """Files."""
        return len(self.shards)

    @cached_property
    def unhashed(self) -> list[int]:
        """Shards without a hash."""
        return [n for n, shard in enumerate(self.shards) if not shard.hashes]

    def spec(self, n: int) -> FileSpec:
        """The file of shard `n`."""
        return self.shards[n].spec(np.dtype(self.dtype))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        facts = {name: value for name, value in asdict(self).items() if name != "sample"}
        return {"format": FORMAT, "version": VERSION, **totals, **facts}

    @classmethod
    def read(cls, folder: ShardFolder) -> StreamIndex:
        """The index of a folder."""
        return cls.from_bytes(folder.read(INDEX), source=INDEX)

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str) -> StreamIndex:
        """An index that was read from `source`."""
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
    """The file; a shard's entry stays text until its turn, so that errors have its number."""

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
_decode_shard = msgspec.json.Decoder(Shard).decode


def _checked(shard: Shard) -> Shard:
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
    """A token stream, its shards opened when first read; picklable, each process opens its own.

    Attributes:
        index: its counts and files.
    """

    def __init__(self, folder: ShardFolder, index: StreamIndex) -> None:
        self.index = index
        self._folder = folder
        self._dtype = np.dtype(index.dtype)
        sizes = [shard.n_tokens for shard in index.shards]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._borders: list[int] = self._bounds.tolist()  # bisect is ten times faster for one key
        self._open: OrderedDict[int, _Map] = OrderedDict()  # the least recently read first

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
        """Rows of `seq_len` tokens that each have a label; with `partial` the last may be short."""
        labelled = max(0, self.n_tokens - 1)
        return -(-labelled // seq_len) if partial else labelled // seq_len

    def row_sizes(self, seq_len: int) -> np.ndarray:
        """(shards,) int64: whole rows that begin in each shard; they sum to `n_rows`."""
        begun = -(-self._bounds // seq_len)  # rows that begin before each border
        return np.diff(np.minimum(begun, self.n_rows(seq_len)))

    def row(self, row: int, seq_len: int, *, apart: bool = True) -> tuple[np.ndarray, list[int]]:
        """Tokens and documents of row number `row`.

        Args:
            row: its number.
            seq_len: tokens of a row.
            apart: say where documents begin; otherwise the row is one.

        Returns:
            (T + 1,) of the files' type, mostly a view of one, the row's T tokens and the label of
            the last, T being `seq_len` or, in a partial last row, what is left; and the lengths of
            the documents, whose sum is T. A document that began in an earlier row counts from this
            row's first token.
        """
        start = row * seq_len
        stop = min(start + seq_len, self.n_tokens - 1)
        assert 0 <= start < stop, f"no row {row} of {seq_len} tokens"
        n, high = bisect_right(self._borders, start) - 1, start
        first = self._borders[n]
        if not apart and stop < self._borders[n + 1]:
            return self._shard(n).ids[start - first : stop + 1 - first], [stop - start]
        parts, bounds = [], [start]
        while high <= stop:
            first, low = self._borders[n], high
            high = min(stop + 1, self._borders[n + 1])
            shard = self._shard(n)
            parts.append(shard.ids[low - first : high - first])
            if apart:
                # One at the row's own start is its first anyway; the label's is the next row's.
                starts = shard.starts_between(max(low, start + 1) - first, min(high, stop) - first)
                bounds += [first + place for place in starts]
            n += 1
        bounds.append(stop)
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return ids, [after - before for before, after in pairwise(bounds)]

    def specs(self) -> list[FileSpec]:
        """What to fetch for each shard."""
        return [self.index.spec(n) for n in range(self.index.n_shards)]

    def texts(self) -> list[str]:
        """The documents' exact texts, in order; kept of held-out text only."""
        files = (self._folder.read(name).decode() for name in self.index.texts)
        return [json.loads(line) for file in files for line in file.splitlines()]

    def verify(self) -> None:
        """Read everything and compare checksums."""
        for shard in self.index.shards:
            with self._folder.pin(shard.spec(self._dtype)) as path:
                for algorithm, expected in shard.hashes.items():
                    if (found := digest(algorithm, _chunks(path))) != expected:
                        raise UserError(
                            f"{path}: is damaged: its {algorithm} is {found}, not {expected}"
                        )

    def close(self) -> None:
        """Let go of open shards; reading opens them again."""
        self._open.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def _shard(self, n: int) -> _Map:
        # Single operations only: several threads may read, and a fork may come at any time.
        shard = self._open.pop(n, None) or self._map(n)
        self._open[n] = shard
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _map(self, n: int) -> _Map:
        shard = self.index.shards[n]
        # A map outlives its file's name, so a shard may leave the cache while it is being read.
        with self._folder.pin(shard.spec(self._dtype)) as path:
            data = np.asarray(np.memmap(path, np.uint8, mode="r"))
        size, offset = shard.n_tokens * self._dtype.itemsize, starts_offset(shard, self._dtype)
        return _Map(data[:size].view(self._dtype), data[offset:].view("<u4"))


@dataclass(frozen=True)
class _Map:
    """An open shard: views of its file.

    Attributes:
        ids: (n_tokens,).
        starts: (n_documents,) uint32, where in `ids` documents start.
    """

    ids: np.ndarray
    starts: np.ndarray

    def starts_between(self, low: int, high: int) -> list[int]:
        """Starts in low … high - 1."""
        # Keys of the starts' own type: others would convert, that is read, all of them.
        keys = np.array((low, max(low, high)), self.starts.dtype)
        first, last = self.starts.searchsorted(keys).tolist()
        return self.starts[first:last].tolist()


def starts_offset(shard: Shard, dtype: np.dtype[Any]) -> int:
    """Where in a shard's file its documents' starts begin: after the ids, at a multiple of 4."""
    return -(-shard.n_tokens * dtype.itemsize // 4) * 4


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


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
