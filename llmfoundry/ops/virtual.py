"""Virtual tokens: trained vectors that stand in front of every document of a batch.

Models with a tuned prompt widen their rows by `in_front` before the first block, and take the
virtual tokens out again after the last one. Packed documents have their own, at positions 0, 1, …
of each, so that a document is computed as if it were alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from llmfoundry.ops.packed_layout import Layout


@dataclass(frozen=True)
class Widened:
    """A batch (B, T) with virtual tokens in it (B, W).

    Attributes:
        layout: of the wider rows; None: every row is one document.
        places: (B, T), where each token went.
        tokens: (B, W), the token at each place, 0 where there is none.
        virtual: (B, W), the virtual token at each place, -1 where there is none.
    """

    layout: Layout | None
    places: Tensor
    tokens: Tensor
    virtual: Tensor

    @property
    def width(self) -> int:
        """W."""
        return self.tokens.shape[1]

    def spread(self, prompt: Tensor, x: Tensor) -> Tensor:
        """(B, W, D) of virtual tokens (P, D) and tokens (B, T, D), in the latter's dtype."""
        index = self.tokens[..., None].expand(-1, -1, x.shape[-1])
        inserted = F.embedding(self.virtual.clamp(min=0), prompt).to(x.dtype)
        return torch.where(self.virtual[..., None] >= 0, inserted, x.gather(1, index))

    def back(self, x: Tensor) -> Tensor:
        """(B, T, D), the tokens' own of (B, W, D)."""
        return x.gather(1, self.places[..., None].expand(-1, -1, x.shape[-1]))


def in_front(layout: Layout | None, shape: torch.Size, count: int, device: torch.device) -> Widened:
    """Put `count` virtual tokens in front of every document or tree of (B, T) tokens.

    Documents of padding alone get none; rows with fewer documents than others are padded.
    """
    rows, width = shape
    if layout is None:
        places = torch.arange(count, count + width, device=device).expand(rows, -1)
        numbers = torch.arange(count + width, device=device).expand(rows, -1)
        tokens, virtual = (numbers - count).clamp(min=0), numbers.where(numbers < count, -1)
        return Widened(None, places, tokens, virtual)
    padding = layout.padding or (0,) * rows
    real = [_real(n, width - pad) for n, pad in zip(layout.lengths, padding, strict=True)]
    last = torch.tensor(real, device=device)[:, None] - 1
    places = torch.arange(width, device=device)
    places = places + count * (torch.minimum(layout.documents.long(), last) + 1)
    wide = width + count * max(real)
    tokens = torch.full((rows, wide), -1, device=device)
    tokens.scatter_(1, places, torch.arange(width, device=device).expand(rows, -1))
    free = (tokens < 0).cumsum(1) - 1  # virtual tokens, document by document, then padding
    virtual = torch.where((tokens < 0) & (free < count * (last + 1)), free % count, -1)
    found = Widened(None, places, tokens.clamp(min=0), virtual)
    return Widened(_wider(layout, found, free, real, count), places, found.tokens, virtual)


def _real(lengths: tuple[int, ...], end: int) -> int:
    """How many documents of a row begin before its padding."""
    return sum(stop - n < end for stop, n in zip(accumulate(lengths), lengths, strict=True))


def _wider(layout: Layout, made: Widened, free: Tensor, real: list[int], count: int) -> Layout:
    """The layout of the wider rows; what fills a row up is one more document, and padding."""
    wide = made.tokens.shape[1]
    inserted, last = made.virtual >= 0, layout.documents[:, -1:].long() + 1
    owners = last.expand(-1, wide).clone().scatter_(1, made.places, layout.documents.long())
    owners = torch.where(inserted, free // count, owners)
    rows = torch.tensor(real, device=free.device)[:, None]
    shifts = count * (layout.documents < rows)
    positions = (free - count * rows).clamp(min=0)
    positions = positions.scatter(1, made.places, layout.positions + shifts)
    positions = torch.where(inserted, made.virtual, positions)
    lengths, padding = [], []
    for row, n in enumerate(real):
        own = [size + count * (i < n) for i, size in enumerate(layout.lengths[row])]
        rest = wide - sum(own)
        lengths.append((*own, rest) if rest else tuple(own))
        padding.append(rest + (layout.padding[row] if layout.padding else 0))
    wider = Layout(positions, owners.int(), tuple(lengths), tuple(padding))
    if layout.ends is None:
        return wider
    stops = [torch.tensor([*accumulate(row)], device=free.device) for row in lengths]
    ends = torch.stack([stop[owner] for stop, owner in zip(stops, owners, strict=True)])
    ends = ends.scatter(1, made.places, made.places.gather(1, layout.ends.long() - 1) + 1).int()
    return replace(wider, ends=ends, depth=layout.depth + count)
