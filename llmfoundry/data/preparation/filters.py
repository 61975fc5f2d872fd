"""Filters and deduplication of documents.

Entry points: `build_filter` decides by the text of a document, `deduplicate` by other documents.
Both only decide: documents are never changed. The published rules are classes of datatrove with
spaCy's English tokenizer, which needs no model and no network, so they decide as a datatrove
pipeline does.

A repeat equals an earlier document (exact) or nearly equals it (minhash). The preparation calls
`signatures` for each task, then `deduplicate` once, and reads its tasks again with `read_drops`.
Each task writes the keys of its documents sorted, so that a range of keys is a contiguous part of
every file. Ranges are searched independently, each with bounded memory, and the result does not
depend on the number of tasks and workers. Documents that share a key form a group, transitively.
The first document of each group in corpus order is retained.

MinHash has the parameters of FineWeb (arXiv:2406.17557): sets of 5 consecutive words, 14 bands of 8
hashes. Two texts with Jaccard similarity s share a band with probability 1 - (1 - s**8)**14: 0.05
at s = 0.5, 0.56 at 0.7, 0.92 at 0.8, 0.9995 at 0.9. The hashes are the scheme "affine32" of
datasketch, which the library guarantees not to change, so that every version and machine finds the
same duplicates. (rensa is many times faster, but its hashes changed from 0.4 to 0.5.)
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry.data.preparation.engines import Run
from llmfoundry.errors import import_optional
from llmfoundry.files import atomic_file
from llmfoundry.recipe.data import FilterConfig

Filter = Callable[[str], str | None]

# Class of datatrove by key. The fastest come first, because the first reason decides: 2.8, 1.4, 0.6
# and 0.5 MB/s of English technical text on one core.
_PUBLISHED = {
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
    "gopher_quality": "GopherQualityFilter",
    "gopher_repetition": "GopherRepetitionFilter",
}
N_BANDS = 14
_BAND_ROWS = 8  # hashes in a band
_SHINGLE_WORDS = 5  # in a shingle
_BLOCK = 1024  # shingles hashed at a time: 1024 x 112 x 4 bytes fit in the cache of a core
_SEED = 1
# Number of keys of a document and dtype of their records, by method. A key has 64 bits. An exact
# one has 64 more (`rest`), because with 1e9 documents, two different ones share 64 random bits with
# a probability of 3 %. `row` is the number of the document in its task.
_FORMATS = {
    "exact": (1, np.dtype([("key", "<u8"), ("rest", "<u8"), ("row", "<u4")])),
    "minhash": (N_BANDS, np.dtype([("key", "<u8"), ("row", "<u4")])),
}
_SEARCH_BYTES = 64  # memory of a search per document in its range
_CHUNK = 1 << 20  # pairs joined at a time
# Letters and digits. Each character is a word in scripts without spaces between words: Thai to
# Myanmar, Khmer, kana, Han.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
    r"|[^\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+"
)
_ASCII_WORD = re.compile(r"[a-z0-9]+")  # the same for ASCII text, in half the time
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word's hash is lost


def build_filter(config: FilterConfig) -> Filter:
    """Return a function that returns why a text is dropped, or None if it is retained.

    The reason begins with the key of the rule. The function is not picklable; the config is.
    """
    rules = [*_length_rules(config), *_published_rules(config)]

    def first_reason(text: str) -> str | None:
        for rule in rules:
            reason = rule(text)
            if reason is not None:
                return reason
        return None

    return first_reason


def _length_rules(config: FilterConfig) -> Iterator[Filter]:
    if config.min_chars is not None or config.max_chars is not None:
        yield _between("chars", len, config.min_chars, config.max_chars)
    if config.min_words is not None or config.max_words is not None:
        yield _between("words", lambda text: len(text.split()), config.min_words, config.max_words)


def _between(unit: str, count: Callable[[str], int], least: int | None, most: int | None) -> Filter:
    def rule(text: str) -> str | None:
        n = count(text)
        if least is not None and n < least:
            return f"min_{unit}"
        return f"max_{unit}" if most is not None and n > most else None

    return rule


def _published_rules(config: FilterConfig) -> Iterator[Filter]:
    chosen = [key for key in _PUBLISHED if getattr(config, key)]
    if not chosen:
        return
    # spacy is imported here to fail early: datatrove imports it at the first document
    modules = ("spacy", "datatrove.pipeline.filters", "datatrove.data")
    where = f"data.filter.{chosen[0]}:"
    _, filters, data = (import_optional(module, where, extra="filters") for module in modules)
    for key in chosen:
        yield _published(key, getattr(filters, _PUBLISHED[key])(), data.Document)


def _published(key: str, rules: Any, document: Any) -> Filter:
    def rule(text: str) -> str | None:
        # a new document each time, because the class of C4 modifies it
        result = rules.filter(document(text=text, id=""))
        is_retained, why = result if isinstance(result, tuple) else (result, "")
        return None if is_retained else f"{key}: {why}"

    return rule


@dataclass(frozen=True)
class KeyRange:
    """Range number `part` of `n_parts` equal ranges of the documents' key number `key`."""

    key: int
    part: int
    n_parts: int


def signatures(texts: Iterable[str], target: Path, *, method: str) -> int:
    """Write the sorted keys of a task's documents: 20 bytes each for exact, 168 for minhash.

    Args:
        texts: the documents, in the order in which they will be read again.
        target: the file; written atomically.
        method: exact or minhash.

    Returns:
        The number of documents.
    """
    # keys of all documents
    hasher, data, n = _HASHERS[method](), bytearray(), 0
    for text in texts:
        data += hasher(text)
        n += 1

    # records (n_keys, n), each row sorted by key
    n_keys, dtype = _FORMATS[method]
    records = np.empty((n_keys, n), dtype)
    words = _key_fields(records)
    keys = np.frombuffer(data, "<u8").reshape(n, n_keys, len(words))
    records["row"] = np.arange(n)
    for number, word in enumerate(words):
        records[word] = keys[:, :, number].T
    for of_key in records:
        of_key[:] = of_key[_order(of_key)]
    _save(target, records)
    return n


def deduplicate(folder: Path, sources: Sequence[Path], run: Run) -> list[Path]:
    """Find repeated documents; return a file for `read_drops` for each task.

    Args:
        folder: output folder; after a kill, finished files there are used.
        sources: files of `signatures`, one per task, in corpus order.
        run: calls a function on many tasks with any number of workers.
    """
    targets = [folder / f"drops-{n:05}.npy" for n in range(len(sources))]
    if all(target.exists() for target in targets):
        return targets

    # pairs of documents that share a key, for each range of keys
    tasks = searches(sources)
    pairs = [folder / f"repeats-{task.key:02}-{task.part:05}.npy" for task in tasks]
    missing = [(task, file) for task, file in zip(tasks, pairs, strict=True) if not file.exists()]
    for _ in run(partial(_find, list(sources)), missing):
        pass

    # groups
    mark_duplicates(sources, pairs, targets)
    for file in pairs:
        file.unlink()
    return targets


def searches(sources: Sequence[Path], *, max_bytes: int = 1 << 30) -> list[KeyRange]:
    """Return ranges for `find_repeats` that need about `max_bytes` of memory each."""
    shapes = [_open(source).shape for source in sources]
    n_documents = sum(shape[1] for shape in shapes)
    n_parts = max(1, -(-n_documents * _SEARCH_BYTES // max_bytes))
    n_keys = shapes[0][0] if shapes else 0
    return [KeyRange(key, part, n_parts) for key in range(n_keys) for part in range(n_parts)]


def find_repeats(sources: Sequence[Path], target: Path, *, search: KeyRange) -> None:
    """Write pairs (first, other), (n, 2) int64, of documents that share a key.

    If several documents share a key, each is paired with the first of them.
    """
    # the records of all tasks in the range, with the number of each document in the corpus
    ranges, documents, n_before = [], [], 0
    for source in sources:
        records = _open(source)
        in_range = _in_range(records[search.key], search)
        ranges.append(in_range)
        documents.append(n_before + in_range["row"].astype(np.int64))
        n_before += records.shape[1]

    # sort by key; the sort is stable, so equal keys stay in corpus order
    merged, numbers = np.concatenate(ranges), np.concatenate(documents)
    order = _order(merged)
    merged, numbers = merged[order], numbers[order]

    # pair each repeated key with the first record of that key
    equal = np.ones(max(0, len(merged) - 1), bool)
    for word in _key_fields(merged):
        equal &= merged[word][1:] == merged[word][:-1]
    others = np.flatnonzero(equal) + 1
    starts = np.flatnonzero(np.concatenate([[True], ~equal]))  # first record of each key
    firsts = starts[np.searchsorted(starts, others, side="right") - 1]
    _save(target, np.stack([numbers[firsts], numbers[others]], axis=1))


def mark_duplicates(sources: Sequence[Path], pairs: Sequence[Path], targets: Sequence[Path]) -> int:
    """Join all pairs to groups, and write for each task which of its documents are dropped.

    This needs 8 bytes of memory per document of the corpus.

    Returns:
        The number of dropped documents.
    """
    # union-find: each document points to an earlier one of its group, the first to itself
    sizes = [_open(source).shape[1] for source in sources]
    earlier = np.arange(sum(sizes))
    for file in pairs:
        file_pairs = _open(file)
        for start in range(0, len(file_pairs), _CHUNK):
            _join(earlier, np.array(file_pairs[start : start + _CHUNK]))

    # all but the first of each group are dropped
    dropped = earlier != np.arange(len(earlier))
    ends = np.cumsum(sizes)
    for target, end, size in zip(targets, ends, sizes, strict=True):
        _save(target, dropped[end - size : end])
    return int(dropped.sum())


def read_drops(file: Path) -> np.ndarray:
    """Return which documents of a task are dropped, (n,) bool, in the order of `signatures`."""
    drops: np.ndarray = np.load(file)
    return drops


def _find(sources: Sequence[Path], task: tuple[KeyRange, Path]) -> None:
    search, target = task
    find_repeats(sources, target, search=search)


def _exact_keys() -> Callable[[str], bytes]:
    return lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest()


def _key_fields(records: np.ndarray) -> tuple[str, ...]:
    assert records.dtype.names is not None
    return records.dtype.names[:-1]  # all but the row


def _order(records: np.ndarray) -> np.ndarray:
    return np.lexsort([records[word] for word in reversed(_key_fields(records))])


def _in_range(records: np.ndarray, search: KeyRange) -> np.ndarray:
    """Return the records in a range of keys; only these, and a few for the bisection, are read."""
    column = records["key"]

    def start(part: int) -> int:
        least_key = part * 2**64 // search.n_parts
        return bisect_left(range(len(column)), least_key, key=lambda n: int(column[n]))

    return np.array(records[start(search.part) : start(search.part + 1)])


def _join(earlier: np.ndarray, pairs: np.ndarray) -> None:
    """Unite the groups of all pairs at once.

    `earlier` always points to a smaller number, so there are no cycles. If a group is to be joined
    to several groups, it is joined to the smallest one, and the others follow in the next round.
    """
    while len(pairs):
        tops = _tops(earlier, pairs)
        earlier[pairs] = tops  # path compression
        pairs = np.sort(tops[tops[:, 0] != tops[:, 1]], axis=1)
        np.minimum.at(earlier, pairs[:, 1], pairs[:, 0])


def _tops(earlier: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the first document of each document's group, among the groups joined so far."""
    while True:
        above = earlier[documents]
        if np.array_equal(above, documents):
            return documents
        documents = above


def _open(file: Path) -> np.ndarray:
    opened: np.ndarray = np.load(file, mmap_mode="r")
    return opened


def _save(target: Path, array: np.ndarray) -> None:
    """Write atomically, with a temporary name that is unique over machines with shared storage."""
    with atomic_file(target) as file:
        np.save(file, array)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation, to compare near duplicates."""
    text = text.lower()
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text) or [text.strip()]


def minhash_keys() -> Callable[[str], bytes]:
    """Return a function from a text to its keys, 8 bytes per band."""
    where = "data.deduplicate: minhash"
    minhash = import_optional("datasketch", where, extra="filters").MinHash
    word_hash = import_optional("xxhash", where, extra="filters").xxh3_64_intdigest
    empty = minhash(N_BANDS * _BAND_ROWS, seed=_SEED, scheme="affine32", hashfunc=int)

    def keys(text: str) -> bytes:
        hashes = [word_hash(word.encode()) for word in words(text)]
        signature = _signature(empty.copy(), _shingles(np.array(hashes, np.uint64)))
        bands = signature.astype("<u4").reshape(N_BANDS, _BAND_ROWS)
        return b"".join(word_hash(band.tobytes()).to_bytes(8, "little") for band in bands)

    return keys


def _shingles(hashes: np.ndarray) -> np.ndarray:
    """Hash shingles: word hashes (n_words,) uint64 to (n_shingles,) uint32.

    A text with fewer than 5 words is one shingle.
    """
    length = min(_SHINGLE_WORDS, len(hashes))
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


_HASHERS: dict[str, Callable[[], Callable[[str], bytes]]] = {
    "exact": _exact_keys,
    "minhash": minhash_keys,
}
