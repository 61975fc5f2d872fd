"""A `model` section as config.json's keys and back, by the table in `architectures.py`.

`write.py` and `read.py` call it. What cannot be expressed exactly is refused, naming every key in
the way; a setting that affects training alone is written where there is a key for it, and reported
by `unkept` where there is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import (
    ARCHITECTURES,
    BALANCING,
    EXPERTS,
    LOSS,
    MLP_TYPE,
    SHARED,
    TOP_K,
    TYPE,
)
from llmfoundry.hf.config_fields import (
    ANYTHING,
    REQUIRED,
    TRAINING,
    Architecture,
    Field,
    Windows,
    field_text,
    get,
    read_nope,
)
from llmfoundry.hf.llm_foundry import FOUNDRY, is_foundry, read_foundry
from llmfoundry.hf.tensor_names import MAPS
from llmfoundry.hf.weight_map import has_bias, padding
from llmfoundry.recipe.architecture.attention import (
    LLAMA3_KEYS,
    ROPE_TYPES,
    RopeConfig,
    TemperatureConfig,
)
from llmfoundry.recipe.architecture.blocks import (
    DEFAULT,
    AttentionOverride,
    BlockOverride,
    BlockOverridesConfig,
    BlockRun,
    LayerConfig,
)
from llmfoundry.recipe.architecture.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.front.typed import Problem, build, to_dict, to_type
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


def choose_architecture(config: ModelConfig, architecture: str | None) -> str:
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
        return field_text(get(config, key))
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
        f"model.{key}: {field_text(get(config, key))} is left out; {name} has nothing like it, and"
        " only training feels it"
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
        _settle_mixture(values)
    return names[kind], _assemble(values)


def _check_kinds(written: Mapping[str, Any]) -> Iterator[str]:
    """Lines for sections, lists and numbers that are none, of the keys that no field reads."""
    for noun, (kinds, keys) in KINDS.items():
        for key in keys:
            value = _look_up(written, key, None)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                yield f"config.json: {key}: {field_text(value)} is not a {noun}"


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
            problems.append(
                f"config.json: {field.theirs}: {field_text(value)} is not a number above 0"
            )
            return None
        found: list[Problem] = []
        key = f"config.json: {field.theirs}"
        declared = Schema.of(ModelConfig).find(field.ours)
        value = to_type(declared.hint if declared else None, value, key, found)
        problems += [problem.line for problem in found]
        return value
    if value not in list(field.choices):  # a list, for what cannot be a dictionary's key
        can = ", ".join(field_text(theirs) for theirs in field.choices)
        problems.append(f"config.json: {field.theirs} {value!r}; the decoder has only {can}")
        return None
    return field.choices[value]


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


def _check_fixed(written: dict[str, Any], architecture: Architecture, problems: list[str]) -> None:
    for fixed in architecture.fixed:
        value = _look_up(written, fixed.theirs, fixed.default)
        if value is not ANYTHING and fixed.default is not ANYTHING and value != fixed.value:
            problems.append(
                f"config.json: {fixed.theirs} {field_text(value)}; {architecture.model_type} is"
                f" read with {field_text(fixed.value)} alone{architecture.advice}"
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


FLOOR, SCALE = 8192, 0.1  # Llama 4's tuning where config.json does not say
FULL, SLIDING = "full_attention", "sliding_attention"
NEO = {"global": FULL, "local": SLIDING}
TUNING = "attn_config.attn_temperature_tuning"
Tuning = tuple[int, float]  # floor_scale, attn_scale
Kind = tuple[int, bool, Tuning | None]  # a layer's window, -1: none; whether it rotates; tuning


def missed_layers(config: ModelConfig, architecture: Architecture) -> dict[str, str]:
    """What stands in the way of an export as settings, and what they must be."""
    layers, overrides = config.layers(), config.block_overrides
    musts = {"attn_config.sliding_window_size": _missed_window(layers, architecture.windows)}
    rotates = all(layer.rotary for layer in layers)
    if config.attn_config.rope and not architecture.nope and not rotates:
        musts["attn_config.nope"] = "nope: false in every layer"
    if any(layer.kv_from != index for index, layer in enumerate(layers)):
        musts["attn_config.reuse_kv_layer_idx"] = "no reuse_kv_layer_idx"
    musts[f"{TUNING}.attn_scale"] = _missed_tuning(layers, architecture)
    musts = {key: must for key, must in musts.items() if must}
    if musts and overrides is not None and overrides.order:
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


def write_layers(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys of config.json that say it."""
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


def read_layers(
    written: Mapping[str, Any], architecture: Architecture, n_layers: int, problems: list[str]
) -> dict[str, Any]:
    """Our settings at dotted keys; a line to `problems` for each key that we have nothing for."""
    sizes = _read_windows(written, architecture.windows, n_layers, problems)
    rotary = [architecture.partial_rotary is not None] * n_layers
    found: dict[str, Any] = {}
    if architecture.nope:
        rotary = read_nope(written, n_layers, problems)
        found |= {"attn_config.rope": any(rotary), "attn_config.nope": not any(rotary)}
    tuning = _read_tuning(written) if architecture.tuned else None
    kinds = [
        (size, rotates, None if rotates else tuning)
        for size, rotates in zip(sizes, rotary, strict=True)
    ]
    return found | _overrides(kinds)


def _read_tuning(written: Mapping[str, Any]) -> Tuning | None:
    scale = written.get("attn_scale", SCALE)
    on = written.get("attn_temperature_tuning", True) and scale
    return (written.get("floor_scale", FLOOR), scale) if on else None


def _read_windows(
    written: Mapping[str, Any], windows: Windows | None, n_layers: int, problems: list[str]
) -> list[int]:
    """The window of every layer."""
    none, given = [-1] * n_layers, list(written.get("layer_types") or [])
    neo = windows is not None and windows.key == "attention_types"
    types = _read_neo(written) if neo else given or _types(written, windows, n_layers)
    key = "attention_types" if neo else "layer_types"
    known = [FULL] if windows is not None and not windows.sizes else [FULL, SLIDING]
    strange = sorted(set(types) - set(known))
    if strange:
        problems.append(f"config.json: {key} {strange[0]!r}; the decoder has {', '.join(known)}")
        return none
    passed_over = windows is None or windows.key == "sliding_window"  # as transformers does
    if len(types) != n_layers or (passed_over and types != _types(written, windows, n_layers)):
        problems.append(f"config.json: {key} do not fit the model's layers")
        return none
    if windows is None or SLIDING not in types:
        return none
    if windows.switch and not written.get("use_sliding_window", False):
        problems.append("config.json: use_sliding_window false, but layer_types has windows")
    name = "window_size" if neo else "sliding_window"
    size = written.get(name, windows.default)
    if not isinstance(size, int) or size < 2:
        problems.append(f"config.json: {name} {size}; the decoder's windows begin at 2")
        return none
    return [size - 1 if kind == SLIDING else -1 for kind in types]


def _types(written: Mapping[str, Any], windows: Windows | None, n_layers: int) -> list[str]:
    """Every layer's kind where config.json does not list them."""
    if windows is None:
        return [FULL] * n_layers
    has_size = written.get("sliding_window", windows.default) is not None
    on = not windows.switch or (written.get("use_sliding_window", False) and has_size)
    if windows.key == "sliding_window":
        return [SLIDING if on and has_size else FULL] * n_layers
    return windows.types(written, n_layers) if on else [FULL] * n_layers


def _read_neo(written: Mapping[str, Any]) -> list[str]:
    """GPT-Neo's runs of kinds, each with how often it is repeated."""
    runs = written.get("attention_types") or [[["global", "local"], 12]]
    return [NEO.get(kind, kind) for kinds, count in runs for kind in kinds * count]


def _overrides(kinds: list[Kind]) -> dict[str, Any]:
    """Settings and block_overrides of layers of these kinds."""
    rotates = any(rotary for _, rotary, _ in kinds)
    base = max(set(kinds), key=lambda kind: (kind[1], kind[0] == -1, kinds.count(kind)))
    found: dict[str, Any] = {"attn_config.sliding_window_size": base[0]}
    if base[2] is not None:
        found[TUNING] = TemperatureConfig(*base[2])
    if len(set(kinds)) == 1:
        return found
    overrides = {
        _name(kind, base): BlockOverride(
            AttentionOverride(
                sliding_window_size=None if kind[0] == base[0] else kind[0],
                nope=True if rotates and not kind[1] else None,
                attn_temperature_tuning=TemperatureConfig(*kind[2]) if kind[2] else None,
            )
        )
        for kind in dict.fromkeys(kinds)
        if kind != base
    }
    names = (_name(kind, base) for kind in kinds)
    found["block_overrides"] = BlockOverridesConfig(_runs(names), overrides)
    return found


def _name(kind: Kind, base: Kind) -> str:
    if kind == base:
        return DEFAULT
    window, rotary, _ = kind
    words = ["full" if window < 0 else "sliding"] * (window != base[0])
    return "_".join([*words, *["nope"] * (rotary != base[1])])


def _runs(names: Iterable[str]) -> list[BlockRun]:
    return [BlockRun(name=name, repeat=len(list(run))) for name, run in groupby(names)]


COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def write_rope(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
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


def read_rope(
    written: Mapping[str, Any], architecture: Architecture, problems: list[str]
) -> dict[str, Any]:
    """Our settings at dotted keys; a line to `problems` for each key that we have nothing for."""
    # transformers takes rope_scaling before rope_parameters, and folds theta into either
    new, old = written.get("rope_parameters") or {}, written.get("rope_scaling") or {}
    said = {**new, **old}
    _check_agree(new, old, problems)
    share = said.get("partial_rotary_factor", written.get("partial_rotary_factor"))
    share = architecture.partial_rotary if share is None else share
    if share != 1.0:
        problems.append(
            f"config.json: partial_rotary_factor {share}; the decoder's rotary turns the whole head"
        )
    return {
        "attn_config.rope_theta": _read_theta(written, said, architecture.theta, problems),
        "attn_config.rope_hf_config": _read_scaling(said, problems),
    }


def _check_agree(new: Mapping[str, Any], old: Mapping[str, Any], problems: list[str]) -> None:
    kinds = [said.get("rope_type", said.get("type")) for said in (new, old) if said]
    kinds = [kind for kind in kinds if kind is not None]
    differing = [key for key in new if key in old and new[key] != old[key]]
    if len(set(kinds)) > 1 or differing:
        key = differing[0] if differing else "rope_type"
        problems.append(
            f"config.json: rope_parameters and rope_scaling disagree about {key}; write the one"
            " it was trained with in both"
        )


def _read_scaling(said: Mapping[str, Any], problems: list[str]) -> RopeConfig:
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        kind = "no_scaling"
    if kind not in ROPE_TYPES:
        can = ", ".join(("default", *ROPE_TYPES[1:]))
        problems.append(f"config.json: rope_type {kind!r}; the decoder has only {can}")
        return RopeConfig()
    wanted = {"no_scaling": (), "llama3": ("factor", *LLAMA3_KEYS)}.get(kind, ("factor",))
    for key in sorted(said.keys() - COMMON - set(wanted)):
        if said[key] is not None:
            problems.append(f"config.json: rope_parameters.{key}; the decoder has nothing like it")
    for key in wanted:
        if said.get(key) is None:
            problems.append(f"config.json: rope_parameters.{key} is missing; {kind} needs it")
    return RopeConfig(type=kind, **{key: said.get(key) for key in wanted})


def _read_theta(
    written: Mapping[str, Any], said: Mapping[str, Any], default: float, problems: list[str]
) -> float:
    """The base of the rotary frequencies."""
    attn = written.get("attn_config")
    places = {
        "rope_parameters.rope_theta": said.get("rope_theta"),
        "rope_theta": written.get("rope_theta"),
        "attn_config.rope_theta": attn.get("rope_theta") if isinstance(attn, dict) else None,
    }
    thetas = {key: theta for key, theta in places.items() if theta is not None}
    if len({float(theta) for theta in thetas.values()}) > 1:
        each = ", ".join(f"{key} {theta}" for key, theta in thetas.items())
        problems.append(f"config.json: {each} disagree; write the one it was trained with in all")
    return float(next(iter(thetas.values()), default))
