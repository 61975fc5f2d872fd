"""Which documents of a corpus repeat an earlier one: equal (exact), or nearly so (minhash).

The preparation calls `signatures` for each of its tasks, then `deduplicate` once, then reads its
tasks again with `read_drops`. The one idea: each task writes its documents' keys sorted, so that a
range of keys is a contiguous part of every file; ranges are searched independently, each in bounded
memory, and any number of tasks and workers finds the same repeats. Documents that share a key are
one group, also through others, and of each group the first in corpus order stays.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llmfoundry.data.preparation.choose.minhash import N_BANDS, minhash_keys
from llmfoundry.data.preparation.engines import Run
from llmfoundry.files import atomic_file

# A key is 64 bits, and of exact repeats 64 more as `rest`: two of 1e9 different documents share 64
# random bits with a probability of 3 %. `row` is the document's place in its task. By method:
# how many keys a document has, and the record of each.
_FORMATS = {
    "exact": (1, np.dtype([("key", "<u8"), ("rest", "<u8"), ("row", "<u4")])),
    "minhash": (N_BANDS, np.dtype([("key", "<u8"), ("row", "<u4")])),
}
_SEARCH_BYTES = 64  # memory that a search takes for each document in its range
_CHUNK = 1 << 20  # pairs joined at a time


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

    Raises:
        UserError: a library that minhash needs is missing.
    """
    hasher, data, n = _HASHERS[method](), bytearray(), 0
    for text in texts:
        data += hasher(text)
        n += 1
    n_keys, dtype = _FORMATS[method]
    records = np.empty((n_keys, n), dtype)
    words = _words(records)
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
    for word in _words(merged):
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


_HASHERS: dict[str, Callable[[], Callable[[str], bytes]]] = {
    "exact": _exact_keys,
    "minhash": minhash_keys,
}


def _words(records: np.ndarray) -> tuple[str, ...]:
    assert records.dtype.names is not None
    return records.dtype.names[:-1]  # all but the row


def _order(records: np.ndarray) -> np.ndarray:
    return np.lexsort([records[word] for word in reversed(_words(records))])


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
