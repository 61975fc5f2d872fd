"""Rotary positions in config.json: base and scaling of the frequencies, for both directions.

`config_keys.py` calls `read_rope` and `write_rope`. transformers from 5.0 stores all settings in
`rope_parameters`; older versions use `rope_theta` and `rope_scaling`. Both forms are written. If a
file has both, they must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from llmfoundry.hf.architecture import Architecture
from llmfoundry.recipe.attention import ROPE_KEYS, ROPE_TYPES, YARN_KEYS, RopeConfig
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import Problem, build

ROPES = ("rope_parameters", "rope_scaling")
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Keys of both sections that every type of scaling may have."""
SETTINGS = COMMON | {
    "short_factor",
    "long_factor",
    *YARN_KEYS,
    *itertools.chain(*ROPE_KEYS.values()),
}
"""Keys of both sections that some type of scaling has; transformers' LongRoPE has the first two."""


def write_rope(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """Return the keys of config.json, both of transformers 5 and of older versions."""
    theta, scaling = config.attn_config.rope_theta, config.attn_config.rope_hf_config
    theta = architecture.theta if theta is None else theta  # None if no layer has RoPE
    rope: dict[str, Any] = {"rope_type": "default"}
    if scaling.type != "no_scaling":
        values = {key: getattr(scaling, key) for key in _keys(scaling.type)}
        values = {key: value for key, value in values.items() if value is not None}
        rope = {"rope_type": scaling.type, **values}
    written: dict[str, Any] = {"rope_theta": theta}
    if scaling.type != "no_scaling":
        written["rope_scaling"] = dict(rope)
    if architecture.partial_rotary != 1.0:
        rope["partial_rotary_factor"] = written["partial_rotary_factor"] = 1.0
    return written | {"rope_parameters": {**rope, "rope_theta": theta}}


def read_rope(
    written: Mapping[str, Any], architecture: Architecture, problems: list[str]
) -> dict[str, Any]:
    """Return the settings of RoPE at dotted keys of the `model` section.

    Args:
        written: content of config.json.
        architecture: its architecture.
        problems: a line is appended for each unsupported value.
    """
    # transformers prefers rope_scaling to rope_parameters; theta may be in either
    new, old = written.get("rope_parameters") or {}, written.get("rope_scaling") or {}
    scaling_keys = old or new
    _check_agree(new, old, problems)
    share = scaling_keys.get("partial_rotary_factor", written.get("partial_rotary_factor"))
    share = architecture.partial_rotary if share is None else share
    if share != 1.0:
        problems.append(
            f"config.json: partial_rotary_factor {share}; the decoder's rotary turns the whole head"
        )
    return {
        "attn_config.rope_theta": _read_theta(written, scaling_keys, architecture.theta, problems),
        "attn_config.rope_hf_config": _read_scaling(written, scaling_keys, problems),
    }


def _keys(kind: str) -> tuple[str, ...]:
    """Return the keys that a type of scaling may have."""
    return ROPE_KEYS[kind] + (YARN_KEYS if kind == "yarn" else ())


def _check_agree(new: Mapping[str, Any], old: Mapping[str, Any], problems: list[str]) -> None:
    """Append a line to `problems` if rope_parameters and rope_scaling differ."""
    kinds = [section.get("rope_type", section.get("type")) for section in (new, old) if section]
    kinds = [kind for kind in kinds if kind is not None]
    differing = [key for key in new if key in old and new[key] != old[key]]
    if len(set(kinds)) > 1 or differing:
        key = differing[0] if differing else "rope_type"
        problems.append(
            f"config.json: rope_parameters and rope_scaling disagree about {key}; write the one"
            " it was trained with in both"
        )


def _read_scaling(
    written: Mapping[str, Any], section: Mapping[str, Any], problems: list[str]
) -> RopeConfig:
    """Return the scaling of the frequencies; append a line to `problems` if it is unsupported."""
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "default":
        kind = "no_scaling"
    if kind not in ROPE_TYPES:
        options = ", ".join(("default", *ROPE_TYPES[1:]))
        problems.append(f"config.json: rope_type {kind!r}; the decoder has only {options}")
        return RopeConfig()
    for key in sorted(section.keys() - COMMON - set(_keys(kind))):
        if section[key] is not None:
            problems.append(f"config.json: rope_parameters.{key}; the decoder has nothing like it")
    values = {key: section[key] for key in _keys(kind) if section.get(key) is not None}
    if kind == "yarn":
        _complete_yarn(written, section, values, problems)
    for key in ROPE_KEYS[kind]:
        if key not in values:
            problems.append(f"config.json: rope_parameters.{key} is missing; {kind} needs it")
    type_problems: list[Problem] = []
    rope = build(RopeConfig, {"type": kind, **values}, type_problems, "rope_parameters.")
    problems += [f"config.json: {problem.line}" for problem in type_problems]
    return rope


def _complete_yarn(
    written: Mapping[str, Any],
    section: Mapping[str, Any],
    values: dict[str, Any],
    problems: list[str],
) -> None:
    """Add, in place, what transformers derives for YaRN, and remove what it ignores."""
    # the sequence length of pretraining, and how far it is extended
    longest = written.get("max_position_embeddings")
    original = written.get("original_max_position_embeddings") or longest
    if original is not None:
        values.setdefault("original_max_position_embeddings", original)
    lengths: list[Any] = [longest, values.get("original_max_position_embeddings")]
    if "factor" in section and all(type(length) is int and length > 0 for length in lengths):
        values.setdefault("factor", lengths[0] / lengths[1])
    # the factor on cosine and sine, which mscale is ignored beside
    is_ratio = "mscale" in values and "mscale_all_dim" in values
    if is_ratio and "attention_factor" not in values:
        return
    if written.get("kv_lora_rank") and "mscale_all_dim" in values:
        problems.append(
            "config.json: rope_parameters.mscale_all_dim without mscale, or beside"
            " attention_factor; the decoder needs mscale and mscale_all_dim alone"
        )
    for key in ("mscale", "mscale_all_dim"):
        values.pop(key, None)


def _read_theta(
    written: Mapping[str, Any], section: Mapping[str, Any], default: float, problems: list[str]
) -> float:
    """Return the base of the RoPE frequencies; append a line to `problems` if keys disagree."""
    attn = written.get("attn_config")
    places = {
        "rope_parameters.rope_theta": section.get("rope_theta"),
        "rope_theta": written.get("rope_theta"),
        "attn_config.rope_theta": attn.get("rope_theta") if isinstance(attn, dict) else None,
    }
    thetas = {key: theta for key, theta in places.items() if theta is not None}
    if len({float(theta) for theta in thetas.values()}) > 1:
        each = ", ".join(f"{key} {theta}" for key, theta in thetas.items())
        problems.append(f"config.json: {each} disagree; write the one it was trained with in all")
    return float(next(iter(thetas.values()), default))
