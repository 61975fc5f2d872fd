"""The attention layer: projections, guards and positions around `ops.attention.select.attend`.

Positions are rotary tables (Su et al., 2021) and queries sharpened with their position; the decoder
makes them once a forward pass. Rotation is the half-split form of GPT-NeoX, Llama and DBRX, with
transformers' ways to stretch its frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmfoundry.errors import UserError
from llmfoundry.models.layers import Linear, norm_maker
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec, alibi_slopes
from llmfoundry.ops.attention.select import attend
from llmfoundry.ops.packed_layout import PackedLayout, at
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.model import ModelConfig

KeysValues = tuple[Tensor, Tensor]  # (B, S, KV, hd) each, as attention takes them
Table = tuple[Tensor, Tensor]  # cosine and sine, (..., T, 1, head_dim) in fp32


def attention_specs(
    config: ModelConfig, layers: Iterable[LayerConfig], device: torch.device
) -> dict[int, AttentionSpec]:
    """What attention is asked for, by the window of the layers; `config` is filled."""
    attn, head_dim = config.attn_config, config.head_dim
    assert head_dim is not None, "the recipe was not filled"
    slopes = None
    if attn.alibi:
        assert attn.alibi_bias_max is not None, "the recipe was not filled"
        slopes = alibi_slopes(config.n_heads, attn.alibi_bias_max, device)
    return {
        window: AttentionSpec(
            attn.softmax_scale or head_dim**-0.5,
            softcap=attn.attn_logit_softcapping,
            slopes=slopes,
            window=window,
            dropout=attn.attn_pdrop,
        )
        for window in {layer.window for layer in layers}
    }


class HeadExchange(Protocol):
    """How attention sees whole rows of which this process has a part of the tokens alone.

    One of those in `distributed/context.py`, which has the shapes.
    """

    @property
    def splits_queries(self) -> bool:
        """Whether the tokens at hand see all keys; else all tokens are seen, of some heads."""

    def own(self, spec: AttentionSpec) -> AttentionSpec:
        """Of the heads that attend here."""

    def inward(self, q: Tensor, kv: KeysValues) -> tuple[Tensor, KeysValues]:
        """Queries, keys and values as attention takes them."""

    def queries(self, q: Tensor, kv: KeysValues) -> Tensor:
        """Queries as attention takes them, beside keys and values that are so already."""

    def outward(self, mixed: Tensor) -> Tensor:
        """What attention made, of this process's tokens and all heads."""


class SlotAttention(Protocol):
    """Attention over keys and values of slots; see `slots.SlotPlan`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, rotary: bool) -> Tensor:
        """(1, N, H, hd)."""


class Stored(Protocol):
    """A cache, as a layer sees it."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store k, v (B, T, KV, hd) of one layer; all that it attends to."""


class KVCache(Stored, Protocol):
    """Keys and values of rows that grow together, as transformers keeps them.

    Attributes:
        length: tokens held; new ones take positions length, length + 1, …
    """

    length: int


@dataclass(frozen=True)
class Context:
    """What one forward pass hands to every block of one kind.

    Attributes:
        plan: who attends to whom; in slots, a `slots.SlotPlan`.
        rotary: table of the new tokens; None: no layer rotates.
        cached_rotary: table of all tokens of the row, where frequencies change as it grows: keys
            are then stored unrotated, and turned when they are read. Otherwise None.
        temperature: factors (..., T, 1, 1) on the queries; None: no factors.
        cache: earlier tokens of the rows.
        tokens: T.
        exchange: with the processes that have the rest of each row; None: rows are whole.
        rotates_late: keys are stored unrotated.
    """

    plan: AttentionPlan | SlotAttention
    rotary: Table | None
    cached_rotary: Table | None
    temperature: Tensor | None
    cache: Stored | None
    tokens: int
    exchange: HeadExchange | None = None
    rotates_late: bool = False


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query attention.

    The order is MPT's: project, clip, normalize queries and keys, rotate, attend, project.

    Args:
        config: filled.
        index: number of the block.
        layer: what this block's attention does. With the keys and values of another block it
            projects queries alone, by Wq in the place of Wqkv.
        is_reused: later blocks take this one's keys and values.

    Attributes:
        widths: of queries, keys and values, of the heads that are here.
    """

    def __init__(
        self, config: ModelConfig, index: int, layer: LayerConfig, *, is_reused: bool
    ) -> None:
        super().__init__()
        attn = config.attn_config
        assert attn.kv_n_heads and config.head_dim and config.attention_bias is not None
        self.index, self.head_dim = index, config.head_dim
        self.rotary, self.is_reused = layer.rotary, is_reused
        self.rotated_keys = config.layers()[layer.kv_from].rotary
        self.clip, self.per_head = attn.clip_qkv, attn.qk_gn
        q_width, kv_width = config.n_heads * config.head_dim, attn.kv_n_heads * config.head_dim
        self.owns_kv = layer.kv_from == index
        widths = (q_width, kv_width, kv_width) if self.owns_kv else (q_width,)
        self.widths: tuple[int, ...] = widths
        projection = Linear(config.d_model, sum(self.widths), bias=config.attention_bias)
        if self.owns_kv:
            self.Wqkv = projection
        else:
            self.Wq = projection
        bias = not config.no_bias
        self.q_ln: nn.Module | None = None
        self.k_ln: nn.Module | None = None
        if attn.qk_ln or attn.qk_gn:
            assert attn.norm_type and attn.norm_eps, "the recipe was not filled"
            norm = partial(norm_maker(attn.norm_type), eps=attn.norm_eps, bias=bias)
            q_norm, k_norm = (config.head_dim,) * 2 if attn.qk_gn else (q_width, kv_width)
            self.q_ln = norm(q_norm)
            self.k_ln = norm(k_norm) if self.owns_kv else None
        self.out_proj = Linear(q_width, config.d_model, bias=bias)

    def forward(
        self, x: Tensor, context: Context, kv: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues | None]:
        """Mix tokens of x (B, T, D).

        Args:
            x: normalized residual stream.
            context: of this forward pass.
            kv: of the block whose keys and values this one takes; None where it makes its own.

        Returns:
            (B, T, D), and where later blocks take them the keys and values, as attention had them.
        """
        assert (kv is None) == self.owns_kv
        projected = self.Wqkv(x) if self.owns_kv else self.Wq(x)  # (B, T, sum of widths)
        if self.clip is not None:
            # clamp's backward pass is four steps, hardtanh's one
            projected = F.hardtanh(projected, -self.clip, self.clip)
        behind = projected.shape[1] - context.tokens  # see `TensorRanks.padded`
        projected = projected[:, : context.tokens] if behind else projected
        parts = projected.split(self.widths, dim=-1)
        q = self._heads(parts[0], self.q_ln)  # (B, T, H, hd)
        if kv is None:
            k, v = self._heads(parts[1], self.k_ln), self._heads(parts[2], None)  # (B, T, KV, hd)
            kv = self._keys_values(k, v, context)  # (B, S, KV, hd) each, S = T and cached tokens
        if self.rotary:
            assert context.rotary is not None
            q = rotate(q, context.rotary)
        if context.temperature is not None:
            q = (q * context.temperature).to(q.dtype)
        if context.exchange is not None:
            if self.owns_kv:
                q, kv = context.exchange.inward(q, kv)
            else:
                q = context.exchange.queries(q, kv)
        if isinstance(context.plan, AttentionPlan):
            mixed = attend(q, *kv, context.plan, training=self.training)  # (B, T, H, hd)
        else:
            mixed = context.plan.attend(q, *kv, rotary=self.rotated_keys)
        if context.exchange is not None:
            mixed = context.exchange.outward(mixed)
        mixed = mixed.flatten(-2)
        mixed = F.pad(mixed, (0, 0, 0, behind)) if behind else mixed
        return self.out_proj(mixed), kv if self.is_reused else None

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """(B, T, heads, hd) of x (B, T, heads * hd), normalized as a whole or head by head."""
        if norm is None:
            return x.unflatten(-1, (-1, self.head_dim))
        if self.per_head:
            return norm(x.unflatten(-1, (-1, self.head_dim)))
        return norm(x).unflatten(-1, (-1, self.head_dim))

    def _keys_values(self, k: Tensor, v: Tensor, context: Context) -> KeysValues:
        """Keys, rotated, and values of the new tokens and of those in the cache."""
        if self.rotary and not context.rotates_late:
            assert context.rotary is not None
            k = rotate(k, context.rotary)
        if context.cache is None:
            # as views, those that later blocks take would keep the whole projection alive
            return (k.contiguous(), v.contiguous()) if self.is_reused else (k, v)
        dtype = k.dtype
        k, v = context.cache.append(self.index, k, v)
        if not isinstance(context.plan, AttentionPlan):
            return k, v
        k, v = k.to(dtype), v.to(dtype)
        if self.rotary and context.cached_rotary is not None:
            k = rotate(k, context.cached_rotary)
        return k, v


def rotary_table(positions: Tensor, frequencies: Tensor) -> Table:
    """Cosine and sine of positions (..., T) times frequencies (half,) or (..., T, half).

    Feature pair (i, i + head_dim/2) turns by position * frequencies[i].
    """
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: Table) -> Tensor:
    """Turn x (B, T, H, head_dim) by the table, in fp32 or wider; x's dtype comes back."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def rotary_frequencies(config: ModelConfig, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Radians per position, (half,) or, with lengths (..., T), (..., T, half), in fp32.

    Pair i has rope_theta^(-2i / head_dim), stretched as rope_hf_config says; all is rounded as
    transformers' LlamaRotaryEmbedding rounds it.

    Args:
        config: filled, with rope.
        lengths: what `dynamic_lengths` gives.
        device: where the table will be.
    """
    attn, head_dim = config.attn_config, config.head_dim
    assert attn.rope_theta is not None and head_dim is not None, "the recipe was not filled"
    base: float | Tensor = attn.rope_theta
    if lengths is not None:
        factor, known = attn.rope_hf_config.factor, config.max_seq_len
        assert factor is not None and known is not None
        growth = factor * lengths.clamp(min=known) / known - (factor - 1)
        base = (base * growth ** (head_dim / (head_dim - 2)))[..., None]
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1 / base**exponents
    stretch = STRETCHES.get(attn.rope_hf_config.type)
    return frequencies if stretch is None else stretch(frequencies, config)


def dynamic_lengths(
    config: ModelConfig, layout: PackedLayout | None, total: int, device: torch.device
) -> Tensor | None:
    """The lengths that decide how much `type: dynamic` stretches; None: nothing is stretched.

    A token's length is that of its own document, so that what a document is packed with changes
    nothing (transformers takes the longest of the whole batch). Without a layout it is `total`:
    the row with all that its key-value cache holds, which grows in generation. Keys in the cache
    are turned anew with it, but what deeper layers made of them stays as it was: beyond
    max_seq_len, generation with a cache is near to that without, not equal.

    In a tree the paths that share a token may have different lengths, and with them frequencies:
    beyond max_seq_len nothing can be shared.

    Decided on the host: lengths of at most max_seq_len cost nothing.

    Args:
        config: filled, with rope.
        layout: documents of the rows.
        total: tokens of a row, those in the cache with it.
        device: where the tokens are.

    Raises:
        UserError: a path of a tree is longer than max_seq_len.
    """
    assert config.max_seq_len is not None, "the recipe was not filled"
    if config.attn_config.rope_hf_config.type != "dynamic":
        return None
    if layout is None:
        long = total > config.max_seq_len
        return torch.full((), total, device=device) if long else None
    longest = layout.depth if layout.ends is not None else max(map(max, layout.lengths))
    if longest <= config.max_seq_len:
        return None
    if layout.ends is not None:
        raise UserError(
            f"max_seq_len: a prompt has {longest} tokens, but the model knows"
            f" {config.max_seq_len}; rope_hf_config.type: dynamic stretches longer ones each by its"
            " own length, so that prompts which begin alike cannot be computed together; write"
            f" {config.max_seq_len} or less, or another type"
        )
    rows = [torch.tensor(row) for row in layout.lengths]
    of_tokens = [row.repeat_interleave(row, output_size=layout.width) for row in rows]
    lengths = torch.stack(of_tokens)
    if layout.ranges is not None:
        lengths = at(lengths, layout.ranges)
    if device.type == "cuda":
        lengths = lengths.pin_memory()  # from pageable memory the copy would wait for the device
    return lengths.to(device, non_blocking=True)


def _linear(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Chen et al., 2023: positions / factor."""
    factor = config.attn_config.rope_hf_config.factor
    assert factor is not None
    return frequencies / factor


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Llama 3.1's: pairs that turn seldom over the original length are slowed by `factor`.

    Those that turn at least high_freq_factor times are kept, and between low_freq_factor and that
    the two are mixed.
    """
    rope = config.attn_config.rope_hf_config
    original, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    assert rope.factor and original and low is not None and high is not None
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


STRETCHES: dict[str, Callable[[Tensor, ModelConfig], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
}  # dynamic changes the base itself


def query_temperature(positions: Tensor, floor_scale: int, attn_scale: float) -> Tensor:
    """Factors (..., T, 1, 1) on the queries at positions (..., T), in fp32.

    1 + attn_scale * log(1 + floor((p + 1) / floor_scale)), as Llama 4 has it in its layers without
    rotation; here in every layer whose settings say so.
    """
    steps = torch.floor((positions + 1.0) / floor_scale)
    return (1 + attn_scale * torch.log1p(steps))[..., None, None]


def longest_document(config: ModelConfig) -> int | None:
    """Tokens that a document may have; None: any number, as no positions are learned."""
    return config.max_seq_len if config.learned_pos_emb else None
