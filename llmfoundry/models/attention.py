"""The attention layer: projections, clipping, QK norm and positions around `attend`.

Entry point: `Attention`. The decoder computes everything that is the same for all layers (plans,
rotary tables, query temperatures) once per forward pass and passes it in as a `Context`.

Rotary embeddings (Su et al., 2021) use the half-split form of GPT-NeoX, Llama and DBRX, with the
frequency scalings of transformers.
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
from torch.distributed.tensor import DTensor

from llmfoundry.errors import UserError
from llmfoundry.models.layers import Linear, norm_maker
from llmfoundry.ops.attention.base import AttentionPlan, AttentionSpec, alibi_slopes
from llmfoundry.ops.attention.select import attend
from llmfoundry.ops.packed_layout import PackedLayout, at
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.model import ResolvedModelConfig

KeysValues = tuple[Tensor, Tensor]  # keys and values, (B, S, KV, hd) each
Table = tuple[Tensor, Tensor]  # cosine and sine, (..., T, 1, head_dim) in fp32


def attention_specs(
    config: ResolvedModelConfig, layers: Iterable[LayerConfig], device: torch.device
) -> dict[int, AttentionSpec]:
    """Return the attention settings of each window that occurs in the layers."""
    attn = config.attn_config
    slopes = None
    if attn.alibi:
        slopes = alibi_slopes(config.n_heads, attn.alibi_bias_max, device)
    return {
        window: AttentionSpec(
            config.softmax_scale,
            softcap=attn.attn_logit_softcapping,
            slopes=slopes,
            window=window,
            dropout=attn.attn_pdrop,
            sinks=attn.sinks,
        )
        for window in {layer.window for layer in layers}
    }


class ContextExchange(Protocol):
    """Context-parallel communication around attention.

    Each rank has a part of the tokens of a sequence, and attention needs the others. The
    implementations, with tensor shapes, are in `distributed/context.py`.
    """

    @property
    def splits_queries(self) -> bool:
        """Whether a rank attends with its own queries and all heads; else all queries, some heads.

        The first is all-gather, the second Ulysses.
        """

    def local_heads(self, values: Tensor) -> Tensor:
        """Return the values of the heads that this rank computes, of values (H,)."""

    def exchange_qkv(self, q: Tensor, kv: KeysValues) -> tuple[Tensor, KeysValues]:
        """Return the queries, keys and values that this rank attends with."""

    def exchange_q(self, q: Tensor, kv: KeysValues) -> Tensor:
        """Return the queries that this rank attends with; `kv` has been exchanged already."""

    def exchange_output(self, attended: Tensor) -> Tensor:
        """Return the attention output of this rank's tokens and all heads."""


class SlotAttention(Protocol):
    """Attention over the keys and values of slots; see `kv_cache.SlotPlan`."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, rotary: bool, sinks: Tensor | None
    ) -> Tensor:
        """Return (1, N, H, hd)."""


class LayerCache(Protocol):
    """The part of a KV cache that an attention layer uses."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> KeysValues:
        """Store k, v (B, T, KV, hd) of a layer; return all keys and values it attends to."""


class KVCache(LayerCache, Protocol):
    """KV cache of sequences that grow together, as in transformers.

    Attributes:
        length: number of cached tokens; new tokens have positions length, length + 1, …
    """

    length: int


@dataclass(frozen=True)
class Context:
    """Input of one forward pass to all blocks with the same window and query temperature.

    Attributes:
        plan: the attention mask and kernel; a `kv_cache.SlotPlan` for a slot cache.
        rotary: table of the new tokens; None: no layer uses rotary embeddings.
        cached_rotary: table of all tokens. Set where the frequencies change as the sequence grows:
            keys are then cached unrotated and rotated when they are read.
        temperature: factors (..., T, 1, 1) on the queries; None: no factors.
        cache: keys and values of earlier tokens.
        tokens: T, the number of new tokens without padding for tensor parallelism.
        exchange: context-parallel communication; None without context parallelism.
        rotates_late: keys are cached unrotated.
    """

    plan: AttentionPlan | SlotAttention
    rotary: Table | None
    cached_rotary: Table | None
    temperature: Tensor | None
    cache: LayerCache | None
    tokens: int
    exchange: ContextExchange | None = None
    rotates_late: bool = False


class Sinks(nn.Module):
    """The sink of each head; see `ops/attention/sinks.py`."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> Tensor:
        """Return the sinks (H,); with tensor parallelism, those of this rank's heads."""
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight


class Attention(nn.Module):
    """Multi-head, multi-query or grouped-query attention.

    The order of operations is MPT's: project, clip, normalize queries and keys, rotate, attend,
    project.

    Args:
        config: resolved model configuration.
        index: number of the block.
        layer: settings of this block's attention. A block that reuses the keys and values of
            another has a projection Wq of the queries in place of Wqkv.
        is_reused: later blocks reuse this block's keys and values.

    Attributes:
        widths: of queries, keys and values in the fused projection; with tensor parallelism, of
            this rank's heads.
    """

    def __init__(
        self, config: ResolvedModelConfig, index: int, layer: LayerConfig, *, is_reused: bool
    ) -> None:
        super().__init__()
        attn = config.attn_config
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
            norm = partial(norm_maker(attn.norm_type), eps=attn.norm_eps, bias=bias)
            q_norm, k_norm = (config.head_dim,) * 2 if attn.qk_gn else (q_width, kv_width)
            self.q_ln = norm(q_norm)
            self.k_ln = norm(k_norm) if self.owns_kv else None
        self.sinks = Sinks(config.n_heads) if attn.sinks else None
        self.out_proj = Linear(q_width, config.d_model, bias=bias)

    def forward(
        self, x: Tensor, context: Context, kv: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues | None]:
        """Apply attention to the normalized residual stream.

        Args:
            x: (B, T, D).
            context: of this forward pass.
            kv: keys and values of the block that this block reuses; None if it computes its own.

        Returns:
            The attention output (B, T, D), and the keys and values if later blocks reuse them.
        """
        assert (kv is None) == self.owns_kv

        # project and clip
        projected = self.Wqkv(x) if self.owns_kv else self.Wq(x)  # (B, T, sum of widths)
        if self.clip is not None:
            # the backward pass of clamp takes four kernels, that of hardtanh one
            projected = F.hardtanh(projected, -self.clip, self.clip)
        # tensor parallelism pads T to a multiple of the ranks (`TensorRanks.padded`)
        padding = projected.shape[1] - context.tokens
        if padding:
            projected = projected[:, : context.tokens]

        # split into heads, normalize, rotate, and append to the cache
        parts = projected.split(self.widths, dim=-1)
        q = self._heads(parts[0], self.q_ln)  # (B, T, H, hd)
        if kv is None:
            k = self._heads(parts[1], self.k_ln)  # (B, T, KV, hd)
            v = self._heads(parts[2], None)
            kv = self._keys_values(k, v, context)  # (B, S, KV, hd) each, S = cached tokens + T
        if self.rotary:
            assert context.rotary is not None
            q = rotate(q, context.rotary)
        if context.temperature is not None:
            q = (q * context.temperature).to(q.dtype)

        # attend, with context-parallel communication before and after
        sinks = None if self.sinks is None else self.sinks()
        if context.exchange is not None:
            if sinks is not None:
                sinks = context.exchange.local_heads(sinks)
            if self.owns_kv:
                q, kv = context.exchange.exchange_qkv(q, kv)
            else:
                q = context.exchange.exchange_q(q, kv)
        if isinstance(context.plan, AttentionPlan):
            attended = attend(
                q, *kv, context.plan, sinks=sinks, training=self.training
            )  # (B, T, H, hd)
        else:
            attended = context.plan.attend(q, *kv, rotary=self.rotated_keys, sinks=sinks)
        if context.exchange is not None:
            attended = context.exchange.exchange_output(attended)

        attended = attended.flatten(-2)  # (B, T, H * hd)
        if padding:
            attended = F.pad(attended, (0, 0, 0, padding))
        return self.out_proj(attended), kv if self.is_reused else None

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Split x (B, T, heads * hd) into (B, T, heads, hd), with QK norm before or after."""
        if norm is None:
            return x.unflatten(-1, (-1, self.head_dim))
        if self.per_head:
            return norm(x.unflatten(-1, (-1, self.head_dim)))
        return norm(x).unflatten(-1, (-1, self.head_dim))

    def _keys_values(self, k: Tensor, v: Tensor, context: Context) -> KeysValues:
        """Return rotated keys and values, cached tokens included."""
        if self.rotary and not context.rotates_late:
            assert context.rotary is not None
            k = rotate(k, context.rotary)
        if context.cache is None:
            # copies, because views that later blocks reuse would keep the fused projection alive
            return (k.contiguous(), v.contiguous()) if self.is_reused else (k, v)
        dtype = k.dtype
        k, v = context.cache.append(self.index, k, v)
        if not isinstance(context.plan, AttentionPlan):
            return k, v
        k, v = k.to(dtype), v.to(dtype)
        if self.rotary and context.cached_rotary is not None:
            k = rotate(k, context.cached_rotary)
        return k, v


def rotary_table(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> Table:
    """Return cosine and sine of positions (..., T) times frequencies (half,) or (..., T, half).

    Feature pair (i, i + head_dim/2) is rotated by the angle position * frequencies[i], and
    multiplied by `scale` (`ResolvedRopeConfig.table_scale`).
    """
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def rotate(x: Tensor, table: Table) -> Tensor:
    """Rotate x (B, T, H, head_dim) by the table. Computes in fp32 or wider, returns x's dtype."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def rotary_frequencies(
    config: ResolvedModelConfig, lengths: Tensor | None, device: torch.device
) -> Tensor:
    """Return the rotary frequencies in radians per position, in fp32.

    Pair i has the frequency rope_theta^(-2i / rotary_dim), scaled as rope_hf_config says. Rounding
    is that of transformers' LlamaRotaryEmbedding.

    Args:
        config: resolved, with rope.
        lengths: (..., T), result of `dynamic_lengths`.
        device: of the result.

    Returns:
        (half,), or (..., T, half) with lengths.
    """
    attn, head_dim = config.attn_config, config.rotary_dim
    base: float | Tensor = attn.rope_theta
    if lengths is not None:
        # NTK-aware scaling of the base, as `type: dynamic` of transformers
        factor, max_seq_len = attn.rope_hf_config.factor, config.max_seq_len
        growth = factor * lengths.clamp(min=max_seq_len) / max_seq_len - (factor - 1)
        base = (base * growth ** (head_dim / (head_dim - 2)))[..., None]
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1 / base**exponents
    scale = ROPE_SCALINGS.get(attn.rope_hf_config.type)
    return frequencies if scale is None else scale(frequencies, config)


def dynamic_lengths(
    config: ResolvedModelConfig, layout: PackedLayout | None, total: int, device: torch.device
) -> Tensor | None:
    """Return the sequence lengths that set the frequencies of `rope_hf_config.type: dynamic`.

    A token's length is the length of its document, so that packing does not change it
    (transformers uses the longest sequence of the batch). Without a layout the length is `total`,
    which grows in generation. Cached keys are then rotated with the new frequencies, but the
    cached values of deeper layers were computed with the old ones. Beyond max_seq_len, generation
    with a cache is therefore close to generation without a cache, and not equal.

    In a prefix tree, paths that share a token may have different lengths and hence different
    frequencies. Beyond max_seq_len no token can be shared.

    The decision is made on the host, so lengths up to max_seq_len cost nothing.

    Args:
        config: resolved, with rope.
        layout: documents of the sequences.
        total: tokens of a sequence, including cached tokens.
        device: of the tokens.

    Returns:
        Lengths (..., T), or None if no length exceeds max_seq_len.

    Raises:
        UserError: a path of a prefix tree is longer than max_seq_len.
    """
    if config.attn_config.rope_hf_config.type != "dynamic":
        return None
    if layout is None:
        is_longer = total > config.max_seq_len
        return torch.full((), total, device=device) if is_longer else None
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
    # each token gets the length of its document
    document_lengths = [torch.tensor(sequence) for sequence in layout.lengths]
    token_lengths = [
        lengths.repeat_interleave(lengths, output_size=layout.width) for lengths in document_lengths
    ]
    lengths = torch.stack(token_lengths)  # (B, T)
    if layout.ranges is not None:
        lengths = at(lengths, layout.ranges)
    if device.type == "cuda":
        lengths = lengths.pin_memory()  # a copy from pageable memory would synchronize
    return lengths.to(device, non_blocking=True)


def _linear(frequencies: Tensor, config: ResolvedModelConfig) -> Tensor:
    """Divide positions by `factor` (position interpolation, Chen et al., 2023)."""
    factor = config.attn_config.rope_hf_config.factor
    return frequencies / factor


def _llama3(frequencies: Tensor, config: ResolvedModelConfig) -> Tensor:
    """Scale the frequencies as Llama 3.1 does.

    A pair with fewer than low_freq_factor rotations over the original length is divided by
    `factor`. A pair with more than high_freq_factor rotations is unchanged. In between, the two
    are interpolated linearly.
    """
    rope = config.attn_config.rope_hf_config
    original, low, high = (
        rope.original_max_position_embeddings,
        rope.low_freq_factor,
        rope.high_freq_factor,
    )
    rotations = original / (2 * math.pi / frequencies)
    smooth = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(frequencies: Tensor, config: ResolvedModelConfig) -> Tensor:
    """Scale the frequencies as YaRN does (Peng et al., 2023).

    A pair with fewer than beta_slow rotations over the original length is divided by `factor`. A
    pair with more than beta_fast rotations is unchanged. In between, the two are interpolated
    linearly in the number of the pair, as in the authors' code (in the paper, in the rotations).
    """
    rope, width = config.attn_config.rope_hf_config, config.rotary_dim
    theta, device = config.attn_config.rope_theta, frequencies.device

    def pair_of(rotations: float) -> float:
        radians_per_position = 2 * math.pi * rotations / rope.original_max_position_embeddings
        return -width * math.log(radians_per_position) / (2 * math.log(theta))

    # the pairs between which frequencies are interpolated
    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32, device=device)
    kept = 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0, 1)
    # `frequencies / factor` would round differently from transformers
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    divided = 1 / (rope.factor * theta**exponents)
    return divided * (1 - kept) + frequencies * kept


ROPE_SCALINGS: dict[str, Callable[[Tensor, ResolvedModelConfig], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}  # `dynamic` scales the base instead, in `rotary_frequencies`


def query_temperature(positions: Tensor, floor_scale: int, attn_scale: float) -> Tensor:
    """Return fp32 factors (..., T, 1, 1) on the queries at positions (..., T).

    The factor is 1 + attn_scale * log(1 + floor((p + 1) / floor_scale)), from Llama 4's layers
    without rotary embeddings. Here any layer can use it.
    """
    steps = torch.floor((positions + 1.0) / floor_scale)
    return (1 + attn_scale * torch.log1p(steps))[..., None, None]


def longest_document(config: ResolvedModelConfig) -> int | None:
    """Return the maximal tokens of a document; None: no limit, as no positions are learned."""
    return config.max_seq_len if config.learned_pos_emb else None
