"""`MDSIndex`: what an MDS `index.json` says of its shards, as a few flat arrays.

The data sources open it, once per run and rank. An index may list half a million shards, so no
Python object stands for a shard: numbers are arrays, texts are one run of bytes with their ends,
and what shards have in common (columns, compressions) is kept once. JSON of that length takes
seconds to parse; `save` and `load` keep the same facts in a file that opens in a moment.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from llmfoundry.data.fetch.file_spec import FileSpec, Packed
from llmfoundry.data.mds import codecs
from llmfoundry.data.mds.encodings import encoded_size
from llmfoundry.errors import UserError

_BINARY = "llmfoundry-mds-index 1"


@dataclass(frozen=True)
class Columns:
    """The columns that shards have, in the order in which a sample stores them.

    Attributes:
        names: sorted.
        encodings: of each, as `find_encoding` takes them.
        sizes: bytes of each value; None where they differ.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    @cached_property
    def position(self) -> dict[str, int]:
        """Each name's place."""
        return {name: n for n, name in enumerate(self.names)}


@dataclass(frozen=True)
class Texts:
    """Many short texts without an object for each.

    Attributes:
        data: (bytes,) uint8, all of them in UTF-8, one after another.
        ends: (n,) int64, where each ends.
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
        sizes: (n,) int64, samples.
        raw_bytes: (n,) int64, length of the file as it is read.
        packed_bytes: (n,) int64, length of its compressed form; -1 where there is none.
        names: of the file as it is read, within the dataset's folder.
        packed_names: of its compressed form; "" where there is none.
        hashes: of the file as it is read: "sha1:abc… xxh64:123…", sorted.
        packed_hashes: of its compressed form.
        column_sets: the different columns that shards have, by first use.
        column_set: (n,) int64, which of them.
        compressions: the different ones.
        compression: (n,) int64, which of them; -1 where there is none.
    """

    sizes: np.ndarray
    raw_bytes: np.ndarray
    packed_bytes: np.ndarray
    names: Texts
    packed_names: Texts
    hashes: Texts
    packed_hashes: Texts
    column_sets: tuple[Columns, ...]
    column_set: np.ndarray
    compressions: tuple[str, ...]
    compression: np.ndarray

    @classmethod
    def from_bytes(cls, data: bytes, *, source: str = "index.json") -> MDSIndex:
        """Parse `index.json`; `source` is what errors call it.

        Raises:
            UserError: it is no MDS index, or says something that cannot be; with the shard.
        """
        return _Parser(source).parse(data)

    @property
    def n_shards(self) -> int:
        """Files."""
        return len(self.sizes)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of what decides the samples: each shard's samples, length, hashes and columns.

        Neither names nor compression count: a copy elsewhere, or packed otherwise, is the same.
        """
        sets = [[c.names, c.encodings, c.sizes] for c in self.column_sets]
        state = hashlib.sha256(json.dumps([self.n_shards, sets]).encode())
        for numbers in (self.sizes, self.raw_bytes, self.column_set, self.hashes.ends):
            state.update(numbers.astype("<i8").tobytes())
        state.update(self.hashes.data.tobytes())
        return state.hexdigest()

    def columns(self, n: int) -> Columns:
        """Those of shard `n`."""
        return self.column_sets[self.column_set[n]]

    def spec(self, n: int) -> FileSpec:
        """The file of shard `n`, and how it is kept."""
        packed = None
        if self.packed_bytes[n] >= 0:
            packed = Packed(
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
        """Read the binary form.

        Raises:
            UserError: it is not whole, or of another version.
        """
        try:
            with np.load(source, allow_pickle=False) as arrays:
                facts = json.loads(arrays["facts"].tobytes())
                known = {name: arrays[name] for name in _NUMBERS}
                for name in _TEXTS:
                    known[name] = Texts(arrays[f"{name}.data"], arrays[f"{name}.ends"])
            if facts[0] != _BINARY:
                raise ValueError(f"it is of {facts[0]!r}, not {_BINARY!r}")
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{source}: no binary MDS index: {error}; delete it, it is made again from"
                " index.json"
            ) from error
        sets = tuple(Columns(*(tuple(part) for part in one)) for one in facts[1])
        return cls(column_sets=sets, compressions=tuple(facts[2]), **known)


_NUMBERS = ("sizes", "raw_bytes", "packed_bytes", "column_set", "compression")
_TEXTS = ("names", "packed_names", "hashes", "packed_hashes")
_COLUMNS = ("column_names", "column_encodings", "column_sizes")


def _pairs(hashes: str) -> tuple[tuple[str, str], ...]:
    found = (part.partition(":") for part in hashes.split())
    return tuple((algorithm, value) for algorithm, _, value in found)


def _texts(texts: list[str]) -> Texts:
    parts = [text.encode() for text in texts]
    ends = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
    return Texts(np.frombuffer(b"".join(parts), np.uint8), ends)


class _WrongEntryError(Exception):
    """What is wrong with a shard's entry."""


class _Parser:
    """Turns JSON into the arrays while it is parsed, so that half a million dicts never coexist.

    The JSON parser calls `_entry` with every dict as it is complete, inner ones first; one that is
    a shard's entry is written into the arrays and replaced by its number.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._n_shards = 0
        self._numbers = array("q")  # those of _NUMBERS, shard after shard
        self._texts: list[str] = []  # those of _TEXTS, likewise
        self._column_sets: dict[Any, int] = {}
        self._compressions: dict[str, int] = {}

    def parse(self, data: bytes) -> MDSIndex:
        try:
            found = json.loads(data, object_hook=self._entry)
        except _WrongEntryError as error:
            raise self._wrong(f"shard {self._n_shards}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"it is not JSON ({error}); copy it again") from error
        self._check(found)
        numbers = np.array(self._numbers, np.int64).reshape(-1, len(_NUMBERS))
        arrays: dict[str, Any] = {key: numbers[:, n].copy() for n, key in enumerate(_NUMBERS)}
        arrays |= {key: _texts(self._texts[n :: len(_TEXTS)]) for n, key in enumerate(_TEXTS)}
        return MDSIndex(
            **arrays,
            column_sets=tuple(Columns(*key) for key in self._column_sets),
            compressions=tuple(self._compressions),
        )

    def _check(self, found: Any) -> None:
        """What is left of the JSON once each shard is a number."""
        if not isinstance(found, dict) or "format" in found or "shards" not in found:
            found_format = found.get("format", "unknown") if isinstance(found, dict) else "unknown"
            raise self._wrong(f"an index of format {found_format}, not of MDS")
        if found.get("version") != 2:
            raise self._wrong(f"version {found.get('version')!r}; only MDS of version 2 is read")
        shards = found["shards"]
        if not isinstance(shards, list):
            raise self._wrong("`shards` is no list")
        for n, shard in enumerate(shards):
            if type(shard) is not int or shard != n:
                raise self._wrong(f"shard {n}: raw_data is missing")
        if len(shards) != self._n_shards:
            raise self._wrong("it has shards outside of the list `shards`")

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._source}: {what}")

    def _entry(self, entry: dict[str, Any]) -> dict[str, Any] | int:
        if "raw_data" not in entry:
            return entry
        n = self._n_shards
        if entry.get("format") != "mds":
            raise _WrongEntryError(f"format {entry.get('format')!r}; only mds is read")
        if entry.get("version") != 2:
            raise _WrongEntryError(f"version {entry.get('version')!r}; only 2 is read")
        samples = _count(entry, "samples")
        name, n_bytes, hashes = _file(entry, "raw_data")
        packed_name, packed_bytes, packed_hashes, compression = "", -1, "", -1
        if entry.get("zip_data") is not None:
            packed_name, packed_bytes, packed_hashes = _file(entry, "zip_data")
            compression = self._find_compression(str(entry.get("compression")))
        column_set = self._find_column_set(entry)
        self._numbers.extend((samples, n_bytes, packed_bytes, column_set, compression))
        self._texts += (name, packed_name, hashes, packed_hashes)
        self._n_shards = n + 1
        return n

    def _find_compression(self, name: str) -> int:
        if name not in self._compressions:
            try:
                codecs.suffix(name)
            except UserError as error:
                raise _WrongEntryError(str(error)) from error
            self._compressions[name] = len(self._compressions)
        return self._compressions[name]

    def _find_column_set(self, entry: dict[str, Any]) -> int:
        names, encodings, sizes = map(entry.get, _COLUMNS)
        if not type(names) is type(encodings) is type(sizes) is list:
            key = next(key for key in _COLUMNS if not isinstance(entry.get(key), list))
            raise _WrongEntryError(f"{key}: {entry.get(key)!r}; it has to be a list")
        columns = tuple(names), tuple(encodings), tuple(sizes)
        try:
            known = self._column_sets.get(columns)
        except TypeError as error:  # a list or an object within, which has no hash
            raise _WrongEntryError(f"columns {columns}: not plain texts and numbers") from error
        if known is None:
            _check_columns(*columns)
            known = self._column_sets[columns] = len(self._column_sets)
        return known


def _check_columns(
    names: tuple[Any, ...], encodings: tuple[Any, ...], sizes: tuple[Any, ...]
) -> None:
    if not (len(names) == len(encodings) == len(sizes) == len(set(names)) > 0):
        raise _WrongEntryError("column_names, column_encodings and column_sizes do not match")
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if not isinstance(name, str) or not isinstance(encoding, str):
            raise _WrongEntryError(f"column {name!r} of encoding {encoding!r}: not text")
        expected = encoded_size(encoding)
        fits = size is None or (type(size) is int and size > 0)
        if not fits or expected not in (None, size):
            raise _WrongEntryError(f"column {name}: {encoding} cannot have a size of {size!r}")


def _file(entry: dict[str, Any], key: str) -> tuple[str, int, str]:
    """Name, length and hashes of a file that an entry describes."""
    file = entry[key]
    if not isinstance(file, dict):
        raise _WrongEntryError(f"{key} is no object")
    name, hashes = file.get("basename"), file.get("hashes")
    if not isinstance(name, str) or not name:
        raise _WrongEntryError(f"{key}.basename is missing")
    if name[0] == "/" or (".." in name and ".." in name.split("/")):
        raise _WrongEntryError(f"{key}.basename: {name!r} lies outside of the dataset's folder")
    size = _count(file, "bytes", f"{key}.")
    if not hashes:
        return name, size, ""
    if not isinstance(hashes, dict) or not all(
        a.isidentifier() and isinstance(h, str) and h.isalnum() for a, h in hashes.items()
    ):
        raise _WrongEntryError(f"{key}.hashes: {hashes!r} are no algorithms with hex digests")
    pairs = " ".join(f"{algorithm}:{hashes[algorithm]}" for algorithm in sorted(hashes))
    return name, size, pairs


def _count(entry: dict[str, Any], key: str, within: str = "") -> int:
    value = entry.get(key)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise _WrongEntryError(f"{within}{key}: {value!r}; it has to be a count")
    return value
