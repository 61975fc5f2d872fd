"""What a file of a data set is, and how it is fetched: the words of the fetching modules.

`FileSpec` names a file and how to verify that it is complete. The index of a format (MDS,
tokens) makes specs; `shard_folder.ShardFolder` turns them into paths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.recipe.data import DataConfig, n_bytes

INDEX = "index.json"
COPIES = ".copies.json"  # beside copies: whose they are
PART = ".part"  # ends the name of a file that is being written
PACKED = ".packed"  # likewise of the compressed form of one, until it is unpacked

_LONGEST_NAME = 240  # bytes of a file's name: file systems take 255, and it gets an ending
# As all are in nearly every data set, of which there may be a million: asked first.
_USUAL = re.compile(
    r"(?:[\w-]{1,80}/){0,4}shard\.[0-9]{1,9}\.(?:mds(?:\.(?:br|bz2|gz|snappy|zstd))?|tokens)",
    re.ASCII,
)
_NOT_WITHIN = re.compile(r"^/|(?:^|/)\.\.(?:/|$)")
_NO_NAME = re.compile(
    rf"(?:^|/)\.?(?:/|$)|[\x00-\x1f\x7f\ud800-\udfff]"
    rf"|(?:^|/)(?:{re.escape(INDEX)}|{re.escape(COPIES)})$|(?:{PART}|{PACKED})$"
)


def wrong_name(name: str) -> str | None:
    """Why no file of a data set can be called so."""
    if _USUAL.fullmatch(name):
        return None
    if _NOT_WITHIN.search(name):
        return f"{_cut(name)} lies outside of the dataset's folder"
    if _NO_NAME.search(name):
        return f"{_cut(name)} cannot be the name of a shard"
    if len(name) * 4 > _LONGEST_NAME and len(name.encode()) > _LONGEST_NAME:
        longest = max(len(part.encode()) for part in name.split("/"))
        if longest > _LONGEST_NAME or len(name.encode()) > 8 * _LONGEST_NAME:
            return f"{_cut(name)} is too long for the name of a file"
    return None


def named_twice(names: Sequence[str]) -> tuple[int, int] | None:
    """The first two of one name, by their numbers; "" is not a name."""
    if len(set(names) - {""}) == len(names) - names.count(""):
        return None
    known: dict[str, int] = {}
    for n, name in enumerate(names):
        if name and (before := known.setdefault(name, n)) != n:
            return before, n
    return None


def _cut(name: str) -> str:
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}…"


@dataclass(frozen=True)
class CompressedFile:
    """The compressed form in which a file is kept.

    Attributes:
        name: path within the data set's folder.
        n_bytes: its size; None if unknown.
        hashes: (algorithm, hex digest) pairs of its bytes.
        compression: zstd, gz:9 … (`codecs`).
    """

    name: str
    n_bytes: int | None
    hashes: tuple[tuple[str, str], ...]
    compression: str


@dataclass(frozen=True)
class FileSpec:
    """A file as it is read.

    Attributes:
        name: path within the data set's folder.
        n_bytes: its size; None if unknown.
        hashes: (algorithm, hex digest) pairs of its bytes.
        packed: how it is kept, if compressed.
    """

    name: str
    n_bytes: int | None
    hashes: tuple[tuple[str, str], ...] = ()
    packed: CompressedFile | None = None


@dataclass(frozen=True)
class FetchOptions:
    """How files are fetched and kept; the fields of `DataConfig` say what each means."""

    cache_folder: str = "~/.cache/llmfoundry"
    cache_limit: int | None = None
    """Bytes."""
    prefetch: int = 2 * 10**9
    """Bytes ahead, of one `ShardFolder` in one process."""
    retry: int = 5
    timeout: float = 60.0
    """Seconds."""
    requests_per_second: float | None = None
    validate_hash: bool = True
    storage_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: DataConfig) -> FetchOptions:
        """The options of a recipe's `data` section."""
        return cls(
            cache_folder=config.cache_folder,
            cache_limit=None if config.cache_limit is None else n_bytes(config.cache_limit),
            prefetch=n_bytes(config.prefetch),
            retry=config.download_retry,
            timeout=config.download_timeout,
            requests_per_second=config.requests_per_second,
            validate_hash=config.validate_hash,
            storage_options=config.storage_options,
        )


def in_words(size: float) -> str:
    """A number of bytes as data.cache_limit takes it, rounded up: 1234567 is 1.24mb."""
    for unit, factor in (("gb", 10**9), ("mb", 10**6), ("kb", 10**3)):
        if size >= factor:
            hundredths = -(-int(size) * 100 // factor)
            return f"{hundredths / 100:.10g}{unit}"
    return f"{int(size)}b"
