"""The corpus in tasks: what one process prepares at a time; called by `prepare`.

The one idea: the cut depends on the corpus alone, so that any number of workers, machines and
restarts makes the same parts, and parts in the order of their tasks are the same output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from llmfoundry.data.preparation.read.corpus import Corpus
from llmfoundry.data.preparation.read.spans import Span

# Small enough to share out a small corpus, large enough that a large one has few parts: thousands
# of tasks balance a thousand workers.
_SMALLEST, _LARGEST = 4 << 20, 256 << 20
_TASKS = 512


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
    """All of a corpus, in order.

    Raises:
        UserError: a file that must be looked into cannot be read.
    """
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
