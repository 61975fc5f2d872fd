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
from llmfoundry.hf import block_fp8, mxfp4
from llmfoundry.hf.architecture import (
    ANYTHING,
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
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.layer_keys import read_layers, write_layers
from llmfoundry.hf.llm_foundry_mpt import FOUNDRY, is_foundry, read_foundry
from llmfoundry.hf.rope_keys import ROPES, read_rope, write_rope
from llmfoundry.hf.tensor_names import MAPS, has_bias
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig, ResolvedModelConfig
from llmfoundry.recipe.schema import MOST_LAYERS, Schema
from llmfoundry.recipe.typed import Problem, build, to_dict, to_type

LOW = "low_precision_"
READ_METHODS = (mxfp4.METHOD, block_fp8.METHOD)  # quantizations whose weights are read to bf16
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
    "text": (
        str,
        ("model_type", *(f"{rope}.{key}" for rope in ROPES for key in ("rope_type", "type"))),
    ),
    "number": (
        (int, float),
        (
            *("rope_theta", "attn_config.rope_theta", *(f"{rope}.rope_theta" for rope in ROPES)),
            *("floor_scale", "attn_scale"),
        ),
    ),
}
# text embedding models, of any architecture, have is_causal false
CAUSAL = FixedField("is_causal", True, True)
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")


def write_settings(config: ResolvedModelConfig, name: str) -> dict[str, Any]:
    """Return the content of config.json for a model in transformers' class `name`."""
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
            # transformers does not use this key, but fails if it is missing
            written["attn_config"]["rope_theta"] = written["rope_theta"]
    return written


def _written(field: ConfigField, config: ResolvedModelConfig) -> Any:
    """Return the value of a field in config.json."""
    if field.write is not None:
        return field.write(config)
    value = get(config, field.ours)
    if field.choices is not None:
        return next(theirs for theirs, ours in field.choices.items() if ours == value)
    return value


def _put(written: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key, and create the sections that it is in."""
    *sections, last = key.split(".")
    for section in sections:
        written = written.setdefault(section, {})
    written[last] = value


def get(config: ModelConfig, key: str) -> Any:
    """Return the setting at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def field_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {field_text(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def plain_settings(config: ResolvedModelConfig) -> ResolvedModelConfig:
    """Return the config in a normal form: equal configs compute equal logits in fp32.

    Settings at their defaults are removed, and low-precision norms become plain norms.
    """
    # attention: default scale, plain norm
    attn, ffn = config.attn_config, config.ffn_config
    scale, default = attn.softmax_scale, config.default_softmax_scale
    if scale is not None and math.isclose(scale, default, rel_tol=1e-9):
        attn = replace(attn, softmax_scale=None)
    if attn.norm_type is not None:
        attn = replace(attn, norm_type=attn.norm_type.removeprefix(LOW))

    # feed-forward network: activation by name where its arguments are the defaults
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
        moe_scoring_func=None if ffn.moe_scoring_func == "softmax" else ffn.moe_scoring_func,
    )

    # scale of the logits as a number; 1 is no scale
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
    """Return the architecture and the resolved `model` section that config.json describes.

    `no_bias` and `attention_bias` have the value of the architecture; the caller corrects them by
    the tensors of the folder.

    Raises:
        UserError: a line for each key whose value the decoder does not support.
    """
    # formats of this project and of LLM Foundry
    problems = list(_check_kinds(written))
    if problems:
        raise UserError(*problems)
    kind = written.get("model_type")
    if kind == OWN_TYPE:
        return OWN, _read_own(written)
    if is_foundry(written):
        config = read_foundry(written, problems)
        return FOUNDRY, _resolved(config, problems)

    # settings of an architecture of transformers
    names = {a.model_type: name for name, a in ARCHITECTURES.items()}
    if kind not in names:
        known = ", ".join([*names, OWN_TYPE])
        raise UserError(f"config.json: model_type {kind!r} cannot be read (can be: {known})")
    architecture = ARCHITECTURES[names[kind]]
    values = {n.key: n.value for n in architecture.needs if n.value is not None}
    for field in architecture.fields:
        values[field.ours] = _read(field, written, problems)

    # settings that depend on several keys
    if MAPS[names[kind]].own_head:
        values["tie_word_embeddings"] = False
    if architecture.settle is not None and not problems:
        architecture.settle(values, written, problems)
    layers = values["n_layers"]
    if isinstance(layers, int) and layers > 0:
        values |= read_layers(written, architecture, layers, problems)
    if architecture.partial_rotary is not None and values.get("attn_config.rope"):
        values |= read_rope(written, architecture, problems)

    # keys that must have one value, and the result
    _check_fixed(written, architecture, problems)
    if problems:
        raise UserError(*problems)
    if architecture.mixture:
        _settle_mixture(values)
    return names[kind], _assemble(values)


def _read_own(written: dict[str, Any]) -> ResolvedModelConfig:
    """Return the `model` section in a config.json of this project's own format."""
    problems: list[Problem] = []
    config = build(ModelConfig, written.get("settings", {}), problems, "settings.")
    if problems:
        raise UserError(*(f"config.json: {problem.line}" for problem in problems))
    return _resolved(config, [])


def check_layers(written: Mapping[str, Any], where: str = "config.json: ") -> None:
    """Check the number of layers before memory is allocated for each layer.

    Args:
        written: content of config.json; sections such as text_config are checked as well.
        where: beginning of the error line.

    Raises:
        UserError: a number of layers is greater than MOST_LAYERS.
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
    """Yield an error line for each wrong type among the keys that no ConfigField reads."""
    for noun, (kinds, keys) in KINDS.items():
        for key in keys:
            value = _look_up(written, key, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                yield f"config.json: {key}: {field_text(value)} is not a {noun}"


def _look_up(written: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the value of a dotted key, or the default."""
    value: Any = written
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return default
        value = value[part]
    return value


def _read(field: ConfigField, written: dict[str, Any], problems: list[str]) -> Any:
    """Return the value of a setting here by its keys in config.json.

    Returns None and appends to `problems` if the value is missing or not supported.
    """
    # the value in config.json: its main key takes precedence over other spellings
    value = field.default
    for key in (*field.also, field.theirs):
        value = _look_up(written, key, value)
    needed = field.default is REQUIRED or isinstance(field.default, int)
    if value is REQUIRED or (value is None and needed):
        problems.append(f"config.json: {field.theirs} is missing")
        return None

    # any value, converted and checked by its type here
    if field.choices is None:
        try:
            if field.read is not None:
                value = field.read(value)
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

    # one of several values
    if value not in list(field.choices):  # as a list, because the value may not be hashable
        options = ", ".join(field_text(theirs) for theirs in field.choices)
        problems.append(f"config.json: {field.theirs} {value!r}; the decoder has only {options}")
        return None
    return field.choices[value]


def _check_fixed(written: dict[str, Any], architecture: Architecture, problems: list[str]) -> None:
    """Append a line to `problems` for each key whose value the architecture does not support."""
    for fixed in (*architecture.fixed, CAUSAL):
        value = _look_up(written, fixed.theirs, fixed.default)
        if value is not ANYTHING and fixed.default is not ANYTHING and value != fixed.value:
            problems.append(
                f"config.json: {fixed.theirs} {field_text(value)}; {architecture.model_type} is"
                f" read with {field_text(fixed.value)} alone{architecture.advice}"
            )
    problems += _quantization_problems(written)


def _quantization_problems(written: Mapping[str, Any]) -> list[str]:
    """Return a line if the weights are stored in a form that is not read."""
    quantized = written.get("quantization_config")
    if quantized is None:
        return []
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if method in READ_METHODS:
        return []
    return [
        f"config.json: quantization_config.quant_method: {field_text(method)}; only"
        f" {' and '.join(READ_METHODS)} are read; write a folder that is not quantized"
    ]


def without_quantization(written: dict[str, Any]) -> dict[str, Any]:
    """Return config.json's content for the weights as they are read, in bf16.

    Raises:
        UserError: the weights are stored in a form that is not read.
    """
    problems = _quantization_problems(written)
    if problems:
        raise UserError(*problems)
    return {key: value for key, value in written.items() if key != "quantization_config"}


def _settle_mixture(values: dict[str, Any]) -> None:
    """Make the settings of a mixture of experts consistent with each other, in place.

    One expert without a shared expert is a plain feed-forward network. A loss weight selects
    balancing by loss.
    """
    if values[EXPERTS] == 1 and values.get(SHARED) is None:
        for key in [key for key in values if key.startswith("ffn_config.moe_")]:
            del values[key]
        del values[MLP_TYPE]
        values[TYPE] = "mptglu"
        return
    # 15 digits, without the rounding error of the product
    if LOSS not in values:  # the class has no such loss
        values.setdefault(BALANCING, "none")
        return
    weight = float(f"{(values[LOSS] or 0) * values[TOP_K]:.15g}")
    values[LOSS] = weight or None
    values[BALANCING] = "loss" if weight else "none"


def _assemble(values: dict[str, Any]) -> ResolvedModelConfig:
    """Return the resolved `model` section with `values`, which has dotted keys."""
    config = ModelConfig(attn_config=AttentionConfig(), ffn_config=FFNConfig())
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, value)
    attn, heads = config.attn_config, config.n_heads
    if attn.kv_n_heads is not None and not attn.is_latent:
        kinds = {1: "multiquery_attention", heads: "multihead_attention"}
        attn.attn_type = kinds.get(attn.kv_n_heads, "grouped_query_attention")
    resolved = _resolved(config, [])
    scale, default = attn.softmax_scale, resolved.default_softmax_scale
    if scale is not None and math.isclose(scale, default, rel_tol=1e-9):
        resolved.attn_config.softmax_scale = None
    return resolved


def _resolved(config: ModelConfig, problems: list[str]) -> ResolvedModelConfig:
    """Check and resolve a section.

    Raises:
        UserError: `problems`, or if it is empty, the problems of the section.
    """
    problems = problems or [f"config.json: {line}" for line in config.check()]
    if problems:
        raise UserError(*problems)
    return config.resolve()


def said_biases(
    written: Mapping[str, Any], name: str, config: ResolvedModelConfig
) -> dict[str, bool]:
    """Return for each kind of bias whether config.json says that the model has it.

    Args:
        written: content of config.json.
        name: name of the architecture.
        config: section that `read_settings` returned.

    Returns:
        Kinds as in `tensor_names.has_bias`.
    """
    if name == FOUNDRY:
        return {kind: has_bias(kind, config) for kind in ("never", "qkv", "other")}
    architecture = ARCHITECTURES[name]
    biased_by_kind = {"never": False, "always": True}
    for key, kind in architecture.biases.items():
        biased_by_kind[kind] = bool(_look_up(written, key, architecture.biased))
    return biased_by_kind


def unread(written: Mapping[str, Any], name: str) -> list[str]:
    """Return a line for each dropout in config.json that the decoder does not apply.

    Args:
        written: content of config.json.
        name: name of the architecture.
    """
    if name in (OWN, FOUNDRY):
        return []
    return [
        f"config.json: {key} {_look_up(written, key, 0)} is left out; the decoder has no such"
        " dropout, and only training feels it"
        for key in ARCHITECTURES[name].unread
        if _look_up(written, key, 0)
    ]
