"""The index of a folder of shards, whichever format they are of.

`builders/data.py` reads it once per run, the preparation where shards are its input. One idea: an
index is all that distinguishes one data set from another, so reading it also asks whose copies are
here, and what it leaves open, the content of shards without hashes, is sampled.
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
"""Names of the folder of held-out shards: LLM Foundry's, and the preparation's."""
Index = MDSIndex | StreamIndex
IndexOf = TypeVar("IndexOf", bound=Index)

_WORTH_KEEPING = 1 << 22  # bytes of JSON
_PLACES, _SAMPLED = 64, 1 << 14  # of a shard, and bytes at each


def open_shards(config: SourceConfig, options: FetchOptions) -> ShardFolder:
    """The folder of a source of shards, its split included."""
    end = config.split

    def whole(place: str | None) -> str | None:
        return place if place is None or end is None else f"{place.rstrip('/')}/{end}"

    return ShardFolder.open(whole(config.remote), whole(config.local), options)


def read_index(folder: ShardFolder, cache_folder: str | None = None) -> Index:
    """What a folder of shards holds, whichever format they are of.

    Args:
        folder: of the shards.
        cache_folder: where the binary form of a large MDS index is kept: half a million shards
            are seconds of JSON and a tenth of a second of that; None: nowhere.

    Raises:
        UserError: it has no index, a damaged one, or this machine has copies of other data.
    """
    source = f"{without_secrets(folder.url)}/{INDEX}"

    def parse(data: bytes) -> Index:
        if f'"{FORMAT}"'.encode() in data:
            return StreamIndex.from_bytes(data, source=source)
        if cache_folder is None or len(data) < _WORTH_KEEPING:
            return MDSIndex.from_bytes(data, source=source)
        return _kept_in_binary(data, Path(cache_folder).expanduser() / "indices", source)

    return folder.read_index(parse)


def _kept_in_binary(data: bytes, kept_in: Path, source: str) -> MDSIndex:
    kept = kept_in / f"{hashlib.sha256(data).hexdigest()[:32]}.npz"
    with contextlib.suppress(OSError, UserError):  # not there, or incomplete
        return MDSIndex.load(kept)
    index = MDSIndex.from_bytes(data, source=source)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(kept) as file:
            index.save(file)
    except OSError as error:
        raise UserError(
            f"data.cache_folder: cannot write {kept}: {error.strerror or error}; free space there"
            " or choose another folder"
        ) from error
    return index


def with_sample(folder: ShardFolder, index: IndexOf) -> IndexOf:
    """The index, its fingerprint taking in some content where shards have no hashes.

    Without, rows that were written anew with the same sizes would pass for those of a checkpoint.
    Of the first, the middle and the last such shard 1 MB is read, in 64 places.

    Raises:
        UserError: a shard cannot be had.
    """
    bare = some_of(index.unhashed)
    if not bare:
        return index
    state = hashlib.blake2b(digest_size=16)
    for n in bare:
        with folder.pin(index.spec(n)) as path, path.open("rb") as file:
            last = max(0, path.stat().st_size - _SAMPLED)
            for place in np.unique(np.linspace(0, last, _PLACES).astype(np.int64)).tolist():
                file.seek(place)
                state.update(file.read(_SAMPLED))
    return replace(index, sample=state.hexdigest())
