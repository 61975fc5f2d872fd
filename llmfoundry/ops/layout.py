"""`Layout`: who attends to whom, and where, in a batch of rows.

Made by the data room and the gauntlet, turned by each attention backend into what it needs. A row
holds documents one after the other, or, where texts begin alike, trees: what they share once, then
what each of them goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
    """

    positions: Tensor
    documents: Tensor
    lengths: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...] | None = None
    ends: Tensor | None = None
    depth: int = 0

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
        return Layout(
            self.positions.to(device, non_blocking=non_blocking),
            self.documents.to(device, non_blocking=non_blocking),
            self.lengths,
            self.padding,
            None if ends is None else ends.to(device, non_blocking=non_blocking),
            self.depth,
        )

    def rows(self, start: int, stop: int) -> Layout:
        """The layout of rows start..stop, for microbatches."""
        return Layout(
            self.positions[start:stop],
            self.documents[start:stop],
            self.lengths[start:stop],
            None if self.padding is None else self.padding[start:stop],
            None if self.ends is None else self.ends[start:stop],
            self.depth,
        )

    def real_places(self) -> Tensor | None:
        """(N,) int64 on the host, flat places b * T + t that are no padding; None: all are."""
        if self.padding is None or not any(self.padding):
            return None
        rows, width = self.positions.shape
        ends = zip(range(0, rows * width, width), self.padding, strict=True)
        return torch.cat([torch.arange(start, start + width - pad) for start, pad in ends])
