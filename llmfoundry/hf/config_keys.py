"""Conversion between a recipe's `model` section and the keys of config.json, for both directions.

`write_folder.py` calls `write_settings`, `read_folder.py` calls `read_settings`. Both follow an
entry of `ARCHITECTURES`: fields, fixed keys and biases here, keys of layers in `layer_keys.py`,
rotary positions in `rope_keys.py`. A config.json that the decoder cannot express exactly is
rejected with a line for each such key. `unread` reports dropouts that the decoder does not support.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import (
    ANYTHING,
    ARCHITECTURES,
    BALANCING,
    EXPERTS,
    LOSS,
    MLP_TYPE,
    OWN,
    OWN_TYPE,
    REQUIRED,
    SHARED,
    TOP_K,
    TYPE,
    Architecture,
    ConfigField,
    FixedField,
)
from llmfoundry.hf.layer_keys import read_layers, write_layers
from llmfoundry.hf.llm_foundry_mpt import FOUNDRY, is_foundry, read_foundry
from llmfoundry.hf.rope_keys import ROPES, read_rope, write_rope
from llmfoundry.hf.tensor_names import MAPS, has_bias
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig, ResolvedModelConfig
from llmfoundry.recipe.schema import MOST_LAYERS, Schema
from llmfoundry.recipe.typed import Problem, build, to_dict, to_type

LOW = "low_precision_"
DEFAULT_ARGUMENTS: dict[str, dict[str, Any]] = {  # of torch, where transformers has the function
    "gelu": {"approximate": "none"},
    "leaky_relu": {"negative_slope": 0.01},
}
KINDS: dict[str, tuple[Any, tuple[str, ...]]] = {  # of keys of config.json that no field reads
    "section": (
        dict,
        (
            *("attn_config", "ffn_config", "settings", *ROPES, "attn_config.rope_hf_config"),
            *("attn_config.rope_dail_config", "attn_config.attn_temperature_tuning"),
        ),
    ),
    "list": (list, ("architectures", "layer_types", "no_rope_layers", "attention_types")),
    "text": (str, ("model_type", *(f"{rope}.rope_type" for rope in ROPES))),
    "number": (
        (int, float),
        (
            *("rope_theta", "attn_config.rope_theta", *(f"{rope}.rope_theta" for rope in ROPES)),
            *("floor_scale", "attn_scale"),
        ),
    ),
}
CAUSAL = FixedField(
    "is_causal", True, True
)  # false in models that embed texts, of any architecture
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


def write_settings(config: ResolvedModelConfig, name: str) -> dict[str, Any]:
    """The keys of config.json that make transformers' class `name` this model."""
    if name == OWN:
        names = {"architectures": ["LlmfoundryForCausalLM"], "model_type": OWN_TYPE}
        return {**names, "settings": to_dict(config)}
    config, architecture = plain_settings(config), ARCHITECTURES[name]
    written: dict[str, Any] = {"architectures": [name], "model_type": architecture.model_type}
    for field in architecture.fields:
        for key in (field.theirs, *field.also):
            _put(written, key, _written(field, config))
    for fixed in architecture.fixed:
        _put(written, fixed.theirs, fixed.value)
    for key, kind in architecture.biases.items():
        _put(written, key, has_bias(kind, config))
    written |= write_layers(config, architecture)
    if architecture.partial_rotary is not None:
        written |= write_rope(config, architecture)
        if architecture.model_type == "dbrx":
            # transformers reads this one without using it, and fails where it is missing
            written["attn_config"]["rope_theta"] = written["rope_theta"]
    return written


def _written(field: ConfigField, config: ResolvedModelConfig) -> Any:
    if field.write is not None:
        return field.write(config)
    value = get(config, field.ours)
    if field.choices is not None:
        return next(theirs for theirs, ours in field.choices.items() if ours == value)
    return value


def _put(written: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        written = written.setdefault(section, {})
    written[last] = value


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


def plain_settings(config: ResolvedModelConfig) -> ResolvedModelConfig:
    """The model of the same logits in fp32, each setting in the shortest way to say it."""
    attn, ffn = config.attn_config, config.ffn_config
    scale, default = attn.softmax_scale, config.head_dim**-0.5
    if scale is not None and math.isclose(scale, default, rel_tol=1e-9):
        attn = replace(attn, softmax_scale=None)
    if attn.norm_type is not None:
        attn = replace(attn, norm_type=attn.norm_type.removeprefix(LOW))
    if not isinstance(ffn.ffn_act_fn, str):
        name, arguments = ffn.activation
        if arguments.items() <= DEFAULT_ARGUMENTS.get(name, {}).items():
            ffn = replace(ffn, ffn_act_fn=name)
        elif (name, arguments) == ("gelu", {"approximate": "tanh"}):
            ffn = replace(ffn, ffn_act_fn="gelu_tanh")
    ffn = replace(
        ffn,
        uniform_expert_assignment=ffn.uniform_expert_assignment or None,
        moe_force_balance=ffn.moe_force_balance or None,
    )
    factor = config.logit_scale
    if factor == "inv_sqrt_d_model":
        factor = config.d_model**-0.5
    return replace(
        config,
        attn_config=attn,
        ffn_config=ffn,
        logit_scale=None if factor == 1 else factor,
        norm_type=config.norm_type.removeprefix(LOW),
    )


def read_settings(written: dict[str, Any]) -> tuple[str, ResolvedModelConfig]:
    """The architecture and the filled `model` section that config.json describes.

    `no_bias` and `attention_bias` are left at what the architecture forces; the file's tensors
    decide them.

    Raises:
        UserError: a line for each key that the decoder cannot follow exactly.
    """
    problems = list(_check_kinds(written))
    if problems:
        raise UserError(*problems)
    kind = written.get("model_type")
    if kind == OWN_TYPE:
        return OWN, _read_own(written)
    if is_foundry(written):
        config = read_foundry(written, problems)
        return FOUNDRY, _resolved(config, problems)
    names = {a.model_type: name for name, a in ARCHITECTURES.items()}
    if kind not in names:
        known = ", ".join([*names, OWN_TYPE])
        raise UserError(f"config.json: model_type {kind!r} cannot be read (can be: {known})")
    architecture = ARCHITECTURES[names[kind]]
    values = {n.key: n.value for n in architecture.needs if n.value is not None}
    for field in architecture.fields:
        values[field.ours] = _read(field, written, problems)
    if MAPS[names[kind]].own_head:
        values["tie_word_embeddings"] = False
    layers = values["n_layers"]
    if isinstance(layers, int) and layers > 0:
        values |= read_layers(written, architecture, layers, problems)
    if architecture.partial_rotary is not None and values.get("attn_config.rope"):
        values |= read_rope(written, architecture, problems)
    _check_fixed(written, architecture, problems)
    if problems:
        raise UserError(*problems)
    if architecture.mixture:
        _settle_mixture(values)
    return names[kind], _assemble(values)


def _read_own(written: dict[str, Any]) -> ResolvedModelConfig:
    problems: list[Problem] = []
    config = build(ModelConfig, written.get("settings", {}), problems, "settings.")
    if problems:
        raise UserError(*(f"config.json: {problem.line}" for problem in problems))
    return _resolved(config, [])


def check_layers(written: Mapping[str, Any], where: str = "config.json: ") -> None:
    """Before anything is made for each layer, which an absurd number would take all memory for.

    Args:
        written: config.json, whose sections, such as text_config, are looked at too.
        where: the beginning of an error.

    Raises:
        UserError: it says more than MOST_LAYERS.
    """
    for key, value in written.items():
        if isinstance(value, dict):
            check_layers(value, f"{where}{key}.")
        elif key in LAYERS and isinstance(value, int | float) and value > MOST_LAYERS:
            raise UserError(
                f"{where}{key} {value:.4g}, and no model has more than {MOST_LAYERS:,} layers;"
                " write the folder of one"
            )


def _check_kinds(written: Mapping[str, Any]) -> Iterator[str]:
    """Lines for sections, lists and numbers that are none, of the keys that no field reads."""
    for noun, (kinds, keys) in KINDS.items():
        for key in keys:
            value = _look_up(written, key, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                yield f"config.json: {key}: {field_text(value)} is not a {noun}"


def _look_up(written: Mapping[str, Any], key: str, default: Any) -> Any:
    value_at: Any = written
    for part in key.split("."):
        if not isinstance(value_at, dict) or part not in value_at:
            return default
        value_at = value_at[part]
    return value_at


def _read(field: ConfigField, written: dict[str, Any], problems: list[str]) -> Any:
    value = field.default
    for key in (*field.also, field.theirs):
        value = _look_up(written, key, value)
    needed = field.default is REQUIRED or isinstance(field.default, int)
    if value is REQUIRED or (value is None and needed):
        problems.append(f"config.json: {field.theirs} is missing")
        return None
    if field.choices is None:
        try:
            value = value if field.read is None else field.read(value)
        except (TypeError, ZeroDivisionError):
            problems.append(
                f"config.json: {field.theirs}: {field_text(value)} is not a number above 0"
            )
            return None
        type_problems: list[Problem] = []
        key = f"config.json: {field.theirs}"
        declared = Schema.of(ModelConfig).find(field.ours)
        value = to_type(declared.hint if declared else None, value, key, type_problems)
        problems += [problem.line for problem in type_problems]
        return value
    if value not in list(field.choices):  # a list, for what cannot be a dictionary's key
        can = ", ".join(field_text(theirs) for theirs in field.choices)
        problems.append(f"config.json: {field.theirs} {value!r}; the decoder has only {can}")
        return None
    return field.choices[value]


def _check_fixed(written: dict[str, Any], architecture: Architecture, problems: list[str]) -> None:
    for fixed in (*architecture.fixed, CAUSAL):
        value = _look_up(written, fixed.theirs, fixed.default)
        if value is not ANYTHING and fixed.default is not ANYTHING and value != fixed.value:
            problems.append(
                f"config.json: {fixed.theirs} {field_text(value)}; {architecture.model_type} is"
                f" read with {field_text(fixed.value)} alone{architecture.advice}"
            )
    if written.get("quantization_config") is not None:
        problems.append("config.json: quantization_config; write a folder that is not quantised")


def _settle_mixture(values: dict[str, Any]) -> None:
    """Make settings that fit each other of what was read, in place."""
    if values[EXPERTS] == 1 and values.get(SHARED) is None:
        for key in [key for key in values if key.startswith("ffn_config.moe_")]:
            del values[key]
        del values[MLP_TYPE]
        values[TYPE] = "mptglu"
        return
    weight = float(f"{(values[LOSS] or 0) * values[TOP_K]:.15g}")  # without its last digit
    values[LOSS] = weight or None
    values[BALANCING] = "loss" if weight else "none"


def _assemble(values: dict[str, Any]) -> ResolvedModelConfig:
    """A resolved `model` section with `values` at dotted keys."""
    config = ModelConfig(attn_config=AttentionConfig(), ffn_config=FFNConfig())
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, value)
    attn, heads = config.attn_config, config.n_heads
    if attn.kv_n_heads is not None:
        kinds = {1: "multiquery_attention", heads: "multihead_attention"}
        attn.attn_type = kinds.get(attn.kv_n_heads, "grouped_query_attention")
    resolved = _resolved(config, [])
    scale, default = attn.softmax_scale, resolved.head_dim**-0.5
    if scale is not None and math.isclose(scale, default, rel_tol=1e-9):
        resolved.attn_config.softmax_scale = None
    return resolved


def _resolved(config: ModelConfig, problems: list[str]) -> ResolvedModelConfig:
    """Check and resolve a section; `problems` found before are raised with its own."""
    problems = problems or [f"config.json: {line}" for line in config.check()]
    if problems:
        raise UserError(*problems)
    return config.resolve()


def said_biases(
    written: Mapping[str, Any], name: str, config: ResolvedModelConfig
) -> dict[str, bool]:
    """Whether rules of each kind of bias (`tensor_names.has_bias`) have one in the file.

    Args:
        written: config.json.
        name: its architecture.
        config: what `read_settings` made of it.
    """
    if name == FOUNDRY:
        return {kind: has_bias(kind, config) for kind in ("never", "qkv", "other")}
    architecture = ARCHITECTURES[name]
    biased_by_kind = {"never": False, "always": True}
    for key, kind in architecture.biases.items():
        biased_by_kind[kind] = bool(_look_up(written, key, architecture.biased))
    return biased_by_kind


def unread(written: Mapping[str, Any], name: str) -> list[str]:
    """A line for each dropout in config.json of `name` that the decoder has not, or elsewhere."""
    if name in (OWN, FOUNDRY):
        return []
    return [
        f"config.json: {key} {_look_up(written, key, 0)} is left out; the decoder has no such"
        " dropout, and only training feels it"
        for key in ARCHITECTURES[name].unread
        if _look_up(written, key, 0)
    ]
