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
        mixture: feed-forward layers are mixtures of experts (`mixture.settle`).
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
                names = dict.fromkeys(show(value) for value in choices.values())
                missed[item.ours] = f"one of {', '.join(names)}"
        spoken = {need.key for need in self.needs}
        for key, off in OFF.items():
            if key not in spoken and not self.keeps(key) and get(config, key) != off:
                missed[key] = show(off)
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


def show(value: Any) -> str:
    """A setting's value as YAML would write it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def only(key: str, value: Any) -> Need:
    """`key` must be `value`."""
    return Need(key, lambda config: get(config, key) == value, show(value), value)
