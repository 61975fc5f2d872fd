"""What every attention backend reads: the spec of a layer, the plan of a forward pass.

The backends are `sdpa`, `flex`, `flash` (with `varlen` and `flash3`), and the plain one in
`select`, which is also what other packages call. Each has three functions: `refusal` (where it does
not run, and why), `prepare` (an `AttentionPlan`, once a forward pass) and `attend` (once a layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmfoundry.attention_limits import ALIBI, DROPOUT, SOFTCAP
from llmfoundry.ops.packed_layout import PackedLayout

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of attention.

    Attributes:
        scale: factor on the logits.
        softcap: logits become c * tanh(logits / c), after the scale and before any bias.
        slopes: (H,) ALiBi's slopes; None: no ALiBi.
        window: a query sees itself and so many keys before it; -1: all.
        dropout: share of the attention weights that are dropped while training.
    """

    scale: float
    softcap: float | None = None
    slopes: Tensor | None = None
    window: int = -1
    dropout: float = 0.0

    @property
    def options(self) -> tuple[str, ...]:
        """What is asked, in the words of `attention_limits`."""
        asked = {
            ALIBI: self.slopes is not None,
            SOFTCAP: self.softcap is not None,
            DROPOUT: self.dropout > 0,
        }
        return tuple(option for option, is_set in asked.items() if is_set)


@dataclass(frozen=True)
class TreePiece:
    """Some adjacent queries of rows that hold trees, and the keys that any of them sees.

    Attributes:
        queries: so many, from where the piece before ends.
        keys: flat places b * T + t, ascending; a slice where they are adjacent too.
        bias: (1, 1, queries, keys) in fp32: 0 where a query sees a key, with ALiBi how far it lies
            back, as a number below 0; minus infinity where it does not.
    """

    queries: int
    keys: Tensor | slice
    bias: Tensor


@dataclass(frozen=True)
class RangePlan:
    """Adjacent queries of the rows, and the keys that any of them sees.

    Attributes:
        queries: so many, from where the range before ends.
        start: place in the row of the first key.
        stop: one past the last key, which is that of the last query.
        plan: how they attend.
    """

    queries: int
    start: int
    stop: int
    plan: AttentionPlan


@dataclass(frozen=True)
class AttentionPlan:
    """What the layers of one forward pass that have the same spec share.

    Attributes:
        impl: the backend that serves; what follows `shared_heads` is for one or two of them.
        spec: what the layers ask; a window that bounds nothing is gone.
        shared_heads: whether the backend reads a key-value head that several query heads share;
            else such heads are repeated for it.
        bias: torch and sdpa: broadcastable to (B, H, T, S): added to the logits, or a boolean
            mask, True where a query sees a key; a document's or a run's is its top-left corner.
            None: causal attention, nothing added.
        packed: sdpa on a CPU: documents are attended to by runs, trees by pieces. A flag of its
            own: torch.compile guards a flag, but the runs' number and lengths too if it is asked
            whether there are any, and nothing if it is asked so of `by_run`.
        runs: with `packed`: (count, length) of adjacent documents of one length, in order.
        pieces: with `packed`: of rows that hold trees, in order.
        by_run: with `packed`: what attends to runs or pieces.
        block_mask: flex: which blocks of keys a block of queries sees.
        score_mod: flex: what is done to a logit; None: nothing.
        borders: varlen, flash and flash3, packed rows: (N + 1,) int32, where the queries of the N
            documents of all rows, one after the other, begin and end.
        longest: with them: the most queries that a document has.
        key_borders: the same of the keys: of a document that begins before the first query there
            are more, its last query then being that of its last key; else the same tensor.
        longest_keys: the most keys that a document has.
        segments: sdpa on a CPU, queries that are the last of packed rows: (queries, keys) of each
            document of all rows; `bias` is then read from its bottom-right corner.
        parts: where queries are some of the row's alone: a plan for each range, and
            nothing of the above.
    """

    impl: str
    spec: AttentionSpec
    shared_heads: bool = True
    bias: Tensor | None = None
    packed: bool = False
    runs: tuple[tuple[int, int], ...] = ()
    pieces: tuple[TreePiece, ...] = ()
    by_run: Callable[[Tensor, Tensor, Tensor, AttentionPlan, float], Tensor] | None = None
    block_mask: BlockMask | None = None
    score_mod: Callable[..., Tensor] | None = None
    borders: Tensor | None = None
    longest: int = 0
    key_borders: Tensor | None = None
    longest_keys: int = 0
    segments: tuple[tuple[int, int], ...] = ()
    parts: tuple[RangePlan, ...] = ()


def alibi_slopes(n_heads: int, alibi_bias_max: int, device: torch.device) -> Tensor:
    """Slopes (H,) of ALiBi (Press et al., 2022), in MPT's order for any number of heads."""
    power = 1 << (n_heads - 1).bit_length()
    exponents = torch.arange(1, power + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-exponents * alibi_bias_max / power)
    return torch.cat([slopes[1::2], slopes[::2]])[:n_heads] if power != n_heads else slopes


def causal_bias(queries: int, keys: int, spec: AttentionSpec, device: torch.device) -> Tensor:
    """Who sees whom among the last `queries` of `keys` positions.

    Without slopes a boolean mask (1, 1, queries, keys), True where a query sees a key; with them
    ALiBi's bias (1, H, queries, keys) in their dtype, minus infinity where it does not.
    """
    key = torch.arange(keys, device=device)
    distance = (key - key[keys - queries :, None])[None, None]
    sees = distance <= 0
    if spec.window >= 0:
        sees &= distance >= -spec.window
    if spec.slopes is None:
        return sees
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))


def dense_bias(
    layout: PackedLayout | None, spec: AttentionSpec, queries: int, past: int, device: torch.device
) -> Tensor:
    """As `causal_bias`, (1 or B, 1 or H, queries, past + queries), documents kept apart.

    The layout is that of all past + queries tokens.
    """
    if layout is not None and layout.ends is not None:
        return _tree_bias(layout.ends, layout.positions, spec)
    bias = causal_bias(queries, past + queries, spec, device)
    if layout is None:
        return bias
    same = layout.documents[:, None, past:, None] == layout.documents[:, None, None, :]
    return bias & same if spec.slopes is None else bias.masked_fill(~same, float("-inf"))


def _tree_bias(ends: Tensor, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """As `causal_bias` for trees, (B, 1 or H, T, T); distances are those along the path."""
    place = torch.arange(ends.shape[1], device=ends.device)
    sees = (place <= place[:, None]) & (place[:, None] < ends[:, None, :])
    distance = positions[:, None, :] - positions[:, :, None]
    if spec.window >= 0:
        sees &= distance >= -spec.window
    sees, distance = sees[:, None], distance[:, None]
    if spec.slopes is None:
        return sees
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))


def document_segments(layout: PackedLayout, past: int) -> tuple[tuple[int, int], ...]:
    """(queries, keys) of each document of all rows whose first `past` tokens are keys alone.

    The queries are the last of the document's tokens; there may be none.
    """
    found = []
    for row in layout.lengths:
        ends = accumulate(row)
        found += [(min(n, max(0, end - past)), n) for n, end in zip(row, ends, strict=True)]
    return tuple(found)


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, S, KV, hd) with as many heads as q (B, T, H, hd)."""
    groups = q.shape[2] // k.shape[2]
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
