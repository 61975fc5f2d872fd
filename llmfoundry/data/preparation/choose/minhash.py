"""MinHash keys of a text: two texts that share one are near duplicates; called by `deduplicate`.

The parameters are FineWeb's (arXiv:2406.17557): sets of 5 consecutive words, 14 bands of 8 hashes.
Two texts whose sets have the Jaccard similarity s share a band with the probability
1 - (1 - s**8)**14: 0.05 at s = 0.5, 0.56 at 0.7, 0.92 at 0.8, 0.9995 at 0.9.

The hashes are datasketch's "affine32", a scheme that the library keeps bit for bit by its name, so
that every version and machine finds the same duplicates. (rensa hashes many times faster, but
changed its hashes from 0.4 to 0.5.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from llmfoundry.errors import import_optional

N_BANDS = 14
_ROWS = 8  # hashes in a band
_WORDS = 5  # in a shingle
_BLOCK = 1024  # shingles hashed at a time: 1024 x 112 x 4 bytes stay in a core's cache
_SEED = 1

# Letters and digits; each sign alone in scripts that put no spaces between words: Thai to Myanmar,
# Khmer, kana, Han.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
    r"|[^\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+"
)
_ASCII_WORD = re.compile(r"[a-z0-9]+")  # what the above finds in ASCII, in half the time
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word's hash is lost


def words(text: str) -> list[str]:
    """What near duplicates are compared by: words in lower case, without punctuation."""
    text = text.lower()
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text) or [text.strip()]


def minhash_keys() -> Callable[[str], bytes]:
    """A function from a text to its keys: one of 8 bytes for each band.

    Raises:
        UserError: a library is missing.
    """
    where = "data.deduplicate: minhash"
    minhash = import_optional("datasketch", where, extra="filters").MinHash
    word_hash = import_optional("xxhash", where, extra="filters").xxh3_64_intdigest
    empty = minhash(N_BANDS * _ROWS, seed=_SEED, scheme="affine32", hashfunc=int)

    def keys(text: str) -> bytes:
        hashes = [word_hash(word.encode()) for word in words(text)]
        signature = _signature(empty.copy(), _shingles(np.array(hashes, np.uint64)))
        bands = signature.astype("<u4").reshape(N_BANDS, _ROWS)
        return b"".join(word_hash(band.tobytes()).to_bytes(8, "little") for band in bands)

    return keys


def _shingles(hashes: np.ndarray) -> np.ndarray:
    """(n_words,) uint64 to (n_shingles,) uint32; a text of fewer than 5 words is one shingle."""
    length = min(_WORDS, len(hashes))
    n = len(hashes) - length + 1
    joined = np.full(n, length, np.uint64)
    for k in range(length):
        joined = joined * _MULTIPLIER + hashes[k : k + n]
    return (joined >> np.uint64(32)).astype(np.uint32)


def _signature(minhash: Any, shingles: np.ndarray) -> np.ndarray:
    for start in range(0, len(shingles), _BLOCK):
        minhash.update_batch(shingles[start : start + _BLOCK].tolist())
    signature: np.ndarray = minhash.digest()
    return signature
