"""The `model` section that a config.json describes; `write_config.py` goes the other way.

`read_folder.py` calls `read_settings`. What the decoder cannot follow exactly is refused, with a
line for each such key; dropouts that it does not have are reported by `unread`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.hf.architectures import (
    ANYTHING,
    ARCHITECTURES,
    BALANCING,
    EXPERTS,
    FULL,
    LOSS,
    MLP_TYPE,
    OWN,
    OWN_TYPE,
    REQUIRED,
    SHARED,
    SLIDING,
    TOP_K,
    TYPE,
    Architecture,
    Field,
    Windows,
    read_nope,
)
from llmfoundry.hf.llm_foundry_mpt import FOUNDRY, is_foundry, read_foundry
from llmfoundry.hf.tensor_names import MAPS, has_bias
from llmfoundry.hf.write_config import FLOOR, NEO, SCALE, TUNING, field_text, get
from llmfoundry.recipe.attention import (
    DEFAULT,
    LLAMA3_KEYS,
    ROPE_TYPES,
    AttentionOverride,
    BlockOverride,
    BlockOverridesConfig,
    BlockRun,
    RopeConfig,
    TemperatureConfig,
)
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.schema import MOST_LAYERS, Schema
from llmfoundry.recipe.typed import Problem, build, to_type

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
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
Tuning = tuple[int, float]  # floor_scale, attn_scale
Kind = tuple[int, bool, Tuning | None]  # a layer's window, -1: none; whether it rotates; tuning
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


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
        values |= _read_layers(written, architecture, layers, problems)
    if architecture.partial_rotary is not None and values.get("attn_config.rope"):
        values |= _read_rope(written, architecture, problems)
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
    """Whether rules of each kind of bias (`tensor_names.has_bias`) have one in the file.

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


def _read_layers(
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
    if windows.types is None or not on:
        return [FULL] * n_layers
    return windows.types(written, n_layers)


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
    names = groupby(_name(kind, base) for kind in kinds)
    runs = [BlockRun(name=name, repeat=len(list(run))) for name, run in names]
    found["block_overrides"] = BlockOverridesConfig(runs, overrides)
    return found


def _name(kind: Kind, base: Kind) -> str:
    if kind == base:
        return DEFAULT
    window, rotary, _ = kind
    words = ["full" if window < 0 else "sliding"] * (window != base[0])
    return "_".join([*words, *["nope"] * (rotary != base[1])])


def _read_rope(
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
