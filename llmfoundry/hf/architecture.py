"""What an entry of the table of architectures consists of, and parts that many entries share.

`architectures.py` has the table. A setting is a `ConfigField`, a `FixedField` key, or a
`Requirement`: a value that the class always has, so that it is not written. All other settings must
have their `OFF` value. An export therefore rejects a new setting of the recipe until an entry
supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmfoundry.recipe.model import ResolvedModelConfig

DOCUMENT_START = "llmfoundry_document_start"
"""Key of an exported model's config.json: ids that documents began with in its training."""
QK_LN, QK_GN = "attn_config.qk_ln", "attn_config.qk_gn"
HEADS, SCALE, CLIP = "attn_config.attn_type", "attn_config.softmax_scale", "attn_config.clip_qkv"
EXPERTS, TOP_K = "ffn_config.moe_num_experts", "ffn_config.moe_top_k"
TYPE, MLP_TYPE, HIDDEN = "ffn_config.ffn_type", "ffn_config.mlp_type", "ffn_config.ffn_hidden_size"
NORMALIZE = "ffn_config.moe_normalize_expert_weights"
BALANCING, LOSS = "ffn_config.moe_balancing", "ffn_config.moe_loss_weight"
JITTER, SHARED = "ffn_config.moe_jitter_eps", "ffn_config.shared_expert_hidden_size"
SINKS = "attn_config.sinks"
GLU_LIMIT, ROUTER_BIAS = "ffn_config.glu_limit", "ffn_config.moe_router_bias"
OWN, OWN_TYPE = "llmfoundry", "llmfoundry"  # our class in recipes, and config.json's model_type
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
REQUIRED = object()  # config.json must have the key
ANYTHING = object()  # whatever it is when read, logits are the same

OFF: dict[str, Any] = {  # optional parts of all layers, and their value where they do nothing
    "logit_scale": None,
    "final_logit_softcapping": None,
    "attn_config.attn_logit_softcapping": None,
    CLIP: None,
    QK_LN: False,
    QK_GN: False,
    SCALE: None,
    SHARED: None,
    SINKS: False,
    GLU_LIMIT: None,
    ROUTER_BIAS: None,
    "attn_config.kv_lora_rank": None,
    "ffn_config.moe_scoring_func": None,  # None: also softmax, in a plain config
    "ffn_config.moe_n_group": None,
    "ffn_config.moe_routed_scaling_factor": None,
    "ffn_config.first_k_dense_replace": None,
    "ffn_config.uniform_expert_assignment": None,  # None: also what is false, in a plain config
    "ffn_config.moe_force_balance": None,
}

TRAINING = {  # settings that affect training alone, and their value where they do nothing
    "emb_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_config.attn_pdrop": 0.0,
    "embedding_fraction": 1.0,
    LOSS: None,
    JITTER: None,
    "ffn_config.moe_zloss_weight": None,
}


@dataclass(frozen=True)
class Requirement:
    """A requirement on a model, so that an architecture can express it.

    Attributes:
        key: our setting.
        value: its value in every model of the architecture; None: it follows from other settings.
        holds: whether a resolved config meets the requirement; None: `key` must be `value`.
        must: value to write for `key`, for the error message; "": `value`.
    """

    key: str
    value: Any = None
    holds: Callable[[ResolvedModelConfig], bool] | None = None
    must: str = ""


@dataclass(frozen=True)
class ConfigField:
    """A key of config.json (dotted if nested) that has the value of one of our settings.

    Attributes:
        default: transformers' default for a missing key; None: the value that our setting derives.
        choices: our values by HF value; the first HF value is written.
        write: computes the HF value of a config, if it is not the value of our setting.
        read: computes our value of the HF value.
        also: other names of the key in other versions: written too, read if the first is missing.
        gguf: method of `gguf.GGUFWriter` that writes the value, for settings of few architectures.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    choices: Mapping[Any, Any] | None = None
    write: Callable[[ResolvedModelConfig], Any] | None = None
    read: Callable[[Any], Any] | None = None
    also: tuple[str, ...] = ()
    gguf: str = ""


@dataclass(frozen=True)
class FixedField:
    """A key of config.json that must have one `value`: the decoder or transformers has no other.

    Attributes:
        default: transformers' default for a missing key. ANYTHING: the key is written for
            transformers, and any value is accepted, because logits do not depend on it.
    """

    theirs: str
    value: Any
    default: Any


@dataclass(frozen=True)
class WindowFields:
    """Keys by which an architecture specifies the layers with a sliding window.

    Attributes:
        key: `layer_types` or GPT-Neo's `attention_types`, which list the type of each layer; or
            `sliding_window`, if it applies to all layers.
        default: window size if config.json has none.
        switch: `use_sliding_window` must be true for windows; a missing key means false.
        types: computes the layer types if config.json does not list them; None: no windows.
        always: a size must be written even if no layer has a window.
        sizes: false if layer types are listed but no type is a window.
    """

    key: str = "layer_types"
    default: int | None = 4096
    switch: bool = True
    types: Callable[[Mapping[str, Any], int], list[str]] | None = None
    always: bool = False
    sizes: bool = True


@dataclass(frozen=True)
class Architecture:
    """Description of one of transformers' classes in terms of our settings.

    Attributes:
        biases: keys for biases of linear layers, and when they apply (`tensor_names.has_bias`). The
            weights in a file must agree.
        biased: value of these keys if config.json lacks them.
        partial_rotary: default fraction of a head that rotates; None: no rotary positions.
        theta: default base of the rotary frequencies.
        windows: keys of sliding windows; None: attention is always full.
        nope: `no_rope_layers` specifies which layers rotate.
        tuned: layers that do not rotate have Llama 4's temperature tuning, other layers do not.
        unread: keys of dropouts that the decoder does not have, or has elsewhere.
        settle: makes settings that several keys decide consistent, in place; gets the settings by
            dotted key, the content of config.json, and a list that problems are appended to.
        advice: advice for a config.json with another value of a fixed key.
    """

    model_type: str
    needs: tuple[Requirement, ...]
    fields: tuple[ConfigField, ...]
    fixed: tuple[FixedField, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    biased: bool = False
    partial_rotary: float | None = 1.0
    theta: float = 10000.0
    windows: WindowFields | None = None
    nope: bool = False
    tuned: bool = False
    unread: tuple[str, ...] = ()
    settle: Callable[[dict[str, Any], Mapping[str, Any], list[str]], None] | None = None
    advice: str = ""

    @property
    def mixture(self) -> bool:
        """Return whether its feed-forward layers are mixtures of experts."""
        return any(need.key == TYPE and need.value == "dmoe" for need in self.needs)


MHA = Requirement(HEADS, "multihead_attention", lambda c: c.attn_config.kv_n_heads == c.n_heads)
MQA = Requirement(HEADS, "multiquery_attention", lambda c: c.attn_config.kv_n_heads == 1)
HEADS_FILL = Requirement(
    "head_dim", None, lambda c: c.head_dim == c.d_model / c.n_heads, "d_model / n_heads"
)
HEADS_DIVIDE = Requirement(
    "n_heads", None, lambda c: c.d_model % c.n_heads == 0, "a divisor of d_model"
)
LEARNED, ROPE = Requirement("learned_pos_emb", True), Requirement("attn_config.rope", True)
ROPE_OR_NOPE = Requirement(
    ROPE.key, None, lambda c: c.attn_config.rope or c.attn_config.nope, "true, or nope: true"
)
LAYERNORM, RMSNORM = Requirement("norm_type", "layernorm"), Requirement("norm_type", "rmsnorm")
MLP, GLU = Requirement(TYPE, "mptmlp"), Requirement(TYPE, "mptglu")
NO_BIAS, NO_QKV_BIAS = Requirement("no_bias", True), Requirement("attention_bias", False)
NO_BIAS_BALANCING = Requirement(  # what the biases have grown to has no place in their checkpoints
    BALANCING, None, lambda c: c.ffn_config.moe_balancing != "bias", "loss or none"
)
GATED_EXPERTS = (
    Requirement(
        TYPE, "dmoe", lambda c: c.ffn_config.ffn_type in ("dmoe", "mptglu"), "dmoe or mptglu"
    ),
    Requirement(MLP_TYPE, "glu", lambda c: c.ffn_config.mlp_type in ("glu", None)),
    NO_BIAS_BALANCING,
)
SUM_TO_ONE = Requirement(
    NORMALIZE,
    1.0,
    lambda c: c.ffn_config.moe_normalize_expert_weights == 1 or not is_mixture(c),
    "1",
)


def is_mixture(config: ResolvedModelConfig) -> bool:
    """Return whether the feed-forward layers are mixtures of experts; otherwise they are dense."""
    return config.ffn_config.ffn_type == "dmoe"


def attention_scale(config: ResolvedModelConfig) -> float:
    """Return the factor of the attention logits."""
    return config.softmax_scale


def logits_divisor(config: ResolvedModelConfig) -> float:
    """Return the divisor of the logits in Granite; logit_scale of a plain config is a number."""
    factor = config.logit_scale
    assert not isinstance(factor, str)
    return 1.0 if factor is None else 1 / factor


_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
_SAME = ("relu", "relu2", "relu6", "leaky_relu", "mish", "sigmoid", "tanh")
ACTIVATIONS = {  # by transformers' ACT2FN from 5.0 on; of several names the first is written
    "gelu": "gelu",
    "gelu_python": "gelu",
    **dict.fromkeys(_TANH, "gelu_tanh"),
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
    **dict(zip(_SAME, _SAME, strict=True)),
}


TIED = ConfigField("tie_word_embeddings", "tie_word_embeddings", True)


def llama_fields(
    *,
    eps: str = "rms_norm_eps",
    act: str = "hidden_act",
    hidden: str = "intermediate_size",
    tied: bool = False,
    kv_heads: Any = REQUIRED,
) -> tuple[ConfigField, ...]:
    """Llama's keys, which most architectures share but for a name or a default."""
    return (
        ConfigField("vocab_size", "vocab_size"),
        ConfigField("hidden_size", "d_model"),
        ConfigField("num_attention_heads", "n_heads"),
        ConfigField("num_key_value_heads", "attn_config.kv_n_heads", kv_heads),
        ConfigField("num_hidden_layers", "n_layers"),
        ConfigField(hidden, HIDDEN),
        ConfigField(act, "ffn_config.ffn_act_fn", choices=ACTIVATIONS),
        ConfigField("max_position_embeddings", "max_seq_len"),
        ConfigField(eps, "norm_eps"),
        ConfigField("attention_dropout", "attn_config.attn_pdrop", 0.0),
        replace(TIED, default=tied),
    )


def head_dim(default: int | None = None) -> ConfigField:
    """Return the field of head_dim, which several configs accept as an extra key."""
    return ConfigField("head_dim", "head_dim", default)


def read_nope(written: Mapping[str, Any], n_layers: int, problems: list[str]) -> list[bool]:
    """Return whether each layer applies RoPE, by the keys of SmolLM3 and Llama 4."""
    flags = written.get("no_rope_layers")
    if not flags:
        every = written.get("no_rope_layer_interval", 4)
        return [bool((index + 1) % every) for index in range(n_layers)]
    if len(flags) < n_layers:
        problems.append(f"config.json: no_rope_layers has {len(flags)} of {n_layers} layers")
        return [True] * n_layers
    return [bool(flag) for flag in flags[:n_layers]]


NORM_TOPK = ConfigField("norm_topk_prob", NORMALIZE, False, choices={True: 1.0, False: None})


def expert_fields(
    *defaults: float,
    experts: str = "num_local_experts",
    top_k: str = "num_experts_per_tok",
    loss: str = "router_aux_loss_coef",
    also: tuple[str, ...] = (),
) -> tuple[ConfigField, ...]:
    """Return the fields of a mixture of experts.

    Args:
        defaults: what transformers takes where the next three are missing.
        experts: the key of their number.
        top_k: of how many of them are active for a token.
        loss: of the weight of the load-balancing loss.
        also: other names of `experts`.
    """
    return (
        ConfigField(
            experts,
            EXPERTS,
            defaults[0],
            write=lambda c: c.ffn_config.moe_num_experts or 1,
            also=also,
        ),
        ConfigField(top_k, TOP_K, defaults[1], write=lambda c: c.ffn_config.moe_top_k or 1),
        ConfigField(loss, LOSS, defaults[2], write=_loss_weight),
    )


def _loss_weight(config: ResolvedModelConfig) -> float:
    """Theirs: transformers' loss is moe_top_k where loads are equal, megablocks' and ours is 1."""
    ffn = config.ffn_config
    return (ffn.moe_loss_weight or 0.0) / (ffn.moe_top_k or 1)
