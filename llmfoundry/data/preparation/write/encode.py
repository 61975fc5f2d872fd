"""Documents to ids on several threads, in order; called by `prepare`.

The `tokenizers` library encodes without holding Python's lock, so threads are enough. Long texts
are cut where that leaves the ids unchanged, which bounds memory and spreads one book over cores.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from llmfoundry.data.text.tokenizer import Tokenizer

_CHUNK = 1 << 18  # characters that a thread encodes at a time
_LONGEST = 1 << 20  # characters of a document encoded in one go, where it can be cut

# Byte-level tokenizers begin a word at a line's first character, so that cutting there gives the
# ids of the whole. Only after a character and before one: runs of white space are words too.
_CUT = re.compile(r"\S\n(?=\S)")


@dataclass(frozen=True)
class DocumentPart:
    """A document, or a part of a long one, on its way to a stream.

    Attributes:
        text: never empty.
        held_out: whether it is validation text.
        first: whether a document begins with it.
        last: whether a document ends with it.
    """

    text: str
    held_out: bool
    first: bool
    last: bool

    @property
    def n_bytes(self) -> int:
        """Of its text in UTF-8."""
        return len(self.text.encode())


def split_text(text: str, longest: int = _LONGEST) -> Iterator[str]:
    """A long text in parts of about `longest` characters whose ids join to those of the whole."""
    start = 0
    while (place := _CUT.search(text, start + longest)) is not None:
        yield text[start : place.end()]
        start = place.end()
    yield text[start:]


def cuts_at_lines(tokenizer: Tokenizer) -> bool:
    """Whether `split_text` keeps the ids; SentencePiece marks the start of each text."""
    before, after = "end.\n", "Start here"
    whole = tokenizer.encode(before + after)
    parts = tokenizer.encode(before) + tokenizer.encode(after)
    # A special token that is read may take the white space at its sides with it.
    return tokenizer.byte_level and tokenizer.split_special_tokens and whole == parts


def encode_all(
    pieces: Iterable[DocumentPart], tokenizer: Tokenizer, workers: int
) -> Iterator[tuple[DocumentPart, list[int]]]:
    """Each piece with its ids, in order, encoded by `workers` threads some chunks ahead."""
    if workers == 1:
        with _one_thread_a_call():
            for chunk in _chunks(pieces):
                ids = tokenizer.encode_batch([piece.text for piece in chunk])
                yield from zip(chunk, ids, strict=True)
        return
    waiting: deque[tuple[list[DocumentPart], Future[list[list[int]]]]] = deque()
    with _one_thread_a_call(), ThreadPoolExecutor(workers) as pool:
        for chunk in _chunks(pieces):
            texts = [piece.text for piece in chunk]
            waiting.append((chunk, pool.submit(tokenizer.encode_batch, texts)))
            if len(waiting) > 2 * workers:
                done, future = waiting.popleft()
                yield from zip(done, future.result(), strict=True)
        for done, future in waiting:
            yield from zip(done, future.result(), strict=True)


def _chunks(pieces: Iterable[DocumentPart]) -> Iterator[list[DocumentPart]]:
    chunk: list[DocumentPart] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Keep `tokenizers` from spreading each call over all cores: num_workers says how many."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
