"""Which documents stay: `build_filter` by what one says, `deduplicate` by what others say.

A filter only decides, so that a document is in the output exactly as it was read, or not at all.
The published rules are datatrove's own classes, with the words of spaCy's English tokenizer, which
needs no model and no network; its decisions are those of a datatrove pipeline.

Repeats are equal to an earlier document (exact), or nearly so (minhash). The preparation calls
`signatures` for each of its tasks, then `deduplicate` once, then reads its tasks again with
`read_drops`. Each task writes its documents' keys sorted, so that a range of keys is a contiguous
part of every file; ranges are searched independently, each in bounded memory, and any number of
tasks and workers finds the same repeats. Documents that share a key are one group, also through
others, and of each group the first in corpus order stays.

MinHash has FineWeb's parameters (arXiv:2406.17557): sets of 5 consecutive words, 14 bands of 8
hashes. Two texts whose sets have the Jaccard similarity s share a band with the probability
1 - (1 - s**8)**14: 0.05 at s = 0.5, 0.56 at 0.7, 0.92 at 0.8, 0.9995 at 0.9. The hashes are
datasketch's "affine32", a scheme that the library keeps bit for bit by its name, so that every
version and machine finds the same duplicates. (rensa hashes many times faster, but changed its
hashes from 0.4 to 0.5.)
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

# By their key: datatrove's class. Cheap ones first, since one reason is enough: 2.8, 1.4, 0.6 and
# 0.5 MB of English technical text a second of one core.
_PUBLISHED = {
    "c4": "C4QualityFilter",
    "fineweb": "FineWebQualityFilter",
    "gopher_quality": "GopherQualityFilter",
    "gopher_repetition": "GopherRepetitionFilter",
}
N_BANDS = 14
_BAND_ROWS = 8  # hashes in a band
_SHINGLE_WORDS = 5  # in a shingle
_BLOCK = 1024  # shingles hashed at a time: 1024 x 112 x 4 bytes stay in a core's cache
_SEED = 1
# A key is 64 bits, and of exact repeats 64 more as `rest`: two of 1e9 different documents share 64
# random bits with a probability of 3 %. `row` is the document's place in its task. By method:
# how many keys a document has, and the record of each.
_FORMATS = {
    "exact": (1, np.dtype([("key", "<u8"), ("rest", "<u8"), ("row", "<u4")])),
    "minhash": (N_BANDS, np.dtype([("key", "<u8"), ("row", "<u4")])),
}
_SEARCH_BYTES = 64  # memory that a search takes for each document in its range
_CHUNK = 1 << 20  # pairs joined at a time
# Letters and digits; each sign alone in scripts that put no spaces between words: Thai to Myanmar,
# Khmer, kana, Han.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
    r"|[^\W_\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+"
)
_ASCII_WORD = re.compile(r"[a-z0-9]+")  # what the above finds in ASCII, in half the time
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no bit of a word's hash is lost


def build_filter(config: FilterConfig) -> Filter:
    """The reason why a text is left out, or None: it stays.

    The reason begins with the key of the rule. What is returned is not picklable; the config is.
    """
    rules = [*_own_rules(config), *_published_rules(config)]

    def reason(text: str) -> str | None:
        return next((found for rule in rules if (found := rule(text)) is not None), None)

    return reason


def _own_rules(config: FilterConfig) -> Iterator[Filter]:
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
    # datatrove imports spacy at the first document only
    modules = ("spacy", "datatrove.pipeline.filters", "datatrove.data")
    where = f"data.filter.{chosen[0]}:"
    _, filters, data = (import_optional(module, where, extra="filters") for module in modules)
    for key in chosen:
        yield _published(key, getattr(filters, _PUBLISHED[key])(), data.Document)


def _published(key: str, rules: Any, document: Any) -> Filter:
    def rule(text: str) -> str | None:
        # A document of its own: C4's class writes its good lines into it.
        result = rules.filter(document(text=text, id=""))
        kept, why = result if isinstance(result, tuple) else (result, "")
        return None if kept else f"{key}: {why}"

    return rule


@dataclass(frozen=True)
class KeyRange:
    """One range of one of the documents' keys, of `n_parts` equal ranges."""

    key: int
    part: int
    n_parts: int


def signatures(texts: Iterable[str], target: Path, *, method: str) -> int:
    """Write the keys of a task's documents: 20 bytes each for exact, 168 for minhash.

    Args:
        texts: the documents in the order in which they will be read again.
        target: the file; written atomically.
        method: exact (the texts are equal, every character) or minhash.

    Returns:
        How many documents there were.
    """
    hasher, data, n = _HASHERS[method](), bytearray(), 0
    for text in texts:
        data += hasher(text)
        n += 1
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
    """For each of the files that `signatures` wrote, in corpus order, one for `read_drops`.

    Args:
        folder: where to write; after a kill, what is finished there is used.
        sources: the files, one a task.
        run: calls a function on each of many tasks, on any number of workers.
    """
    targets = [folder / f"drops-{n:05}.npy" for n in range(len(sources))]
    if all(target.exists() for target in targets):
        return targets
    tasks = searches(sources)
    pairs = [folder / f"repeats-{task.key:02}-{task.part:05}.npy" for task in tasks]
    left = [both for both in zip(tasks, pairs, strict=True) if not both[1].exists()]
    for _ in run(partial(_find, list(sources)), left):
        pass
    mark_duplicates(sources, pairs, targets)
    for file in pairs:
        file.unlink()
    return targets


def searches(sources: Sequence[Path], *, max_bytes: int = 1 << 30) -> list[KeyRange]:
    """The tasks of `find_repeats` that take about `max_bytes` of memory each."""
    shapes = [_open(source).shape for source in sources]
    n_documents = sum(shape[1] for shape in shapes)
    n_parts = max(1, -(-n_documents * _SEARCH_BYTES // max_bytes))
    n_keys = shapes[0][0] if shapes else 0
    return [KeyRange(key, part, n_parts) for key in range(n_keys) for part in range(n_parts)]


def find_repeats(sources: Sequence[Path], target: Path, *, search: KeyRange) -> None:
    """Write pairs (first, other), (n, 2) int64: documents of the corpus that share a key.

    Of several with one key, each other is paired with the first.
    """
    ranges, documents, before = [], [], 0
    for source in sources:
        records = _open(source)
        found = _in_range(records[search.key], search)
        ranges.append(found)
        documents.append(before + found["row"].astype(np.int64))
        before += records.shape[1]
    merged, numbers = np.concatenate(ranges), np.concatenate(documents)
    order = _order(merged)  # stable: equal keys stay in corpus order
    merged, numbers = merged[order], numbers[order]
    equal = np.ones(max(0, len(merged) - 1), bool)
    for word in _key_fields(merged):
        equal &= merged[word][1:] == merged[word][:-1]
    others = np.flatnonzero(equal) + 1
    starts = np.flatnonzero(np.concatenate([[True], ~equal]))  # where each key begins
    firsts = starts[np.searchsorted(starts, others, side="right") - 1]
    _save(target, np.stack([numbers[firsts], numbers[others]], axis=1))


def mark_duplicates(sources: Sequence[Path], pairs: Sequence[Path], targets: Sequence[Path]) -> int:
    """Join all pairs to groups, and write for each source which of its documents are left out.

    Takes 8 bytes of memory for each document of the corpus.

    Returns:
        How many are left out.
    """
    sizes = [_open(source).shape[1] for source in sources]
    earlier = np.arange(sum(sizes))  # of each document one of its group; the first: itself
    for file in pairs:
        found = _open(file)
        for start in range(0, len(found), _CHUNK):
            _join(earlier, np.array(found[start : start + _CHUNK]))
    dropped = earlier != np.arange(len(earlier))
    ends = np.cumsum(sizes)
    for target, end, size in zip(targets, ends, sizes, strict=True):
        _save(target, dropped[end - size : end])
    return int(dropped.sum())


def read_drops(file: Path) -> np.ndarray:
    """Of each document that `signatures` saw in this task whether it is left out, (n,) bool."""
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
    """The records of the search's range of keys; reads only those, and a few to find them."""
    column = records["key"]

    def place(part: int) -> int:
        low = part * 2**64 // search.n_parts
        return bisect_left(range(len(column)), low, key=lambda at: int(column[at]))

    return np.array(records[place(search.part) : place(search.part + 1)])


def _join(earlier: np.ndarray, pairs: np.ndarray) -> None:
    """Unite the groups of each pair; `earlier` always points to a smaller number, so never round.

    All pairs at once: of several groups that one is to be joined to, it takes the smallest, and the
    rest are joined in the next turn.
    """
    while len(pairs):
        tops = _tops(earlier, pairs)
        earlier[pairs] = tops  # shorter ways for the next chunk
        pairs = np.sort(tops[tops[:, 0] != tops[:, 1]], axis=1)
        np.minimum.at(earlier, pairs[:, 1], pairs[:, 0])


def _tops(earlier: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The first document of each one's group, as far as groups are joined."""
    while True:
        above = earlier[documents]
        if np.array_equal(above, documents):
            return documents
        documents = above


def _open(file: Path) -> np.ndarray:
    opened: np.ndarray = np.load(file, mmap_mode="r")
    return opened


def _save(target: Path, array: np.ndarray) -> None:
    """Whole or not there at all; by a name that no other machine takes, on storage they share."""
    with atomic_file(target) as file:
        np.save(file, array)


def words(text: str) -> list[str]:
    """What near duplicates are compared by: words in lower case, without punctuation."""
    text = text.lower()
    return (_ASCII_WORD if text.isascii() else _WORD).findall(text) or [text.strip()]


def minhash_keys() -> Callable[[str], bytes]:
    """A function from a text to its keys: one of 8 bytes for each band."""
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
    """(n_words,) uint64 to (n_shingles,) uint32; a text of fewer than 5 words is one shingle."""
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
