"""The `model` section: the decoder's shape, with LLM Foundry's key names.

A field whose default is None is either derived (the docstring says from what) or belongs to a
setting that is off: giving it a value then is an error, because it would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.architecture.attention import NORMS, AttentionConfig
from llmfoundry.recipe.architecture.blocks import BlockOverridesConfig, LayerConfig, layer_configs
from llmfoundry.recipe.architecture.ffn import FFNConfig
from llmfoundry.recipe.architecture.init import InitConfig
from llmfoundry.recipe.values.bounds import (
    FRACTION,
    MOST_LAYERS,
    POSITIVE,
    TOKENS,
    Range,
    choice,
    out_of_bounds,
)
from llmfoundry.recipe.values.checks import divides, inert, set_defaults

__all__ = ["AttentionConfig", "FFNConfig", "InitConfig", "ModelConfig"]


@dataclass
class ModelConfig:
    """A decoder-only transformer; MPT, GPT-2, Llama and Starcoder2 shapes are settings of it."""

    name: Annotated[str, choice(("mpt_causal_lm",))] = "mpt_causal_lm"
    """The model family; mpt_causal_lm is the project's own decoder."""
    d_model: Annotated[int, Range(1, 2**20, "no device holds a wider matrix")] = 2048
    """Width of the residual stream."""
    n_heads: Annotated[int, Range(1, 2**16)] = 16
    """Query heads."""
    n_layers: Annotated[int, Range(1, MOST_LAYERS)] = 24
    """Blocks."""
    head_dim: Annotated[int | None, Range(1, 2**16)] = None
    """Width of one head; unset: d_model / n_heads."""
    expansion_ratio: Annotated[float | None, Range(above=0, most=2**16)] = None
    """Inner width of the feed-forward layer over d_model; 4 unless ffn_hidden_size is given."""
    vocab_size: Annotated[int | None, Range(1, 2**31 - 1, "ids have 32 bits")] = None
    """Rows of the embedding; unset: the tokenizer's size, rounded up to a multiple of 64."""
    max_seq_len: Annotated[int | None, TOKENS] = None
    """Longest row; unset: the recipe's max_seq_len. More only widens learned positions."""
    learned_pos_emb: bool | None = None
    """A learned vector for each position; unset: true unless alibi or rope is on."""
    no_bias: bool = False
    """Drop the biases of linear layers and norms."""
    attention_bias: bool | None = None
    """Biases of the query, key and value projections; unset: the opposite of no_bias."""
    norm_type: Annotated[str, choice(NORMS)] = "layernorm"
    """layernorm or rmsnorm, computed in fp32; low_precision_layernorm, low_precision_rmsnorm: in
    the precision of the matrix products."""
    norm_eps: Annotated[float, POSITIVE] = 1e-5
    """Added to the variance under the norm's root."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head."""
    logit_scale: Annotated[
        float | str | None, POSITIVE, choice(("inv_sqrt_d_model",), "a number")
    ] = None
    """Factor on the logits: a number, or inv_sqrt_d_model for 1 / sqrt(d_model); unset: none."""
    final_logit_softcapping: Annotated[float | None, POSITIVE] = None
    """Logits become c * tanh(logits / c) (Gemma 2), after logit_scale; unset: no cap."""
    emb_pdrop: Annotated[float, FRACTION] = 0.0
    """Dropout on the embeddings, while training."""
    resid_pdrop: Annotated[float, FRACTION] = 0.0
    """Dropout on what each layer adds to the residual stream, while training."""
    embedding_fraction: float = 1.0
    """Share of the gradient that reaches the embeddings (Ding et al., 2021; 1: all)."""
    attn_config: AttentionConfig = field(default_factory=AttentionConfig)
    """Attention."""
    ffn_config: FFNConfig = field(default_factory=FFNConfig)
    """Feed-forward layer."""
    init_config: InitConfig = field(default_factory=InitConfig)
    """Initialisation."""
    block_overrides: BlockOverridesConfig | None = None
    """Layers that differ from the settings above; unset: all are alike."""

    def check(self, key: str = "model.") -> Iterator[str]:
        """Lines for values that cannot be, contradict each other, or have no effect."""
        if (yield from out_of_bounds(key, self)):
            return
        if not 0 < self.embedding_fraction <= 1:
            yield f"{key}embedding_fraction: {self.embedding_fraction}; write a number in (0, 1]"
        if self.head_dim is None:
            yield from divides(f"{key}n_heads", self.n_heads, f"{key}d_model", self.d_model)
        yield from self._check_positions(key)
        yield from self.attn_config.check(f"{key}attn_config.", self.n_heads)
        head_dim = self.head_dim or self.d_model // self.n_heads
        yield from self.attn_config.check_impl(f"{key}attn_config.", head_dim)
        yield from self.ffn_config.check(f"{key}ffn_config.")
        yield from self.init_config.check(f"{key}init_config.")
        if self.ffn_config.ffn_type != "dmoe":
            why = f"without {key}ffn_config.ffn_type: dmoe"
            yield from inert(f"{key}init_config.", self.init_config, ["router_init_std"], why)
        if self.block_overrides is not None:
            where = f"{key}block_overrides."
            yield from self.block_overrides.check(where, self.attn_config, self.n_layers)
        if self.ffn_config.moe_impl == "megablocks" and not self.no_bias:
            yield (
                f"{key}ffn_config.moe_impl: megablocks' experts have no biases; write grouped_mm,"
                f" or {key}no_bias: true"
            )
        yield from self._check_hidden_size(key)

    def _check_positions(self, key: str) -> Iterator[str]:
        attn = self.attn_config
        head_dim = self.head_dim or self.d_model // self.n_heads
        if attn.rope and head_dim % 2:
            yield f"{key}attn_config.rope: needs an even head_dim, which is {head_dim}"
        if attn.rope_hf_config.type == "dynamic" and head_dim == 2:
            yield f"{key}attn_config.rope_hf_config.type: dynamic needs a head_dim above 2"
        others = [name for name in ("alibi", "rope", "nope") if getattr(attn, name)]
        if self.learned_pos_emb and others:
            other = others[0]
            yield f"{key}learned_pos_emb: true, with attn_config.{other}: true; set one to false"
        if self.learned_pos_emb is False and not others:
            yield (
                f"{key}learned_pos_emb: false leaves the model without positions; write"
                " attn_config.nope: true if that is meant, or set alibi or rope"
            )

    def _check_hidden_size(self, key: str) -> Iterator[str]:
        ratio, hidden = self.expansion_ratio, self.ffn_config.ffn_hidden_size
        if ratio is None:
            return
        if hidden is not None and hidden != self.d_model * ratio:
            yield from inert(key, self, ["expansion_ratio"], "beside ffn_config.ffn_hidden_size")
        elif self.d_model * ratio != int(self.d_model * ratio):
            yield f"{key}expansion_ratio: {ratio} * d_model ({self.d_model}) is not a whole number"

    def fill(self, *, max_seq_len: int | None = None, vocab_size: int | None = None) -> None:
        """Write derived values in place, so that a saved recipe specifies all that was used.

        Args:
            max_seq_len: the recipe's row length.
            vocab_size: the tokenizer's size, once it is known.
        """
        attn = self.attn_config
        if self.ffn_config.ffn_hidden_size is None:
            set_defaults(self, expansion_ratio=4.0)
            self.ffn_config.ffn_hidden_size = int(self.d_model * (self.expansion_ratio or 4))
        self.ffn_config.fill()
        set_defaults(self, head_dim=self.d_model // self.n_heads, max_seq_len=max_seq_len)
        set_defaults(self, learned_pos_emb=not (attn.alibi or attn.rope or attn.nope))
        set_defaults(self, attention_bias=not self.no_bias)
        attn.fill(self.n_heads, self.norm_type, self.norm_eps)
        self.init_config.fill()
        if vocab_size is not None:
            set_defaults(self, vocab_size=-(-vocab_size // 64) * 64)

    def layers(self) -> list[LayerConfig]:
        """What each block's attention does; the model must be checked."""
        return layer_configs(self.attn_config, self.block_overrides, self.n_layers)
