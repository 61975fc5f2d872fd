"""Hex digests by the names that mosaicml-streaming writes into an index.

The shard cache checks files with them and `MDSWriter` writes them. hashlib's algorithms are always
there; xxhash's (`xxh3_64` …), some ten times faster than sha1, need their package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from llmfoundry.errors import UserError, import_optional

# shake_* has no digest of a fixed length, so an index cannot name it.
HASHLIB = tuple(sorted(n for n in hashlib.algorithms_guaranteed if not n.startswith("shake_")))
XXHASH = ("xxh128", "xxh32", "xxh3_128", "xxh3_64", "xxh64")


def digest(algorithm: str, chunks: Iterable[bytes | memoryview]) -> str:
    """The hex digest of the chunks one after another.

    Raises:
        UserError: no such algorithm, or its package is not installed.
    """
    state = _new(algorithm)
    for chunk in chunks:
        state.update(chunk)
    return str(state.hexdigest())


def check_algorithm(algorithm: str) -> None:
    """Whether `digest` can do it.

    Raises:
        UserError: it cannot.
    """
    _new(algorithm)


def _new(algorithm: str) -> Any:
    if algorithm in HASHLIB:
        # Not a matter of security, and so allowed where md5 is otherwise forbidden.
        return hashlib.new(algorithm, usedforsecurity=False)
    if algorithm not in XXHASH:
        raise UserError(
            f"hash {algorithm!r}: no such algorithm; write one of {', '.join((*HASHLIB, *XXHASH))}"
        )
    library = import_optional("xxhash", f"hash {algorithm}:", package="xxhash")
    return getattr(library, algorithm)()
