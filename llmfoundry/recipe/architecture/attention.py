"""The `model.attn_config` section: kinds of heads, positions, numerical guards, backends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.attention_limits import ALIBI, DROPOUT, LIMITS, SOFTCAP, limit
from llmfoundry.recipe.values.bounds import FRACTION, POSITIVE, TOKENS, Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import divides, inert, set_defaults
from llmfoundry.recipe.values.choices import ChoiceTable, Entry

ATTN_TYPES = ("multihead_attention", "multiquery_attention", "grouped_query_attention")


@dataclass(frozen=True)
class NormType(Entry):
    """A kind of norm: `make(width, eps=, bias=)`, whose `weight` begins as 1 and `bias` as 0."""


_NORMS = "llmfoundry.models.layers"
NORMS = ChoiceTable(
    "model.norm_type",
    NormType,
    {
        "layernorm": NormType(f"{_NORMS}:LayerNorm"),
        "rmsnorm": NormType(f"{_NORMS}:RMSNorm"),
        "low_precision_layernorm": NormType(f"{_NORMS}:low_precision_layernorm"),
        "low_precision_rmsnorm": NormType(f"{_NORMS}:low_precision_rmsnorm"),
    },
)
ATTN_IMPLS = ("auto", *LIMITS)
ROPE_TYPES = ("no_scaling", "linear", "dynamic", "llama3")
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

WINDOW = Range(-1, 2**31 - 1)


@dataclass
class RopeConfig:
    """How rotary frequencies are stretched beyond the length that they were trained for."""

    type: Annotated[str, choice(ROPE_TYPES)] = "no_scaling"
    """no_scaling; linear: positions / factor (Chen et al., 2023); dynamic: theta grows with rows
    longer than max_seq_len (NTK-aware); llama3: low frequencies / factor, high ones kept."""
    factor: Annotated[float | None, Range(1)] = None
    """Stretch; required by every type but no_scaling."""
    low_freq_factor: Annotated[float | None, POSITIVE] = None
    """Only with llama3, required: wavelengths above original length / this are stretched."""
    high_freq_factor: Annotated[float | None, POSITIVE] = None
    """Only with llama3, required: wavelengths below original length / this are kept."""
    original_max_position_embeddings: Annotated[int | None, TOKENS] = None
    """Only with llama3, required: the length that the frequencies were trained for."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, are missing, or have no effect."""
        if (yield from out_of_bounds(key, self)):
            return
        wanted = {"no_scaling": (), "llama3": ("factor", *LLAMA3_KEYS)}.get(self.type, ("factor",))
        for name in ("factor", *LLAMA3_KEYS):
            if name not in wanted:
                yield from inert(key, self, [name], f"with type: {self.type}")
            elif getattr(self, name) is None:
                yield f"{key}{name}: type: {self.type} needs it; write a number"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not low < high:
            yield f"{key}high_freq_factor: {high} must be greater than low_freq_factor ({low})"


FLOOR_SCALE = 8192  # Llama 4's


@dataclass
class TemperatureConfig:
    """Queries sharpened with their position, as Llama 4 does in layers without positions."""

    floor_scale: Annotated[int | None, Range(1)] = None
    """Positions to which the same factor applies; 8192 where attn_scale is above 0."""
    attn_scale: Annotated[float, Range(0)] = 0.0
    """A query at p is multiplied by 1 + attn_scale * log(1 + floor((p + 1) / floor_scale)); 0: by
    nothing."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
        if not self.attn_scale:
            yield from inert(key, self, ["floor_scale"], "with attn_scale: 0")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.attn_scale:
            set_defaults(self, floor_scale=FLOOR_SCALE)


@dataclass
class AttentionConfig:
    """Attention: kinds of heads, positions, numerical guards."""

    attn_type: Annotated[str, choice(ATTN_TYPES)] = "multihead_attention"
    """multihead_attention, multiquery_attention (one key-value head), grouped_query_attention."""
    attn_impl: Annotated[str, choice(ATTN_IMPLS)] = "auto"
    """auto: the fastest that the device and the other settings allow. sdpa: PyTorch's fused
    attention. On CUDA alone: flex (FlexAttention), varlen (PyTorch's variable-length kernel), flash
    (the flash-attn package), flash3 (flash-attn-3, on Hopper). torch: plain matmul and softmax, the
    slow reference."""
    kv_n_heads: Annotated[int | None, Range(1)] = None
    """Key-value heads; divides n_heads. Only for, and required by, grouped_query_attention."""
    softmax_scale: Annotated[float | None, POSITIVE] = None
    """Factor on the attention logits; unset: 1 / sqrt(head_dim)."""
    attn_logit_softcapping: Annotated[float | None, POSITIVE] = None
    """Attention logits become c * tanh(logits / c) (Gemma 2); unset: no cap."""
    attn_pdrop: Annotated[float, FRACTION] = 0.0
    """Dropout on attention weights, while training."""
    clip_qkv: Annotated[float | None, POSITIVE] = None
    """Clamp queries, keys and values to [-c, c] after their projection; unset: no clamp."""
    qk_ln: bool = False
    """Normalize the whole query and key width before positions are applied."""
    qk_gn: bool = False
    """Normalize each query and key head by itself before positions are applied."""
    norm_type: Annotated[str | None, choice(NORMS)] = None
    """Only with qk_ln or qk_gn: the kind of that norm; unset: model.norm_type."""
    norm_eps: Annotated[float | None, POSITIVE] = None
    """Only with qk_ln or qk_gn: added to the variance under its root; unset: model.norm_eps."""
    sliding_window_size: Annotated[int, WINDOW] = -1
    """A token sees itself and this many tokens before it; -1: all."""
    alibi: bool = False
    """Attention with linear biases (Press et al., 2022) in place of position embeddings."""
    alibi_bias_max: Annotated[int | None, Range(1)] = None
    """ALiBi's steepest exponent: slopes 2^(-alibi_bias_max * i / n). 8 where alibi is on."""
    rope: bool = False
    """Rotary positions (Su et al., 2021), half-split form, over the whole head."""
    rope_theta: Annotated[float | None, POSITIVE] = None
    """Base of the rotary frequencies. 10000 where rope is on."""
    rope_hf_config: RopeConfig = field(default_factory=RopeConfig)
    """Only with rope: how frequencies are stretched for longer rows."""
    nope: bool = False
    """No positions at all (Kazemnejad et al., 2023): causality alone orders the tokens."""
    attn_temperature_tuning: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Queries sharpened with their position."""

    def check(self, key: str, n_heads: int) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        if (yield from out_of_bounds(key, self)):
            return
        if self.attn_type == "grouped_query_attention":
            if self.kv_n_heads is None:
                yield f"{key}kv_n_heads: {self.attn_type} needs it; write a divisor of n_heads"
            else:
                yield from divides(f"{key}kv_n_heads", self.kv_n_heads, "model.n_heads", n_heads)
        elif self.kv_n_heads not in (None, self.derived_kv_heads(n_heads)):
            yield from inert(key, self, ["kv_n_heads"], "without grouped_query_attention")
        if self.qk_ln and self.qk_gn:
            yield f"{key}qk_gn: and qk_ln exclude each other; set one of them to false"
        if not (self.qk_ln or self.qk_gn):
            yield from inert(key, self, ["norm_type", "norm_eps"], "without qk_ln or qk_gn")
        yield from check_window(f"{key}sliding_window_size", self.sliding_window_size)
        yield from self.attn_temperature_tuning.check(f"{key}attn_temperature_tuning.")
        yield from self._check_positions(key)

    def check_impl(self, key: str, head_dim: int) -> Iterator[str]:
        """A line where the backend that is named cannot serve these options."""
        if self.attn_impl in LIMITS:
            options = [name for name in (ALIBI, SOFTCAP, DROPOUT) if getattr(self, name)]
            reason = limit(self.attn_impl, options, head_dim)
            if reason is not None:
                yield f"{key}attn_impl: {self.attn_impl} {reason}"

    def _check_positions(self, key: str) -> Iterator[str]:
        chosen = [name for name in ("alibi", "rope", "nope") if getattr(self, name)]
        if len(chosen) > 1:
            both = " and ".join(chosen[1:])
            yield f"{key}{chosen[0]}: and {both} exclude each other; set one of them to false"
        if not self.alibi:
            yield from inert(key, self, ["alibi_bias_max"], "without alibi: true")
        if not self.rope:
            yield from inert(key, self, ["rope_theta"], "without rope: true")
            if self.rope_hf_config != RopeConfig():
                yield f"{key}rope_hf_config: has no effect without rope: true; remove it"
        yield from self.rope_hf_config.check(f"{key}rope_hf_config.")

    def derived_kv_heads(self, n_heads: int) -> int | None:
        """Key-value heads that the attention type alone decides."""
        return {"multihead_attention": n_heads, "multiquery_attention": 1}.get(self.attn_type)

    def fill(self, n_heads: int, norm_type: str, norm_eps: float) -> None:
        """Write derived values in place; the norm is the model's."""
        set_defaults(self, kv_n_heads=self.derived_kv_heads(n_heads))
        if self.qk_ln or self.qk_gn:
            set_defaults(self, norm_type=norm_type, norm_eps=norm_eps)
        if self.alibi:
            set_defaults(self, alibi_bias_max=8)
        if self.rope:
            set_defaults(self, rope_theta=10000.0)
        self.attn_temperature_tuning.fill()


def check_window(key: str, size: int | None) -> Iterator[str]:
    """A window is a positive number of tokens, or -1 for all."""
    if size == 0:
        yield f"{key}: {size}; write -1 (all earlier tokens) or a number of tokens"
