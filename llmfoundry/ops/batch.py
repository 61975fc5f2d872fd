"""`Batch`: what one step reads; `Answers`: which of its documents are better and which worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.packed_layout import Layout, Ranges, at

IGNORE = -100  # a label that counts neither in the loss nor in its denominator


@dataclass(frozen=True)
class Answers:
    """Documents to compare. D: the most documents of a row; a row of fewer is filled up with 0.

    The two of a pair are neighbours in their row, the chosen one first. The document that a token
    belongs to is `layout.documents`; its learned tokens are the answer.

    Attributes:
        side: (B, D) int64: 1 chosen or desirable, -1 rejected or undesirable, 0 no answer.
        begins: for each row of each document the place in the row where its answer begins, on the
            host; one past the document where it has none.
        reference: (B, D) fp32, the reference model's log-probability of each answer; None: it is
            not known beforehand.
        mismatched: (B, D) fp32, the same of each document's prompt with the answer of the one
            before it in the row (`llmfoundry.train.preference`); None: as for
            `reference`.
        baseline: (B,) fp32, what KTO compares rewards with, one number for the global batch; None:
            it is not known yet, or not needed.
    """

    side: Tensor
    begins: tuple[tuple[int, ...], ...]
    reference: Tensor | None = None
    mismatched: Tensor | None = None
    baseline: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Answers:
        """The same with each tensor changed."""
        known = (self.reference, self.mismatched, self.baseline)
        return Answers(
            change(self.side), self.begins, *(None if t is None else change(t) for t in known)
        )

    def rows(self, start: int, stop: int) -> Answers:
        """Those of rows start..stop, for microbatches."""
        part = self.map(lambda tensor: tensor[start:stop])
        return replace(part, begins=self.begins[start:stop])


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with what follows each.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, the token that follows tokens[b, t]; IGNORE where none is asked.
        layout: documents and positions; None: every row is one document.
        weights: (B, T) fp32, what each label counts, 0 where it is IGNORE; None: 1 for each.
        answers: sides of the documents of preference rows; None: there are no such rows.
    """

    tokens: Tensor
    labels: Tensor
    layout: Layout | None
    weights: Tensor | None = None
    answers: Answers | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        if device.type == "cpu":
            return self
        layout = self.layout.to(device, non_blocking=True) if self.layout else None
        weights, answers = self.weights, self.answers
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            layout,
            None if weights is None else weights.to(device, non_blocking=True),
            answers and answers.map(lambda tensor: tensor.to(device, non_blocking=True)),
        )

    def pin_memory(self) -> Batch:
        """A copy on the host from where transfers to a GPU need not wait."""
        layout = self.layout
        if layout is not None:
            layout = replace(
                layout,
                positions=layout.positions.pin_memory(),
                documents=layout.documents.pin_memory(),
                ends=None if layout.ends is None else layout.ends.pin_memory(),
            )
        weights = None if self.weights is None else self.weights.pin_memory()
        answers = self.answers and self.answers.map(Tensor.pin_memory)
        return Batch(self.tokens.pin_memory(), self.labels.pin_memory(), layout, weights, answers)

    def split(self, rows: int) -> Iterator[Batch]:
        """Microbatches of at most `rows` rows, in order."""
        for start in range(0, len(self.tokens), rows):
            stop = min(start + rows, len(self.tokens))
            layout = self.layout.rows(start, stop) if self.layout else None
            weights = None if self.weights is None else self.weights[start:stop]
            answers = self.answers and self.answers.rows(start, stop)
            yield Batch(self.tokens[start:stop], self.labels[start:stop], layout, weights, answers)

    def padded(self, count: int) -> Batch:
        """With so many tokens behind each row that nothing learns from and none is asked of."""
        assert self.answers is None, "rows of answers are not padded"
        layout = self.layout or whole_rows(self.tokens)
        return Batch(
            F.pad(self.tokens, (0, count)),
            F.pad(self.labels, (0, count), value=IGNORE),
            layout.padded(count),
            None if self.weights is None else F.pad(self.weights, (0, count)),
        )

    def part(self, ranges: Ranges) -> Batch:
        """The same rows, of whose tokens only those at `ranges` are at hand."""
        assert self.answers is None, "rows of answers are not shared"
        layout = self.layout or whole_rows(self.tokens)
        return Batch(
            at(self.tokens, ranges),
            at(self.labels, ranges),
            layout.part(ranges),
            None if self.weights is None else at(self.weights, ranges),
        )


def whole_rows(tokens: Tensor) -> Layout:
    """What a batch without a layout means: each row of tokens (B, T) is one document."""
    rows, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).expand(rows, -1)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    return Layout(positions, documents, ((width,),) * rows)
