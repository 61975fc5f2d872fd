"""`Layout`: who attends to whom, and where, in a batch of rows.

Made by the data room and the gauntlet, turned by each attention backend into what it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Documents packed into rows; a token sees itself and earlier tokens of its own document.

    Attributes:
        positions: (B, T) int64, each token's place in its document, from 0.
        documents: (B, T) int32, which document of its row a token belongs to, from 0, ascending.
        lengths: for each row the lengths of its documents, in order; their sum is T. The same
            facts as `documents`, on the host, so that no backend has to ask the device for them.
        padding: for each row how many of its last tokens are padding, which experts leave out, on
            the host; None: none.
    """

    positions: Tensor
    documents: Tensor
    lengths: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...] | None = None

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

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Layout:
        """The same layout with its tensors on `device`."""
        return Layout(
            self.positions.to(device, non_blocking=non_blocking),
            self.documents.to(device, non_blocking=non_blocking),
            self.lengths,
            self.padding,
        )

    def rows(self, start: int, stop: int) -> Layout:
        """The layout of rows start..stop, for microbatches."""
        return Layout(
            self.positions[start:stop],
            self.documents[start:stop],
            self.lengths[start:stop],
            None if self.padding is None else self.padding[start:stop],
        )

    def real_places(self) -> Tensor | None:
        """(N,) int64 on the host, flat places b * T + t that are no padding; None: all are."""
        if self.padding is None or not any(self.padding):
            return None
        rows, width = self.positions.shape
        ends = zip(range(0, rows * width, width), self.padding, strict=True)
        return torch.cat([torch.arange(start, start + width - pad) for start, pad in ends])
