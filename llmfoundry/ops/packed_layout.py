"""`Layout`: who attends to whom, and where, in a batch of rows.

Made by the data room and the gauntlet, turned by each attention backend into what it needs. A row
holds documents one after the other, or, where texts begin alike, trees: what they share once, then
what each of them goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
"""Neighbouring places of a row each, first and one past the last, ascending."""


def at(x: Tensor, ranges: Ranges) -> Tensor:
    """X (B, T, ...) at some places of its rows, (B, t, ...)."""
    if len(ranges) == 1:
        return x[:, slice(*ranges[0])]
    return torch.cat([x[:, start:stop] for start, stop in ranges], dim=1)


@dataclass(frozen=True)
class Layout:
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
    ) -> Layout:
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
    ) -> Layout:
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

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Layout:
        """The same layout with its tensors on `device`."""
        ends = self.ends
        return replace(
            self,
            positions=self.positions.to(device, non_blocking=non_blocking),
            documents=self.documents.to(device, non_blocking=non_blocking),
            ends=None if ends is None else ends.to(device, non_blocking=non_blocking),
        )

    def rows(self, start: int, stop: int) -> Layout:
        """The layout of rows start..stop, for microbatches."""
        return replace(
            self,
            positions=self.positions[start:stop],
            documents=self.documents[start:stop],
            lengths=self.lengths[start:stop],
            padding=None if self.padding is None else self.padding[start:stop],
            ends=None if self.ends is None else self.ends[start:stop],
        )

    def part(self, ranges: Ranges) -> Layout:
        """The layout of the same rows, of whose tokens only those at `ranges` are at hand."""
        assert self.ends is None and self.ranges is None, "documents alone are shared"
        return replace(self, positions=at(self.positions, ranges), ranges=ranges)

    def padded(self, count: int) -> Layout:
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

    def span(self, start: int, stop: int) -> Layout:
        """Documents of the neighbouring places start..stop, cut where these begin and end."""
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
