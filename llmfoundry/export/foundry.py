"""MPT as LLM Foundry saved it, which has more settings than transformers' class of the name.

Read only, from the folder that LLM Foundry's `scripts/inference/convert_composer_to_hf.py` writes:
config.json with model_type `mpt` and a section `ffn_config`, weights `transformer.blocks.{i}...`.
Most keys are the recipe's own. A mixture is `torch_dmoe`, or `mb_dmoe` of megablocks, which stores
experts as `models.moe.Stacks` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmfoundry.models import hf_experts
from llmfoundry.models.hf_maps import Rule, WeightMap
from llmfoundry.recipe.attention import LLAMA3_KEYS
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.typed import Problem, build, keys

FOUNDRY = "MPTForCausalLM"  # transformers' class is called MptForCausalLM
MIXTURES = ("torch_dmoe", "mb_dmoe")  # the first without a balancing loss
IGNORED = {  # of attn_config and ffn_config: how to compute, not what
    "attn_impl",
    "attn_uses_sequence_id",
    "rope_impl",
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
OFF = {  # of the same sections: what the decoder has nothing for, and its value where it is off
    "prefix_lm": False,
    "fused_qkv": True,
    "kv_dim": None,
    "rope_dail_config": {"type": "original"},
    "shared_expert_weighted_sum": False,
    "return_bias": False,
}
ATTENTION = ("Wqkv", "Wq", "q_ln", "k_ln", "out_proj")  # Wq where keys and values are reused
ELSEWHERE = ("init_config", "name")  # sections that logits do not feel


def is_foundry(written: Mapping[str, Any]) -> bool:
    """Whether config.json is LLM Foundry's; transformers' own MPT has no such section."""
    ffn = written.get("ffn_config")
    return written.get("model_type") == "mpt" and isinstance(ffn, dict) and "ffn_type" in ffn


def read_foundry(written: Mapping[str, Any], problems: list[str]) -> ModelConfig:
    """The `model` section; a line to `problems` for each key that we have nothing for."""
    ours = {key: written[key] for key in keys(ModelConfig) if key in written}
    ours = {key: value for key, value in ours.items() if key not in ELSEWHERE}
    for section in ("attn_config", "ffn_config"):
        said = dict(written.get(section) or {})
        for key, off in OFF.items():
            if key in said and not _is_off(said.pop(key), off):
                problems.append(f"config.json: {section}.{key}; the decoder has nothing like it")
        ours[section] = {key: value for key, value in said.items() if key not in IGNORED}
    _read_attention(ours["attn_config"])
    _read_ffn(ours["ffn_config"], problems)
    if any(ours["attn_config"].get(name) for name in ("alibi", "rope")):
        ours["learned_pos_emb"] = False  # as LLM Foundry does, with a warning
    if "ffn_hidden_size" in ours["ffn_config"]:
        ours.pop("expansion_ratio", None)
    found: list[Problem] = []
    config = build(ModelConfig, ours, found)
    problems += [f"config.json: {problem.line}" for problem in found]
    return config


def _is_off(value: Any, off: Any) -> bool:
    if isinstance(off, dict):
        return not value or all(value.get(key, wanted) == wanted for key, wanted in off.items())
    return value is None or value == off


def _read_attention(attn: dict[str, Any]) -> None:
    """Leave out, in place, what LLM Foundry writes although it is without effect."""
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


def _read_ffn(ffn: dict[str, Any], problems: list[str]) -> None:
    """Our keys of a mixture's, in place; those of a dense layer are ours."""
    if ffn.get("ffn_hidden_size") is None:
        ffn.pop("ffn_hidden_size", None)
    kind = ffn.get("ffn_type")
    if kind not in MIXTURES:
        return
    ffn["ffn_type"] = "dmoe"
    for key in ("ffn_act_fn", "moe_num_experts"):  # of which megablocks has defaults of its own
        if ffn.get(key) is None:
            problems.append(f"config.json: ffn_config.{key} is missing")
    if not ffn.pop("shared_expert", False):
        ffn["shared_expert_hidden_size"] = None
    elif ffn.get("shared_expert_hidden_size") is None:
        ffn["shared_expert_hidden_size"] = ffn.get("ffn_hidden_size")
    for key in ("moe_normalize_expert_weights", "moe_zloss_weight", "moe_jitter_eps"):
        ffn[key] = ffn.get(key) or None  # 0 is none there
    weight = ffn.pop("moe_loss_weight", 0.1)  # megablocks' default
    if kind == "mb_dmoe" and weight:
        ffn |= {"moe_balancing": "loss", "moe_loss_weight": weight, "moe_lbl_scope": "microbatch"}
    else:
        ffn["moe_balancing"] = "none"


def foundry_map(config: ModelConfig, written: Mapping[str, Any]) -> WeightMap:
    """Names of the weights: ours after `transformer.`, but for routers and experts."""
    block = "transformer.blocks.{i}."
    inside = "norm_attn_norm." if written.get("fuse_norm_attn_norm") else ""
    rules = (
        *(Rule(name, (f"transformer.{name}.weight",), "any") for name in ("wte", "wpe", "norm_f")),
        *(
            Rule(f"blocks.{{i}}.{name}", (f"{block}{inside}{name}.weight",), "any")
            for name in ("norm_1", "norm_2", *(f"attn.{part}" for part in ATTENTION))
        ),
        *(
            Rule(f"blocks.{{i}}.ffn.{ours}{name}", (f"{block}ffn.{theirs}{name}.weight",), "any")
            for ours, theirs in {"": "", "shared.": "shared_expert."}.items()
            for name in ("gate_proj", "up_proj", "down_proj")
        ),
        Rule("lm_head", ("lm_head.weight",)),
    )
    return WeightMap(rules, (hf_experts.DBRX,) if config.ffn_config.ffn_type == "dmoe" else ())
