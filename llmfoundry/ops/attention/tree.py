"""Rows that hold trees, cut into pieces for kernels that know nothing but a mask, on a CPU.

`sdpa` calls `cut` once a forward pass. What a run of neighbouring queries sees is the
path to the first of them and the run itself: keys of other branches and trees are not even looked
at, so that attention in a tree costs little more than that of each path's own new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfoundry.ops.attention.plan import AttentionSpec, TreePiece
from llmfoundry.ops.packed_layout import Layout

PIECE = 128
"""Queries a piece."""


def cut(layout: Layout, spec: AttentionSpec) -> tuple[TreePiece, ...]:
    """All tokens of the rows, in order, as queries of pieces; the layout is on a CPU."""
    assert layout.ends is not None
    pieces = []
    for row, (ends, positions) in enumerate(zip(layout.ends, layout.positions, strict=True)):
        offset = row * len(ends)
        for start in range(0, len(ends), PIECE):
            pieces.append(_piece(ends, positions, start, offset, spec))
    return tuple(pieces)


def _piece(
    ends: Tensor, positions: Tensor, start: int, offset: int, spec: AttentionSpec
) -> TreePiece:
    """Queries start, start + 1, … of a row (T,) whose first token has the flat place `offset`."""
    stop = min(start + PIECE, len(ends))
    queries = torch.arange(start, stop)[:, None]
    keys = torch.cat([(ends[:start] > start).nonzero()[:, 0], queries[:, 0]])
    distance = positions[keys] - positions[start:stop, None]
    sees = (keys <= queries) & (queries < ends[keys])
    if spec.window >= 0:
        sees &= distance >= -spec.window
        seen = sees.any(dim=0)
        keys, distance, sees = keys[seen], distance[:, seen], sees[:, seen]
    back = distance.float() if spec.slopes is not None else torch.zeros(sees.shape)
    bias = back.masked_fill(~sees, float("-inf"))[None, None]
    first, last = int(keys[0]), int(keys[-1])
    if last - first + 1 == len(keys):
        return TreePiece(stop - start, slice(offset + first, offset + last + 1), bias)
    return TreePiece(stop - start, keys + offset, bias)
