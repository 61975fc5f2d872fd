"""A `model` section as config.json's keys; `read_config.py` goes the other way.

`write_folder.py` calls `choose_architecture` and `write_settings`. What an architecture cannot
express exactly is refused, naming every key in the way; a setting that affects training alone is
written where there is a key for it, and reported by `unkept` where there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import (
    ARCHITECTURES,
    FULL,
    JITTER,
    LOSS,
    OFF,
    OWN,
    OWN_TYPE,
    QK_GN,
    QK_LN,
    SLIDING,
    TRAINING,
    TYPE,
    Architecture,
    Field,
    Need,
    Windows,
    is_mixture,
)
from llmfoundry.hf.tensor_names import MAPS, has_bias, padding
from llmfoundry.recipe.attention import LLAMA3_KEYS, LayerConfig
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import to_dict

POSITIONS = ("learned_pos_emb", "attn_config.alibi", "attn_config.rope", "attn_config.nope")
LOW = "low_precision_"
DEFAULT_ARGUMENTS: dict[str, dict[str, Any]] = {  # of torch, where transformers has the function
    "gelu": {"approximate": "none"},
    "leaky_relu": {"negative_slope": 0.01},
}
NEO = {"global": FULL, "local": SLIDING}
TUNING = "attn_config.attn_temperature_tuning"
FLOOR, SCALE = 8192, 0.1  # Llama 4's tuning where config.json has none


def choose_architecture(
    config: ModelConfig,
    architecture: str | None,
    among: Mapping[str, Architecture] = ARCHITECTURES,
    *,
    engine: str = "transformers",
    advice: str = f"write architecture={OWN} for a folder that transformers loads after `import"
    " llmfoundry.hf`",
) -> str:
    """The architecture to write: the one asked for, else the one that fits exactly.

    Of several that fit it is the one with the fewest linear layers whose bias would be zeros, and
    of these the first of the table.

    Args:
        config: filled.
        architecture: the one asked for; None: any.
        among: those that `engine` has.
        engine: whose architectures they are, for messages.
        advice: what to write where none fits.

    Raises:
        UserError: it does not fit, or none does: what to write instead, and a line for each setting
            in its way.
    """
    if architecture == OWN and among is ARCHITECTURES:
        return OWN
    if architecture is not None and architecture not in among:
        options = [*among, *([OWN] if among is ARCHITECTURES else [])]
        raise UserError(
            f"architecture: {architecture!r} is not a choice{nearest(architecture, options)}"
            f" (choices: {', '.join(options)})"
        )
    plain, layers = _plain(config), config.layers()
    names = among if architecture is None else [architecture]
    missed = {name: _missed(plain, layers, among[name]) for name in names}
    name = min(names, key=lambda name: _distance(plain, name, missed[name]))
    if not missed[name]:
        return name
    why = f"{name} of {engine} cannot be this model"
    if architecture is None:
        why = f"no {engine} architecture is exactly this model; {name} is nearest"
    lines = [
        f"model.{key}: {_value_text(config, key)}; {name} needs {must}"
        for key, must in missed[name].items()
    ]
    raise UserError(f"architecture: {why}; {advice}", *lines)


def _distance(plain: ModelConfig, name: str, missed: Mapping[str, str]) -> tuple[int, int, int]:
    """Missed needs, those of positions and experts first: no one changes these for an export."""
    grave = sum(key in POSITIONS or (key == TYPE and is_mixture(plain)) for key in missed)
    return grave, len(missed), padding(MAPS[name], plain)


def _value_text(config: ModelConfig, key: str) -> str:
    if key != "block_overrides":
        return field_text(get(config, key))
    assert config.block_overrides is not None
    return ", ".join(config.block_overrides.overrides)


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


def _plain(config: ModelConfig) -> ModelConfig:
    """The model of the same logits in fp32, each setting in the shortest way to say it."""
    attn, ffn = config.attn_config, config.ffn_config
    scale, default = attn.softmax_scale, (config.head_dim or 1) ** -0.5
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


def _missed(
    plain: ModelConfig, layers: Sequence[LayerConfig], architecture: Architecture
) -> dict[str, str]:
    """What prevents an export: settings, and what they must be."""
    missed = {need.key: need.must or field_text(need.value) for need in architecture.needs
              if not _holds(need, plain)}  # fmt: skip
    for field in architecture.fields:
        choices = field.choices
        if choices is not None and get(plain, field.ours) not in choices.values():
            names = dict.fromkeys(field_text(value) for value in choices.values())
            missed[field.ours] = f"one of {', '.join(names)}"
    kept = {part.key for part in architecture.needs} | {part.ours for part in architecture.fields}
    for key, off in OFF.items():
        if key not in kept and get(plain, key) != off:
            missed[key] = field_text(off)
    attn = plain.attn_config
    if (attn.qk_ln or attn.qk_gn) and not missed.keys() & {QK_LN, QK_GN}:
        if attn.norm_type != plain.norm_type:
            missed["attn_config.norm_type"] = f"norm_type, {plain.norm_type}"
        if attn.norm_eps != plain.norm_eps:
            missed["attn_config.norm_eps"] = f"norm_eps, {plain.norm_eps}"
    return missed | _missed_layers(plain, layers, architecture)


def _holds(need: Need, plain: ModelConfig) -> bool:
    return get(plain, need.key) == need.value if need.holds is None else need.holds(plain)


def _missed_layers(
    config: ModelConfig, layers: Sequence[LayerConfig], architecture: Architecture
) -> dict[str, str]:
    """As `_missed`, of what may differ between layers."""
    musts = {"attn_config.sliding_window_size": _missed_window(layers, architecture.windows)}
    rotates = all(layer.rotary for layer in layers)
    if config.attn_config.rope and not architecture.nope and not rotates:
        musts["attn_config.nope"] = "nope: false in every layer"
    if any(layer.kv_from != index for index, layer in enumerate(layers)):
        musts["attn_config.reuse_kv_layer_idx"] = "no reuse_kv_layer_idx"
    musts[f"{TUNING}.attn_scale"] = _missed_tuning(layers, architecture)
    musts = {key: must for key, must in musts.items() if must}
    if musts and config.block_overrides is not None and config.block_overrides.order:
        return {"block_overrides": ", ".join(musts.values())}
    return musts


def _missed_window(layers: Sequence[LayerConfig], windows: Windows | None) -> str:
    sizes = {layer.window for layer in layers}
    if (windows is None or not windows.sizes) and sizes != {-1}:
        return "sliding_window_size: -1 in every layer"
    if windows is not None and windows.key == "sliding_window" and len(sizes) > 1:
        return "the same sliding_window_size in every layer"
    if len(sizes - {-1}) > 1:
        return "one sliding_window_size, or -1, in every layer"
    return ""


def _missed_tuning(layers: Sequence[LayerConfig], architecture: Architecture) -> str:
    if not architecture.tuned:
        tuned = any(layer.temperature for layer in layers)
        return "attn_temperature_tuning.attn_scale: 0 in every layer" if tuned else ""
    rotary = {layer.temperature for layer in layers if layer.rotary} - {None}
    others = {layer.temperature for layer in layers if not layer.rotary}
    if rotary or len(others) > 1:
        return "attn_temperature_tuning in the layers that do not rotate, the same in all of them"
    return ""


def write_settings(config: ModelConfig, name: str) -> dict[str, Any]:
    """The keys of config.json that make transformers' class `name` this model."""
    if name == OWN:
        names = {"architectures": ["LlmfoundryForCausalLM"], "model_type": OWN_TYPE}
        return {**names, "settings": to_dict(config)}
    config, architecture = _plain(config), ARCHITECTURES[name]
    written: dict[str, Any] = {"architectures": [name], "model_type": architecture.model_type}
    for field in architecture.fields:
        for key in (field.theirs, *field.also):
            _put(written, key, _written(field, config))
    for fixed in architecture.fixed:
        _put(written, fixed.theirs, fixed.value)
    for key, kind in architecture.biases.items():
        _put(written, key, has_bias(kind, config))
    written |= _write_layers(config, architecture)
    if architecture.partial_rotary is not None:
        written |= _write_rope(config, architecture)
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


def _write_layers(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Keys for what may differ between layers: rotation, temperature, windows."""
    layers = config.layers()
    written: dict[str, Any] = {}
    if architecture.nope:
        written["no_rope_layers"] = [int(layer.rotary) for layer in layers]
    if architecture.tuned:
        tunings = [layer.temperature for layer in layers if layer.temperature]
        floor, scale = tunings[0] if tunings else (FLOOR, 0.0)
        written |= {"attn_temperature_tuning": True, "floor_scale": floor, "attn_scale": scale}
    if architecture.windows is None:
        return written
    sizes = [layer.window for layer in layers]
    return written | _write_windows(architecture.windows, sizes, config.max_seq_len or 1)


def _write_windows(windows: Windows, sizes: Sequence[int], longest: int) -> dict[str, Any]:
    size = max(sizes) + 1 or None
    types = [FULL if window < 0 else SLIDING for window in sizes]
    if windows.key == "attention_types":
        kinds = {theirs: kind for kind, theirs in NEO.items()}
        runs = [[[kinds[kind]], len(list(run))] for kind, run in groupby(types)]
        return {"attention_types": runs, "window_size": size or longest}
    if not windows.sizes:
        return {"layer_types": types}
    written: dict[str, Any] = {"sliding_window": size or (longest if windows.always else None)}
    if windows.key == "layer_types":
        written["layer_types"] = types
    if windows.switch:
        written["use_sliding_window"] = size is not None
    return written


def _write_rope(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys for transformers from 5.0 on, and those that older readers know."""
    theta, scaling = config.attn_config.rope_theta, config.attn_config.rope_hf_config
    theta = architecture.theta if theta is None else theta  # None where no layer rotates
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling.type != "no_scaling":
        given = {key: getattr(scaling, key) for key in ("factor", *LLAMA3_KEYS)}
        given = {key: value for key, value in given.items() if value is not None}
        rope = {"rope_type": scaling.type, **given}
    written: dict[str, Any] = {"rope_theta": theta}
    if scaling.type != "no_scaling":
        written["rope_scaling"] = dict(rope)
    if architecture.partial_rotary != 1.0:
        rope["partial_rotary_factor"] = written["partial_rotary_factor"] = 1.0
    return written | {"rope_parameters": {**rope, "rope_theta": theta}}


def unkept(config: ModelConfig, name: str) -> list[str]:
    """A line for each setting that `name` has no key for, and that logits do not depend on."""
    if name == OWN:
        return []
    architecture = ARCHITECTURES[name]
    lines = [
        f"model.{key}: {field_text(get(config, key))} is left out; {name} has nothing like it, and"
        " only training feels it"
        for key, off in TRAINING.items()
        if get(config, key) != off and not _keeps(architecture, key)
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


def remarks(config: ModelConfig, name: str) -> list[str]:
    """Lines of the model card on a mixture in transformers' class `name`."""
    if name == OWN or not is_mixture(config):
        return []
    architecture = ARCHITECTURES[name]
    loss = next(field.theirs for field in architecture.fields if field.ours == LOSS)
    lines = [
        f"{name} computes its router in the precision of the weights, where training was in fp32:"
        " in bf16 a few per cent of the tokens go to other experts, so compare logits in fp32.",
        f"`{loss}` is moe_loss_weight / moe_top_k: with equal loads transformers'"
        " load-balancing loss is moe_top_k, in training it was 1. transformers adds it only with"
        " `output_router_logits=True`, and counts loads over a batch and all layers.",
    ]
    if config.ffn_config.moe_jitter_eps is not None and _keeps(architecture, JITTER):
        lines.append(
            "In transformers' training the jitter reaches the experts as well; here it was the"
            " router's alone."
        )
    return lines


def _keeps(architecture: Architecture, key: str) -> bool:
    """Whether a field holds our setting `key`."""
    return any(field.ours == key for field in architecture.fields)
