"""What is held out, and what one process prepares at a time: both depend on the corpus alone.

A document's side is decided by a hash of its text: it does not move when the corpus grows, and
equal documents are never on both sides. Of few documents the ends of the longest are held out
instead, so that there is text of several. The tokenizer's training and the preparation both ask
here. Tasks are cut so that any number of workers, machines and restarts makes the same parts, and
parts in the order of their tasks are the same output.
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
"""Documents from which held-out text comes at least: the gauntlet compares pieces of several."""
_MOST = 0.5  # of a document that is cut: more of it is trained on than measured
_PIECE = 1 << 16  # characters of the longest piece sampled whole
# Small enough to share out a small corpus, large enough that a large one has few parts: thousands
# of tasks balance a thousand workers.
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
_TASKS = 512


@dataclass(frozen=True)
class HoldoutSplit:
    """Holds out the documents whose hash lies below a bound, or the ends of a few documents.

    Attributes:
        bound: of 2**64.
        note: what to show the user about it; empty for the ordinary case.
        ends: hashes of the documents whose end is held out; then no whole document is.
        tail: share of each of these that is held out.
    """

    bound: int
    note: str = ""
    ends: frozenset[int] = frozenset()
    tail: float = 0.0

    @property
    def settings(self) -> int | list[float]:
        """All that decides the sides."""
        return [self.tail, *sorted(self.ends)] if self.ends else self.bound

    def holds_out(self, text: str) -> bool:
        """Whether this text is validation text as a whole."""
        return content_hash(text) < self.bound

    def sides(self, text: str) -> list[tuple[str, bool]]:
        """The text whole or in two, in order, and of each part whether it is held out."""
        if content_hash(text) not in self.ends:
            return [(text, self.holds_out(text))]
        start = tail_start(text, self.tail)
        return [(text[:start], False), (text[start:], True)]


def content_hash(text: str) -> int:
    """64 uniform bits of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def tail_start(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text begins, at a line or else at a word if one is near.

    There is something besides white space before and behind it in any text of two such characters.
    """
    share = max(1, round(len(text) * fraction))
    first, last = len(text) - len(text.lstrip()), len(text.rstrip()) - 1
    exact = min(max(first + 1, len(text) - share), last)
    near = max(first + 1, exact - share)  # at most twice as much is held out
    found = (text.rfind(mark, near, exact) + 1 for mark in ("\n", " "))
    return next((start for start in found if start), exact)


def make_split(corpus: Corpus) -> HoldoutSplit:
    """The split that data.validation_fraction asks for.

    Reads until some documents are held out and another is not. Where a corpus has too few for that,
    the ends of its longest are: that share of all its text. Of one document without
    an end, nothing is.
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
    if few.longest and not keeps_columns(corpus.config.text_column):  # half of a row is none
        return few.split_ends(fraction)
    return few.split_whole(fraction, bound)


@dataclass
class _FewDocuments:
    """What is known of the documents of a corpus that may have few.

    Attributes:
        n: documents.
        size: their characters.
        smallest: the least hash, and where its document is.
        largest: the greatest hash.
        longest: by their hashes, the longest documents of which an end can be held out: length,
            how often the text is there, and where first.
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
        """Hold out the ends of the longest."""
        cut = sum(length * times for length, times, _ in self.longest.values())
        tail = min(max(_MOST, fraction), fraction * self.size / cut)
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
        """Hold out documents below the bound, or the one of the smallest hash."""
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
    """At most `n_bytes` of training text, spread evenly over the corpus, in its order.

    Documents are cut into pieces, and the pieces with the smallest hashes stay: one pass, memory
    bounded by the sample, and the same choice each time.
    """
    length = max(1, min(_PIECE, n_bytes // 64))
    kept: list[tuple[int, int, str]] = []  # a heap, largest hash first: (-hash, place, piece)
    size = place = 0
    for document in corpus:
        if corpus.drops(document) is not None:
            continue
        text = "".join(text for text, held_out in split.sides(document.text) if not held_out)
        for start in range(0, len(text), length):
            piece = text[start : start + length]
            heapq.heappush(kept, (-content_hash(f"{place} {piece}"), place, piece))
            size, place = size + len(piece.encode()), place + 1
            while size > n_bytes:
                size -= len(heapq.heappop(kept)[2].encode())
    return [piece for _, _, piece in sorted(kept, key=lambda entry: entry[1])]


@dataclass(frozen=True)
class PartitionTask:
    """Consecutive spans of the corpus.

    Attributes:
        number: in the corpus' order.
        spans: what to read, in order.
    """

    number: int
    spans: tuple[Span, ...]

    @property
    def part(self) -> str:
        """The folder of what it makes, below that of its stream."""
        return f"part-{self.number:05}"

    @property
    def n_bytes(self) -> int | None:
        """Of input; None: unknown."""
        sizes = [span.n_bytes for span in self.spans if span.n_bytes is not None]
        return sum(sizes) if len(sizes) == len(self.spans) else None

    def fingerprint(self, corpus: Corpus, **settings: Any) -> str:
        """Names what it makes: its files as they are now, and the settings."""
        spans = [
            [*(corpus.files[span.source].facts if corpus.files else []), *astuple(span)]
            for span in self.spans
        ]
        facts = json.dumps([spans, settings], sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def cut_tasks(corpus: Corpus) -> list[PartitionTask]:
    """All of a corpus, in order."""
    total = sum(file.size for file in corpus.files)
    # A power of two, so that most tasks stay as they are when a file is corrected.
    longest = min(max(_SMALLEST, 1 << (total // _TASKS).bit_length()), _LARGEST)
    return [
        PartitionTask(number, tuple(spans))
        for number, spans in enumerate(_runs(corpus.spans(longest), longest))
    ]


def _runs(spans: Iterable[Span], longest: int) -> Iterator[list[Span]]:
    """Consecutive spans of `longest` bytes in all at most, or one; those of unknown size alone."""
    run: list[Span] = []
    size = 0
    for span in spans:
        more = longest if span.n_bytes is None else span.n_bytes
        if run and size + more > longest:
            yield run
            run, size = [], 0
        run.append(span)
        size += more
    if run:
        yield run
