"""Input of a training step (`Batch`), and documents or trees packed into it (`PackedLayout`).

The data package and the gauntlet create layouts. Each attention backend converts them to what its
kernel needs. A sequence holds documents one after the other, or trees, if texts share a prefix: the
prefix is stored once, followed by each continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges of positions in a sequence, (first, one past the last), in ascending order."""


def at(x: Tensor, ranges: Ranges) -> Tensor:
    """Return the positions of x (B, T, ...) that lie in some ranges, (B, t, ...)."""
    if len(ranges) == 1:
        return x[:, slice(*ranges[0])]
    return torch.cat([x[:, start:stop] for start, stop in ranges], dim=1)


@dataclass(frozen=True)
class PackedLayout:
    """Documents or trees packed into sequences.

    A token attends to itself and to earlier tokens of its document; in a tree, of the path from the
    root. Tokens of a tree are in preorder, so that all descendants of a token follow it directly
    and one number per token describes which tokens attend to it.

    Attributes:
        positions: (B, T) int64, position of each token in its document, or depth in its tree.
        documents: (B, T) int32, index of the document or tree of each token in its sequence,
            ascending from 0.
        lengths: for each sequence the lengths of its documents or trees, in order; their sum is T.
            The same information as `documents`, on the host, so that no backend has to synchronize.
        padding: number of padding tokens at the end of each sequence, on the host; experts skip
            them. None: no padding.
        ends: (B, T) int32: later tokens i < ends[j] of the sequence attend to token j, and no
            others. None: no trees; all later tokens of a document attend to a token.
        depth: with `ends`: number of tokens of the longest path in any tree, on the host.
        ranges: positions of the local tokens under context parallelism. `positions` is then (B, t),
            of local tokens only, and all else is of full sequences. None: all tokens are local.
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
        """T, tokens of a full sequence."""
        return self.documents.shape[1]

    @classmethod
    def from_lengths(
        cls,
        lengths: list[list[int]] | tuple[tuple[int, ...], ...],
        padding: tuple[int, ...] | None = None,
    ) -> PackedLayout:
        """Build a layout from the document lengths of each sequence; all must sum to the same T."""
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
        """Build a layout from the end of each token's subtree in its sequence, (B, T).

        Without branches the result is a layout of documents, which more backends support.
        """
        ends = torch.as_tensor(ends, dtype=torch.int64)
        rows, width = ends.shape
        # The depth of a token is the number of earlier tokens whose subtree contains it: +1 after
        # each token, -1 at the end of its subtree.
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
        # without branches, each token except a root is one deeper than the previous token
        branches = bool((~roots[:, 1:] & (torch.diff(positions) != 1)).any())
        if not branches:
            return cls(positions, documents, lengths, padding)
        depth = int(positions.max()) + 1
        return cls(positions, documents, lengths, padding, ends.int(), depth)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PackedLayout:
        """Return the layout with its tensors on `device`."""
        ends = self.ends
        return replace(
            self,
            positions=self.positions.to(device, non_blocking=non_blocking),
            documents=self.documents.to(device, non_blocking=non_blocking),
            ends=None if ends is None else ends.to(device, non_blocking=non_blocking),
        )

    def rows(self, start: int, stop: int) -> PackedLayout:
        """Return the layout of sequences start..stop, for microbatches."""
        return replace(
            self,
            positions=self.positions[start:stop],
            documents=self.documents[start:stop],
            lengths=self.lengths[start:stop],
            padding=None if self.padding is None else self.padding[start:stop],
            ends=None if self.ends is None else self.ends[start:stop],
        )

    def part(self, ranges: Ranges) -> PackedLayout:
        """Return the layout of the same sequences, of which only tokens in `ranges` are local."""
        assert self.ends is None and self.ranges is None, "documents alone are shared"
        return replace(self, positions=at(self.positions, ranges), ranges=ranges)

    def padded(self, count: int) -> PackedLayout:
        """Return the layout with `count` padding tokens after each sequence, as a document."""
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
        """Return the layout of positions start..stop; documents that cross them are split."""
        assert self.ends is None, "documents alone are cut"
        lengths = []
        for row in self.lengths:
            ends = [*accumulate(row)]
            cut = [min(e, stop) - max(e - n, start) for e, n in zip(ends, row, strict=True)]
            lengths.append(tuple(n for n in cut if n > 0))
        documents = self.documents[:, start:stop]
        return replace(self, documents=documents, lengths=tuple(lengths), ranges=None)

    def real_places(self) -> Tensor | None:
        """Return (N,) int64 on the host: flat indices b * t + i of local tokens without padding.

        None if there is no padding.
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


IGNORE = -100  # label of tokens that are not in the loss


@dataclass(frozen=True)
class AnswerDocuments:
    """Documents to compare in preference tuning.

    D is the largest number of documents of a sequence; sequences with fewer are padded with 0. The
    two documents of a pair are adjacent in their sequence, the chosen one first. A token belongs to
    the document `layout.documents`, and the tokens of a document that are in the loss are the
    answer.

    Attributes:
        side: (B, D) int64: 1 chosen or desirable, -1 rejected or undesirable, 0 no answer.
        begins: for each document of each sequence the position where its answer begins, on the
            host; one past the document if it has none.
        reference: (B, D) fp32, the reference model's log-probability of each answer; None: not
            computed in advance.
        mismatched: (B, D) fp32, the same for each document's prompt with the answer of the previous
            document (`llmfoundry.train.preference_loss`); None: as for `reference`.
        baseline: (B,) fp32, baseline of the rewards in KTO, one number per global batch; None: not
            computed yet, or not needed.
    """

    side: Tensor
    begins: tuple[tuple[int, ...], ...]
    reference: Tensor | None = None
    mismatched: Tensor | None = None
    baseline: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> AnswerDocuments:
        """Return the documents with a function applied to each tensor."""
        known = (self.reference, self.mismatched, self.baseline)
        return AnswerDocuments(
            change(self.side), self.begins, *(None if t is None else change(t) for t in known)
        )

    def rows(self, start: int, stop: int) -> AnswerDocuments:
        """Return the documents of sequences start..stop, for microbatches."""
        part = self.map(lambda tensor: tensor[start:stop])
        return replace(part, begins=self.begins[start:stop])


@dataclass(frozen=True)
class TeacherTokens:
    """The k most probable next tokens of a teacher at each token of a batch.

    Attributes:
        ids: (B, T, k), int32 token ids; different from each other at each labeled token.
        log_probs: (B, T, k), fp16 or wider: the teacher's log-probability of each id.
    """

    ids: Tensor
    log_probs: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> TeacherTokens:
        """Return the tokens with a function applied to both tensors."""
        return TeacherTokens(change(self.ids), change(self.log_probs))


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens with the label of each token.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, the token that follows tokens[b, t]; IGNORE: not in the loss.
        layout: documents and positions; None: every sequence is one document.
        weights: (B, T) fp32, loss weight of each label, 0 for IGNORE; None: all are 1.
        answers: sides of the documents in preference tuning; None: other training.
        teacher: the teacher's next tokens in distillation; None: other training.
    """

    tokens: Tensor
    labels: Tensor
    layout: PackedLayout | None
    weights: Tensor | None = None
    answers: AnswerDocuments | None = None
    teacher: TeacherTokens | None = None

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`."""
        if device.type == "cpu":
            return self
        layout = self.layout.to(device, non_blocking=True) if self.layout else None
        weights, answers, teacher = self.weights, self.answers, self.teacher

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(
            move(self.tokens),
            move(self.labels),
            layout,
            None if weights is None else move(weights),
            answers and answers.map(move),
            teacher and teacher.map(move),
        )

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory, from which copies to a GPU are asynchronous."""
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
        teacher = self.teacher and self.teacher.map(Tensor.pin_memory)
        tokens, labels = self.tokens.pin_memory(), self.labels.pin_memory()
        return Batch(tokens, labels, layout, weights, answers, teacher)

    def split(self, rows: int) -> Iterator[Batch]:
        """Yield microbatches of at most `rows` sequences, in order."""
        for start in range(0, len(self.tokens), rows):
            stop = min(start + rows, len(self.tokens))
            part = slice(start, stop)
            yield Batch(
                self.tokens[part],
                self.labels[part],
                self.layout.rows(start, stop) if self.layout else None,
                None if self.weights is None else self.weights[part],
                self.answers and self.answers.rows(start, stop),
                self.teacher and self.teacher.map(itemgetter(part)),
            )

    def padded(self, count: int) -> Batch:
        """Return the batch with `count` padding tokens after each sequence, not in the loss."""
        assert self.answers is None, "rows of answers are not padded"
        layout = self.layout or whole_rows(self.tokens)
        return Batch(
            F.pad(self.tokens, (0, count)),
            F.pad(self.labels, (0, count), value=IGNORE),
            layout.padded(count),
            None if self.weights is None else F.pad(self.weights, (0, count)),
            teacher=self.teacher and self.teacher.map(lambda x: F.pad(x, (0, 0, 0, count))),
        )

    def part(self, ranges: Ranges) -> Batch:
        """Return the same sequences, of which only tokens in `ranges` are local."""
        assert self.answers is None, "rows of answers are not shared"
        layout = self.layout or whole_rows(self.tokens)
        return Batch(
            at(self.tokens, ranges),
            at(self.labels, ranges),
            layout.part(ranges),
            None if self.weights is None else at(self.weights, ranges),
            teacher=self.teacher and self.teacher.map(lambda x: at(x, ranges)),
        )


def whole_rows(tokens: Tensor) -> PackedLayout:
    """Return the layout of a batch without one: each sequence of tokens (B, T) is one document."""
    rows, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).expand(rows, -1)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    return PackedLayout(positions, documents, ((width,),) * rows)
