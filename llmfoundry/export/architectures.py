"""transformers' architectures that some of our settings express exactly: one table, both ways.

`choose` picks the one to export to, `write_settings` and `read_settings` turn a `model` section
into config.json's keys and back. transformers ignores keys that it does not know, and several
that it does (an MPT always has ALiBi with exponent 8, whatever its config.json says); so a
setting goes out only where `needs` allows it, and comes in only where `fields` and `fixed` cover
it. Anything else is refused by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmfoundry.recipe.model import ModelConfig

REQUIRED = object()  # config.json must have the key
ANYTHING = object()  # whatever it says when read, logits are the same


@dataclass(frozen=True)
class Need:
    """What a model must be for an architecture to express it.

    Attributes:
        key: our setting.
        holds: whether a filled config fits.
        must: what to write for `key`, for the user who reads the refusal.
        value: what `key` is in every model of the architecture; None where it follows from others.
    """

    key: str
    holds: Callable[[ModelConfig], bool]
    must: str
    value: Any = None


@dataclass(frozen=True)
class Field:
    """A key of config.json (dotted where nested) that says what one of our settings says.

    Attributes:
        default: what transformers takes where the key is missing; None: what our setting derives.
        choices: our values by theirs; the first of theirs is written.
        derived: written where our setting is unset.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    choices: Mapping[str, Any] | None = None
    derived: Callable[[ModelConfig], Any] | None = None


@dataclass(frozen=True)
class Fixed:
    """A key of config.json that must be `value`, because the decoder has nothing else.

    Attributes:
        default: what transformers takes where the key is missing; ANYTHING: the key is written for
            transformers' sake, and read whatever it says, since logits do not depend on it.
    """

    theirs: str
    value: Any
    default: Any


@dataclass(frozen=True)
class Architecture:
    """How one of transformers' classes says what the decoder is.

    Attributes:
        biases: keys that say whether linear layers have biases. Written only: what is read is
            decided by the biases that the file holds.
        partial_rotary: share of a head that rotates where config.json does not say.
    """

    model_type: str
    needs: tuple[Need, ...]
    fields: tuple[Field, ...]
    fixed: tuple[Fixed, ...] = ()
    biases: tuple[str, ...] = ()
    partial_rotary: float = 1.0

    @property
    def rope(self) -> bool:
        """Whether positions are rotary."""
        return any(need.key == "attn_config.rope" for need in self.needs)


def get(config: ModelConfig, key: str) -> Any:
    """The setting at dotted `key`."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def show(value: Any) -> str:
    """A setting's value as YAML would write it."""
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _only(key: str, value: Any) -> Need:
    return Need(key, lambda config: get(config, key) == value, show(value), value)


_PLAIN = (_only("attn_config.clip_qkv", None), _only("attn_config.softmax_scale", None))
_NO_QK_LN = _only("attn_config.qk_ln", False)
_MHA = Need(
    "attn_config.attn_type",
    lambda c: c.attn_config.kv_n_heads == c.n_heads,
    "multihead_attention",
    "multihead_attention",
)
_MQA = Need(
    "attn_config.attn_type",
    lambda c: c.attn_config.kv_n_heads == 1,
    "multiquery_attention",
    "multiquery_attention",
)
_HEADS_FILL = Need("head_dim", lambda c: c.head_dim == c.d_model / c.n_heads, "d_model / n_heads")
_HEADS_DIVIDE = Need("n_heads", lambda c: c.d_model % c.n_heads == 0, "a divisor of d_model")
_FOUR_TIMES = Need(
    "ffn_config.ffn_hidden_size",
    lambda c: c.ffn_config.ffn_hidden_size == 4 * c.d_model,
    "4 * d_model",
)
_LEARNED, _ROPE = _only("learned_pos_emb", True), _only("attn_config.rope", True)
_LAYERNORM, _RMSNORM = _only("norm_type", "layernorm"), _only("norm_type", "rmsnorm")
_MLP, _GLU = _only("ffn_config.ffn_type", "mptmlp"), _only("ffn_config.ffn_type", "mptglu")
_NO_BIAS = _only("no_bias", True)
_LLAMA_NEEDS = (_ROPE, _RMSNORM, _GLU, _NO_QK_LN, *_PLAIN)

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def _tied(default: bool) -> Field:
    return Field("tie_word_embeddings", "tie_word_embeddings", default)


_GPT2_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("n_embd", "d_model"),
    Field("n_head", "n_heads"),
    Field("n_layer", "n_layers"),
    Field("n_positions", "max_seq_len"),
    Field("n_inner", "ffn_config.ffn_hidden_size", None),
    Field("activation_function", "ffn_config.ffn_act_fn", choices=_ACTIVATIONS),
    Field("layer_norm_epsilon", "norm_eps"),
    _tied(True),
)
_GPT2_FIXED = (
    Fixed("scale_attn_weights", True, True),
    Fixed("add_cross_attention", False, False),
    Fixed("resid_pdrop", 0.0, ANYTHING),
    Fixed("embd_pdrop", 0.0, ANYTHING),
    Fixed("attn_pdrop", 0.0, ANYTHING),
)
_MOSAIC_FIELDS = (
    Field("vocab_size", "vocab_size"),
    Field("d_model", "d_model"),
    Field("n_heads", "n_heads"),
    Field("n_layers", "n_layers"),
    Field("max_seq_len", "max_seq_len"),
    Field("attn_config.clip_qkv", "attn_config.clip_qkv", None),
)


def _llama_fields(*, eps: str, tied: bool = False, kv_heads: Any = REQUIRED) -> tuple[Field, ...]:
    return (
        Field("vocab_size", "vocab_size"),
        Field("hidden_size", "d_model"),
        Field("num_attention_heads", "n_heads"),
        Field("num_key_value_heads", "attn_config.kv_n_heads", kv_heads),
        Field("num_hidden_layers", "n_layers"),
        Field("intermediate_size", "ffn_config.ffn_hidden_size"),
        Field("hidden_act", "ffn_config.ffn_act_fn", choices=_ACTIVATIONS),
        Field("max_position_embeddings", "max_seq_len"),
        Field(eps, "norm_eps"),
        _tied(tied),
    )


_HEAD_DIM = Field("head_dim", "head_dim", None)
_LLAMA_FIELDS = (*_llama_fields(eps="rms_norm_eps", kv_heads=None), _HEAD_DIM)
_LLAMA_BIASES = ("attention_bias", "mlp_bias")

ARCHITECTURES: dict[str, Architecture] = {  # the first that fits is written
    "MptForCausalLM": Architecture(
        "mpt",
        (
            _only("attn_config.alibi", True),
            _only("attn_config.alibi_bias_max", 8),
            _LAYERNORM,
            _NO_BIAS,
            _MLP,
            _only("ffn_config.ffn_act_fn", "gelu"),
            _FOUR_TIMES,
            _MHA,
            _HEADS_FILL,
            _NO_QK_LN,
        ),
        (
            *_MOSAIC_FIELDS,
            Field("layer_norm_epsilon", "norm_eps", 1e-5),
            Field("attn_config.softmax_scale", "attn_config.softmax_scale", None),
            _tied(True),
        ),
        (
            Fixed("attn_config.attn_type", "multihead_attention", "multihead_attention"),
            Fixed("attn_config.alibi", True, True),
            Fixed("attn_config.alibi_bias_max", 8, 8),
            Fixed("attn_config.qk_ln", False, False),
            Fixed("attn_config.prefix_lm", False, False),
            Fixed("expansion_ratio", 4, 4),
            Fixed("no_bias", True, True),
            Fixed("logit_scale", None, None),
            Fixed("learned_pos_emb", False, ANYTHING),  # true in MPT-7B's own, beside ALiBi
        ),
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        (_LEARNED, _LAYERNORM, _MLP, _MHA, _HEADS_FILL, _NO_QK_LN, *_PLAIN),
        _GPT2_FIELDS,
        (*_GPT2_FIXED, Fixed("scale_attn_by_inverse_layer_idx", False, False)),
    ),
    "GPTBigCodeForCausalLM": Architecture(
        "gpt_bigcode",
        (_LEARNED, _LAYERNORM, _MLP, _MQA, _HEADS_FILL, _NO_QK_LN, *_PLAIN),
        _GPT2_FIELDS,
        (*_GPT2_FIXED, Fixed("multi_query", True, True)),
    ),
    "LlamaForCausalLM": Architecture(
        "llama", (*_LLAMA_NEEDS, _HEADS_DIVIDE), _LLAMA_FIELDS, biases=_LLAMA_BIASES
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        (_ROPE, _RMSNORM, _GLU, _NO_QK_LN, _only("attn_config.clip_qkv", None)),
        (
            *_LLAMA_FIELDS,
            Field(
                "attention_multiplier",
                "attn_config.softmax_scale",
                1.0,
                derived=lambda c: (c.head_dim or 1) ** -0.5,
            ),
        ),
        (
            Fixed("embedding_multiplier", 1.0, 1.0),
            Fixed("residual_multiplier", 1.0, 1.0),
            Fixed("logits_scaling", 1.0, 1.0),
        ),
        biases=_LLAMA_BIASES,
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        (_ROPE, _RMSNORM, _MLP, _NO_QK_LN, *_PLAIN, _HEADS_DIVIDE),
        _LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        (_ROPE, _LAYERNORM, _MLP, _NO_QK_LN, *_PLAIN),
        (*_llama_fields(eps="norm_epsilon", tied=True), _HEAD_DIM),
        (Fixed("sliding_window", None, None),),
        biases=("use_bias",),
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm",
        (_ROPE, _LAYERNORM, _GLU, _NO_BIAS, _HEADS_FILL, _NO_QK_LN, *_PLAIN),
        _llama_fields(eps="layer_norm_eps"),
        (
            Fixed("use_parallel_residual", False, False),
            Fixed("qk_layernorm", False, False),
        ),
        biases=("use_qkv_bias",),
        partial_rotary=0.25,
    ),
    "DbrxForCausalLM": Architecture(
        "dbrx",
        (
            _ROPE,
            _LAYERNORM,
            _only("norm_eps", 1e-5),
            _GLU,
            _NO_BIAS,
            _HEADS_FILL,
            _only("tie_word_embeddings", False),
            _NO_QK_LN,
            _only("attn_config.softmax_scale", None),
        ),
        (
            *_MOSAIC_FIELDS,
            Field("attn_config.kv_n_heads", "attn_config.kv_n_heads", 1),
            Field("ffn_config.ffn_hidden_size", "ffn_config.ffn_hidden_size"),
            Field("ffn_config.ffn_act_fn.name", "ffn_config.ffn_act_fn", "silu", _ACTIVATIONS),
        ),
        (  # a mixture of one expert, which gets all of the weight
            Fixed("ffn_config.moe_num_experts", 1, 4),
            Fixed("ffn_config.moe_top_k", 1, 1),
            Fixed("ffn_config.moe_normalize_expert_weights", 1.0, ANYTHING),
            Fixed("tie_word_embeddings", False, False),
        ),
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        (
            _ROPE,
            _RMSNORM,
            _GLU,
            _only("attn_config.qk_ln", True),
            _NO_BIAS,
            _HEADS_FILL,
            *_PLAIN,
        ),
        _llama_fields(eps="rms_norm_eps", kv_heads=None),
        (  # a mixture of one expert, which gets all of the weight
            Fixed("num_experts", 1, 64),
            Fixed("num_experts_per_tok", 1, 8),
            Fixed("clip_qkv", None, None),  # theirs clamps after the norm of queries and keys
            Fixed("sliding_window", None, None),
        ),
        biases=("attention_bias",),
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        (*_LLAMA_NEEDS, _NO_BIAS),
        (*_llama_fields(eps="rms_norm_eps"), _HEAD_DIM),
        (Fixed("sliding_window", None, 4096),),
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        (*_LLAMA_NEEDS, _NO_BIAS),
        (*_llama_fields(eps="rms_norm_eps"), _HEAD_DIM),
        (Fixed("use_sliding_window", False, False),),
    ),
}
