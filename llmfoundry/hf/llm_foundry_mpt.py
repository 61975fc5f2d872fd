"""Import of MPT folders saved by LLM Foundry, with more settings than transformers' MPT class.

Entry points: `is_foundry`, `read_foundry` and `foundry_map`. The folders are those that LLM
Foundry's `scripts/inference/convert_composer_to_hf.py` writes: config.json with model_type `mpt`
and Foundry's class or a section `ffn_config`, and weights `transformer.blocks.{i}...`. Most keys
are the same as in a recipe. Defaults and implicit settings differ, such as the norm type of queries
and keys. Mixtures are `torch_dmoe`, or `mb_dmoe` of megablocks, which stores experts as
`models.moe.ExpertWeights` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmfoundry.hf import expert_names
from llmfoundry.hf.architectures import FOUNDRY_OFF
from llmfoundry.hf.tensor_names import NameRule, WeightMap
from llmfoundry.recipe.attention import LLAMA3_KEYS
from llmfoundry.recipe.model import ModelConfig, ResolvedModelConfig
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.typed import Problem, build

FOUNDRY = "MPTForCausalLM"  # transformers' class is called MptForCausalLM
MIXTURES = ("torch_dmoe", "mb_dmoe")  # the first without a balancing loss
IGNORED = {  # of attn_config and ffn_config: how to compute, not what
    "attn_impl",
    "attn_uses_sequence_id",
    "rope_impl",
    "fused_qkv",  # one matrix or three: `foundry_map`
    "moe_world_size",
    "moe_expert_model_parallelism",
    "moe_weight_parallelism",
    "moe_lbl_in_fp32",
    "moe_capacity_factor",
    "memory_optimized_mlp",
    "mlp_impl",
    "fc_type",
    "bf16",
    "fp16",
    "bias",  # megablocks' own, one for all experts: refused by its name where a file has it
    "num_layers",
    "remat_act_fn",
    "moe_zloss_in_fp32",
    "device_mesh",
    "lbl_process_group",
}
DEFAULTS = {"max_seq_len": 2048, "vocab_size": 50368, "norm_type": "low_precision_layernorm"}
QK_NORM = {"norm_type": "low_precision_layernorm", "norm_eps": 1e-5}  # the model's never reach it
OFF = {  # of the same sections: what the decoder has nothing for, and its value where it is off
    "prefix_lm": False,
    "kv_dim": None,
    "seq_parallel_world_size": 1,
    "rope_dail_config": {"type": "original"},
    "shared_expert_weighted_sum": False,
    "return_bias": False,
}
ELSEWHERE = ("init_config", "name")  # sections that logits do not feel


def is_foundry(written: Mapping[str, Any]) -> bool:
    """Return whether config.json was written by LLM Foundry, not by transformers' own MPT class."""
    ffn, classes = written.get("ffn_config"), written.get("architectures") or ()
    has_ffn_type = isinstance(ffn, dict) and "ffn_type" in ffn  # the first MPTs have no ffn_config
    return written.get("model_type") == "mpt" and (has_ffn_type or FOUNDRY in classes)


def read_foundry(written: Mapping[str, Any], problems: list[str]) -> ModelConfig:
    """Return the `model` section; append a line to `problems` for each unsupported key."""
    # the keys that both have, and their sections without keys that have no effect
    keys = Schema.of(ModelConfig).keys
    ours: dict[str, Any] = DEFAULTS | {k: written[k] for k in keys if k in written}
    ours = {key: value for key, value in ours.items() if key not in ELSEWHERE}
    ours["norm_type"] = str(ours["norm_type"]).lower()
    for section in ("attn_config", "ffn_config"):
        section_values = dict(written.get(section) or {})
        for key, off in OFF.items():
            if key in section_values and not _is_off(section_values.pop(key), off):
                problems.append(f"config.json: {section}.{key}; the decoder has nothing like it")
        ours[section] = {key: value for key, value in section_values.items() if key not in IGNORED}

    # values that are written differently here
    _read_attention(ours["attn_config"])
    _read_ffn(ours["ffn_config"], problems)
    if any(ours["attn_config"].get(name) for name in ("alibi", "rope")):
        ours["learned_pos_emb"] = False  # as LLM Foundry does, with a warning
    elif not ours.get("learned_pos_emb", True):
        ours["attn_config"]["nope"] = True
    _read_overrides(ours)
    _settle_scale(ours)
    if "ffn_hidden_size" in ours["ffn_config"]:
        ours.pop("expansion_ratio", None)

    # the section
    type_problems: list[Problem] = []
    config = build(ModelConfig, ours, type_problems)
    problems += [f"config.json: {problem.line}" for problem in type_problems]
    return config


def _is_off(value: Any, off: Any) -> bool:
    """Return whether the value of an unsupported key has no effect."""
    if isinstance(off, dict):
        return not value or all(value.get(key, wanted) == wanted for key, wanted in off.items())
    return value is None or value == off


def _read_attention(attn: dict[str, Any]) -> None:
    """Remove keys in place that LLM Foundry writes although they have no effect."""
    scaling, tuning = (attn.get(key) for key in ("rope_hf_config", "attn_temperature_tuning"))
    if not attn.get("rope"):
        scaling = None
        attn.pop("rope_theta", None)
    if not attn.get("alibi"):
        attn.pop("alibi_bias_max", None)
    if attn.get("attn_type") != "grouped_query_attention":
        attn.pop("kv_n_heads", None)
    if scaling is None or scaling.get("type", "no_scaling") == "no_scaling":
        attn.pop("rope_hf_config", None)
    elif scaling["type"] != "llama3":
        attn["rope_hf_config"] = {k: v for k, v in scaling.items() if k not in LLAMA3_KEYS}
    if tuning is not None and not tuning.get("attn_scale"):
        attn.pop("attn_temperature_tuning")
    for key in FOUNDRY_OFF:
        if not attn.get(key):
            attn.pop(key, None)
    if attn.get("qk_ln") or attn.get("qk_gn"):
        norm = QK_NORM | {key: attn[key] for key in QK_NORM if key in attn}
        attn |= norm | {"norm_type": str(norm["norm_type"]).lower()}
    else:
        for key in QK_NORM:
            attn.pop(key, None)


def _read_overrides(ours: dict[str, Any]) -> None:
    """Write explicitly, in place, that a repetition applies to the entire order."""
    overrides = ours.get("block_overrides")
    if isinstance(overrides, dict) and "repeat" in overrides:
        repetition = {"order": overrides.get("order"), "repeat": overrides["repeat"]}
        others = {key: value for key, value in overrides.items() if key != "repeat"}
        ours["block_overrides"] = others | {"order": [repetition]}


def _settle_scale(ours: dict[str, Any]) -> None:
    """Set the attention scale explicitly, in place, to that of heads of width d_model / n_heads."""
    width, default = ours.get("head_dim"), ModelConfig()
    if width and ours["attn_config"].get("softmax_scale") is None:
        derived = ours.get("d_model", default.d_model) / ours.get("n_heads", default.n_heads)
        ours["attn_config"]["softmax_scale"] = None if width == derived else derived**-0.5


def _read_ffn(ffn: dict[str, Any], problems: list[str]) -> None:
    """Convert the keys of a mixture of experts in place; those of a dense layer are unchanged."""
    if ffn.get("ffn_hidden_size") is None:
        ffn.pop("ffn_hidden_size", None)
    if isinstance(ffn.get("ffn_act_fn"), dict):
        ffn["ffn_act_fn"] = {k: v for k, v in ffn["ffn_act_fn"].items() if k != "inplace"}
    kind = ffn.get("ffn_type")
    if kind not in MIXTURES:
        if ffn.get("ffn_act_fn") is None:
            ffn.pop("ffn_act_fn", None)
        return
    ffn["ffn_type"] = "dmoe"
    # megablocks has other defaults for these keys, so they must be in the file
    for key in ("ffn_act_fn", "moe_num_experts"):
        if ffn.get(key) is None:
            problems.append(f"config.json: ffn_config.{key} is missing")
    if not ffn.pop("shared_expert", False):
        ffn["shared_expert_hidden_size"] = None
    elif ffn.get("shared_expert_hidden_size") is None:
        ffn["shared_expert_hidden_size"] = ffn.get("ffn_hidden_size")
    for key in ("moe_normalize_expert_weights", "moe_zloss_weight", "moe_jitter_eps"):
        ffn[key] = ffn.get(key) or None  # 0 in LLM Foundry is None here
    weight = ffn.pop("moe_loss_weight", 0.1)  # megablocks' default
    if kind == "mb_dmoe" and weight:
        ffn |= {"moe_balancing": "loss", "moe_loss_weight": weight, "moe_lbl_scope": "microbatch"}
    else:
        ffn["moe_balancing"] = "none"


def foundry_map(config: ResolvedModelConfig, written: Mapping[str, Any]) -> WeightMap:
    """Return the map of weight names: ours after `transformer.`, except for routers and experts."""
    # attention and norms of a block: our name and the kind of bias
    block = "transformer.blocks.{i}."
    inside = "norm_attn_norm." if written.get("fuse_norm_attn_norm") else ""
    fused = (written.get("attn_config") or {}).get("fused_qkv", True)
    norm, qk_norm = map(_norm_bias, (config.norm_type, config.attn_config.norm_type))
    attention = {
        "norm_1": norm,
        "norm_2": norm,
        "attn.Wqkv": "qkv",
        "attn.Wq": "qkv",  # in layers that reuse the keys and values of another layer
        "attn.q_ln": qk_norm,
        "attn.k_ln": qk_norm,
        "attn.out_proj": "other",
    }

    # rules of all layers
    rules = (
        *(NameRule(name, (f"transformer.{name}.weight",)) for name in ("wte", "wpe")),
        NameRule("norm_f", ("transformer.norm_f.weight",), norm),
        *(
            NameRule(f"blocks.{{i}}.{name}", _parts(f"{block}{inside}{name}.weight", fused), bias)
            for name, bias in attention.items()
        ),
        *(
            NameRule(
                f"blocks.{{i}}.ffn.{ours}{name}", (f"{block}ffn.{theirs}{name}.weight",), "other"
            )
            for ours, theirs in {"": "", "shared.": "shared_expert."}.items()
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        NameRule("lm_head", ("lm_head.weight",)),
    )
    return WeightMap(rules, (expert_names.DBRX,) if config.ffn_config.ffn_type == "dmoe" else ())


def _parts(name: str, fused: bool) -> tuple[str, ...]:
    """Return the names of one matrix; unfused queries, keys and values have three."""
    if fused or "Wqkv" not in name:
        return (name,)
    return tuple(name.replace("Wqkv", part) for part in ("Wq", "Wk", "Wv"))


def _norm_bias(norm_type: str | None) -> str:
    """Return when norms have a bias, see `has_bias`; `norm_type` None: there are no such norms."""
    return "other" if norm_type is not None and norm_type.endswith("layernorm") else "never"
