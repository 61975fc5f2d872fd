"""Specification of a dataset's files, and options of their download.

A `FileSpec` has the name of a file, and the size and hashes that verify it. The index of a format
(MDS or token shards) creates the specs. `shard_folder.ShardFolder` returns the path of a spec.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.recipe.data import DataConfig, n_bytes

INDEX = "index.json"
COPIES = ".copies.json"  # record of a local shard cache: its remote and index
PART = ".part"  # suffix of a file that is being written
PACKED = ".packed"  # suffix of a compressed file until it is decompressed

_LONGEST_NAME = 240  # bytes of a file's name: file systems allow 255, and suffixes are added
# Usual names of shards, tested first: an index may have a million names.
_USUAL = re.compile(
    r"(?:[\w-]{1,80}/){0,4}shard\.[0-9]{1,9}\.(?:mds(?:\.(?:br|bz2|gz|snappy|zstd))?|tokens)",
    re.ASCII,
)
# an absolute path, or a path with the folder ".."
_NOT_WITHIN = re.compile(r"^/|(?:^|/)\.\.(?:/|$)")
# empty parts, "." and a slash at the end; control characters and surrogates; names of our own files
_NO_NAME = re.compile(
    rf"(?:^|/)\.?(?:/|$)|[\x00-\x1f\x7f\ud800-\udfff]"
    rf"|(?:^|/)(?:{re.escape(INDEX)}|{re.escape(COPIES)})$|(?:{PART}|{PACKED})$"
)


def wrong_name(name: str) -> str | None:
    """Return why a name is not valid for a file of a dataset; None if it is valid."""
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
    """Return the numbers of the first two equal names; None if all differ; "" is no name."""
    # a set is faster than the loop, and nearly all indices have distinct names
    n_names = len(names) - names.count("")
    if len(set(names) - {""}) == n_names:
        return None
    first_numbers: dict[str, int] = {}
    for n, name in enumerate(names):
        if not name:
            continue
        if name in first_numbers:
            return first_numbers[name], n
        first_numbers[name] = n
    return None


def _cut(name: str) -> str:
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}…"


@dataclass(frozen=True)
class CompressedFile:
    """Compressed file.

    Attributes:
        name: path within the dataset's folder.
        n_bytes: compressed size; None: unknown.
        hashes: (algorithm, hex digest) pairs of the compressed bytes.
        compression: zstd, gz:9 … (`codecs`).
    """

    name: str
    n_bytes: int | None
    hashes: tuple[tuple[str, str], ...]
    compression: str


@dataclass(frozen=True)
class FileSpec:
    """File of a dataset, decompressed.

    Attributes:
        name: path within the dataset's folder.
        n_bytes: size; None: unknown.
        hashes: (algorithm, hex digest) pairs of the content.
        packed: the compressed file in the store; None: it is not compressed.
    """

    name: str
    n_bytes: int | None
    hashes: tuple[tuple[str, str], ...] = ()
    packed: CompressedFile | None = None


@dataclass(frozen=True)
class FetchOptions:
    """Options of downloads and of the local shard cache; `DataConfig` documents the fields."""

    cache_folder: str = "~/.cache/llmfoundry"
    cache_limit: int | None = None
    """Bytes."""
    prefetch: int = 2 * 10**9
    """Bytes to download ahead, per `ShardFolder` and process."""
    retry: int = 5
    timeout: float = 60.0
    """Seconds."""
    requests_per_second: float | None = None
    validate_hash: bool = True
    storage_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: DataConfig) -> FetchOptions:
        """Return the options of a recipe's `data` section."""
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
    """Format a size in the form of data.cache_limit, rounded up: 1234567 is 1.24mb."""
    for unit, factor in (("gb", 10**9), ("mb", 10**6), ("kb", 10**3)):
        if size >= factor:
            hundredths = -(-int(size) * 100 // factor)
            return f"{hundredths / 100:.10g}{unit}"
    return f"{int(size)}b"
