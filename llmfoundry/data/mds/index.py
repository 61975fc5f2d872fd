"""`MDSIndex`: what an MDS `index.json` specifies of its shards, as a few flat arrays.

The data sources open it, once per run and rank. An index may list half a million shards, so no
Python object stands for a shard: numbers are arrays, texts are one run of bytes with their ends,
and what shards have in common (columns, compressions) is kept once. JSON of that length takes
a second or two to parse; `save` and `load` keep the same facts in a file that opens in a moment.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import numpy as np

from llmfoundry.data.file_spec import CompressedFile, FileSpec, named_twice, wrong_name
from llmfoundry.data.mds import codecs
from llmfoundry.data.mds.codecs import encoded_size
from llmfoundry.errors import UserError

_BINARY = "llmfoundry-mds-index 1"


@dataclass(frozen=True)
class Columns:
    """The columns that shards have, in the order in which a sample stores them.

    Attributes:
        names: sorted names.
        encodings: encoding of each column, a name that `find_encoding` accepts.
        sizes: bytes of each column's values; None: the values differ in size.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    @cached_property
    def position(self) -> dict[str, int]:
        """Return the position of each column by name."""
        return {name: n for n, name in enumerate(self.names)}


@dataclass(frozen=True)
class StringArray:
    """Many short texts without an object for each.

    Attributes:
        data: (bytes,) uint8, the concatenated texts in UTF-8.
        ends: (n,) int64, the end of each text in `data`.
    """

    data: np.ndarray
    ends: np.ndarray

    def __getitem__(self, n: int) -> str:
        start = self.ends[n - 1] if n else 0
        return self.data[start : self.ends[n]].tobytes().decode()


@dataclass(frozen=True)
class MDSIndex:
    """The shards of an MDS dataset; every array has an entry for each.

    Attributes:
        sizes: (n,) int64, number of samples.
        raw_bytes: (n,) int64, length of the uncompressed file.
        packed_bytes: (n,) int64, length of the compressed file; -1: the shard is not compressed.
        names: name of the uncompressed file in the folder of the dataset.
        packed_names: name of the compressed file; "": the shard is not compressed.
        hashes: sorted hashes of the uncompressed file: "sha1:abc… xxh64:123…".
        packed_hashes: hashes of the compressed file.
        column_sets: the distinct columns of shards, in the order of their first use.
        column_set: (n,) int64, index into `column_sets`.
        compressions: the distinct compressions.
        compression: (n,) int64, index into `compressions`; -1: the shard is not compressed.
        sample: digest of sampled content if hashes are missing (`shard_index`); "": not sampled.
    """

    sizes: np.ndarray
    raw_bytes: np.ndarray
    packed_bytes: np.ndarray
    names: StringArray
    packed_names: StringArray
    hashes: StringArray
    packed_hashes: StringArray
    column_sets: tuple[Columns, ...]
    column_set: np.ndarray
    compressions: tuple[str, ...]
    compression: np.ndarray
    sample: str = ""

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str = "index.json") -> MDSIndex:
        """Parse `index.json`; errors name it `source`."""
        return _Parser(source).parse(data)

    @property
    def n_shards(self) -> int:
        """Return the number of shards."""
        return len(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """Return the sha256 of the samples, lengths, hashes and columns of all shards.

        Names and compression are ignored, so that a renamed or compressed copy has the same
        fingerprint. The digest of sampled content, if any, follows after a colon.
        """
        sets = [[c.names, c.encodings, c.sizes] for c in self.column_sets]
        state = hashlib.sha256(json.dumps([self.n_shards, sets]).encode())
        for numbers in (self.sizes, self.raw_bytes, self.column_set, self.hashes.ends):
            state.update(numbers.astype("<i8").tobytes())
        state.update(self.hashes.data.tobytes())
        return ":".join(filter(None, (state.hexdigest(), self.sample)))

    @cached_property
    def digest(self) -> str:
        """Return the sha256 of the index, including names and compression."""
        rows = self.fingerprint.removesuffix(f":{self.sample}")
        state = hashlib.sha256(json.dumps([rows, self.compressions]).encode())
        for numbers in (self.packed_bytes, self.compression):
            state.update(numbers.astype("<i8").tobytes())
        for texts in (self.names, self.packed_names, self.packed_hashes):
            state.update(texts.ends.astype("<i8").tobytes() + texts.data.tobytes())
        return state.hexdigest()

    @property
    def is_packed(self) -> bool:
        """Return whether any shard is compressed."""
        return bool((self.packed_bytes >= 0).any())

    @cached_property
    def unhashed(self) -> list[int]:
        """Return the shards with samples but without a hash."""
        is_bare = np.diff(self.hashes.ends, prepend=0) == 0
        return (is_bare & (self.sizes > 0)).nonzero()[0].tolist()

    def columns(self, n: int) -> Columns:
        """Return the columns of shard `n`."""
        return self.column_sets[self.column_set[n]]

    def spec(self, n: int) -> FileSpec:
        """Return the file of shard `n` and its compressed form."""
        packed = None
        if self.packed_bytes[n] >= 0:
            packed = CompressedFile(
                name=self.packed_names[n],
                n_bytes=int(self.packed_bytes[n]),
                hashes=_pairs(self.packed_hashes[n]),
                compression=self.compressions[self.compression[n]],
            )
        return FileSpec(
            name=self.names[n],
            n_bytes=int(self.raw_bytes[n]),
            hashes=_pairs(self.hashes[n]),
            packed=packed,
        )

    def save(self, target: Path | IO[bytes]) -> None:
        """Write the binary form: an uncompressed .npz, whose checksums are those of zip.

        Its arrays have the attributes' names; of `names` and the other texts it has `names.data`
        and `names.ends`; `facts` is the rest, as JSON in UTF-8: the format with its version, the
        column sets and the compressions.
        """
        sets = [[c.names, c.encodings, c.sizes] for c in self.column_sets]
        facts = json.dumps([_BINARY, sets, self.compressions]).encode()
        arrays: dict[str, Any] = {"facts": np.frombuffer(facts, np.uint8)}
        arrays |= {name: getattr(self, name) for name in _NUMBERS}
        for name in _TEXTS:
            texts = getattr(self, name)
            arrays |= {f"{name}.data": texts.data, f"{name}.ends": texts.ends}
        # An open file: given a path, numpy would add .npz to its name.
        if isinstance(target, Path):
            with target.open("wb") as file:
                np.savez(file, **arrays)
        else:
            np.savez(target, **arrays)

    @classmethod
    def load(cls, source: Path | IO[bytes]) -> MDSIndex:
        """Read the binary form."""
        try:
            with np.load(source, allow_pickle=False) as arrays:
                facts = json.loads(arrays["facts"].tobytes())
                known = {name: arrays[name] for name in _NUMBERS}
                for name in _TEXTS:
                    known[name] = StringArray(arrays[f"{name}.data"], arrays[f"{name}.ends"])
            if facts[0] != _BINARY:
                raise ValueError(f"it is of {facts[0]!r}, not {_BINARY!r}")
        except _DAMAGE as error:
            raise UserError(
                f"{source}: not a binary MDS index: {error}; delete it, it is made again from"
                " index.json"
            ) from error
        sets = tuple(Columns(*(tuple(part) for part in one)) for one in facts[1])
        return cls(column_sets=sets, compressions=tuple(facts[2]), **known)


_NUMBERS = ("sizes", "raw_bytes", "packed_bytes", "column_set", "compression")
_DAMAGE = (ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
_TEXTS = ("names", "packed_names", "hashes", "packed_hashes")

_Values = TypeVar("_Values")


def _pairs(hashes: str) -> tuple[tuple[str, str], ...]:
    found = (part.partition(":") for part in hashes.split())
    return tuple((algorithm, value) for algorithm, _, value in found)


def _texts(texts: list[str]) -> StringArray:
    together = "".join(texts)
    lengths = map(len, texts if together.isascii() else (text.encode() for text in texts))
    ends = np.cumsum(np.fromiter(lengths, np.int64, len(texts)))
    return StringArray(np.frombuffer(together.encode(), np.uint8), ends)


class _WrongEntryError(Exception):
    """A shard's entry in the index is invalid; the text is the reason."""


_LONGEST = (1 << 32) - 1  # bytes of a shard: its offsets are u32
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2 * _LONGEST)]  # packed, it may have grown
_Count = Annotated[int, msgspec.Meta(ge=0, le=_LONGEST)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]
_Size = Annotated[int, msgspec.Meta(gt=0, le=_LONGEST)]


class _File(msgspec.Struct, gc=False):
    """A file that an entry describes."""

    basename: Annotated[str, msgspec.Meta(min_length=1)]
    n_bytes: _Bytes = msgspec.field(name="bytes")
    hashes: dict[str, str] | None = None


class _Shard(msgspec.Struct, gc=False):
    """An entry; its columns stay text, since nearly all shards have the same."""

    raw_data: _File
    samples: _Count
    column_names: msgspec.Raw
    column_encodings: msgspec.Raw
    column_sizes: msgspec.Raw
    format: Any = None
    version: Any = None
    zip_data: _File | None = None
    compression: str | None = None


class _Index(msgspec.Struct):
    """The file; a shard's entry stays text until its turn, so that they are never all objects."""

    shards: list[msgspec.Raw] | None = None
    format: Any = msgspec.UNSET
    version: Any = None


_decode_index = msgspec.json.Decoder(_Index).decode
_decode_shard = msgspec.json.Decoder(_Shard).decode
_decode_names = msgspec.json.Decoder(tuple[_Name, ...]).decode
_decode_sizes = msgspec.json.Decoder(tuple[_Size | None, ...]).decode


class _Parser:
    """Writes the entries into the arrays, one after another."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._numbers = array("q")  # those of _NUMBERS, shard after shard
        self._texts: list[str] = []  # those of _TEXTS, likewise
        self._column_sets: dict[Columns, int] = {}
        self._column_texts: dict[tuple[bytes, ...], int] = {}  # as they stand in the JSON
        self._compressions: dict[str, int] = {}

    def parse(self, data: bytes) -> MDSIndex:
        for n, text in enumerate(self._entries(data)):
            try:
                self._add(_decode_shard(text))
            except _WrongEntryError as error:
                raise self._wrong(f"shard {n}: {error}") from error
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise self._wrong(f"shard {n}: {_line(error)}; write the index again") from error
        self._check_twice()
        numbers = np.array(self._numbers, np.int64).reshape(-1, len(_NUMBERS))
        arrays: dict[str, Any] = {key: numbers[:, n].copy() for n, key in enumerate(_NUMBERS)}
        arrays |= {key: _texts(self._texts[n :: len(_TEXTS)]) for n, key in enumerate(_TEXTS)}
        return MDSIndex(
            **arrays,
            column_sets=tuple(self._column_sets),
            compressions=tuple(self._compressions),
        )

    def _check_twice(self) -> None:
        for place, key in enumerate(("raw_data", "zip_data")):
            names = self._texts[place :: len(_TEXTS)]
            if (found := named_twice(names)) is not None:
                first, second = found
                raise self._wrong(
                    f"shard {second}: {key}.basename: {names[first]!r} is that of shard {first},"
                    " too; write the index again"
                )

    def _entries(self, data: bytes) -> list[msgspec.Raw]:
        try:
            found = _decode_index(data)
        except msgspec.ValidationError as error:
            raise self._wrong(f"not an MDS index: {_line(error)}; write it again") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._wrong(f"it is not JSON ({error}); copy it again") from error
        if found.format is not msgspec.UNSET or found.shards is None:
            known = "unknown" if found.format is msgspec.UNSET else found.format
            raise self._wrong(f"an index of format {known}, not of MDS")
        if found.version != 2:
            raise self._wrong(f"version {found.version!r}; only MDS of version 2 is read")
        return found.shards

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._source}: {what if len(what) <= 300 else what[:300] + '…'}")

    def _add(self, shard: _Shard) -> None:
        if shard.format != "mds":
            raise _WrongEntryError(f"format {shard.format!r}; only mds is read")
        if shard.version != 2:
            raise _WrongEntryError(f"version {shard.version!r}; only 2 is read")
        raw, packed = shard.raw_data, shard.zip_data
        packed_name, packed_bytes, packed_hashes, compression = "", -1, "", -1
        if packed is not None:
            packed_name, packed_bytes = _name(packed, "zip_data"), packed.n_bytes
            packed_hashes = _hashes(packed, "zip_data")
            compression = self._find_compression(str(shard.compression))
        column_set = self._find_column_set(shard)
        self._numbers.extend((shard.samples, raw.n_bytes, packed_bytes, column_set, compression))
        self._texts += (
            _name(raw, "raw_data"),
            packed_name,
            _hashes(raw, "raw_data"),
            packed_hashes,
        )

    def _find_compression(self, name: str) -> int:
        if name not in self._compressions:
            try:
                codecs.suffix(name)
            except UserError as error:
                raise _WrongEntryError(str(error)) from error
            self._compressions[name] = len(self._compressions)
        return self._compressions[name]

    def _find_column_set(self, shard: _Shard) -> int:
        names, encodings, sizes = shard.column_names, shard.column_encodings, shard.column_sizes
        texts = bytes(names), bytes(encodings), bytes(sizes)
        known = self._column_texts.get(texts)
        if known is None:
            columns = _columns(texts)
            known = self._column_sets.setdefault(columns, len(self._column_sets))
            self._column_texts[texts] = known
        return known


def _columns(texts: tuple[bytes, ...]) -> Columns:
    columns = Columns(
        _decoded(_decode_names, texts[0], "column_names"),
        _decoded(_decode_names, texts[1], "column_encodings"),
        _decoded(_decode_sizes, texts[2], "column_sizes"),
    )
    names, encodings, sizes = columns.names, columns.encodings, columns.sizes
    if not (len(names) == len(encodings) == len(sizes) == len(set(names)) > 0):
        raise _WrongEntryError("column_names, column_encodings and column_sizes do not match")
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if encoded_size(encoding) not in (None, size):
            raise _WrongEntryError(f"column {name}: {encoding} cannot have a size of {size!r}")
    return columns


def _decoded(decode: Callable[[bytes], _Values], text: bytes, key: str) -> _Values:
    try:
        return decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _WrongEntryError(f"{_line(error, key)}; write the index again") from error


def _name(file: _File, key: str) -> str:
    wrong = wrong_name(file.basename)
    if wrong is not None:
        raise _WrongEntryError(f"{key}.basename: {wrong}")
    return file.basename


def _hashes(file: _File, key: str) -> str:
    hashes = file.hashes
    if not hashes:
        return ""
    if not all(a.isidentifier() and h.isalnum() for a, h in hashes.items()):
        raise _WrongEntryError(f"{key}.hashes: {hashes!r} are not algorithms with hex digests")
    return " ".join(f"{algorithm}:{hashes[algorithm]}" for algorithm in sorted(hashes))


def _line(error: Exception, key: str = "") -> str:
    """Return a decoder's error with the key first.

    msgspec writes "reason - at `$.key`".
    """
    reason, _, path = str(error).partition(" - at `$")
    full_key = f"{key}{path.rstrip('`')}".lstrip(".")
    return f"{full_key}: {reason}" if full_key else reason
