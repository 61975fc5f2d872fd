"""KV cache with one slot per sequence, and attention over it (continuous batching).

Entry point: `SlotCache`, which `inference/decoder_slots.py` uses. A forward pass takes the new
tokens of all sequences concatenated into one sequence, so that no matmul processes padding. Only
attention looks at slots separately. Adjacent slots with one new token each attend in one call, with
a mask where their lengths differ. Each longer chunk of a prompt attends in a call of its own.
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
from llmfoundry.recipe.model import ResolvedModelConfig

MAX_PADDING_RATIO = 2
"""Bound on (keys read) / (keys of the sequences) for slots that attend in one call."""


@dataclass(frozen=True)
class TokenChunk:
    """New tokens of one sequence.

    Attributes:
        slot: slot of the sequence.
        past: number of tokens that the slot holds.
        tokens: the tokens after those; at least one.
        wanted: number of last tokens whose logits are needed.
    """

    slot: int
    past: int
    tokens: tuple[int, ...]
    wanted: int


@dataclass(frozen=True)
class SlotGroup:
    """Adjacent slots that attend in one call.

    Attributes:
        slots: range of slots.
        count: new tokens of each slot.
        keys: range of positions that any of the slots attends to.
        plan: mask and kernel.
        table: rotary table of the keys, (slots or 1, S, 1, hd), if keys are cached unrotated.
    """

    slots: slice
    count: int
    keys: slice
    plan: AttentionPlan
    table: Table | None

    @property
    def tokens(self) -> int:
        """Number of new tokens of all its slots."""
        return (self.slots.stop - self.slots.start) * self.count


@dataclass(frozen=True)
class SlotPlan:
    """Attention of all layers with one window in one forward pass."""

    groups: tuple[SlotGroup, ...]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, rotary: bool, sinks: Tensor | None
    ) -> Tensor:
        """Attend over the slots of a layer.

        Args:
            q: (1, N, H, hd) queries of the new tokens.
            k: (slots, S, KV, hd).
            v: (slots, S, KV, hd).
            rotary: the layer that computed the keys uses rotary embeddings.
            sinks: (H,) of the layer; None: it has none.

        Returns:
            (1, N, H, hd).
        """
        outputs = []
        group_queries = q[0].split([group.tokens for group in self.groups])
        for queries, group in zip(group_queries, self.groups, strict=True):
            queries = queries.unflatten(0, (-1, group.count))  # (slots, count, H, hd)
            keys, values = k[group.slots, group.keys], v[group.slots, group.keys]
            if rotary and group.table is not None:
                keys = rotate(keys, group.table)
            attended = attend(queries, keys, values, group.plan, sinks=sinks)
            outputs.append(attended.flatten(0, 1))
        return torch.cat(outputs)[None]


class SlottedCache:
    """Interface of caches that know the location of each new token and bring their own attention.

    `SlotCache` is one. The cache of a serving engine with paged attention is another.

    Attributes:
        positions: (1, N) of the new tokens of a forward pass.
        rotates_late: keys are cached unrotated, because their angles depend on the final length.
    """

    positions: Tensor
    rotates_late: bool = False

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store k, v (1, N, KV, hd) of a layer; return the keys and values for `plan`."""
        raise NotImplementedError

    def lengths(self) -> Tensor | None:
        """Return the sequence length of each new token (1, N); None: frequencies are fixed."""
        return None

    def plan(
        self, kernels: AttentionKernels, spec: AttentionSpec, dtype: torch.dtype
    ) -> SlotAttention:
        """Return the attention of layers with this spec in this forward pass."""
        raise NotImplementedError


class SlotCache(SlottedCache):
    """KV cache with a fixed number of slots, for every layer that computes keys and values.

    Attributes:
        slots: maximal number of sequences.
        length: maximal tokens of a sequence.
        positions: (1, N) of the new tokens passed to `begin`.
    """

    def __init__(
        self,
        config: ResolvedModelConfig,
        *,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        ranks: int = 1,
    ) -> None:
        """Allocate empty slots.

        Args:
            config: resolved model configuration.
            slots: maximal number of sequences.
            length: maximal tokens of a sequence.
            device: of keys and values.
            dtype: of keys and values.
            ranks: number of tensor-parallel ranks that share the key-value heads. Of latent
                attention, which caches one row for all heads, each rank holds all.

        Raises:
            MemoryError: the host does not have enough memory.
        """
        heads, key_width, value_width = config.cache_row
        if not config.attn_config.is_latent:
            heads //= ranks
        owners = [i for i, layer in enumerate(config.layers()) if layer.kv_from == i]
        self._cache_index = {layer: index for index, layer in enumerate(owners)}
        self.config, self.slots, self.length = config, slots, length
        self.rotates_late = config.attn_config.rope_hf_config.type == "dynamic"
        shape = (len(owners), slots, length, heads)
        nbytes = math.prod(shape) * (key_width + value_width) * dtype.itemsize
        # on a CPU an allocation that is too large would get this process killed later
        if device.type == "cpu" and nbytes > available_host_memory():
            raise MemoryError(f"tried to allocate {nbytes / 2**30:.1f} GiB")
        # zeros, because masked values are multiplied by 0, and 0 * NaN is NaN
        self._keys = torch.zeros(*shape, key_width, device=device, dtype=dtype)
        self._values = torch.zeros(*shape, value_width, device=device, dtype=dtype)

    def begin(self, chunks: Sequence[TokenChunk]) -> Tensor:
        """Start a forward pass over new tokens; return them concatenated, (1, N)."""
        assert all(c.past + len(c.tokens) <= self.length for c in chunks), "a slot is too short"
        columns = [
            (token, chunk.past + i, chunk.slot)
            for chunk in chunks
            for i, token in enumerate(chunk.tokens)
        ]
        tokens, positions, self._slot = torch.tensor(columns, device=self._keys.device).T
        self._chunks, self.positions = chunks, positions[None].contiguous()
        return tokens[None].contiguous()

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store k, v (1, N, KV, hd) of a layer; return all its slots (slots, length, KV, hd)."""
        index = self._cache_index[layer]
        keys, values = self._keys[index], self._values[index]
        target = (self._slot, self.positions[0])
        keys[target], values[target] = k[0].to(keys.dtype), v[0].to(values.dtype)
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to slot `target`."""
        for cached in (self._keys, self._values):
            cached[:, target, :length] = cached[:, source, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot that may hold NaN, which a mask's 0 would not remove."""
        self._keys[:, slot] = 0
        self._values[:, slot] = 0

    def lengths(self) -> Tensor | None:
        """Return the sequence length of each new token (1, N); None: frequencies are fixed."""
        if not self.rotates_late:
            return None
        totals = [chunk.past + len(chunk.tokens) for chunk in self._chunks for _ in chunk.tokens]
        return torch.tensor([totals], device=self.positions.device)

    def plan(self, kernels: AttentionKernels, spec: AttentionSpec, dtype: torch.dtype) -> SlotPlan:
        """Return the attention of layers with this spec for the tokens passed to `begin`."""
        groups, offset = [], 0
        for chunks in _group_chunks(self._chunks):
            groups.append(self._group(chunks, offset, kernels, spec, dtype))
            offset += groups[-1].tokens
        return SlotPlan(tuple(groups))

    def _group(
        self,
        chunks: list[TokenChunk],
        offset: int,
        kernels: AttentionKernels,
        spec: AttentionSpec,
        dtype: torch.dtype,
    ) -> SlotGroup:
        first, count = chunks[0], len(chunks[0].tokens)
        slots = slice(first.slot, first.slot + len(chunks))
        past, end = min(c.past for c in chunks), max(c.past for c in chunks) + count
        device, table = self.positions.device, self._key_table(chunks, end)
        # all sequences have the same length: plain causal attention
        if end == past + count:
            plan = kernels.plan(None, spec, queries=count, past=past, device=device, dtype=dtype)
            return SlotGroup(slots, count, slice(0, end), plan, table)
        # lengths differ: one query per slot, with a mask
        start = max(0, past - spec.window) if spec.window >= 0 and table is None else 0
        bias = _single_query_bias(
            self.positions[0, offset : offset + len(chunks)], start, end, spec
        )
        plan = kernels.masked(spec, bias)
        return SlotGroup(slots, count, slice(start, end), plan, table)

    def _key_table(self, chunks: list[TokenChunk], end: int) -> Table | None:
        """Return the rotary table of the keys for the current length of each sequence."""
        if not self.rotates_late:
            return None
        device = self.positions.device
        totals = torch.tensor([[c.past + len(c.tokens)] for c in chunks], device=device)
        frequencies = rotary_frequencies(self.config, totals, device)
        return rotary_table(torch.arange(end, device=device)[None], frequencies)


def _group_chunks(chunks: Sequence[TokenChunk]) -> Iterator[list[TokenChunk]]:
    """Group chunks of one token in adjacent slots whose lengths are similar."""
    group: list[TokenChunk] = []
    for chunk in chunks:
        if group and not _fits(group, chunk):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _fits(group: list[TokenChunk], chunk: TokenChunk) -> bool:
    lengths = [c.past + 1 for c in (*group, chunk)]
    is_adjacent = chunk.slot == group[-1].slot + 1
    is_single = len(group[-1].tokens) == len(chunk.tokens) == 1
    keys_read = max(lengths) * len(lengths)
    return is_adjacent and is_single and keys_read <= MAX_PADDING_RATIO * sum(lengths)


def _single_query_bias(positions: Tensor, start: int, end: int, spec: AttentionSpec) -> Tensor:
    """Return the mask or bias (n, 1 or H, 1, end - start) of one query per slot.

    The semantics are those of `ops.attention.base.causal_bias`.

    Args:
        positions: (n,) of the queries.
        start: first key.
        end: one past the last key.
        spec: window and ALiBi slopes.
    """
    distance = torch.arange(start, end, device=positions.device) - positions[:, None]
    visible = distance <= 0
    if spec.window >= 0:
        visible &= distance >= -spec.window
    visible, distance = visible[:, None, None], distance[:, None, None]
    if spec.slopes is None:
        return visible
    return (spec.slopes.view(1, -1, 1, 1) * distance).masked_fill(~visible, float("-inf"))
