"""DeepSeek-V2 and DeepSeek-V3: latent attention, groups of experts, shared experts, dense layers.

The table in `architectures.py` has these two entries. config.json counts shared experts, and has
keys for the first dense layers and for groups of experts even if a model has none. `settle_keys`
makes the settings of these keys consistent with each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmfoundry.hf.architecture import (
    ANYTHING,
    BALANCING,
    EXPERTS,
    HEADS,
    HEADS_DIVIDE,
    HIDDEN,
    MLP_TYPE,
    NO_BIAS,
    NO_BIAS_BALANCING,
    NO_QKV_BIAS,
    NORMALIZE,
    RMSNORM,
    ROPE,
    SHARED,
    TOP_K,
    TYPE,
    Architecture,
    ConfigField,
    FixedField,
    Requirement,
    llama_fields,
)
from llmfoundry.recipe.attention import LATENT
from llmfoundry.recipe.model import ResolvedModelConfig

SCORES, GROUPS = "ffn_config.moe_scoring_func", "ffn_config.moe_n_group"
BEST_GROUPS, FACTOR = "ffn_config.moe_topk_group", "ffn_config.moe_routed_scaling_factor"
N_DENSE, DENSE_HIDDEN = "ffn_config.first_k_dense_replace", "ffn_config.dense_hidden_size"


def _has_whole_shared(config: ResolvedModelConfig) -> bool:
    shared = config.ffn_config.shared_expert_hidden_size
    return shared is not None and shared % config.ffn_config.ffn_hidden_size == 0


_NEEDS = (
    ROPE,
    RMSNORM,
    NO_BIAS,
    NO_QKV_BIAS,
    Requirement(HEADS, LATENT),
    # transformers' norms of latent vectors have this number, whatever rms_norm_eps is
    Requirement("attn_config.norm_eps", 1e-6),
    Requirement(TYPE, "dmoe"),
    Requirement(MLP_TYPE, "glu"),
    Requirement(SHARED, None, _has_whole_shared, "a multiple of ffn_hidden_size"),
)


def _fields(
    *, groups: int | None, best: int | None, factor: float, experts: int, top_k: int | None,
    n_dense: int, dense: int, hidden: int, shared: int,
) -> tuple[ConfigField, ...]:  # fmt: skip
    """Return the keys of both architectures; the arguments are transformers' defaults."""
    return (
        *(f for f in llama_fields(kv_heads=None) if f.theirs != "intermediate_size"),
        *(
            ConfigField(key, f"attn_config.{key}", default)
            for key, default in (
                ("q_lora_rank", None),
                ("kv_lora_rank", 512),
                ("qk_nope_head_dim", 128),
                ("qk_rope_head_dim", 64),
                ("v_head_dim", 128),
            )
        ),
        ConfigField("moe_intermediate_size", HIDDEN, hidden),
        ConfigField("n_routed_experts", EXPERTS, experts),
        ConfigField("num_experts_per_tok", TOP_K, top_k),
        ConfigField(
            "n_shared_experts",
            SHARED,
            shared,
            write=lambda c: (
                (c.ffn_config.shared_expert_hidden_size or 0) // c.ffn_config.ffn_hidden_size
            ),
        ),
        ConfigField(
            "routed_scaling_factor",
            FACTOR,
            factor,
            write=lambda c: c.ffn_config.moe_routed_scaling_factor or 1.0,
            read=lambda factor: None if factor == 1 else factor,
        ),
        ConfigField("n_group", GROUPS, groups, write=lambda c: c.ffn_config.moe_n_group or 1),
        ConfigField("topk_group", BEST_GROUPS, best, write=_best_groups),
        ConfigField(
            "first_k_dense_replace",
            N_DENSE,
            n_dense,
            write=lambda c: c.ffn_config.first_k_dense_replace or 0,
            read=lambda count: count or None,
        ),
        ConfigField(
            "intermediate_size",
            DENSE_HIDDEN,
            dense,
            write=lambda c: c.ffn_config.dense_hidden_size or c.ffn_config.ffn_hidden_size,
        ),
    )


def _best_groups(config: ResolvedModelConfig) -> int:
    ffn = config.ffn_config
    return 1 if ffn.moe_n_group is None else ffn.moe_topk_group


def settle_keys(values: dict[str, Any], written: Mapping[str, Any], problems: list[str]) -> None:
    """Make settings that several keys decide consistent; see `Architecture.settle`."""
    # shared experts are counted there, and measured here
    if values[SHARED] and values[HIDDEN]:
        values[SHARED] *= values[HIDDEN]
    else:
        values[SHARED] = None
    if values[N_DENSE] is None:
        values[DENSE_HIDDEN] = None
    # DeepSeek-V2 has groups only with this method; DeepSeek-V3 always, and one group is none
    method = written.get("topk_method", "greedy")
    is_v2 = values[SCORES] == "softmax"
    if is_v2 and method not in ("greedy", "group_limited_greedy"):
        problems.append(
            f"config.json: topk_method {method!r}; the decoder has greedy and group_limited_greedy"
        )
    has_groups = method != "greedy" if is_v2 else values[GROUPS] != 1
    if values[GROUPS] is None or not has_groups:
        values[GROUPS] = values[BEST_GROUPS] = None


_COMMON = Architecture(
    "deepseek",
    _NEEDS,
    (),
    settle=settle_keys,
)
_NO_BIASES = FixedField("attention_bias", False, False)
DEEPSEEK: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": replace(
        _COMMON,
        model_type="deepseek_v2",
        needs=(
            *_NEEDS,
            HEADS_DIVIDE,
            Requirement(SCORES, "softmax", lambda c: c.ffn_config.moe_scoring_func != "sigmoid"),
            # its class ignores norm_topk_prob, and has no place for biases
            Requirement(
                NORMALIZE,
                None,
                lambda c: c.ffn_config.moe_normalize_expert_weights is None,
                "null",
            ),
            NO_BIAS_BALANCING,
        ),
        fields=(
            ConfigField(  # `settle_keys` reads it; groups have a field of their own
                "topk_method",
                GROUPS,
                "greedy",
                write=lambda c: "group_limited_greedy" if c.ffn_config.moe_n_group else "greedy",
                read=lambda method: None,
            ),
            *_fields(
                groups=None, best=None, factor=1.0, experts=64, top_k=None, n_dense=0, dense=11008,
                hidden=1407, shared=2,
            ),
        ),
        fixed=(_NO_BIASES, FixedField("mlp_bias", False, False),
               FixedField("norm_topk_prob", False, False)),
    ),
    "DeepseekV3ForCausalLM": replace(
        _COMMON,
        model_type="deepseek_v3",
        needs=(*_NEEDS, Requirement(SCORES, "sigmoid"), Requirement(BALANCING, "bias")),
        fields=(
            *_fields(
                groups=8, best=4, factor=2.5, experts=256, top_k=8, n_dense=3, dense=18432,
                hidden=2048, shared=1,
            ),
            ConfigField("norm_topk_prob", NORMALIZE, True, choices={True: 1.0, False: None}),
        ),
        fixed=(
            _NO_BIASES,
            FixedField("rope_interleave", True, True),
            # transformers has no others; other engines read the two keys
            FixedField("scoring_func", "sigmoid", ANYTHING),
            FixedField("topk_method", "noaux_tc", ANYTHING),
        ),
    ),
}  # fmt: skip
