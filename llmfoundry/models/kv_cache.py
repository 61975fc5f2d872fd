"""Keys and values of many sequences, each in a slot of its own, and how a forward pass reads them.

`inference/decoder_rows.py` fills the slots. The one idea: a pass takes the new tokens of all
sequences in one row, whatever their number and position, so that nothing is padded in a matrix
product; attention alone looks at slots apart. What has one new token in adjacent slots is attended
to together, under a mask where the lengths differ; each longer piece by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmfoundry.models.attention import (
    KeysValues,
    SlotAttention,
    Table,
    rotary_frequencies,
    rotary_table,
    rotate,
)
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec
from llmfoundry.ops.attention.select import AttentionKernels, attend
from llmfoundry.ops.devices import available_host_memory
from llmfoundry.recipe.model import ModelConfig

WASTE = 2
"""Keys that slots attended to together look at, for each that their sequences have, at most."""


@dataclass(frozen=True)
class Piece:
    """New tokens of one sequence.

    Attributes:
        slot: where it is.
        past: tokens of it that the slot holds.
        tokens: those that follow them; at least one.
        wanted: so many of the last are given their logits.
    """

    slot: int
    past: int
    tokens: tuple[int, ...]
    wanted: int


@dataclass(frozen=True)
class SlotGroup:
    """Slots that attend in one call.

    Attributes:
        slots: adjacent ones.
        count: new tokens of each, one after the other in the row.
        keys: places of a slot that any of them sees.
        plan: how they attend.
        table: of the keys' positions, (slots or 1, S, 1, hd), where keys are stored unrotated.
    """

    slots: slice
    count: int
    keys: slice
    plan: AttentionPlan
    table: Table | None

    @property
    def tokens(self) -> int:
        """Places of the row that it takes."""
        return (self.slots.stop - self.slots.start) * self.count


@dataclass(frozen=True)
class SlotPlan:
    """How the layers of one window attend in one forward pass."""

    groups: tuple[SlotGroup, ...]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, rotary: bool) -> Tensor:
        """Attention (1, N, H, hd) of q (1, N, H, hd) over a layer's slots (slots, S, KV, hd).

        `rotary`: the keys are of a layer that rotates them.
        """
        mixed = []
        parts = q[0].split([group.tokens for group in self.groups])
        for part, group in zip(parts, self.groups, strict=True):
            rows = part.unflatten(0, (-1, group.count))  # (slots, count, H, hd)
            keys, values = k[group.slots, group.keys], v[group.slots, group.keys]
            if rotary and group.table is not None:
                keys = rotate(keys, group.table)
            mixed.append(attend(rows, keys, values, group.plan).flatten(0, 1))
        return torch.cat(mixed)[None]


class PlacedCache:
    """Where keys and values are kept by who knows the place of each new token, and attends itself.

    Slots are one; a serving engine that brings its own attention is another.

    Attributes:
        positions: (1, N) of a pass's new tokens.
        rotates_late: keys are stored unrotated, as their angles depend on how long a row becomes.
    """

    positions: Tensor
    rotates_late: bool = False

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store k, v (1, N, KV, hd) of one layer; what `plan` attends to."""
        raise NotImplementedError

    def lengths(self) -> Tensor | None:
        """(1, N): of the sequence of each new token; None: nothing depends on it."""
        return None

    def plan(
        self, kernels: AttentionKernels, spec: AttentionSpec, dtype: torch.dtype
    ) -> SlotAttention:
        """How layers of this spec attend in this pass."""
        raise NotImplementedError


class SlotCache(PlacedCache):
    """Keys and values for every layer that makes its own.

    Attributes:
        slots: how many sequences there may be.
        length: tokens that each may have.
        positions: (1, N) of the new tokens of the pass that `begin` began.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        share: int = 1,
    ) -> None:
        """Empty slots; `share` is the number of processes that share the heads.

        Raises:
            MemoryError: the host has not as much.
        """
        kv_heads, head_dim = config.attn_config.kv_n_heads, config.head_dim
        assert kv_heads is not None and head_dim is not None, "the recipe was not filled"
        owners = [i for i, layer in enumerate(config.layers()) if layer.kv_from == i]
        self._place = {layer: place for place, layer in enumerate(owners)}
        self.config, self.slots, self.length = config, slots, length
        self.rotates_late = config.attn_config.rope_hf_config.type == "dynamic"
        shape = (len(owners), slots, length, kv_heads // share, head_dim)
        asked = 2 * math.prod(shape) * dtype.itemsize
        if device.type == "cpu" and asked > available_host_memory():  # or this process is killed
            raise MemoryError(f"tried to allocate {asked / 2**30:.1f} GiB")
        # zeros: what a mask hides is still multiplied, by 0
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)

    def begin(self, pieces: Sequence[Piece]) -> Tensor:
        """Say what the next forward pass adds; its tokens (1, N)."""
        rows = [
            (token, piece.past + i, piece.slot)
            for piece in pieces
            for i, token in enumerate(piece.tokens)
        ]
        assert all(piece.past + len(piece.tokens) <= self.length for piece in pieces), "slots end"
        tokens, positions, self._slot = torch.tensor(rows, device=self._keys.device).T
        self._pieces, self.positions = pieces, positions[None].contiguous()
        return tokens[None].contiguous()

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store k, v (1, N, KV, hd) of one layer; all its slots (slots, length, KV, hd)."""
        place, where = self._place[layer], (self._slot, self.positions[0])
        keys, values = self._keys[place], self._values[place]
        keys[where], values[where] = k[0].to(keys.dtype), v[0].to(values.dtype)
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first tokens of one slot those of another."""
        for stored in (self._keys, self._values):
            stored[:, target, :length] = stored[:, source, :length]

    def clear(self, slot: int) -> None:
        """Forget what may be no numbers: times the 0 of a mask it would be none."""
        self._keys[:, slot] = 0
        self._values[:, slot] = 0

    def lengths(self) -> Tensor | None:
        """(1, N): of the sequence of each new token; None: nothing depends on it."""
        if not self.rotates_late:
            return None
        ends = [p.past + len(p.tokens) for p in self._pieces for _ in p.tokens]
        return torch.tensor([ends], device=self.positions.device)

    def plan(self, kernels: AttentionKernels, spec: AttentionSpec, dtype: torch.dtype) -> SlotPlan:
        """How layers of this spec attend in the pass that `begin` began."""
        groups, at = [], 0
        for pieces in _together(self._pieces):
            groups.append(self._group(pieces, at, kernels, spec, dtype))
            at += groups[-1].tokens
        return SlotPlan(tuple(groups))

    def _group(
        self,
        pieces: list[Piece],
        at: int,
        kernels: AttentionKernels,
        spec: AttentionSpec,
        dtype: torch.dtype,
    ) -> SlotGroup:
        first, count = pieces[0], len(pieces[0].tokens)
        slots = slice(first.slot, first.slot + len(pieces))
        past, end = min(p.past for p in pieces), max(p.past for p in pieces) + count
        device, table = self.positions.device, self._table(pieces, end)
        if end == past + count:
            plan = kernels.plan(None, spec, queries=count, past=past, device=device, dtype=dtype)
            return SlotGroup(slots, count, slice(0, end), plan, table)
        start = max(0, past - spec.window) if spec.window >= 0 and table is None else 0
        bias = _bias(self.positions[0, at : at + len(pieces)], start, end, spec)
        plan = kernels.masked(spec, bias)
        return SlotGroup(slots, count, slice(start, end), plan, table)

    def _table(self, pieces: list[Piece], end: int) -> Table | None:
        """Of the keys, by the length that each sequence has now."""
        if not self.rotates_late:
            return None
        device = self.positions.device
        totals = torch.tensor([[p.past + len(p.tokens)] for p in pieces], device=device)
        frequencies = rotary_frequencies(self.config, totals, device)
        return rotary_table(torch.arange(end, device=device)[None], frequencies)


def _together(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Adjacent slots that have one new token each, and are not too different in length."""
    group: list[Piece] = []
    for piece in pieces:
        if group and not _fits(group, piece):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _fits(group: list[Piece], piece: Piece) -> bool:
    lengths = [p.past + 1 for p in (*group, piece)]
    follows = piece.slot == group[-1].slot + 1
    single = len(group[-1].tokens) == len(piece.tokens) == 1
    return follows and single and max(lengths) * len(lengths) <= WASTE * sum(lengths)


def _bias(positions: Tensor, start: int, end: int, spec: AttentionSpec) -> Tensor:
    """As `ops.attention.base.causal_bias`, (n, 1 or H, 1, end - start), of a query each."""
    distance = torch.arange(start, end, device=positions.device) - positions[:, None]
    sees = distance <= 0
    if spec.window >= 0:
        sees &= distance >= -spec.window
    sees, distance = sees[:, None, None], distance[:, None, None]
    if spec.slopes is None:
        return sees
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~sees, float("-inf"))
