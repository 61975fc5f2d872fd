"""What is held out, and what one process prepares at a time: both depend on the corpus alone.

A document's side is decided by a hash of its text: it never moves when the corpus grows, and equal
documents are never on both sides. Of a corpus of one document the end is held out. The tokenizer's
training and the preparation both ask here. Tasks are cut so that any number of workers, machines
and restarts makes the same parts, and parts in the order of their tasks are the same output.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from llmfoundry.data.preparation.corpus import Corpus, Document
from llmfoundry.data.preparation.readers import Span
from llmfoundry.errors import UserError

_PIECE = 1 << 16  # characters of the longest piece sampled whole
# Small enough to share out a small corpus, large enough that a large one has few parts: thousands
# of tasks balance a thousand workers.
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
_TASKS = 512


@dataclass(frozen=True)
class Split:
    """Holds out the documents whose hash lies below a bound, or the end of the only one.

    Attributes:
        bound: of 2**64.
        note: what to show the user about it; empty for the ordinary case.
        tail: of the only document: its share that is held out.
    """

    bound: int
    note: str = ""
    tail: float = 0.0

    @property
    def settings(self) -> int | list[float]:
        """All that decides the sides."""
        return [self.bound, self.tail] if self.tail else self.bound

    def holds_out(self, text: str) -> bool:
        """Whether this text is validation text as a whole."""
        return content_hash(text) < self.bound

    def sides(self, text: str) -> list[tuple[str, bool]]:
        """The text whole or in two, in order, and of each part whether it is held out."""
        if not self.tail:
            return [(text, self.holds_out(text))]
        start = tail_start(text, self.tail)
        return [(text[:start], False), (text[start:], True)]


def content_hash(text: str) -> int:
    """64 uniform bits of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def tail_start(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text begins, at a line or else at a word if one is near.

    0 where nothing would stand before or behind it.
    """
    share = max(1, round(len(text) * fraction))
    exact = len(text) - share
    near = max(0, exact - share)  # at most twice as much is held out
    found = [at for mark in ("\n", " ") if (at := text.rfind(mark, near, exact) + 1)]
    for start in (*found, exact):
        if text[:start].strip() and text[start:].strip():
            return start
    return 0


def make_split(corpus: Corpus) -> Split:
    """The split that data.validation_fraction asks for.

    Reads until there is a held-out document and another. A corpus so small that there is none gives
    up the document with the smallest hash instead, and a corpus of one document its end.

    Raises:
        UserError: the corpus holds one document only, of one character.
    """
    fraction = corpus.config.validation_fraction
    bound = int(fraction * 2**64)
    if not bound:
        return Split(0)
    smallest, largest, first = 2**64, -1, None
    for document in corpus:
        if corpus.drops(document) is not None:
            continue
        first, value = first or document, content_hash(document.text)
        if value < smallest:
            smallest, where = value, document.where
        largest = max(largest, value)
        if smallest < min(bound, largest):
            return Split(bound)
    if first is None:
        return Split(bound)
    if smallest == largest:
        return _split_of_one(first, fraction)
    note = f"no document fell into the held-out {fraction:g}, so one was taken: {where}"
    return Split(smallest + 1, note)


def _split_of_one(document: Document, fraction: float) -> Split:
    """The end of the corpus' only document."""
    if not tail_start(document.text, fraction):
        raise UserError(
            f"data.validation_fraction: {document.where} is the corpus' only document, and too"
            " short for its end to be held out; add documents, or set data.validation_fraction=0"
            " eval.validation=false"
        )
    note = f"{document.where} is the only document, so its last {fraction:g} was held out"
    return Split(0, note, tail=fraction)


def training_sample(corpus: Corpus, split: Split, n_bytes: int) -> list[str]:
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
class Task:
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
            [*(astuple(corpus.files[span.source]) if corpus.files else []), *astuple(span)]
            for span in self.spans
        ]
        facts = json.dumps([spans, settings], sort_keys=True)
        return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def cut_tasks(corpus: Corpus) -> list[Task]:
    """All of a corpus, in order."""
    total = sum(file.size for file in corpus.files)
    # A power of two, so that most tasks stay as they are when a file is corrected.
    longest = min(max(_SMALLEST, 1 << (total // _TASKS).bit_length()), _LARGEST)
    return [
        Task(number, tuple(spans))
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
