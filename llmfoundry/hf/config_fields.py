"""What `architectures.py` is written with: how one of transformers' classes says what we say.

A setting goes out as a `Field`, a `Fixed` key or nothing at all, where the class can be nothing
else (`Need`). Whatever none of an architecture's parts speaks of must be `OFF`, so a setting that
is new here is refused until a row of the table takes it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmfoundry.recipe.architecture.model import ModelConfig

QK_LN, QK_GN = "attn_config.qk_ln", "attn_config.qk_gn"
REQUIRED = object()  # config.json must have the key
ANYTHING = object()  # whatever it says when read, logits are the same

OFF: dict[str, Any] = {  # optional parts of all layers, and their value where they do nothing
    "logit_scale": None,
    "final_logit_softcapping": None,
    "attn_config.attn_logit_softcapping": None,
    "attn_config.clip_qkv": None,
    QK_LN: False,
    QK_GN: False,
    "attn_config.softmax_scale": None,
    "ffn_config.shared_expert_hidden_size": None,
    "ffn_config.uniform_expert_assignment": None,  # None: also what is false, in a plain config
    "ffn_config.moe_force_balance": None,
}

TRAINING = {  # settings that only training feels, and their value where they do nothing
    "emb_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_config.attn_pdrop": 0.0,
    "embedding_fraction": 1.0,
    "ffn_config.moe_loss_weight": None,
    "ffn_config.moe_jitter_eps": None,
    "ffn_config.moe_zloss_weight": None,
}


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
        write: their value of a config, where it is not simply our setting's.
        read: our value of theirs.
        also: other names of the key, by version of transformers: written too, read where the first
            is missing.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    choices: Mapping[Any, Any] | None = None
    write: Callable[[ModelConfig], Any] | None = None
    read: Callable[[Any], Any] | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A key of config.json that must be `value`: the decoder or transformers has nothing else.

    Attributes:
        default: what transformers takes where the key is missing; ANYTHING: the key is written for
            transformers' sake, and read whatever it says, since logits do not depend on it.
    """

    theirs: str
    value: Any
    default: Any


def no_types(_: Mapping[str, Any], n_layers: int) -> list[str]:
    """No layer has a window."""
    return ["full_attention"] * n_layers


@dataclass(frozen=True)
class Windows:
    """How an architecture says which layers attend to a sliding window.

    Attributes:
        key: `layer_types` or GPT-Neo's `attention_types`, which name each layer's kind; or
            `sliding_window`, where that holds for all layers.
        default: the window's size where config.json does not say.
        switch: `use_sliding_window` must be true for windows, and is false where missing.
        types: the layers' types where config.json does not list them.
        always: a size must be given even where no layer has a window.
        sizes: false where layers' kinds are listed, but none of them is a window.
    """

    key: str = "layer_types"
    default: int | None = 4096
    switch: bool = True
    types: Callable[[Mapping[str, Any], int], list[str]] = no_types
    always: bool = False
    sizes: bool = True


@dataclass(frozen=True)
class Architecture:
    """How one of transformers' classes says what the decoder is.

    Attributes:
        biases: keys that say whether linear layers have biases, each with which of our layers'
            they follow (`weight_map.has_bias`). The weights that are read must agree.
        biased: what these keys are where config.json does not say.
        partial_rotary: share of a head that rotates where config.json does not say; None: the
            architecture has no rotary positions.
        theta: base of the rotary frequencies where config.json does not say.
        windows: None: attention is over everything before.
        nope: `no_rope_layers` says which layers rotate.
        tuned: layers that do not rotate have Llama 4's temperature tuning, others have none.
        unread: keys of dropouts that the decoder does not have, or has elsewhere.
        mixture: feed-forward layers are mixtures of experts (`config_json.py` settles how).
        advice: for whoever wants to read another value of a key that is fixed.
    """

    model_type: str
    needs: tuple[Need, ...]
    fields: tuple[Field, ...]
    fixed: tuple[Fixed, ...] = ()
    biases: Mapping[str, str] = field(default_factory=dict)
    biased: bool = False
    partial_rotary: float | None = None
    theta: float = 10000.0
    windows: Windows | None = None
    nope: bool = False
    tuned: bool = False
    unread: tuple[str, ...] = ()
    mixture: bool = False
    advice: str = ""

    def keeps(self, key: str) -> bool:
        """Whether a field says what our setting `key` is."""
        return any(item.ours == key for item in self.fields)

    def missed(self, config: ModelConfig) -> dict[str, str]:
        """What stands in the way of a filled, plain config: settings, and what they must be."""
        missed = {need.key: need.must for need in self.needs if not need.holds(config)}
        for item in self.fields:
            choices = item.choices
            if choices is not None and get(config, item.ours) not in choices.values():
                names = dict.fromkeys(field_text(value) for value in choices.values())
                missed[item.ours] = f"one of {', '.join(names)}"
        spoken = {need.key for need in self.needs}
        for key, off in OFF.items():
            if key not in spoken and not self.keeps(key) and get(config, key) != off:
                missed[key] = field_text(off)
        attn = config.attn_config
        if (attn.qk_ln or attn.qk_gn) and not missed.keys() & {QK_LN, QK_GN}:
            if attn.norm_type != config.norm_type:
                missed["attn_config.norm_type"] = f"norm_type, {config.norm_type}"
            if attn.norm_eps != config.norm_eps:
                missed["attn_config.norm_eps"] = f"norm_eps, {config.norm_eps}"
        return missed


def get(config: ModelConfig, key: str) -> Any:
    """The setting at dotted `key`."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def field_text(value: Any) -> str:
    """A setting's value as YAML would write it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {field_text(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def only(key: str, value: Any) -> Need:
    """`key` must be `value`."""
    return Need(key, lambda config: get(config, key) == value, field_text(value), value)


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


def read_nope(written: Mapping[str, Any], n_layers: int, problems: list[str]) -> list[bool]:
    """Whether each layer rotates, by SmolLM3's and Llama 4's keys."""
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
