"""The `model` section: the decoder's shape, with LLM Foundry's key names.

A field whose default is None is either derived (the docstring says from what) or belongs to a
setting that is off: giving it a value then is an error, because it would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmfoundry.recipe.checks import above, at_least, divides, fill, inert, one_of

ATTN_TYPES = ("multihead_attention", "multiquery_attention", "grouped_query_attention")
ATTN_IMPLS = ("sdpa", "torch")
FFN_TYPES = ("mptmlp", "mptglu")
ACTIVATIONS = ("gelu", "gelu_tanh", "silu", "relu")
NORM_TYPES = ("layernorm", "rmsnorm")
INITS = ("kaiming_normal_", "baseline_")


@dataclass
class AttentionConfig:
    """Attention: kinds of heads, positions, numerical guards."""

    attn_type: str = "multihead_attention"
    """multihead_attention, multiquery_attention (one key-value head), grouped_query_attention."""
    attn_impl: str = "sdpa"
    """sdpa: PyTorch's fused attention. torch: plain matmul and softmax, the slow reference."""
    kv_n_heads: int | None = None
    """Key-value heads; divides n_heads. Only for, and required by, grouped_query_attention."""
    softmax_scale: float | None = None
    """Factor on the attention logits; unset: 1 / sqrt(head_dim)."""
    clip_qkv: float | None = None
    """Clamp queries, keys and values to [-c, c] after their projection; unset: no clamp."""
    qk_ln: bool = False
    """Normalise the whole query and key width (norm_type) before positions are applied."""
    alibi: bool = False
    """Attention with linear biases (Press et al., 2022) in place of position embeddings."""
    alibi_bias_max: int | None = None
    """ALiBi's steepest exponent: slopes 2^(-alibi_bias_max * i / n). 8 where alibi is on."""
    rope: bool = False
    """Rotary positions (Su et al., 2021), half-split form, over the whole head."""
    rope_theta: float | None = None
    """Base of the rotary frequencies. 10000 where rope is on."""

    def check(self, key: str, n_heads: int) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from one_of(f"{key}attn_type", self.attn_type, ATTN_TYPES)
        yield from one_of(f"{key}attn_impl", self.attn_impl, ATTN_IMPLS)
        if self.attn_type == "grouped_query_attention":
            if self.kv_n_heads is None:
                yield f"{key}kv_n_heads: {self.attn_type} needs it; write a divisor of n_heads"
            else:
                yield from divides(f"{key}kv_n_heads", self.kv_n_heads, "model.n_heads", n_heads)
        elif self.kv_n_heads not in (None, self.derived_kv_heads(n_heads)):
            yield from inert(key, self, ["kv_n_heads"], "without grouped_query_attention")
        if self.alibi and self.rope:
            yield f"{key}alibi: and rope exclude each other; set one of them to false"
        if not self.alibi:
            yield from inert(key, self, ["alibi_bias_max"], "without alibi: true")
        if not self.rope:
            yield from inert(key, self, ["rope_theta"], "without rope: true")
        yield from above(f"{key}clip_qkv", self.clip_qkv, 0)
        yield from above(f"{key}softmax_scale", self.softmax_scale, 0)
        yield from at_least(f"{key}alibi_bias_max", self.alibi_bias_max, 1)
        yield from above(f"{key}rope_theta", self.rope_theta, 0)

    def derived_kv_heads(self, n_heads: int) -> int | None:
        """Key-value heads that the attention type alone decides."""
        return {"multihead_attention": n_heads, "multiquery_attention": 1}.get(self.attn_type)

    def fill(self, n_heads: int) -> None:
        """Write derived values in place."""
        fill(self, kv_n_heads=self.derived_kv_heads(n_heads))
        if self.alibi:
            fill(self, alibi_bias_max=8)
        if self.rope:
            fill(self, rope_theta=10000.0)


@dataclass
class FFNConfig:
    """The feed-forward layer."""

    ffn_type: str = "mptmlp"
    """mptmlp: down(act(up x)). mptglu: down(act(gate x) * up x) (Shazeer, 2020)."""
    ffn_act_fn: str = "gelu"
    """gelu (exact), gelu_tanh, silu or relu."""
    ffn_hidden_size: int | None = None
    """Inner width; unset: d_model * expansion_ratio."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}ffn_type", self.ffn_type, FFN_TYPES)
        yield from one_of(f"{key}ffn_act_fn", self.ffn_act_fn, ACTIVATIONS)
        yield from at_least(f"{key}ffn_hidden_size", self.ffn_hidden_size, 1)


@dataclass
class InitConfig:
    """How weights start."""

    name: str = "kaiming_normal_"
    """kaiming_normal_ (He et al., 2015; fan_in, relu gain) or baseline_ (normal with init_std)."""
    init_std: float | None = None
    """Standard deviation of baseline_; 0.02 there."""
    emb_init_std: float | None = None
    """Standard deviation of the embeddings; unset: the same scheme as the other weights."""
    init_div_is_residual: bool = True
    """Divide the projections that write to the residual stream by sqrt(2 * n_layers)."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from one_of(f"{key}name", self.name, INITS)
        if self.name != "baseline_":
            yield from inert(key, self, ["init_std"], "without name: baseline_")
        yield from above(f"{key}init_std", self.init_std, 0)
        yield from above(f"{key}emb_init_std", self.emb_init_std, 0)


@dataclass
class ModelConfig:
    """A decoder-only transformer; MPT, GPT-2, Llama and Starcoder2 shapes are settings of it."""

    name: str = "mpt_causal_lm"
    """The model family; mpt_causal_lm is the project's own decoder."""
    d_model: int = 2048
    """Width of the residual stream."""
    n_heads: int = 16
    """Query heads."""
    n_layers: int = 24
    """Blocks."""
    head_dim: int | None = None
    """Width of one head; unset: d_model / n_heads."""
    expansion_ratio: float | None = None
    """Inner width of the feed-forward layer over d_model; 4 unless ffn_hidden_size is given."""
    vocab_size: int | None = None
    """Rows of the embedding; unset: the tokenizer's size, rounded up to a multiple of 64."""
    max_seq_len: int | None = None
    """Longest row; unset: the recipe's max_seq_len. More only widens learned positions."""
    learned_pos_emb: bool | None = None
    """A learned vector for each position; unset: true unless alibi or rope is on."""
    no_bias: bool = False
    """Drop the biases of linear layers and norms."""
    norm_type: str = "layernorm"
    """layernorm or rmsnorm, computed in fp32."""
    norm_eps: float = 1e-5
    """Added to the variance under the norm's root."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head."""
    attn_config: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention."""
    ffn_config: FFNConfig = field(default_factory=FFNConfig)
    """Feed-forward layer."""
    init_config: InitConfig = field(default_factory=InitConfig)
    """Initialisation."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Lines for values that cannot be, contradict each other, or have no effect."""
        yield from one_of(f"{key}name", self.name, ("mpt_causal_lm",))
        yield from one_of(f"{key}norm_type", self.norm_type, NORM_TYPES)
        sizes = ("d_model", "n_heads", "n_layers", "head_dim", "vocab_size", "max_seq_len")
        for size in sizes:
            yield from at_least(f"{key}{size}", getattr(self, size), 1)
        yield from above(f"{key}norm_eps", self.norm_eps, 0)
        if self.n_heads < 1:
            return
        if self.head_dim is None:
            yield from divides(f"{key}n_heads", self.n_heads, f"{key}d_model", self.d_model)
        attn = self.attn_config
        head_dim = self.head_dim or self.d_model // self.n_heads
        if attn.rope and head_dim % 2:
            yield f"{key}attn_config.rope: needs an even head_dim, which is {head_dim}"
        if self.learned_pos_emb and (attn.alibi or attn.rope):
            other = "alibi" if attn.alibi else "rope"
            yield f"{key}learned_pos_emb: true, with attn_config.{other}: true; set one to false"
        yield from attn.check(f"{key}attn_config.", self.n_heads)
        yield from self.ffn_config.check(f"{key}ffn_config.")
        yield from self.init_config.check(f"{key}init_config.")
        yield from self._check_hidden_size(key)

    def _check_hidden_size(self, key: str) -> Iterator[str]:
        ratio, hidden = self.expansion_ratio, self.ffn_config.ffn_hidden_size
        yield from above(f"{key}expansion_ratio", ratio, 0)
        if ratio is None:
            return
        if hidden is not None and hidden != self.d_model * ratio:
            yield from inert(key, self, ["expansion_ratio"], "beside ffn_config.ffn_hidden_size")
        elif self.d_model * ratio != int(self.d_model * ratio):
            yield f"{key}expansion_ratio: {ratio} * d_model ({self.d_model}) is not a whole number"

    def fill(self, *, max_seq_len: int | None = None, vocab_size: int | None = None) -> None:
        """Write derived values in place, so that a saved recipe says all that was used.

        Args:
            max_seq_len: the recipe's row length.
            vocab_size: the tokenizer's size, once it is known.
        """
        attn = self.attn_config
        if self.ffn_config.ffn_hidden_size is None:
            fill(self, expansion_ratio=4.0)
            self.ffn_config.ffn_hidden_size = int(self.d_model * (self.expansion_ratio or 4))
        fill(self, head_dim=self.d_model // self.n_heads, max_seq_len=max_seq_len)
        fill(self, learned_pos_emb=not (attn.alibi or attn.rope))
        attn.fill(self.n_heads)
        if self.init_config.name == "baseline_":
            fill(self.init_config, init_std=0.02)
        if vocab_size is not None:
            fill(self, vocab_size=-(-vocab_size // 64) * 64)
