"""Table of the transformers architectures that the decoder can express, for export and import.

`choose_architecture.py` chooses the class of an export. `config_keys.py` converts between a `model`
section and config.json by the class's entry. A setting is a `ConfigField`, a `FixedField` key, or a
`Requirement`: a value that the class always has, so that it is not written. All other settings must
have their `OFF` value. An export therefore rejects a new setting of the recipe until an entry
supports it.

transformers ignores unknown keys and some known ones (an MPT always has ALiBi with exponent 8,
whatever its config.json contains). An entry therefore contains only keys whose effect was read in
the class's source code and is tested.
"""

from __future__ import annotations

import math
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
GPT2_FIELDS = (
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("n_embd", "d_model"),
    ConfigField("n_head", "n_heads"),
    ConfigField("n_layer", "n_layers"),
    ConfigField("n_positions", "max_seq_len"),
    ConfigField("n_inner", HIDDEN, None),
    ConfigField("activation_function", "ffn_config.ffn_act_fn", choices=ACTIVATIONS),
    ConfigField("layer_norm_epsilon", "norm_eps"),
    ConfigField("resid_pdrop", "resid_pdrop", 0.1),
    ConfigField("embd_pdrop", "emb_pdrop", 0.1),
    ConfigField("attn_pdrop", "attn_config.attn_pdrop", 0.1),
    TIED,
)
GPT2_FIXED = (
    FixedField("scale_attn_weights", True, True),
    FixedField("add_cross_attention", False, False),
)
MOSAIC_FIELDS = (
    *(
        ConfigField(key, key)
        for key in ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")
    ),
    ConfigField("attn_config.clip_qkv", CLIP, None, gguf="add_clamp_kqv"),
)
FOUNDRY_OFF = ("clip_qkv",)  # of attention: LLM Foundry turns it off by 0 as well as by null


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


LLAMA_FIELDS = (*llama_fields(kv_heads=None), head_dim())
GRANITE_FIELDS = (
    *LLAMA_FIELDS,
    ConfigField("attention_multiplier", SCALE, 1.0, write=attention_scale),
    ConfigField(
        "logits_scaling",
        "logit_scale",
        1.0,
        write=logits_divisor,
        read=lambda said: None if said == 1 else 1 / said,
    ),
)
GRANITE_FIXED = (
    FixedField("embedding_multiplier", 1.0, 1.0),
    FixedField("residual_multiplier", 1.0, 1.0),
)


def _is_root_of_whole(config: ResolvedModelConfig) -> bool:
    square = attention_scale(config) ** -2
    return math.isclose(square, round(square), rel_tol=1e-9)


def _gemma_head(config: ResolvedModelConfig) -> bool:
    """Gemma multiplies the embedding, not the head that shares it, by sqrt(d_model)."""
    wanted = config.d_model**-0.5 if config.tie_word_embeddings else 1.0
    return math.isclose(1 / logits_divisor(config), wanted, rel_tol=1e-9)


_LLAMA = (ROPE, RMSNORM, GLU)
_LLAMA_BIASES = {"attention_bias": "any", "mlp_bias": "other"}
_QWEN_WINDOWS = WindowFields(
    types=lambda written, layers: [
        FULL if i < written.get("max_window_layers", 28) else SLIDING for i in range(layers)
    ]
)

NORM_TOPK = ConfigField("norm_topk_prob", NORMALIZE, False, choices={True: 1.0, False: None})
DBRX_NORM = ConfigField(
    NORMALIZE,
    NORMALIZE,
    1.0,
    write=lambda c: c.ffn_config.moe_normalize_expert_weights if is_mixture(c) else 1.0,
)


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


_GRANITE_EXPERTS = expert_fields(8, 2, 0.001)

ARCHITECTURES: dict[str, Architecture] = {  # of those that fit as well, the first is written
    "MptForCausalLM": Architecture(
        "mpt",
        (
            Requirement("attn_config.alibi", True),
            Requirement("attn_config.alibi_bias_max", 8),
            LAYERNORM,
            NO_BIAS,
            NO_QKV_BIAS,
            MLP,
            Requirement("ffn_config.ffn_act_fn", "gelu"),
            Requirement(
                HIDDEN, None, lambda c: c.ffn_config.ffn_hidden_size == 4 * c.d_model, "4 * d_model"
            ),
            MHA,
            HEADS_FILL,
        ),
        (
            *MOSAIC_FIELDS,
            ConfigField("layer_norm_epsilon", "norm_eps", 1e-5),
            ConfigField("attn_config.softmax_scale", SCALE, None),
            TIED,
        ),
        (
            FixedField("attn_config.attn_type", "multihead_attention", "multihead_attention"),
            FixedField("attn_config.alibi", True, True),
            FixedField("attn_config.alibi_bias_max", 8, 8),
            FixedField("attn_config.qk_ln", False, False),
            FixedField("attn_config.prefix_lm", False, False),
            FixedField("expansion_ratio", 4, 4),
            FixedField("no_bias", True, True),
            FixedField("logit_scale", None, None),
            FixedField("learned_pos_emb", False, ANYTHING),  # true in MPT-7B's own, beside ALiBi
        ),
        partial_rotary=None,
        # its attn_pdrop is all of its dropouts at once, and must be a whole number
        unread=("resid_pdrop", "emb_pdrop", "attn_config.attn_pdrop"),
        advice=", because transformers passes the key over; if LLM Foundry trained the model, write"
        " architectures: [MPTForCausalLM] there, its own class",
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        (LEARNED, LAYERNORM, MLP, MHA, HEADS_FILL),
        GPT2_FIELDS,
        (*GPT2_FIXED, FixedField("scale_attn_by_inverse_layer_idx", False, False)),
        partial_rotary=None,
    ),
    "GPTBigCodeForCausalLM": Architecture(
        "gpt_bigcode",
        (LEARNED, LAYERNORM, MLP, MQA, HEADS_FILL),
        GPT2_FIELDS,
        (*GPT2_FIXED, FixedField("multi_query", True, True)),
        partial_rotary=None,
    ),
    "LlamaForCausalLM": Architecture(
        "llama",
        (*_LLAMA, HEADS_DIVIDE),
        LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        _LLAMA,
        GRANITE_FIELDS,
        GRANITE_FIXED,
        biases=_LLAMA_BIASES,
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        (ROPE, RMSNORM, MLP, HEADS_DIVIDE),
        LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        (ROPE, LAYERNORM, MLP),
        (
            *llama_fields(eps="norm_epsilon", tied=True),
            head_dim(),
            ConfigField("residual_dropout", "resid_pdrop", 0.0),
            ConfigField("embedding_dropout", "emb_pdrop", 0.0),
        ),
        biases={"use_bias": "any"},
        biased=True,
        windows=WindowFields(key="sliding_window", default=None, switch=False),
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm",
        (ROPE, LAYERNORM, GLU, NO_BIAS, HEADS_FILL),
        (
            *llama_fields(eps="layer_norm_eps"),
            ConfigField("qk_layernorm", "attn_config.qk_gn", False),
        ),
        (FixedField("use_parallel_residual", False, False),),
        biases={"use_qkv_bias": "qkv"},
        partial_rotary=0.25,
        unread=("hidden_dropout",),  # of the feed-forward layer alone
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        (*_LLAMA, NO_BIAS, NO_QKV_BIAS),
        (*llama_fields(), head_dim()),
        windows=WindowFields(key="sliding_window", switch=False),
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        (*_LLAMA, NO_BIAS),
        (*llama_fields(), head_dim()),
        windows=_QWEN_WINDOWS,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        (*_LLAMA, Requirement(QK_GN, True), NO_BIAS),
        (*llama_fields(), head_dim(128)),
        biases={"attention_bias": "any"},
        windows=_QWEN_WINDOWS,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        (ROPE_OR_NOPE, RMSNORM, GLU),
        (*llama_fields(tied=True), head_dim()),
        biases=_LLAMA_BIASES,
        theta=2000000.0,
        windows=WindowFields(
            default=None,
            types=lambda written, layers: [
                FULL if rotates else SLIDING for rotates in read_nope(written, layers, [])
            ],
        ),
        nope=True,
    ),
    "VaultGemmaForCausalLM": Architecture(
        "vaultgemma",
        (
            *_LLAMA,
            NO_BIAS,
            HEADS_DIVIDE,
            Requirement(
                "d_model",
                None,
                lambda c: math.isqrt(c.d_model) ** 2 == c.d_model,
                "a square number",
            ),
            Requirement(
                "logit_scale",
                None,
                _gemma_head,
                "inv_sqrt_d_model if tie_word_embeddings, else null",
            ),
            Requirement(SCALE, None, _is_root_of_whole, "1 / sqrt(a whole number)"),
        ),
        (
            *llama_fields(act="hidden_activation", tied=True),
            head_dim(256),
            ConfigField(
                "query_pre_attn_scalar",
                "attn_config.softmax_scale",
                256,
                write=lambda config: round(attention_scale(config) ** -2),
                read=lambda square: square**-0.5,
            ),
            ConfigField("attn_logit_softcapping", "attn_config.attn_logit_softcapping", 50.0),
            ConfigField("final_logit_softcapping", "final_logit_softcapping", 30.0),
            ConfigField(
                "tie_word_embeddings",
                "logit_scale",
                True,
                write=lambda config: config.tie_word_embeddings,
                read=lambda tied: "inv_sqrt_d_model" if tied else None,
            ),
        ),
        # before 5.23 transformers takes SDPA, which knows no softcap, unless told otherwise
        (FixedField("_attn_implementation", "eager", ANYTHING),),
        biases={"attention_bias": "any"},
        windows=WindowFields(
            switch=False,
            types=lambda _, layers: [FULL if i % 2 else SLIDING for i in range(layers)],
            always=True,
        ),
    ),
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        (ROPE_OR_NOPE, RMSNORM, GLU, NO_BIAS),
        (*llama_fields(hidden="intermediate_size_mlp"), head_dim(128)),
        (FixedField("moe_layers", [], None), FixedField("use_qk_norm", False, True)),
        biases={"attention_bias": "any"},
        theta=500000.0,
        windows=WindowFields(
            switch=False,
            types=lambda written, layers: [
                "chunked_attention" if rotates else FULL
                for rotates in read_nope(written, layers, [])
            ],
            sizes=False,
        ),
        nope=True,
        tuned=True,
    ),
    "GPTNeoForCausalLM": Architecture(
        "gpt_neo",
        (
            LEARNED,
            LAYERNORM,
            MLP,
            MHA,
            HEADS_FILL,
            NO_QKV_BIAS,
            Requirement(SCALE, 1.0),
        ),
        (
            ConfigField("vocab_size", "vocab_size"),
            ConfigField("hidden_size", "d_model"),
            ConfigField("num_heads", "n_heads"),
            ConfigField("num_layers", "n_layers"),
            ConfigField("max_position_embeddings", "max_seq_len"),
            ConfigField("intermediate_size", HIDDEN, None),
            ConfigField("activation_function", "ffn_config.ffn_act_fn", "gelu_new", ACTIVATIONS),
            ConfigField("layer_norm_epsilon", "norm_eps", 1e-5),
            ConfigField("resid_dropout", "resid_pdrop", 0.0),
            ConfigField("embed_dropout", "emb_pdrop", 0.0),
            ConfigField("attention_dropout", "attn_config.attn_pdrop", 0.0),
            TIED,
        ),
        partial_rotary=None,
        windows=WindowFields(key="attention_types", default=256, switch=False),
    ),
    "DbrxForCausalLM": Architecture(
        "dbrx",
        (
            ROPE,
            LAYERNORM,
            Requirement("norm_eps", 1e-5),
            *GATED_EXPERTS,
            NO_BIAS,
            NO_QKV_BIAS,
            HEADS_FILL,
            # transformers' DBRX fails without one
            Requirement(CLIP, None, lambda c: c.attn_config.clip_qkv is not None, "a number"),
        ),
        (
            *MOSAIC_FIELDS,
            ConfigField("attn_config.kv_n_heads", "attn_config.kv_n_heads", 1),
            ConfigField("attn_config.attn_pdrop", "attn_config.attn_pdrop", 0.0),
            ConfigField("resid_pdrop", "resid_pdrop", 0.0),
            ConfigField(HIDDEN, HIDDEN),
            # 5.17 fails at keys of ffn_config that it does not know: these are all of them
            ConfigField("ffn_config.ffn_act_fn.name", "ffn_config.ffn_act_fn", "silu", ACTIVATIONS),
            *expert_fields(4, 1, 0.01, experts=EXPERTS, top_k=TOP_K, loss=LOSS),
            DBRX_NORM,
            ConfigField(JITTER, JITTER, None, read=lambda eps: eps or None),
        ),
        (FixedField("tie_word_embeddings", False, False),),
        unread=("emb_pdrop",),  # transformers has the key, and does nothing with it
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        (ROPE, RMSNORM, *GATED_EXPERTS, Requirement(QK_LN, True), NO_BIAS, HEADS_FILL),
        (
            *llama_fields(kv_heads=None),
            *expert_fields(64, 8, 0.01, experts="num_experts"),
            NORM_TOPK,
        ),
        (
            FixedField("clip_qkv", None, None),  # theirs clamps after the norm of queries and keys
            FixedField("sliding_window", None, None),
        ),
        biases={"attention_bias": "any"},
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS, NO_QKV_BIAS),
        (
            *llama_fields(),
            head_dim(),
            *expert_fields(8, 2, 0.001),
            ConfigField(
                "router_jitter_noise",
                JITTER,
                0.0,
                write=lambda config: config.ffn_config.moe_jitter_eps or 0.0,
                read=lambda eps: eps or None,
            ),
        ),
        theta=1000000.0,
        windows=WindowFields(key="sliding_window", default=None, switch=False),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        (ROPE, RMSNORM, *GATED_EXPERTS, Requirement(QK_GN, True), NO_BIAS),
        (
            *llama_fields(hidden="moe_intermediate_size"),
            head_dim(),
            *expert_fields(128, 8, 0.001, also=("num_experts",)),
            NORM_TOPK,
        ),
        (FixedField("decoder_sparse_step", 1, 1), FixedField("mlp_only_layers", [], [])),
        biases={"attention_bias": "any"},
        windows=WindowFields(key="sliding_window"),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        (
            ROPE,
            RMSNORM,
            Requirement(TYPE, "dmoe"),
            Requirement(MLP_TYPE, "glu"),
            Requirement("ffn_config.ffn_act_fn", "quick_gelu"),
            Requirement(
                GLU_LIMIT, None, lambda c: c.ffn_config.glu_limit is not None, "a number, such as 7"
            ),
            Requirement(ROUTER_BIAS, True),
            NO_BIAS_BALANCING,
            SUM_TO_ONE,
            Requirement(SINKS, True),
        ),
        (
            *(field for field in llama_fields(kv_heads=8) if field.theirs != "hidden_act"),
            head_dim(64),
            *expert_fields(128, 4, 0.001),
            ConfigField("swiglu_limit", GLU_LIMIT, 7.0),
        ),
        (FixedField("swiglu_alpha", 1.702, 1.702), FixedField("hidden_act", "silu", ANYTHING)),
        biases={"attention_bias": "any"},
        biased=True,
        theta=150000.0,
        windows=WindowFields(
            default=128,
            switch=False,
            always=True,
            types=lambda _, layers: [FULL if i % 2 else SLIDING for i in range(layers)],
        ),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS),
        (*GRANITE_FIELDS, *_GRANITE_EXPERTS),
        GRANITE_FIXED,
        biases={"attention_bias": "any"},
    ),
    "GraniteMoeSharedForCausalLM": Architecture(
        "granitemoeshared",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS),
        (
            *GRANITE_FIELDS,
            *_GRANITE_EXPERTS,
            ConfigField(
                "shared_intermediate_size",
                SHARED,
                0,
                write=lambda config: config.ffn_config.shared_expert_hidden_size or 0,
                read=lambda hidden: hidden or None,
            ),
        ),
        GRANITE_FIXED,
        biases={"attention_bias": "any"},
    ),
}
