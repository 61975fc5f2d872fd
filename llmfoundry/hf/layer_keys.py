"""Settings that differ between layers, to and from config.json: windows, rotation, temperature.

`config_keys.py` calls `read_layers` and `write_layers`. `choose_architecture.py` calls
`missed_layers` for settings that an architecture cannot express. config.json lists every layer. A
recipe has common settings and `block_overrides`. `LayerKind` is the intermediate representation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from llmfoundry.hf.architecture import FULL, SLIDING, Architecture, WindowFields, read_nope
from llmfoundry.recipe.attention import (
    DEFAULT,
    AttentionOverride,
    BlockOverride,
    BlockOverridesConfig,
    BlockRun,
    LayerConfig,
    TemperatureConfig,
)
from llmfoundry.recipe.model import ModelConfig

NEO = {"global": FULL, "local": SLIDING}
"""GPT-Neo's names of layers."""
TUNING = "attn_config.attn_temperature_tuning"
FLOOR, SCALE = 8192, 0.1  # Llama 4's tuning where config.json has none
Tuning = tuple[int, float]  # floor_scale, attn_scale
LayerKind = tuple[int, bool, Tuning | None]
"""Of a layer: its window (-1: none), whether it rotates, its temperature tuning."""


def write_layers(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
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


def _write_windows(windows: WindowFields, sizes: Sequence[int], longest: int) -> dict[str, Any]:
    """Return the keys of config.json for attention windows.

    Args:
        windows: the keys of the architecture.
        sizes: window of each layer here, -1: full attention. config.json counts the token itself,
            so that its number is greater by one.
        longest: maximum sequence length.
    """
    size = max(sizes) + 1 or None  # None: no layer has a window
    types = [FULL if window < 0 else SLIDING for window in sizes]

    # GPT-Neo: runs of equal layers
    if windows.key == "attention_types":
        neo_names = {ours: neo for neo, ours in NEO.items()}
        runs = [[[neo_names[layer_type]], len(list(run))] for layer_type, run in groupby(types)]
        return {"attention_types": runs, "window_size": size or longest}

    # other architectures
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
    """Return settings of layers at dotted keys of the `model` section.

    Args:
        written: content of config.json.
        architecture: its architecture.
        n_layers: number of layers.
        problems: a line is appended for each unsupported value.
    """
    sizes = _read_windows(written, architecture.windows, n_layers, problems)
    rotary = [architecture.partial_rotary is not None] * n_layers
    keys: dict[str, Any] = {}
    if architecture.nope:
        rotary = read_nope(written, n_layers, problems)
        keys |= {"attn_config.rope": any(rotary), "attn_config.nope": not any(rotary)}
    tuning = _read_tuning(written) if architecture.tuned else None
    kinds = [
        (size, rotates, None if rotates else tuning)
        for size, rotates in zip(sizes, rotary, strict=True)
    ]
    return keys | _overrides(kinds)


def _read_tuning(written: Mapping[str, Any]) -> Tuning | None:
    """Return floor and scale of Llama 4's attention temperature; None: not used."""
    scale = written.get("attn_scale", SCALE)
    if not written.get("attn_temperature_tuning", True) or not scale:
        return None
    return written.get("floor_scale", FLOOR), scale


def _read_windows(
    written: Mapping[str, Any], windows: WindowFields | None, n_layers: int, problems: list[str]
) -> list[int]:
    """Return the window of each layer, -1: full attention.

    Appends a line to `problems` if the types of the layers or their window are not supported.
    """
    # the type of each layer: listed in config.json, or by the rule of the architecture
    no_windows, listed_types = [-1] * n_layers, list(written.get("layer_types") or [])
    is_neo = windows is not None and windows.key == "attention_types"
    if is_neo:
        key, types = "attention_types", _read_neo(written)
    else:
        key, types = "layer_types", listed_types or _types(written, windows, n_layers)

    # check the types
    known = [FULL] if windows is not None and not windows.sizes else [FULL, SLIDING]
    unknown = sorted(set(types) - set(known))
    if unknown:
        problems.append(f"config.json: {key} {unknown[0]!r}; the decoder has {', '.join(known)}")
        return no_windows
    # transformers ignores layer_types of these architectures, so the list must agree with the rule
    is_ignored = windows is None or windows.key == "sliding_window"
    if len(types) != n_layers or (is_ignored and types != _types(written, windows, n_layers)):
        problems.append(f"config.json: {key} do not fit the model's layers")
        return no_windows

    # the window
    if windows is None or SLIDING not in types:
        return no_windows
    if windows.switch and not written.get("use_sliding_window", False):
        problems.append("config.json: use_sliding_window false, but layer_types has windows")
    name = "window_size" if is_neo else "sliding_window"
    size = written.get(name, windows.default)
    if not isinstance(size, int) or size < 2:
        problems.append(f"config.json: {name} {size}; the decoder's windows begin at 2")
        return no_windows
    return [size - 1 if layer_type == SLIDING else -1 for layer_type in types]


def _types(written: Mapping[str, Any], windows: WindowFields | None, n_layers: int) -> list[str]:
    """Return the type of each layer by the architecture's rule, for a config.json without list."""
    if windows is None:
        return [FULL] * n_layers
    has_size = written.get("sliding_window", windows.default) is not None
    is_on = not windows.switch or (written.get("use_sliding_window", False) and has_size)
    if windows.key == "sliding_window":
        return [SLIDING if is_on and has_size else FULL] * n_layers
    if windows.types is None or not is_on:
        return [FULL] * n_layers
    return windows.types(written, n_layers)


def _read_neo(written: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer of GPT-Neo, whose config.json has [types, repetitions]."""
    runs = written.get("attention_types") or [[["global", "local"], 12]]
    return [NEO.get(neo, neo) for neo_types, count in runs for neo in neo_types * count]


def _overrides(kinds: list[LayerKind]) -> dict[str, Any]:
    """Return the settings and block_overrides for the window, rotation and tuning of each layer."""
    # the most common kind of layer is the default of the model; rotating, full layers come first
    rotates = any(rotary for _, rotary, _ in kinds)
    base = max(set(kinds), key=lambda kind: (kind[1], kind[0] == -1, kinds.count(kind)))
    keys: dict[str, Any] = {"attn_config.sliding_window_size": base[0]}
    if base[2] is not None:
        keys[TUNING] = TemperatureConfig(*base[2])
    if len(set(kinds)) == 1:
        return keys

    # an override for each other kind, and the order of the layers in runs of equal kinds
    overrides = {
        _override_name(kind, base): BlockOverride(
            AttentionOverride(
                sliding_window_size=None if kind[0] == base[0] else kind[0],
                nope=True if rotates and not kind[1] else None,
                attn_temperature_tuning=TemperatureConfig(*kind[2]) if kind[2] else None,
            )
        )
        for kind in dict.fromkeys(kinds)
        if kind != base
    }
    names = groupby(_override_name(kind, base) for kind in kinds)
    runs = [BlockRun(name=name, repeat=len(list(run))) for name, run in names]
    keys["block_overrides"] = BlockOverridesConfig(runs, overrides)
    return keys


def _override_name(kind: LayerKind, base: LayerKind) -> str:
    """Return the name of a kind in block_overrides, such as `sliding` or `nope`."""
    if kind == base:
        return DEFAULT
    window, rotary, _ = kind
    base_window, base_rotary, _ = base
    words = []
    if window != base_window:
        words.append("full" if window < 0 else "sliding")
    if rotary != base_rotary:
        words.append("nope")
    return "_".join(words)


def missed_layers(
    config: ModelConfig, layers: Sequence[LayerConfig], architecture: Architecture
) -> dict[str, str]:
    """Return settings of layers that prevent an export, each with what it must be."""
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


def _missed_window(layers: Sequence[LayerConfig], windows: WindowFields | None) -> str:
    """Return what the windows must be for an export; empty if they can be exported."""
    sizes = {layer.window for layer in layers}
    if (windows is None or not windows.sizes) and sizes != {-1}:
        return "sliding_window_size: -1 in every layer"
    if windows is not None and windows.key == "sliding_window" and len(sizes) > 1:
        return "the same sliding_window_size in every layer"
    if len(sizes - {-1}) > 1:
        return "one sliding_window_size, or -1, in every layer"
    return ""


def _missed_tuning(layers: Sequence[LayerConfig], architecture: Architecture) -> str:
    """Return what the attention temperature must be for an export; empty if it can be exported."""
    if not architecture.tuned:
        tuned = any(layer.temperature for layer in layers)
        return "attn_temperature_tuning.attn_scale: 0 in every layer" if tuned else ""
    rotary = {layer.temperature for layer in layers if layer.rotary} - {None}
    others = {layer.temperature for layer in layers if not layer.rotary}
    if rotary or len(others) > 1:
        return "attn_temperature_tuning in the layers that do not rotate, the same in all of them"
    return ""
