"""The `model.attn_config` and `model.block_overrides` sections.

Attention heads, positions, numerical guards and backends, and layers that differ from the settings
of the model. `layer_configs` expands both sections into one `LayerConfig` per block, which is all
that the decoder reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.attention_limits import ALIBI, DROPOUT, LIMITS, SINKS, SOFTCAP, limit
from llmfoundry.recipe.checks import divides, inert, nearest, set_defaults
from llmfoundry.recipe.choice_table import SHIPPED, ChoiceRecord, ChoiceTable
from llmfoundry.recipe.schema import (
    FRACTION,
    POSITIVE,
    TOKENS,
    WIDTH,
    Only,
    Range,
    Unless,
    check_fields,
    choice,
)
from llmfoundry.recipe.typed import flat

LATENT = "multihead_latent_attention"
ATTN_TYPES = (
    "multihead_attention",
    "multiquery_attention",
    "grouped_query_attention",
    LATENT,
)


@dataclass(frozen=True)
class NormType(ChoiceRecord):
    """A norm: `make(width, eps=, bias=)`; `weight` is initialized to 1, `bias` to 0."""


NORMS = ChoiceTable(
    "model.norm_type",
    NormType,
    {
        "layernorm": NormType(SHIPPED),
        "rmsnorm": NormType(SHIPPED),
        "low_precision_layernorm": NormType(SHIPPED),
        "low_precision_rmsnorm": NormType(SHIPPED),
    },
)
ATTN_IMPLS = ("auto", *LIMITS)
BETA_FAST, BETA_SLOW = 32.0, 1.0  # of YaRN's authors
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "no_scaling": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", *LLAMA3_KEYS),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The keys that each type of scaling needs."""
ROPE_TYPES = tuple(ROPE_KEYS)
YARN_KEYS = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
"""The keys that YaRN may have."""
_YARN = Only("type", "yarn")

WINDOW = Range(-1, 2**31 - 1)
_LATENT = Only("attn_type", LATENT)
_HEAD = Range(1, 2**16)
_NORMED = Only(("qk_ln", "qk_gn", "kv_lora_rank"))


@dataclass
class RopeConfig:
    """Scaling of the rotary frequencies beyond the sequence length of pretraining."""

    type: Annotated[str, choice(ROPE_TYPES)] = "no_scaling"
    """no_scaling; linear: positions are divided by factor (Chen et al., 2023); dynamic: theta grows
    with sequences longer than max_seq_len (NTK-aware); llama3: low frequencies are divided by
    factor, high ones stay; yarn: as llama3 with other bounds, and attention is sharpened (Peng et
    al., 2023)."""
    factor: Annotated[float | None, Range(1), Unless("type", "no_scaling")] = None
    """Scaling factor; required by every type but no_scaling."""
    low_freq_factor: Annotated[float | None, POSITIVE, Only("type", "llama3")] = None
    """Wavelengths above the original length divided by this number are scaled; required."""
    high_freq_factor: Annotated[float | None, POSITIVE, Only("type", "llama3")] = None
    """Wavelengths below the original length divided by this number stay; required."""
    original_max_position_embeddings: Annotated[
        int | None, TOKENS, Only("type", ("llama3", "yarn"))
    ] = None
    """The sequence length of pretraining; required."""
    beta_fast: Annotated[float | None, POSITIVE, _YARN] = None
    """Frequencies with more rotations than this number over the original length stay; unset: 32."""
    beta_slow: Annotated[float | None, POSITIVE, _YARN] = None
    """Frequencies with fewer rotations than this number over the original length are divided by
    factor; unset: 1."""
    truncate: Annotated[bool, _YARN] = True
    """Round the two bounds outwards to whole feature pairs. gpt-oss has false."""
    attention_factor: Annotated[float | None, POSITIVE, _YARN] = None
    """Rotated queries and keys are multiplied by this number; unset: 0.1 ln(factor) + 1, or what
    follows from mscale."""
    mscale: Annotated[float | None, POSITIVE, _YARN] = None
    """As in DeepSeek-V2: with m(s) = 0.1 s ln(factor) + 1, attention_factor is m(mscale) /
    m(mscale_all_dim). Needs mscale_all_dim."""
    mscale_all_dim: Annotated[float | None, POSITIVE, _YARN] = None
    """See mscale. Multi-head latent attention also multiplies its softmax scale by
    m(mscale_all_dim) squared, unless softmax_scale is set."""

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid, missing or ineffective value."""
        if (yield from check_fields(key, self)):
            return
        for name in ROPE_KEYS[self.type]:
            if getattr(self, name) is None:
                yield f"{key}{name}: type: {self.type} needs it; write a number"
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not low < high:
            yield f"{key}high_freq_factor: {high} must be greater than low_freq_factor ({low})"
        slow, fast = self.beta_slow or BETA_SLOW, self.beta_fast or BETA_FAST
        if not slow < fast:
            yield f"{key}beta_fast: {fast} must be greater than beta_slow ({slow})"
        if (self.mscale is None) != (self.mscale_all_dim is None):
            here, there = ("mscale", "mscale_all_dim")[:: 1 if self.mscale is None else -1]
            yield f"{key}{here}: {there} needs it; write a number, or remove {there}"
        elif self.mscale is not None and self.attention_factor is not None:
            yield f"{key}attention_factor: follows from mscale; remove one of them"

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.type == "yarn":
            set_defaults(self, beta_fast=BETA_FAST, beta_slow=BETA_SLOW)


class ResolvedRopeConfig(RopeConfig):
    """`RopeConfig` after its check: what the type needs is set."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float

    @property
    def table_scale(self) -> float:
        """Factor on cosine and sine, which multiplies rotated queries and keys; 1 except YaRN's."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def latent_scale(self) -> float:
        """Factor on the default softmax scale of multi-head latent attention."""
        return 1.0 if self.mscale_all_dim is None else self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, strength: float) -> float:
        """Return YaRN's growth of the logits' scale with `factor`, m(strength)."""
        return 0.1 * strength * math.log(self.factor) + 1.0


def drop_former_scaling(model: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Remove, in place, the scaling of a saved model if overrides choose another type.

    Args:
        model: values of a model section.
        overrides: values to be written into it.
    """
    attn, kind = model.get("attn_config") or {}, "attn_config.rope_hf_config.type"
    saved, chosen = attn.get("rope_hf_config"), dict(flat(overrides)).get(kind)
    if isinstance(saved, dict) and chosen not in (None, saved.get("type")):
        saved.clear()


FLOOR_SCALE = 8192  # as in Llama 4


@dataclass
class TemperatureConfig:
    """Attention temperature by query position, as in Llama 4's layers without positions."""

    floor_scale: Annotated[int | None, Range(1), Only("attn_scale")] = None
    """Number of consecutive positions that share a factor; default 8192."""
    attn_scale: Annotated[float, Range(0)] = 0.0
    """A query at position p is multiplied by 1 + attn_scale * log(1 + floor((p + 1) /
    floor_scale)). 0: off."""

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.attn_scale:
            set_defaults(self, floor_scale=FLOOR_SCALE)


class ResolvedTemperatureConfig(TemperatureConfig):
    """`TemperatureConfig` with defaults resolved."""

    floor_scale: int


@dataclass
class AttentionConfig:
    """Attention: heads, positions, numerical guards."""

    attn_type: Annotated[str, choice(ATTN_TYPES)] = "multihead_attention"
    """multihead_attention, multiquery_attention (one key-value head), grouped_query_attention
    (kv_n_heads of them), or multihead_latent_attention (DeepSeek-AI, 2024): keys and values are
    computed from a latent vector per token, which is all that generation caches."""
    attn_impl: Annotated[str, choice(ATTN_IMPLS)] = "auto"
    """auto: the fastest that the device and the other settings allow. sdpa: PyTorch's fused
    attention. For CUDA: flex (FlexAttention), varlen (PyTorch's variable-length kernel), flash (the
    flash-attn package), flash3 (flash-attn-3, on Hopper). torch: plain matmul and softmax, the slow
    reference."""
    kv_n_heads: Annotated[int | None, Range(1)] = None
    """Key-value heads, a divisor of n_heads. Only with grouped_query_attention, which requires
    it."""
    kv_lora_rank: Annotated[int | None, WIDTH, _LATENT] = None
    """Width of the latent vector that keys and values are computed from; required."""
    q_lora_rank: Annotated[int | None, WIDTH, _LATENT] = None
    """Width of the latent vector that queries are computed from; unset: queries are projected from
    the residual stream."""
    qk_nope_head_dim: Annotated[int | None, _HEAD, _LATENT] = None
    """Width of the part of a query and key head that is not rotated; required."""
    qk_rope_head_dim: Annotated[int | None, _HEAD, _LATENT] = None
    """Width of the rotated part, whose key all heads share; required, an even number."""
    v_head_dim: Annotated[int | None, _HEAD, _LATENT] = None
    """Width of a value head; default qk_nope_head_dim."""
    softmax_scale: Annotated[float | None, POSITIVE] = None
    """Factor on the attention logits; unset: 1 / sqrt(head_dim)."""
    attn_logit_softcapping: Annotated[float | None, POSITIVE] = None
    """Attention logits become c * tanh(logits / c) (Gemma 2); unset: no cap."""
    attn_pdrop: Annotated[float, FRACTION] = 0.0
    """Dropout probability of attention weights during training."""
    sinks: bool = False
    """A learned logit per head that takes part in the softmax and has no value, so that a token can
    attend to nothing (gpt-oss; Xiao et al., 2023)."""
    clip_qkv: Annotated[float | None, POSITIVE] = None
    """Clamp queries, keys and values to [-c, c] after the projection; unset: no clamp."""
    qk_ln: bool = False
    """Normalize queries and keys over all heads together, before positions are applied."""
    qk_gn: bool = False
    """Normalize the queries and keys of each head separately, before positions are applied."""
    norm_type: Annotated[str | None, choice(NORMS), _NORMED] = None
    """The norm of queries and keys, or of latent vectors; unset: model.norm_type."""
    norm_eps: Annotated[float | None, POSITIVE, _NORMED] = None
    """Added to the variance in this norm; unset: model.norm_eps."""
    sliding_window_size: Annotated[int, WINDOW] = -1
    """A token attends to itself and this many tokens before it; -1: to all."""
    alibi: bool = False
    """Attention with linear biases (Press et al., 2022) in place of position embeddings."""
    alibi_bias_max: Annotated[int | None, Range(1), Only("alibi")] = None
    """Exponent of the steepest ALiBi slope: head i of n has slope 2^(-alibi_bias_max * i / n);
    default 8."""
    rope: bool = False
    """Rotary position embeddings (Su et al., 2021) over the whole head (with
    multihead_latent_attention over qk_rope_head_dim of it), half-split form."""
    rope_theta: Annotated[float | None, POSITIVE, Only("rope")] = None
    """Base of the rotary frequencies; default 10000."""
    rope_hf_config: Annotated[RopeConfig, Only("rope")] = field(default_factory=RopeConfig)
    """Scaling of the rotary frequencies for longer sequences."""
    nope: bool = False
    """No position embeddings (Kazemnejad et al., 2023): the order of tokens follows from causal
    attention alone."""
    attn_temperature_tuning: TemperatureConfig = field(default_factory=TemperatureConfig)
    """Attention temperature that depends on the position of the query."""

    def check(self, key: str, n_heads: int) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        if (yield from check_fields(key, self)):
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
        if self.is_latent:
            yield from self._check_latent(key)
        yield from check_window(f"{key}sliding_window_size", self.sliding_window_size)
        yield from self.attn_temperature_tuning.check(f"{key}attn_temperature_tuning.")
        yield from self._check_positions(key)

    @property
    def is_latent(self) -> bool:
        """Whether this is multi-head latent attention."""
        return self.attn_type == LATENT

    @property
    def latent_head_dim(self) -> int:
        """Width of a query and key head of multi-head latent attention."""
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    def _check_latent(self, key: str) -> Iterator[str]:
        """Check the keys of multi-head latent attention."""
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            if getattr(self, name) is None:
                yield f"{key}{name}: attn_type: {LATENT} needs it; write a width"
        if not self.rope:
            yield f"{key}rope: false, but {LATENT} rotates a part of each head; write true"
        if (self.qk_rope_head_dim or 0) % 2:
            yield f"{key}qk_rope_head_dim: {self.qk_rope_head_dim}; write an even number"
        if self.sinks:
            yield f"{key}sinks: attn_type: {LATENT} has none; remove it"
        for name in ("clip_qkv", "qk_ln", "qk_gn"):
            if getattr(self, name):
                why = "clamps" if name == "clip_qkv" else "normalizes"
                yield (
                    f"{key}{name}: {why} queries and keys, which attn_type: {LATENT} computes from"
                    " normalized latent vectors; remove it"
                )
        if self.rope_hf_config.type == "dynamic":
            yield (
                f"{key}rope_hf_config.type: dynamic rotates cached keys again, and attn_type:"
                f" {LATENT} caches them rotated; write linear or llama3"
            )

    def check_impl(self, key: str, head_dim: int) -> Iterator[str]:
        """Yield an error line if the attention backend does not support these options."""
        if self.attn_impl in LIMITS:
            options = [name for name in (ALIBI, SOFTCAP, DROPOUT, SINKS) if getattr(self, name)]
            reason = limit(self.attn_impl, options, head_dim)
            if reason is not None:
                yield f"{key}attn_impl: {self.attn_impl} {reason}"

    def _check_positions(self, key: str) -> Iterator[str]:
        chosen = [name for name in ("alibi", "rope", "nope") if getattr(self, name)]
        if len(chosen) > 1:
            both = " and ".join(chosen[1:])
            yield f"{key}{chosen[0]}: and {both} exclude each other; set one of them to false"
        yield from self.rope_hf_config.check(f"{key}rope_hf_config.")
        base = 10000.0 if self.rope_theta is None else self.rope_theta
        if self.rope_hf_config.type == "yarn" and not base > 1:
            yield f"{key}rope_theta: {base:g}; yarn needs a number above 1"

    def derived_kv_heads(self, n_heads: int) -> int | None:
        """Return the number of key-value heads that follows from the attention type; else None."""
        kv_n_heads = {"multihead_attention": n_heads, "multiquery_attention": 1, LATENT: n_heads}
        return kv_n_heads.get(self.attn_type)

    def fill(self, n_heads: int, norm_type: str, norm_eps: float) -> None:
        """Resolve defaults in place; the norm is the model's."""
        set_defaults(self, kv_n_heads=self.derived_kv_heads(n_heads))
        if self.is_latent:
            set_defaults(self, v_head_dim=self.qk_nope_head_dim)
        if self.qk_ln or self.qk_gn or self.is_latent:
            set_defaults(self, norm_type=norm_type, norm_eps=norm_eps)
        if self.alibi:
            set_defaults(self, alibi_bias_max=8)
        if self.rope:
            set_defaults(self, rope_theta=10000.0)
        self.rope_hf_config.fill()
        self.attn_temperature_tuning.fill()


class ResolvedAttentionConfig(AttentionConfig):
    """`AttentionConfig` with defaults resolved."""

    kv_n_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_type: str
    norm_eps: float
    alibi_bias_max: int
    rope_theta: float
    rope_hf_config: ResolvedRopeConfig
    attn_temperature_tuning: ResolvedTemperatureConfig


def check_window(key: str, size: int | None) -> Iterator[str]:
    """Check that a window is a positive number of tokens, or -1 for all."""
    if size == 0:
        yield f"{key}: {size}; write -1 (all earlier tokens) or a number of tokens"


DEFAULT = "default"


@dataclass
class AttentionOverride:
    """Settings of one kind of layer; unset keys have the values of model.attn_config."""

    sliding_window_size: Annotated[int | None, WINDOW] = None
    """A token attends to itself and this many tokens before it; -1: to all."""
    nope: bool | None = None
    """No rotary embedding in this layer. Only with attn_config.rope=true."""
    reuse_kv_layer_idx: Annotated[int | None, Range(-(2**20))] = None
    """Use the keys and values of another layer, given as a negative offset: -1 is the layer before.
    They are rotated if that layer rotates. The window is the one of this layer."""
    attn_temperature_tuning: TemperatureConfig | None = None
    """Attention temperature that depends on the position of the query."""

    def check(self, key: str, attn: AttentionConfig) -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        yield from check_window(f"{key}sliding_window_size", self.sliding_window_size)
        if self.attn_temperature_tuning is not None:
            where = f"{key}attn_temperature_tuning."
            yield from self.attn_temperature_tuning.check(where)
        if attn.is_latent and self.reuse_kv_layer_idx is not None:
            yield (
                f"{key}reuse_kv_layer_idx: layers of attn_config.attn_type: {LATENT} do not share"
                " keys and values; remove it"
            )
        if self.nope and not attn.rope:
            yield f"{key}nope: has no effect without attn_config.rope: true; remove it"
        if self.reuse_kv_layer_idx is not None and self.reuse_kv_layer_idx >= 0:
            yield (
                f"{key}reuse_kv_layer_idx: {self.reuse_kv_layer_idx}; write a negative number,"
                " -1 for the layer before"
            )


@dataclass
class BlockOverride:
    """A named kind of layer."""

    attn_config: AttentionOverride = field(default_factory=AttentionOverride)
    """Attention."""


@dataclass
class BlockRun:
    """One kind of layer, or a sequence of runs, with a number of repetitions."""

    name: str | None = None
    """default, or a key of block_overrides.overrides."""
    order: list[BlockRun] | None = None
    """A sequence of runs that is repeated as a whole, in place of a name."""
    repeat: Annotated[int, Range(1, 2**20)] = 1
    """Number of repetitions."""


@dataclass
class BlockOverridesConfig:
    """Kinds of layers by name, and the order in which they are stacked."""

    order: list[BlockRun] = field(default_factory=list)
    """From the first block to the last: {name: local, repeat: 3}, or {order: [...], repeat: 2}."""
    overrides: dict[str, BlockOverride] = field(default_factory=dict)
    """The settings of each named kind of layer."""

    def check(self, key: str, attn: AttentionConfig, n_layers: int) -> Iterator[str]:
        """Yield an error line for each unknown kind, and for an order of the wrong length."""
        if DEFAULT in self.overrides:
            yield f"{key}overrides.{DEFAULT}: the name of the model's own settings; write another"
        for name, override in self.overrides.items():
            yield from override.attn_config.check(f"{key}overrides.{name}.attn_config.", attn)
        problems = list(self._check_runs(f"{key}order", self.order))
        yield from problems
        if problems:
            return
        length = _length(self.order)
        if length != n_layers:
            yield f"{key}order: is {length} layers long, but n_layers is {n_layers}"
            return
        names = self.names()
        for unused in sorted(set(self.overrides) - set(names) - {DEFAULT}):
            yield f"{key}overrides.{unused}: is not in order and has no effect; remove it"
        sources = self.sources(names)
        wrong: dict[str, str] = {}
        for index, name in enumerate(names):
            if name not in wrong:  # one line for each kind is enough
                wrong.update((name, line) for line in self._check_reuse(key, names, index, sources))
        yield from wrong.values()

    def _check_runs(self, key: str, runs: list[BlockRun]) -> Iterator[str]:
        options = [DEFAULT, *self.overrides]
        for index, run in enumerate(runs):
            where = f"{key}[{index}]"
            yield from check_fields(f"{where}.", run)
            if (run.name is None) == (run.order is None):
                yield f"{where}: has both or neither; write a name or an order"
            elif run.order is not None:
                yield from self._check_runs(f"{where}.order", run.order)
            elif run.name not in options:
                hint = nearest(str(run.name), options)
                yield f"{where}.name: {run.name!r} is not in overrides{hint}"

    def _check_reuse(
        self, key: str, names: list[str], index: int, sources: list[int]
    ) -> Iterator[str]:
        key, source = f"{key}overrides.{names[index]}.", sources[index]
        back = self._kind(names[index]).reuse_kv_layer_idx
        if back is None or back >= 0:
            return
        if source < 0:
            where = f"{key}attn_config.reuse_kv_layer_idx"
            yield f"{where}: {back} from layer {index} is before the first"

    def names(self) -> list[str]:
        """Return the kind of every layer, in order."""
        return list(_expand(self.order))

    def sources(self, names: list[str]) -> list[int]:
        """Return the layer whose keys and values each layer uses, or its own number without reuse.

        The number is negative if that layer would lie before the first.
        """
        sources: list[int] = []
        for index, name in enumerate(names):
            above = index + min(0, self._kind(name).reuse_kv_layer_idx or 0)
            sources.append(sources[above] if 0 <= above < index else above)
        return sources

    def _kind(self, name: str) -> AttentionOverride:
        override = self.overrides.get(name)
        return override.attn_config if override is not None else AttentionOverride()


@dataclass(frozen=True)
class LayerConfig:
    """Settings that may differ between layers.

    Attributes:
        window: a token attends to itself and this many tokens before it; -1: to all.
        rotary: whether queries and keys are rotated.
        kv_from: the layer whose keys and values are used; the layer's own number without reuse.
        temperature: floor_scale and attn_scale of the attention temperature; None: off.
        is_dense: a plain feed-forward layer in place of the model's experts.
    """

    window: int
    rotary: bool
    kv_from: int
    temperature: tuple[int, float] | None = None
    is_dense: bool = False


def layer_configs(
    attn: AttentionConfig, overrides: BlockOverridesConfig | None, n_layers: int
) -> list[LayerConfig]:
    """Return the settings of every layer of a checked model."""
    if overrides is None or not overrides.order:
        overrides = BlockOverridesConfig(order=[BlockRun(DEFAULT, repeat=n_layers)])
    names, layers = overrides.names(), []
    for name, source in zip(names, overrides.sources(names), strict=True):
        kind = overrides._kind(name)
        window, tuning = kind.sliding_window_size, kind.attn_temperature_tuning
        tuning = attn.attn_temperature_tuning if tuning is None else tuning
        floor = tuning.floor_scale or FLOOR_SCALE
        layers.append(
            LayerConfig(
                window=attn.sliding_window_size if window is None else window,
                rotary=attn.rope and not kind.nope,
                kv_from=source,
                temperature=(floor, tuning.attn_scale) if tuning.attn_scale else None,
            )
        )
    return layers


def _length(runs: list[BlockRun]) -> int:
    """Return the number of layers of some runs, without expanding them."""
    return sum(run.repeat * (1 if run.order is None else _length(run.order)) for run in runs)


def _expand(runs: list[BlockRun]) -> Iterator[str]:
    for run in runs:
        for _ in range(run.repeat):
            if run.order is not None:
                yield from _expand(run.order)
            else:
                assert run.name is not None, "check the recipe first"
                yield run.name
