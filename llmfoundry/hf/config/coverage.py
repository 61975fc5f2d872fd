"""Which of transformers' architectures keeps which optional setting, as a table for people.

    python -c "from llmfoundry.hf.config.coverage import markdown; print(markdown())"

What no architecture keeps is refused by its key, or, where only training feels it, named in the
model card; a folder of our own class (`architecture=llmfoundry`) keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable

from llmfoundry.hf.config.architectures import ARCHITECTURES
from llmfoundry.hf.config.parts import OFF, TRAINING, Architecture
from llmfoundry.hf.tensor_names import MAPS

REUSE = "block_overrides.overrides.reuse_kv_layer_idx"


def markdown() -> str:
    """A row for each optional setting: the architectures that can have it on."""
    lines = ["| setting | kept by |", "|---|---|"]
    for key in (*_STRUCTURAL, *OFF, *TRAINING):
        names = [name for name in ARCHITECTURES if keeps(name, key)]
        lines.append(f"| `{key}` | {', '.join(names) or 'none'} |")
    return "\n".join(lines)


def keeps(name: str, key: str) -> bool:
    """Whether models of the architecture can have the setting on."""
    architecture = ARCHITECTURES[name]
    if key in _STRUCTURAL:
        return _STRUCTURAL[key](name, architecture)
    demanded = [need.value for need in architecture.needs if need.key == key]
    on = any(value not in (None, OFF.get(key)) for value in demanded)
    return on or architecture.keeps(key)


def _demands(key: str) -> Callable[[str, Architecture], bool]:
    return lambda _, a: any(need.key == key and need.value for need in a.needs)


def _qkv_bias(name: str, _: Architecture) -> bool:
    (bias,) = (rule.bias for rule in MAPS[name].rules if rule.ours.endswith("Wqkv"))
    return bias != "never"


_STRUCTURAL: dict[str, Callable[[str, Architecture], bool]] = {  # what is no single field
    "learned_pos_emb": _demands("learned_pos_emb"),
    "attn_config.alibi": _demands("attn_config.alibi"),
    "attn_config.rope": lambda _, a: a.partial_rotary is not None,
    "attn_config.rope_hf_config.type": lambda _, a: a.partial_rotary is not None,
    "attn_config.nope": lambda _, a: a.nope,
    "attn_config.sliding_window_size": lambda _, a: a.windows is not None,
    "block_overrides.overrides.sliding_window_size": lambda _, a: (
        a.windows is not None and a.windows.key != "sliding_window"
    ),
    "block_overrides.overrides.nope": lambda _, a: a.nope and a.partial_rotary is not None,
    "attn_config.attn_temperature_tuning.attn_scale": lambda _, a: a.tuned,
    "block_overrides.overrides.attn_temperature_tuning.attn_scale": lambda _, a: a.tuned,
    REUSE: lambda _, __: False,
    "attention_bias": _qkv_bias,
    "ffn_config.moe_num_experts": lambda _, a: a.mixture,
    "ffn_config.moe_normalize_expert_weights": lambda _, a: a.mixture,
}
