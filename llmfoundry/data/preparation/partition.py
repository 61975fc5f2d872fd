"""Holdout split of a corpus, and its partition into tasks; both depend on the corpus alone.

Entry points: `make_split`, `cut_tasks`, and `training_sample` for the training of a tokenizer. A
hash of its text decides whether a document is held out. The decision does not change when the
corpus grows, and equal documents are on the same side. If there are few documents, the ends of the
longest ones are held out instead, so that held-out text comes from several documents. The partition
does not depend on the number of workers, machines or restarts. The parts in the order of their
tasks are the output.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from typing import Any

from llmfoundry.data.preparation.columns import keeps_columns
from llmfoundry.data.preparation.corpus import Corpus, Document
from llmfoundry.data.preparation.readers import Span

FEW = 4
"""Minimal number of documents with held-out text: the gauntlet compares pieces of several."""
_MOST = 0.5  # maximal held-out fraction of a document, so that training has the larger part
_PIECE = 1 << 16  # maximal characters of a sampled piece
# Bytes of a task: small enough to distribute a small corpus, large enough for few parts of a large
# one. Thousands of tasks balance a thousand workers.
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
_TASKS = 512


@dataclass(frozen=True)
class HoldoutSplit:
    """Holds out documents whose hash is below a bound, or the ends of a few documents.

    Attributes:
        bound: bound of the hash, out of 2**64.
        note: message for the user; usually empty.
        ends: hashes of documents whose end is held out; no complete document is held out then.
        tail: held-out fraction of each of these documents.
    """

    bound: int
    note: str = ""
    ends: frozenset[int] = frozenset()
    tail: float = 0.0

    @property
    def settings(self) -> int | list[float]:
        """Return everything that the split depends on."""
        return [self.tail, *sorted(self.ends)] if self.ends else self.bound

    def holds_out(self, text: str) -> bool:
        """Return whether the complete text is held out."""
        return content_hash(text) < self.bound

    def sides(self, text: str) -> list[tuple[str, bool]]:
        """Return the parts of a text, one or two, each with whether it is held out."""
        if content_hash(text) not in self.ends:
            return [(text, self.holds_out(text))]
        start = tail_start(text, self.tail)
        return [(text[:start], False), (text[start:], True)]


def content_hash(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def tail_start(text: str, fraction: float) -> int:
    """Return the start of the last `fraction` of a text, at a nearby line or word if possible.

    Both parts contain more than white space if the text has at least two other characters.
    """
    length = max(1, round(len(text) * fraction))
    first, last = len(text) - len(text.lstrip()), len(text.rstrip()) - 1
    exact = min(max(first + 1, len(text) - length), last)
    earliest = max(first + 1, exact - length)  # at most twice the fraction is held out
    for separator in ("\n", " "):
        start = text.rfind(separator, earliest, exact) + 1
        if start:
            return start
    return exact


def make_split(corpus: Corpus) -> HoldoutSplit:
    """Return the split for data.validation_fraction.

    Documents are read until FEW are held out and another is not. If the corpus has too few
    documents, the ends of its longest documents are held out, with the same fraction of all text.
    If it has one document that cannot be split, nothing is held out.
    """
    fraction = corpus.config.validation_fraction
    bound = int(fraction * 2**64)
    if not bound:
        return HoldoutSplit(0)
    few = _FewDocuments()
    below: set[int] = set()
    for document in corpus:
        if corpus.drops(document) is not None:
            continue
        value = content_hash(document.text)
        few.add(document, value)
        if value < bound:
            below.add(value)
        if len(below) >= FEW and few.largest >= bound:
            return HoldoutSplit(bound)
    if not few.n:
        return HoldoutSplit(bound)
    # rows with several columns cannot be split
    if few.longest and not keeps_columns(corpus.config.text_column):
        return few.split_ends(fraction)
    return few.split_whole(fraction, bound)


@dataclass
class _FewDocuments:
    """Statistics of the documents read so far, in case the corpus has few.

    Attributes:
        n: number of documents.
        size: total characters.
        smallest: smallest hash, and location of its document.
        largest: largest hash.
        longest: the longest documents that can be split, by hash: length, number of occurrences,
            location of the first.
    """

    n: int = 0
    size: int = 0
    smallest: tuple[int, str] = (2**64, "")
    largest: int = -1
    longest: dict[int, tuple[int, int, str]] = field(default_factory=dict)

    def add(self, document: Document, value: int) -> None:
        """Count a document of this hash."""
        length = len(document.text)
        self.n, self.size = self.n + 1, self.size + length
        self.smallest = min(self.smallest, (value, document.where))
        self.largest = max(self.largest, value)
        if value in self.longest:
            length, times, where = self.longest[value]
            self.longest[value] = (length, times + 1, where)
        elif len(document.text.strip()) > 1:
            self.longest[value] = (length, 1, document.where)
            if len(self.longest) > FEW:
                del self.longest[min(self.longest, key=lambda v: (self.longest[v][0], v))]

    def split_ends(self, fraction: float) -> HoldoutSplit:
        """Return the split that holds out the ends of the longest documents."""
        longest_size = sum(length * times for length, times, _ in self.longest.values())
        tail = min(max(_MOST, fraction), fraction * self.size / longest_size)
        if self.smallest[0] == self.largest:
            note = f"{self.smallest[1]} is the only document, so its last {fraction:g} was held out"
        else:
            names = ", ".join(where for _, _, where in self.longest.values())
            note = (
                f"{self.n:,} documents are few, so of the longest the last {tail:.2g} was held out:"
                f" {names}"
            )
        return HoldoutSplit(0, note, frozenset(self.longest), tail)

    def split_whole(self, fraction: float, bound: int) -> HoldoutSplit:
        """Return the split that holds out documents below the bound, or the one of least hash."""
        value, where = self.smallest
        if value == self.largest:
            return HoldoutSplit(
                0, f"{where} is the only document, and no end of it could be held out"
            )
        if value < bound:
            return HoldoutSplit(bound)
        note = f"no document fell into the held-out {fraction:g}, so one was taken: {where}"
        return HoldoutSplit(value + 1, note)


def training_sample(corpus: Corpus, split: HoldoutSplit, n_bytes: int) -> list[str]:
    """Sample at most `n_bytes` of training text, uniformly over the corpus, in corpus order.

    Documents are split into pieces, and the pieces with the smallest hashes are retained. This
    needs one pass and memory for the sample only, and always selects the same pieces.
    """
    length = max(1, min(_PIECE, n_bytes // 64))
    sample: list[tuple[int, int, str]] = []  # heap, largest hash first: (-hash, number, piece)
    size = number = 0
    for document in corpus:
        if corpus.drops(document) is not None:
            continue
        text = "".join(text for text, held_out in split.sides(document.text) if not held_out)
        for start in range(0, len(text), length):
            piece = text[start : start + length]
            heapq.heappush(sample, (-content_hash(f"{number} {piece}"), number, piece))
            size, number = size + len(piece.encode()), number + 1
            while size > n_bytes:
                size -= len(heapq.heappop(sample)[2].encode())
    return [piece for _, _, piece in sorted(sample, key=lambda entry: entry[1])]


@dataclass(frozen=True)
class PartitionTask:
    """Consecutive spans of a corpus.

    Attributes:
        number: number of the task, in corpus order.
        spans: spans to read, in order.
    """

    number: int
    spans: tuple[Span, ...]

    @property
    def part(self) -> str:
        """Return the name of the part's folder in the folder of a stream."""
        return f"part-{self.number:05}"

    @property
    def n_bytes(self) -> int | None:
        """Return the size of the input; None if it is unknown."""
        sizes = [span.n_bytes for span in self.spans if span.n_bytes is not None]
        return sum(sizes) if len(sizes) == len(self.spans) else None

    def fingerprint(self, corpus: Corpus, **settings: Any) -> str:
        """Return a hash of the input files in their present state and of the settings."""
        spans = [
            [*(corpus.files[span.source].facts if corpus.files else []), *astuple(span)]
            for span in self.spans
        ]
        facts = json.dumps([spans, settings], sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def cut_tasks(corpus: Corpus) -> list[PartitionTask]:
    """Partition a corpus into tasks, in order."""
    total = sum(file.size for file in corpus.files)
    # a power of two, so that most tasks do not change when a file is corrected
    longest = min(max(_SMALLEST, 1 << (total // _TASKS).bit_length()), _LARGEST)
    return [
        PartitionTask(number, tuple(spans))
        for number, spans in enumerate(_runs(corpus.spans(longest), longest))
    ]


def _runs(spans: Iterable[Span], longest: int) -> Iterator[list[Span]]:
    """Group consecutive spans up to `longest` bytes; a span of unknown size is a group."""
    run: list[Span] = []
    size = 0
    for span in spans:
        span_size = longest if span.n_bytes is None else span.n_bytes
        if run and size + span_size > longest:
            yield run
            run, size = [], 0
        run.append(span)
        size += span_size
    if run:
        yield run
