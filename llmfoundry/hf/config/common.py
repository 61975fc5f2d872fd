"""Needs and fields that several rows of `architectures.py` share."""

from __future__ import annotations

from typing import Any

from llmfoundry.hf.config.parts import REQUIRED, Field, Fixed, Need, only
from llmfoundry.recipe.architecture.model import ModelConfig

MHA = Need(
    "attn_config.attn_type",
    lambda c: c.attn_config.kv_n_heads == c.n_heads,
    "multihead_attention",
    "multihead_attention",
)
MQA = Need(
    "attn_config.attn_type",
    lambda c: c.attn_config.kv_n_heads == 1,
    "multiquery_attention",
    "multiquery_attention",
)
HEADS_FILL = Need("head_dim", lambda c: c.head_dim == c.d_model / c.n_heads, "d_model / n_heads")
HEADS_DIVIDE = Need("n_heads", lambda c: c.d_model % c.n_heads == 0, "a divisor of d_model")
FOUR_TIMES = Need(
    "ffn_config.ffn_hidden_size",
    lambda c: c.ffn_config.ffn_hidden_size == 4 * c.d_model,
    "4 * d_model",
)
LEARNED, ROPE = only("learned_pos_emb", True), only("attn_config.rope", True)
ROPE_OR_NOPE = Need(
    "attn_config.rope", lambda c: c.attn_config.rope or c.attn_config.nope, "true, or nope: true"
)
LAYERNORM, RMSNORM = only("norm_type", "layernorm"), only("norm_type", "rmsnorm")
MLP, GLU = only("ffn_config.ffn_type", "mptmlp"), only("ffn_config.ffn_type", "mptglu")
NO_BIAS, NO_QKV_BIAS = only("no_bias", True), only("attention_bias", False)

ACTIVATIONS = {  # by transformers' ACT2FN from 5.0 on; of several names the first is written
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
    "mish": "mish",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}


def shared_head(default: bool) -> Field:
    """Whether the head is the embedding."""
    return Field("tie_word_embeddings", "tie_word_embeddings", default)


GPT2_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("n_embd", "d_model"),
    Field("n_head", "n_heads"),
    Field("n_layer", "n_layers"),
    Field("n_positions", "max_seq_len"),
    Field("n_inner", "ffn_config.ffn_hidden_size", None),
    Field("activation_function", "ffn_config.ffn_act_fn", choices=ACTIVATIONS),
    Field("layer_norm_epsilon", "norm_eps"),
    Field("resid_pdrop", "resid_pdrop", 0.1),
    Field("embd_pdrop", "emb_pdrop", 0.1),
    Field("attn_pdrop", "attn_config.attn_pdrop", 0.1),
    shared_head(True),
)
GPT2_FIXED = (
    Fixed("scale_attn_weights", True, True),
    Fixed("add_cross_attention", False, False),
)
MOSAIC_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("d_model", "d_model"),
    Field("n_heads", "n_heads"),
    Field("n_layers", "n_layers"),
    Field("max_seq_len", "max_seq_len"),
    Field("attn_config.clip_qkv", "attn_config.clip_qkv", None),
)


def llama_fields(
    *,
    eps: str = "rms_norm_eps",
    act: str = "hidden_act",
    hidden: str = "intermediate_size",
    tied: bool = False,
    kv_heads: Any = REQUIRED,
) -> tuple[Field, ...]:
    """Llama's keys, which most architectures share but for a name or a default."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("num_attention_heads", "n_heads"),
        Field("num_key_value_heads", "attn_config.kv_n_heads", kv_heads),
        Field("num_hidden_layers", "n_layers"),
        Field(hidden, "ffn_config.ffn_hidden_size"),
        Field(act, "ffn_config.ffn_act_fn", choices=ACTIVATIONS),
        Field("max_position_embeddings", "max_seq_len"),
        Field(eps, "norm_eps"),
        Field("attention_dropout", "attn_config.attn_pdrop", 0.0),
        shared_head(tied),
    )


def head_dim(default: int | None = None) -> Field:
    """The width of a head, a key that several configs take without having a name for it."""
    return Field("head_dim", "head_dim", default)


def attention_scale(config: ModelConfig) -> float:
    """The factor on attention's logits."""
    scale, width = config.attn_config.softmax_scale, config.head_dim
    assert width is not None, "the recipe was not filled"
    return width**-0.5 if scale is None else scale


def logits_divisor(config: ModelConfig) -> float:
    """What Granite divides logits by; `config` is plain, so its logit_scale is a number."""
    factor = config.logit_scale
    assert not isinstance(factor, str)
    return 1.0 if factor is None else 1 / factor


LLAMA_FIELDS = (*llama_fields(kv_heads=None), head_dim())
GRANITE_FIELDS = (
    *LLAMA_FIELDS,
    Field("attention_multiplier", "attn_config.softmax_scale", 1.0, write=attention_scale),
    Field(
        "logits_scaling",
        "logit_scale",
        1.0,
        write=logits_divisor,
        read=lambda said: None if said == 1 else 1 / said,
    ),
)
GRANITE_FIXED = (Fixed("embedding_multiplier", 1.0, 1.0), Fixed("residual_multiplier", 1.0, 1.0))
