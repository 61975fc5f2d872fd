"""A `model` section as config.json's keys and back, by the table in `architectures.py`.

Called by `hf.py`. What cannot be said exactly is refused, with every key that is in the way; what
only training feels goes along where there is a key for it, and is named by `unkept` where not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.hf.config.architectures import ARCHITECTURES
from llmfoundry.hf.config.layers import missed_layers, read_layers, write_layers
from llmfoundry.hf.config.mixture import TYPE, settle
from llmfoundry.hf.config.parts import ANYTHING, REQUIRED, TRAINING, Architecture, Field, get, show
from llmfoundry.hf.config.rope import read_rope, write_rope
from llmfoundry.hf.llm_foundry import FOUNDRY, is_foundry, read_foundry
from llmfoundry.hf.tensor_names import MAPS
from llmfoundry.hf.weight_map import has_bias, padding
from llmfoundry.recipe.architecture.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.front.typed import Problem, build, convert, to_dict
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.values.bounds import MOST_LAYERS
from llmfoundry.recipe.values.checks import nearest

OWN, OWN_TYPE = "llmfoundry", "llmfoundry"  # the name in recipes, and config.json's model_type

ROPES = ("rope_parameters", "rope_scaling")
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
POSITIONS = ("learned_pos_emb", "attn_config.alibi", "attn_config.rope", "attn_config.nope")
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
LOW = "low_precision_"
DEFAULT_ARGUMENTS: dict[str, dict[str, Any]] = {  # of torch, where transformers has the function
    "gelu": {"approximate": "none"},
    "leaky_relu": {"negative_slope": 0.01},
}


def choose(config: ModelConfig, architecture: str | None) -> str:
    """The architecture to write: the one asked for, else the one that fits exactly.

    Of several that fit it is the one with the fewest linear layers whose bias would be zeros, and
    of these the first of the table.

    Raises:
        UserError: it does not fit, or none does: what to write instead, and a line for each setting
            in its way.
    """
    if architecture == OWN:
        return OWN
    if architecture is not None and architecture not in ARCHITECTURES:
        options = [*ARCHITECTURES, OWN]
        raise UserError(
            f"architecture: {architecture!r} is not a choice{nearest(architecture, options)}"
            f" (choices: {', '.join(options)})"
        )
    plain = _plain(config)
    name = architecture or min(ARCHITECTURES, key=lambda name: _distance(plain, name))
    missed = _missed(plain, name)
    if not missed:
        return name
    why = f"{name} cannot be this model"
    if architecture is None:
        why = f"no transformers architecture is exactly this model; {name} is nearest"
    lines = [f"model.{key}: {_say(config, key)}; {name} needs {must}" for key, must in missed]
    raise UserError(
        f"architecture: {why}; write architecture={OWN} for a folder that transformers loads"
        " after `import llmfoundry.hf`",
        *lines,
    )


def _missed(plain: ModelConfig, name: str) -> list[tuple[str, str]]:
    architecture = ARCHITECTURES[name]
    missed = architecture.missed(plain) | missed_layers(plain, architecture)
    return list(missed.items())


def _distance(plain: ModelConfig, name: str) -> tuple[int, int, int]:
    """Missed needs, those of positions and experts first: no one changes these for an export."""
    missed = _missed(plain, name)
    has_experts = plain.ffn_config.ffn_type == "dmoe"
    grave = sum(key in POSITIONS or (key == TYPE and has_experts) for key, _ in missed)
    return grave, len(missed), padding(MAPS[name], plain)


def _say(config: ModelConfig, key: str) -> str:
    if key != "block_overrides":
        return show(get(config, key))
    assert config.block_overrides is not None
    return ", ".join(config.block_overrides.overrides)


def _plain(config: ModelConfig) -> ModelConfig:
    """The model of the same logits in fp32, each setting in the shortest way to say it."""
    attn, ffn = config.attn_config, config.ffn_config
    scale, default = attn.softmax_scale, (config.head_dim or 1) ** -0.5
    if scale is not None and math.isclose(scale, default, rel_tol=1e-9):
        attn = dataclasses.replace(attn, softmax_scale=None)
    if attn.norm_type is not None:
        attn = dataclasses.replace(attn, norm_type=attn.norm_type.removeprefix(LOW))
    name, arguments = ffn.activation
    if arguments.items() <= DEFAULT_ARGUMENTS.get(name, {}).items():
        ffn = dataclasses.replace(ffn, ffn_act_fn=name)
    elif (name, arguments) == ("gelu", {"approximate": "tanh"}):
        ffn = dataclasses.replace(ffn, ffn_act_fn="gelu_tanh")
    ffn = dataclasses.replace(
        ffn,
        uniform_expert_assignment=ffn.uniform_expert_assignment or None,
        moe_force_balance=ffn.moe_force_balance or None,
    )
    factor = config.logit_scale
    if factor == "inv_sqrt_d_model":
        factor = config.d_model**-0.5
    return dataclasses.replace(
        config,
        attn_config=attn,
        ffn_config=ffn,
        logit_scale=None if factor == 1 else factor,
        norm_type=config.norm_type.removeprefix(LOW),
    )


def write_settings(config: ModelConfig, name: str) -> dict[str, Any]:
    """The keys of config.json that make transformers' class `name` this model."""
    if name == OWN:
        return {"model_type": OWN_TYPE, "settings": to_dict(config)}
    config, architecture = _plain(config), ARCHITECTURES[name]
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


def _written(field: Field, config: ModelConfig) -> Any:
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


def unkept(config: ModelConfig, name: str) -> list[str]:
    """A line for each setting that `name` has no key for, and that logits do not depend on."""
    if name == OWN:
        return []
    architecture = ARCHITECTURES[name]
    lines = [
        f"model.{key}: {show(get(config, key))} is left out; {name} has nothing like it, and only"
        " training feels it"
        for key, off in TRAINING.items()
        if get(config, key) != off and not architecture.keeps(key)
    ]
    if MAPS[name].own_head and config.tie_word_embeddings:
        lines.append(
            f"model.tie_word_embeddings: true is left out; the head of {name} is its own, here a"
            " copy of the embedding, and only training feels it"
        )
    norms = {"norm_type": config.norm_type, "attn_config.norm_type": config.attn_config.norm_type}
    if norms["norm_type"] == norms["attn_config.norm_type"]:
        del norms["attn_config.norm_type"]
    return lines + [
        f"model.{key}: {norm} is written as {norm.removeprefix(LOW)}; transformers has no other,"
        " and in fp32 the two are one"
        for key, norm in norms.items()
        if norm is not None and norm.startswith(LOW)
    ]


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


def check_layers(written: Mapping[str, Any]) -> None:
    """Before anything is made for each layer, which an absurd number would take all memory for.

    Raises:
        UserError: config.json says more than MOST_LAYERS.
    """
    for key in LAYERS:
        value = written.get(key)
        if isinstance(value, int | float) and value > MOST_LAYERS:
            raise UserError(
                f"config.json: {key} {value:.4g}, and no model has more than {MOST_LAYERS:,}"
                " layers; write the folder of one"
            )


def read_settings(written: dict[str, Any]) -> tuple[str, ModelConfig]:
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
        return FOUNDRY, _filled(config, problems)
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
        settle(values)
    return names[kind], _assemble(values)


def _check_kinds(written: Mapping[str, Any]) -> Iterator[str]:
    """Lines for sections, lists and numbers that are none, of the keys that no field reads."""
    for noun, (kinds, keys) in KINDS.items():
        for key in keys:
            value = _look_up(written, key, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                yield f"config.json: {key}: {show(value)} is not a {noun}"


def said_biases(written: Mapping[str, Any], name: str, config: ModelConfig) -> dict[str, bool]:
    """Whether rules of each kind of bias (`weight_map.has_bias`) have one in the file.

    Args:
        written: config.json.
        name: its architecture.
        config: what `read_settings` made of it.
    """
    if name == FOUNDRY:
        return {kind: has_bias(kind, config) for kind in ("never", "qkv", "other")}
    architecture = ARCHITECTURES[name]
    said = {"never": False, "always": True}
    for key, kind in architecture.biases.items():
        said[kind] = bool(_look_up(written, key, architecture.biased))
    return said


def _read_own(written: dict[str, Any]) -> ModelConfig:
    problems: list[Problem] = []
    config = build(ModelConfig, written.get("settings", {}), problems, "settings.")
    if problems:
        raise UserError(*(f"config.json: {problem.line}" for problem in problems))
    return _filled(config, [])


def _look_up(written: Mapping[str, Any], key: str, default: Any) -> Any:
    found: Any = written
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return default
        found = found[part]
    return found


def _read(field: Field, written: dict[str, Any], problems: list[str]) -> Any:
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
            problems.append(f"config.json: {field.theirs}: {show(value)} is not a number above 0")
            return None
        found: list[Problem] = []
        key = f"config.json: {field.theirs}"
        declared = Schema.of(ModelConfig).find(field.ours)
        value = convert(declared.hint if declared else None, value, key, found)
        problems += [problem.line for problem in found]
        return value
    if value not in list(field.choices):  # a list, for what cannot be a dictionary's key
        can = ", ".join(show(theirs) for theirs in field.choices)
        problems.append(f"config.json: {field.theirs} {value!r}; the decoder has only {can}")
        return None
    return field.choices[value]


def _check_fixed(written: dict[str, Any], architecture: Architecture, problems: list[str]) -> None:
    for fixed in architecture.fixed:
        value = _look_up(written, fixed.theirs, fixed.default)
        if value is not ANYTHING and fixed.default is not ANYTHING and value != fixed.value:
            problems.append(
                f"config.json: {fixed.theirs} {show(value)}; {architecture.model_type} is read"
                f" with {show(fixed.value)} alone{architecture.advice}"
            )
    if written.get("quantization_config") is not None:
        problems.append("config.json: quantization_config; write a folder that is not quantised")


def _assemble(values: dict[str, Any]) -> ModelConfig:
    """A filled `model` section with `values` at dotted keys."""
    config = ModelConfig(attn_config=AttentionConfig(), ffn_config=FFNConfig())
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(get(config, section) if section else config, name, value)
    attn, heads = config.attn_config, config.n_heads
    if attn.kv_n_heads is not None:
        kinds = {1: "multiquery_attention", heads: "multihead_attention"}
        attn.attn_type = kinds.get(attn.kv_n_heads, "grouped_query_attention")
    _filled(config, [])
    scale, default = attn.softmax_scale, (config.head_dim or 1) ** -0.5
    if scale is not None and math.isclose(scale, default, rel_tol=1e-9):
        attn.softmax_scale = None
    return config


def _filled(config: ModelConfig, problems: list[str]) -> ModelConfig:
    """The same, checked and filled; what was found wrong before is raised with what is now."""
    problems = problems or [f"config.json: {line}" for line in config.check()]
    if problems:
        raise UserError(*problems)
    config.fill()
    return config
