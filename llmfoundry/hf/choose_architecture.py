"""Choice of the transformers architecture that expresses a `model` section exactly.

Entry point: `choose_architecture`; `write_folder.py` and `gguf/` call it. A class fits if the table
in `architectures.py` expresses every setting that affects logits. If no class fits, the export is
rejected with a line for each unsupported setting. Settings that only affect training are dropped
and reported by `unkept`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmfoundry.errors import UserError
from llmfoundry.hf.architecture import (
    JITTER,
    LOSS,
    OFF,
    OWN,
    QK_GN,
    QK_LN,
    TRAINING,
    TYPE,
    Architecture,
    Requirement,
    is_mixture,
)
from llmfoundry.hf.architectures import ARCHITECTURES
from llmfoundry.hf.config_keys import LOW, field_text, get, plain_settings
from llmfoundry.hf.layer_keys import missed_layers
from llmfoundry.hf.tensor_names import MAPS, padding
from llmfoundry.recipe.attention import LayerConfig
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.model import ResolvedModelConfig

POSITIONS = ("learned_pos_emb", "attn_config.alibi", "attn_config.rope", "attn_config.nope")


def choose_architecture(
    config: ResolvedModelConfig,
    architecture: str | None,
    among: Mapping[str, Architecture] = ARCHITECTURES,
    *,
    engine: str = "transformers",
    advice: str = f"write architecture={OWN} for a folder that transformers loads after `import"
    " llmfoundry.hf`",
) -> str:
    """Return the requested architecture, or the one that expresses the model exactly.

    Among several, the architecture with the fewest zero biases to add is chosen, then the first one
    of the table.

    Args:
        config: the resolved `model` section.
        architecture: the requested architecture; None: any.
        among: architectures of `engine`.
        engine: name of the engine, for messages.
        advice: what to write instead if no architecture fits, for messages.

    Raises:
        UserError: the requested architecture does not fit, or none does; with a line for each
            unsupported setting.
    """
    if architecture == OWN and among is ARCHITECTURES:
        return OWN
    if architecture is not None and architecture not in among:
        options = [*among, *([OWN] if among is ARCHITECTURES else [])]
        raise UserError(
            f"architecture: {architecture!r} is not a choice{nearest(architecture, options)}"
            f" (choices: {', '.join(options)})"
        )
    plain, layers = plain_settings(config), config.layers()
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


def _distance(
    plain: ResolvedModelConfig, name: str, missed: Mapping[str, str]
) -> tuple[int, int, int]:
    """Return a sort key: unsupported settings, first those of positions and experts.

    Users are unlikely to change positions or experts for an export.
    """
    grave = sum(key in POSITIONS or (key == TYPE and is_mixture(plain)) for key in missed)
    return grave, len(missed), padding(MAPS[name], plain)


def _value_text(config: ResolvedModelConfig, key: str) -> str:
    if key != "block_overrides":
        return field_text(get(config, key))
    assert config.block_overrides is not None
    return ", ".join(config.block_overrides.overrides)


def _missed(
    plain: ResolvedModelConfig, layers: Sequence[LayerConfig], architecture: Architecture
) -> dict[str, str]:
    """Return the settings that prevent an export, each with the value that it must have."""
    missed = {need.key: need.must or field_text(need.value) for need in architecture.needs
              if not _holds(need, plain)}  # fmt: skip
    for field in architecture.fields:
        choices = field.choices
        if choices is not None and get(plain, field.ours) not in choices.values():
            names = dict.fromkeys(field_text(value) for value in choices.values())
            missed[field.ours] = f"one of {', '.join(names)}"
    covered_keys = {part.key for part in architecture.needs} | {
        part.ours for part in architecture.fields
    }
    for key, off in OFF.items():
        if key not in covered_keys and get(plain, key) != off:
            missed[key] = field_text(off)
    attn = plain.attn_config
    if attn.is_latent and attn.norm_type != plain.norm_type:
        missed["attn_config.norm_type"] = f"norm_type, {plain.norm_type}"
    if (attn.qk_ln or attn.qk_gn) and not missed.keys() & {QK_LN, QK_GN}:
        if attn.norm_type != plain.norm_type:
            missed["attn_config.norm_type"] = f"norm_type, {plain.norm_type}"
        if attn.norm_eps != plain.norm_eps:
            missed["attn_config.norm_eps"] = f"norm_eps, {plain.norm_eps}"
    return missed | missed_layers(plain, layers, architecture)


def _holds(need: Requirement, plain: ResolvedModelConfig) -> bool:
    return get(plain, need.key) == need.value if need.holds is None else need.holds(plain)


def unkept(config: ResolvedModelConfig, name: str) -> list[str]:
    """Return a line for each training-only setting that `name` has no key for."""
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


def remarks(config: ResolvedModelConfig, name: str) -> list[str]:
    """Return lines for the model card about a mixture of experts in transformers' class `name`."""
    if name == OWN or not is_mixture(config):
        return []
    architecture = ARCHITECTURES[name]
    loss = next((field.theirs for field in architecture.fields if field.ours == LOSS), None)
    if loss is None:
        return []  # DeepSeek's routers are in fp32 there too, and have no such loss
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
    """Return whether the architecture has a key for our setting `key`."""
    return any(field.ours == key for field in architecture.fields)
