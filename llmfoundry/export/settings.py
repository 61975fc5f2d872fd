"""A `model` section as config.json's keys and back, by the table in `architectures.py`.

Called by `hf.py`. What cannot be said exactly is refused, with every key that is in the way.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.export.architectures import (
    ANYTHING,
    ARCHITECTURES,
    REQUIRED,
    Architecture,
    Field,
    Need,
    get,
    show,
)
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig
from llmfoundry.recipe.typed import Problem, build, to_dict

OWN, OWN_TYPE = "llmfoundry", "llmfoundry"  # the name in recipes, and config.json's model_type

POSITIONS = ("learned_pos_emb", "attn_config.alibi", "attn_config.rope")


def choose(config: ModelConfig, architecture: str | None) -> str:
    """The architecture to write: the one asked for, else the first that fits exactly.

    Raises:
        UserError: it does not fit, or none does; a line for each setting in its way.
    """
    if architecture == OWN:
        return OWN
    plain = _plain(config)
    if architecture is not None:
        if architecture not in ARCHITECTURES:
            options = [*ARCHITECTURES, OWN]
            raise UserError(
                f"architecture: {architecture!r} is not a choice{nearest(architecture, options)}"
                f" (choices: {', '.join(options)})"
            )
        if _obstacles(plain, architecture):
            why = f"{architecture} cannot be this model"
            raise UserError(*_obstacles(plain, architecture), _other_ways(why))
        return architecture
    closest = min(ARCHITECTURES, key=lambda name: _distance(plain, name))
    if not _obstacles(plain, closest):
        return closest
    why = f"no transformers architecture is exactly this model; {closest} is nearest"
    raise UserError(*_obstacles(plain, closest), _other_ways(why))


def _missed(config: ModelConfig, name: str) -> list[Need]:
    return [need for need in ARCHITECTURES[name].needs if not need.holds(config)]


def _distance(config: ModelConfig, name: str) -> tuple[int, int]:
    """Missed needs, those of positions first: no one changes these for an export."""
    missed = _missed(config, name)
    return sum(need.key in POSITIONS for need in missed), len(missed)


def _obstacles(config: ModelConfig, name: str) -> list[str]:
    return [
        f"model.{need.key}: {show(get(config, need.key))}; {name} needs {need.must}"
        for need in _missed(config, name)
    ]


def _other_ways(why: str) -> str:
    return (
        f"architecture: {why}; write architecture={OWN} for a folder that transformers loads"
        " after `import llmfoundry.hf`"
    )


def _plain(config: ModelConfig) -> ModelConfig:
    """The same model, a softmax_scale that says what is so anyway left out."""
    scale, default = config.attn_config.softmax_scale, (config.head_dim or 1) ** -0.5
    if scale is None or not math.isclose(scale, default, rel_tol=1e-9):
        return config
    attn = dataclasses.replace(config.attn_config, softmax_scale=None)
    return dataclasses.replace(config, attn_config=attn)


def write_settings(config: ModelConfig, name: str) -> dict[str, Any]:
    """The keys of config.json that make transformers' class `name` this model."""
    if name == OWN:
        return {"model_type": OWN_TYPE, "settings": to_dict(config)}
    config, architecture = _plain(config), ARCHITECTURES[name]
    written: dict[str, Any] = {"architectures": [name], "model_type": architecture.model_type}
    for field in architecture.fields:
        _put(written, field.theirs, _written(field, config))
    for fixed in architecture.fixed:
        _put(written, fixed.theirs, fixed.value)
    for key in architecture.biases:
        _put(written, key, not config.no_bias)
    if architecture.rope:
        _put_rope(written, architecture, config)
    return written


def _written(field: Field, config: ModelConfig) -> Any:
    value = get(config, field.ours)
    if field.choices is not None:
        return next(theirs for theirs, ours in field.choices.items() if ours == value)
    return field.derived(config) if value is None and field.derived else value


def _put(written: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        written = written.setdefault(section, {})
    written[last] = value


def _put_rope(written: dict[str, Any], architecture: Architecture, config: ModelConfig) -> None:
    theta = config.attn_config.rope_theta
    assert theta is not None, "the recipe was not filled"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if architecture.partial_rotary != 1.0:
        rope["partial_rotary_factor"] = written["partial_rotary_factor"] = 1.0
    written["rope_parameters"] = rope
    written["rope_theta"] = theta  # for readers older than rope_parameters
    if architecture.model_type == "dbrx":
        # transformers reads this one without using it, and fails where it is missing
        written["attn_config"]["rope_theta"] = theta


def read_settings(written: dict[str, Any]) -> tuple[str, ModelConfig]:
    """The architecture and the filled `model` section that config.json describes.

    `no_bias` is left at what the architecture forces; the file's tensors decide it. Dropout is
    not read: the decoder has none, and logits do not depend on it.

    Raises:
        UserError: a line for each key that the decoder cannot follow exactly.
    """
    kind = written.get("model_type")
    if kind == OWN_TYPE:
        return OWN, _read_own(written)
    names = {a.model_type: name for name, a in ARCHITECTURES.items()}
    if kind not in names:
        known = ", ".join([*names, OWN_TYPE])
        raise UserError(f"config.json: model_type {kind!r} cannot be read (can be: {known})")
    architecture = ARCHITECTURES[names[kind]]
    problems: list[str] = []
    values = {n.key: n.value for n in architecture.needs if n.value is not None}
    for field in architecture.fields:
        values[field.ours] = _read(field, written, problems)
    if architecture.rope:
        values["attn_config.rope_theta"] = _read_rope(written, architecture, problems)
    _check_fixed(written, architecture, problems)
    if problems:
        raise UserError(*problems)
    return names[kind], _assemble(values)


def _read_own(written: dict[str, Any]) -> ModelConfig:
    problems: list[Problem] = []
    config = build(ModelConfig, written.get("settings", {}), problems, "settings.")
    if problems:
        raise UserError(*(f"config.json: {problem.line}" for problem in problems))
    return config


def _look_up(written: dict[str, Any], key: str, default: Any) -> Any:
    found: Any = written
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return default
        found = found[part]
    return found


def _read(field: Field, written: dict[str, Any], problems: list[str]) -> Any:
    value = _look_up(written, field.theirs, field.default)
    if value is REQUIRED:
        problems.append(f"config.json: {field.theirs} is missing")
        return None
    if field.choices is None:
        return value
    if value not in field.choices:
        can = ", ".join(field.choices)
        problems.append(f"config.json: {field.theirs} {value!r}; the decoder has only {can}")
    return field.choices.get(value)


def _check_fixed(written: dict[str, Any], architecture: Architecture, problems: list[str]) -> None:
    for fixed in architecture.fixed:
        value = _look_up(written, fixed.theirs, fixed.default)
        if value is not ANYTHING and fixed.default is not ANYTHING and value != fixed.value:
            problems.append(
                f"config.json: {fixed.theirs} {show(value)}; the decoder has only"
                f" {show(fixed.value)}"
            )
    if any(kind != "full_attention" for kind in written.get("layer_types") or ()):
        problems.append("config.json: layer_types; the decoder's attention has no window")
    if written.get("quantization_config") is not None:
        problems.append("config.json: quantization_config; write a folder that is not quantised")


def _read_rope(written: dict[str, Any], architecture: Architecture, problems: list[str]) -> float:
    """The base of the rotary frequencies; anything beyond it is a problem."""
    rope = written.get("rope_parameters") or {}
    scaling = written.get("rope_scaling") or {}
    said = {**scaling, **rope}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind != "default":
        problems.append(f"config.json: rope_type {kind!r}; the decoder's rotary has no scaling")
    share = rope.get("partial_rotary_factor", written.get("partial_rotary_factor"))
    if (architecture.partial_rotary if share is None else share) != 1.0:
        problems.append(
            f"config.json: partial_rotary_factor {share or architecture.partial_rotary}; the"
            " decoder's rotary turns the whole head"
        )
    places = ("rope_parameters.rope_theta", "rope_theta", "attn_config.rope_theta")
    found = {key: _look_up(written, key, None) for key in places}
    thetas = {key: theta for key, theta in found.items() if theta is not None}
    if len({float(theta) for theta in thetas.values()}) > 1:
        each = ", ".join(f"{key} {theta}" for key, theta in thetas.items())
        problems.append(f"config.json: {each} disagree; write the one it was trained with in all")
    return float(next(iter(thetas.values()), 10000.0))


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
    problems = [f"config.json: {line}" for line in config.check()]
    if problems:
        raise UserError(*problems)
    config.fill()
    return _plain(config)
