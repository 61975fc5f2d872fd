"""Which documents are held out, and which text a tokenizer may learn from.

A document's side is decided by a hash of its text alone: it never moves when the corpus grows, and
equal documents are never on both sides. Of a corpus of one document the end is held out. The
tokenizer's training and the preparation both ask here.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass

from llmfoundry.data.preparation.read.corpus import Corpus, Document
from llmfoundry.errors import UserError

_PIECE = 1 << 16  # characters of the longest piece sampled whole


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
