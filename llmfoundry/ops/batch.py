"""`Batch`: what one step reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmfoundry.ops.layout import Layout

IGNORE = -100  # a label that counts neither in the loss nor in its denominator


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with what follows each.

    Attributes:
        tokens: (B, T) int64.
        labels: (B, T) int64, the token that follows tokens[b, t]; IGNORE where none is asked.
        layout: documents and positions; None: every row is one document.
    """

    tokens: Tensor
    labels: Tensor
    layout: Layout | None

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        if device.type == "cpu":
            return self
        layout = self.layout.to(device, non_blocking=True) if self.layout else None
        return Batch(
            self.tokens.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            layout,
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
        return Batch(self.tokens.pin_memory(), self.labels.pin_memory(), layout)

    def split(self, rows: int) -> Iterator[Batch]:
        """Microbatches of at most `rows` rows, in order."""
        for start in range(0, len(self.tokens), rows):
            stop = min(start + rows, len(self.tokens))
            layout = self.layout.rows(start, stop) if self.layout else None
            yield Batch(self.tokens[start:stop], self.labels[start:stop], layout)
