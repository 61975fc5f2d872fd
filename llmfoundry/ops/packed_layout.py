"""`Batch`, what one step reads, and `PackedLayout`: who attends to whom in its rows.

The data package and the gauntlet make layouts, each attention backend turns them into what it
needs. A row holds documents one after the other, or, where texts share a prefix, trees: the prefix
once, then each continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Neighbouring places of a row each, first and one past the last, ascending."""


def at(x: Tensor, ranges: Ranges) -> Tensor:
    """X (B, T, ...) at some places of its rows, (B, t, ...)."""
    if len(ranges) == 1:
        return x[:, slice(*ranges[0])]
    return torch.cat([x[:, start:stop] for start, stop in ranges], dim=1)


@dataclass(frozen=True)
class PackedLayout:
    """Documents or trees packed into rows.

    A token sees itself and the earlier tokens of its own document; in a tree, of the path from the
    root to itself. Tokens of a tree stand in preorder, so that everything below a token follows it
    in one piece and a single number says who sees it.

    Attributes:
        positions: (B, T) int64, each token's place in its document or depth in its tree, from 0.
        documents: (B, T) int32, which document or tree of its row a token belongs to, from 0,
            ascending.
        lengths: for each row the lengths of its documents or trees, in order; their sum is T. The
            same facts as `documents`, on the host, so that no backend has to ask the device.
        padding: for each row how many of its last tokens are padding, which experts leave out, on
            the host; None: none.
        ends: (B, T) int32: token j of a row is seen by its later tokens i < ends[j] and by no
            other. None: nothing branches, and every token is seen to the end of its document.
        depth: with `ends`: tokens of the longest path of all trees, on the host.
        ranges: places of the tokens at hand, where other processes have the rest of each row:
            `positions` is then (B, t), of these alone, and all else of whole rows. None: all are.
    """

    positions: Tensor
    documents: Tensor
    lengths: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...] | None = None
    ends: Tensor | None = None
    depth: int = 0
    ranges: Ranges | None = None

    @property
    def width(self) -> int:
        """T, tokens of a whole row."""
        return self.documents.shape[1]

    @classmethod
    def from_lengths(
        cls,
        lengths: list[list[int]] | tuple[tuple[int, ...], ...],
        padding: tuple[int, ...] | None = None,
    ) -> PackedLayout:
        """Build from each row's document lengths; every row must sum to the same T."""
        rows = tuple(tuple(row) for row in lengths)
        assert len({sum(row) for row in rows}) == 1, "rows of a batch have one length"
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
        documents = torch.stack(
            [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
        )
        return cls(positions, documents.int(), rows, padding)

    @classmethod
    def from_ends(
        cls, ends: Tensor | Sequence[Sequence[int]], padding: tuple[int, ...] | None = None
    ) -> PackedLayout:
        """Build from where each token's part of its tree ends, (B, T), counted in its row.

        Without a branch anywhere the layout is that of documents, which more backends serve.
        """
        ends = torch.as_tensor(ends, dtype=torch.int64)
        rows, width = ends.shape
        # A token's depth is the number of earlier ones that it is below: +1 after each token, -1
        # where its part ends.
        steps = torch.zeros(rows, width + 2, dtype=torch.int64)
        steps[:, 1 : width + 1] = 1
        steps.scatter_add_(1, ends, torch.full_like(ends, -1))
        positions = steps.cumsum(1)[:, :width]
        roots = positions == 0
        lengths = tuple(
            tuple(torch.diff(row.nonzero()[:, 0], append=torch.tensor([width])).tolist())
            for row in roots
        )
        documents = (roots.cumsum(1) - 1).int()
        # where nothing branches, each token but a root is one deeper than the one before
        branches = bool((~roots[:, 1:] & (torch.diff(positions) != 1)).any())
        if not branches:
            return cls(positions, documents, lengths, padding)
        depth = int(positions.max()) + 1
        return cls(positions, documents, lengths, padding, ends.int(), depth)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PackedLayout:
        """The same layout with its tensors on `device`."""
        ends = self.ends
        return replace(
            self,
            positions=self.positions.to(device, non_blocking=non_blocking),
            documents=self.documents.to(device, non_blocking=non_blocking),
            ends=None if ends is None else ends.to(device, non_blocking=non_blocking),
        )

    def rows(self, start: int, stop: int) -> PackedLayout:
        """The layout of rows start..stop, for microbatches."""
        return replace(
            self,
            positions=self.positions[start:stop],
            documents=self.documents[start:stop],
            lengths=self.lengths[start:stop],
            padding=None if self.padding is None else self.padding[start:stop],
            ends=None if self.ends is None else self.ends[start:stop],
        )

    def part(self, ranges: Ranges) -> PackedLayout:
        """The layout of the same rows, of whose tokens only those at `ranges` are at hand."""
        assert self.ends is None and self.ranges is None, "documents alone are shared"
        return replace(self, positions=at(self.positions, ranges), ranges=ranges)

    def padded(self, count: int) -> PackedLayout:
        """With so many tokens of padding behind each row: a document of its own."""
        assert self.ends is None and self.ranges is None, "documents alone are padded"
        places = torch.arange(count, device=self.positions.device).expand(len(self.lengths), -1)
        last = self.documents[:, -1:] + 1
        padding = self.padding or (0,) * len(self.lengths)
        return replace(
            self,
            positions=torch.cat([self.positions, places], dim=1),
            documents=torch.cat([self.documents, last.expand(-1, count)], dim=1),
            lengths=tuple((*row, count) for row in self.lengths),
            padding=tuple(n + count for n in padding),
        )

    def span(self, start: int, stop: int) -> PackedLayout:
        """Documents of the adjacent places start..stop, cut where these begin and end."""
        assert self.ends is None, "documents alone are cut"
        lengths = []
        for row in self.lengths:
            ends = [*accumulate(row)]
            cut = [min(e, stop) - max(e - n, start) for e, n in zip(ends, row, strict=True)]
            lengths.append(tuple(n for n in cut if n > 0))
        documents = self.documents[:, start:stop]
        return replace(self, documents=documents, lengths=tuple(lengths), ranges=None)

    def real_places(self) -> Tensor | None:
        """(N,) int64 on the host, flat places b * t + i of tokens at hand that are no padding.

        None: all are.
        """
        if self.padding is None or not any(self.padding):
            return None
        here = self.positions.shape[1]
        ranges = self.ranges or ((0, self.width),)
        places = []
        for row, pad in enumerate(self.padding):
            first = row * here
            for start, stop in ranges:
                real = max(0, min(stop, self.width - pad) - start)
                places.append(torch.arange(first, first + real))
                first += stop - start
        return torch.cat(places)


IGNORE = -100  # a label that counts neither in the loss nor in its denominator


@dataclass(frozen=True)
class AnswerDocuments:
    """Documents to compare. D: the most documents of a row; a row of fewer is filled up with 0.

    The two of a pair are adjacent in their row, the chosen one first. The document that a token
    belongs to is `layout.documents`; its learned tokens are the answer.

    Attributes:
        side: (B, D) int64: 1 chosen or desirable, -1 rejected or undesirable, 0 no answer.
        begins: for each row of each document the place in the row where its answer begins, on the
            host; one past the document where it has none.
        reference: (B, D) fp32, the reference model's log-probability of each answer; None: it is
            not known beforehand.
        mismatched: (B, D) fp32, the same of each document's prompt with the answer of the one
            before it in the row (`llmfoundry.train.preference_loss`); None: as for
            `reference`.
        baseline: (B,) fp32, what KTO compares rewards with, one number for the global batch; None:
            it is not known yet, or not needed.
    """

    side: Tensor
    begins: tuple[tuple[int, ...], ...]
    reference: Tensor | None = None
    mismatched: Tensor | None = None
    baseline: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> AnswerDocuments:
        """The same with each tensor changed."""
        known = (self.reference, self.mismatched, self.baseline)
        return AnswerDocuments(
            change(self.side), self.begins, *(None if t is None else change(t) for t in known)
        )

    def rows(self, start: int, stop: int) -> AnswerDocuments:
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
    layout: PackedLayout | None
    weights: Tensor | None = None
    answers: AnswerDocuments | None = None

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


def whole_rows(tokens: Tensor) -> PackedLayout:
    """What a batch without a layout means: each row of tokens (B, T) is one document."""
    rows, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).expand(rows, -1)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    return PackedLayout(positions, documents, ((width,),) * rows)
