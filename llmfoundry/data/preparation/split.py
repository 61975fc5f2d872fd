"""Which documents are held out, and which text a tokenizer may learn from.

A document's side is decided by a hash of its text alone: it never moves when the corpus grows, and
equal documents are never on both sides. The tokenizer's training and the preparation both ask here.
"""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass

from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.errors import UserError

_PIECE = 1 << 16  # characters of the longest piece sampled whole


@dataclass(frozen=True)
class Split:
    """Holds out the documents whose hash lies below a bound.

    Attributes:
        bound: of 2**64.
        note: what to tell the user about it; empty for the ordinary case.
    """

    bound: int
    note: str = ""

    def holds_out(self, text: str) -> bool:
        """Whether this text is validation text."""
        return content_hash(text) < self.bound


def content_hash(text: str) -> int:
    """64 uniform bits of the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def make_split(corpus: Corpus) -> Split:
    """The split that data.validation_fraction asks for.

    Reads until the first held-out document. A corpus so small that there is none gives up the
    document with the smallest hash instead.

    Raises:
        UserError: the corpus holds one document only.
    """
    fraction = corpus.config.validation_fraction
    bound = int(fraction * 2**64)
    if not bound:
        return Split(0)
    smallest, where, largest = 2**64, "", -1
    for document in corpus:
        if corpus.drops(document) is not None:
            continue
        value = content_hash(document.text)
        if value < bound:
            return Split(bound)
        if value < smallest:
            smallest, where = value, document.where
        largest = max(largest, value)
    if smallest == largest:
        raise UserError(
            f"data.validation_fraction: {where} is the corpus' only document, so none can be held"
            " out; add documents, or set data.validation_fraction=0 eval.validation=false"
        )
    note = f"no document fell into the held-out {fraction:g}, so one was taken: {where}"
    return Split(smallest + 1, note)


def training_sample(corpus: Corpus, split: Split, n_bytes: int) -> list[str]:
    """At most `n_bytes` of training text, spread evenly over the corpus, in its order.

    Documents are cut into pieces, and the pieces with the smallest hashes stay: one pass, memory
    bounded by the sample, and the same choice each time.
    """
    length = max(1, min(_PIECE, n_bytes // 64))
    kept: list[tuple[int, int, str]] = []  # a heap, largest hash first: (-hash, place, piece)
    size = place = 0
    for document in corpus:
        if corpus.drops(document) is not None or split.holds_out(document.text):
            continue
        for start in range(0, len(document.text), length):
            piece = document.text[start : start + length]
            heapq.heappush(kept, (-content_hash(f"{place} {piece}"), place, piece))
            size, place = size + len(piece.encode()), place + 1
            while size > n_bytes:
                size -= len(heapq.heappop(kept)[2].encode())
    return [piece for _, _, piece in sorted(kept, key=lambda entry: entry[1])]
