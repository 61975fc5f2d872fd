"""Reader of a shard folder's index, in any format.

Entry points: `open_shards`, `read_index` and `with_sample`. `builders/data.py` calls them once per
run, and the preparation if its input is shards. The one idea: the index identifies a dataset.
Reading it therefore also checks that the local shard cache belongs to it. The content of shards
without hashes, which the index does not identify, is sampled.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from llmfoundry.data.file_spec import INDEX
from llmfoundry.data.mds.index import MDSIndex
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder, some_of
from llmfoundry.data.store_address import without_secrets
from llmfoundry.data.token_shards import FORMAT, StreamIndex
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_file
from llmfoundry.recipe.source import SourceConfig

TWINS = {"val": "validation", "validation": "val"}
"""Names of the folder of validation shards: in LLM Foundry, and in the preparation here."""
Index = MDSIndex | StreamIndex
IndexOf = TypeVar("IndexOf", bound=Index)

_WORTH_KEEPING = 1 << 22  # bytes of a JSON index that is cached in binary form
_PLACES, _SAMPLED = 64, 1 << 14  # sampled positions of a shard, and bytes at each


def open_shards(config: SourceConfig, options: FetchOptions) -> ShardFolder:
    """Return the folder of a source of shards, including its split."""
    split = config.split

    def with_split(folder: str | None) -> str | None:
        return folder if folder is None or split is None else f"{folder.rstrip('/')}/{split}"

    return ShardFolder.open(with_split(config.remote), with_split(config.local), options)


def read_index(folder: ShardFolder, cache_folder: str | None = None) -> Index:
    """Read the index of a folder of shards.

    Args:
        folder: the folder.
        cache_folder: folder for the binary form of a large MDS index; None: it is not cached. With
            half a million shards, JSON takes seconds, the binary form a tenth of a second.

    Raises:
        UserError: the index is missing or damaged, or the local shard cache has other data.
    """
    source = f"{without_secrets(folder.url)}/{INDEX}"

    def parse(data: bytes) -> Index:
        if f'"{FORMAT}"'.encode() in data:
            return StreamIndex.from_bytes(data, source=source)
        if cache_folder is None or len(data) < _WORTH_KEEPING:
            return MDSIndex.from_bytes(data, source=source)
        return _cached_index(data, Path(cache_folder).expanduser() / "indices", source)

    return folder.read_index(parse)


def _cached_index(data: bytes, folder: Path, source: str) -> MDSIndex:
    """Return a parsed MDS index, from its binary form in `folder` if it is there."""
    path = folder / f"{hashlib.sha256(data).hexdigest()[:32]}.npz"
    with contextlib.suppress(OSError, UserError):  # missing or incomplete
        return MDSIndex.load(path)
    index = MDSIndex.from_bytes(data, source=source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            index.save(file)
    except OSError as error:
        raise UserError(
            f"data.cache_folder: cannot write {path}: {error.strerror or error}; free space there"
            " or choose another folder"
        ) from error
    return index


def with_sample(folder: ShardFolder, index: IndexOf) -> IndexOf:
    """Add a hash of some content to the fingerprint of an index with shards without hashes.

    Otherwise, shards that were rewritten with the same sizes would look unchanged to a checkpoint.
    1 MB of the first, the middle and the last such shard is read, at 64 positions each.

    Raises:
        UserError: a shard cannot be read.
    """
    sampled_shards = some_of(index.unhashed)
    if not sampled_shards:
        return index
    state = hashlib.blake2b(digest_size=16)
    for n in sampled_shards:
        with folder.pin(index.spec(n)) as path, path.open("rb") as file:
            last = max(0, path.stat().st_size - _SAMPLED)
            for offset in np.unique(np.linspace(0, last, _PLACES).astype(np.int64)).tolist():
                file.seek(offset)
                state.update(file.read(_SAMPLED))
    return replace(index, sample=state.hexdigest())
