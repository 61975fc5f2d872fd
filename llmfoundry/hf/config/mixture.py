"""Mixtures of experts in config.json: what their architectures share, and how training differs.

The classes here have gated experts alone, chosen by a softmax over all of them, and no biases to
balance them. A dense gated layer goes out as a mixture of one expert, which gets all of the
weight, and a mixture of one comes back as that layer. How their load-balancing loss differs is said
in the model card.
"""

from __future__ import annotations

from typing import Any

from llmfoundry.hf.config.common import (
    ACTIVATIONS,
    GRANITE_FIELDS,
    GRANITE_FIXED,
    HEADS_FILL,
    LAYERNORM,
    MOSAIC_FIELDS,
    NO_BIAS,
    NO_QKV_BIAS,
    RMSNORM,
    ROPE,
    head_dim,
    llama_fields,
)
from llmfoundry.hf.config.parts import Architecture, Field, Fixed, Need, Windows, only
from llmfoundry.recipe.architecture.model import ModelConfig

EXPERTS, TOP_K = "ffn_config.moe_num_experts", "ffn_config.moe_top_k"
TYPE, MLP_TYPE = "ffn_config.ffn_type", "ffn_config.mlp_type"
NORMALISE = "ffn_config.moe_normalize_expert_weights"
BALANCING, LOSS = "ffn_config.moe_balancing", "ffn_config.moe_loss_weight"
JITTER, SHARED = "ffn_config.moe_jitter_eps", "ffn_config.shared_expert_hidden_size"


def _is_mixture(config: ModelConfig) -> bool:
    return config.ffn_config.ffn_type == "dmoe"


GATED_EXPERTS = (
    Need(TYPE, lambda c: c.ffn_config.ffn_type in ("dmoe", "mptglu"), "dmoe or mptglu", "dmoe"),
    Need(MLP_TYPE, lambda c: c.ffn_config.mlp_type in ("glu", None), "glu", "glu"),
    # what the biases have grown to has no place in their checkpoints
    Need(BALANCING, lambda c: c.ffn_config.moe_balancing != "bias", "loss or none"),
)
SUM_TO_ONE = Need(
    NORMALISE,
    lambda c: not _is_mixture(c) or c.ffn_config.moe_normalize_expert_weights == 1,
    "1",
    1.0,
)
HAS_CLIP = Need(  # transformers' DBRX fails without one
    "attn_config.clip_qkv", lambda c: c.attn_config.clip_qkv is not None, "a number"
)
NORM_TOPK = Field("norm_topk_prob", NORMALISE, False, choices={True: 1.0, False: None})
DBRX_NORM = Field(
    "ffn_config.moe_normalize_expert_weights",
    NORMALISE,
    1.0,
    write=lambda c: c.ffn_config.moe_normalize_expert_weights if _is_mixture(c) else 1.0,
)


def expert_fields(
    experts: str,
    top_k: str,
    loss: str,
    *,
    defaults: tuple[int, int, float],
    also: tuple[str, ...] = (),
) -> tuple[Field, ...]:
    """The keys of a mixture: its experts, how many a token visits, the weight of the loss.

    Args:
        experts: the key of their number.
        top_k: of how many a token visits.
        loss: of the weight of the load-balancing loss.
        defaults: what transformers takes where the three are missing.
        also: other names of `experts`.
    """
    return (
        Field(experts, EXPERTS, defaults[0], write=lambda c: _or_one(c, EXPERTS), also=also),
        Field(top_k, TOP_K, defaults[1], write=lambda c: _or_one(c, TOP_K)),
        Field(loss, LOSS, defaults[2], write=_loss_weight),
    )


def _or_one(config: ModelConfig, key: str) -> int:
    return getattr(config.ffn_config, key.split(".")[1]) or 1


def _loss_weight(config: ModelConfig) -> float:
    """Theirs: transformers' loss is moe_top_k where loads are equal, megablocks' and ours is 1."""
    ffn = config.ffn_config
    return (ffn.moe_loss_weight or 0.0) / (ffn.moe_top_k or 1)


def settle(values: dict[str, Any]) -> None:
    """Make settings that fit each other of what was read, in place."""
    if values[EXPERTS] == 1 and values.get(SHARED) is None:
        for key in [key for key in values if key.startswith("ffn_config.moe_")]:
            del values[key]
        del values[MLP_TYPE]
        values[TYPE] = "mptglu"
        return
    weight = float(
        f"{(values[LOSS] or 0) * values[TOP_K]:.15g}"
    )  # without the division's last digit
    values[LOSS] = weight or None
    values[BALANCING] = "loss" if weight else "none"


def remarks(config: ModelConfig, name: str, architecture: Architecture) -> list[str]:
    """What the model card says of the mixture in transformers' class `name`."""
    if not _is_mixture(config):
        return []
    loss = next(field.theirs for field in architecture.fields if field.ours == LOSS)
    lines = [
        f"{name} computes its router in the precision of the weights, where training was in fp32:"
        " in bf16 a few per cent of the tokens go to other experts, so compare logits in fp32.",
        f"`{loss}` is moe_loss_weight / moe_top_k: with equal loads transformers'"
        " load-balancing loss is moe_top_k, in training it was 1. transformers adds it only with"
        " `output_router_logits=True`, and counts loads over a batch and all layers.",
    ]
    if config.ffn_config.moe_jitter_eps is not None and architecture.keeps(JITTER):
        lines.append(
            "In transformers' training the jitter reaches the experts as well; here it was the"
            " router's alone."
        )
    return lines


_GRANITE_EXPERTS = expert_fields(
    "num_local_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    defaults=(8, 2, 0.001),
)
MIXTURES: dict[str, Architecture] = {  # rows of architectures.py
    "DbrxForCausalLM": Architecture(
        "dbrx",
        (
            ROPE,
            LAYERNORM,
            only("norm_eps", 1e-5),
            *GATED_EXPERTS,
            NO_BIAS,
            NO_QKV_BIAS,
            HEADS_FILL,
            HAS_CLIP,
        ),
        (
            *MOSAIC_FIELDS,
            Field("attn_config.kv_n_heads", "attn_config.kv_n_heads", 1),
            Field("attn_config.attn_pdrop", "attn_config.attn_pdrop", 0.0),
            Field("resid_pdrop", "resid_pdrop", 0.0),
            Field("ffn_config.ffn_hidden_size", "ffn_config.ffn_hidden_size"),
            # 5.17 fails at keys of ffn_config that it does not know: these are all of them
            Field("ffn_config.ffn_act_fn.name", "ffn_config.ffn_act_fn", "silu", ACTIVATIONS),
            *expert_fields(
                "ffn_config.moe_num_experts",
                "ffn_config.moe_top_k",
                "ffn_config.moe_loss_weight",
                defaults=(4, 1, 0.01),
            ),
            DBRX_NORM,
            Field("ffn_config.moe_jitter_eps", JITTER, None, read=lambda eps: eps or None),
        ),
        (Fixed("tie_word_embeddings", False, False),),
        partial_rotary=1.0,
        unread=("emb_pdrop",),  # transformers has the key, and does nothing with it
        mixture=True,
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        (ROPE, RMSNORM, *GATED_EXPERTS, only("attn_config.qk_ln", True), NO_BIAS, HEADS_FILL),
        (
            *llama_fields(kv_heads=None),
            *expert_fields(
                "num_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                defaults=(64, 8, 0.01),
            ),
            NORM_TOPK,
        ),
        (
            Fixed("clip_qkv", None, None),  # theirs clamps after the norm of queries and keys
            Fixed("sliding_window", None, None),
        ),
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        mixture=True,
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS, NO_QKV_BIAS),
        (
            *llama_fields(),
            head_dim(),
            *expert_fields(
                "num_local_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                defaults=(8, 2, 0.001),
            ),
            Field(
                "router_jitter_noise",
                JITTER,
                0.0,
                write=lambda config: config.ffn_config.moe_jitter_eps or 0.0,
                read=lambda eps: eps or None,
            ),
        ),
        partial_rotary=1.0,
        theta=1000000.0,
        windows=Windows(key="sliding_window", default=None, switch=False),
        mixture=True,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        (ROPE, RMSNORM, *GATED_EXPERTS, only("attn_config.qk_gn", True), NO_BIAS),
        (
            *llama_fields(hidden="moe_intermediate_size"),
            head_dim(),
            *expert_fields(
                "num_local_experts",
                "num_experts_per_tok",
                "router_aux_loss_coef",
                defaults=(128, 8, 0.001),
                also=("num_experts",),
            ),
            NORM_TOPK,
        ),
        (Fixed("decoder_sparse_step", 1, 1), Fixed("mlp_only_layers", [], [])),
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        windows=Windows(key="sliding_window"),
        mixture=True,
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS),
        (*GRANITE_FIELDS, *_GRANITE_EXPERTS),
        GRANITE_FIXED,
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        mixture=True,
    ),
    "GraniteMoeSharedForCausalLM": Architecture(
        "granitemoeshared",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS),
        (
            *GRANITE_FIELDS,
            *_GRANITE_EXPERTS,
            Field(
                "shared_intermediate_size",
                SHARED,
                0,
                write=lambda config: config.ffn_config.shared_expert_hidden_size or 0,
                read=lambda hidden: hidden or None,
            ),
        ),
        GRANITE_FIXED,
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        mixture=True,
    ),
}
