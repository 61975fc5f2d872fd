"""transformers' architectures that some of our settings express exactly: one table, both ways.

`config_json.py` picks the one to export to, and turns a `model` section into config.json's keys and
back by its row. transformers ignores keys that it does not know, and several that it does (an MPT
always has ALiBi with exponent 8, whatever its config.json says); so a row claims only what its
class was read, and is tested, to do. Which row keeps which setting: `markdown()` below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from llmfoundry.hf.config_fields import (
    ACTIVATIONS,
    ANYTHING,
    FOUR_TIMES,
    GLU,
    GPT2_FIELDS,
    GPT2_FIXED,
    GRANITE_FIELDS,
    GRANITE_FIXED,
    HEADS_DIVIDE,
    HEADS_FILL,
    LAYERNORM,
    LEARNED,
    LLAMA_FIELDS,
    MHA,
    MLP,
    MOSAIC_FIELDS,
    MQA,
    NO_BIAS,
    NO_QKV_BIAS,
    OFF,
    RMSNORM,
    ROPE,
    ROPE_OR_NOPE,
    TRAINING,
    Architecture,
    Field,
    Fixed,
    Need,
    Windows,
    attention_scale,
    head_dim,
    llama_fields,
    logits_divisor,
    only,
    read_nope,
    shared_head,
)
from llmfoundry.hf.tensor_names import MAPS
from llmfoundry.recipe.architecture.model import ModelConfig


def _is_root_of_whole(config: ModelConfig) -> bool:
    square = attention_scale(config) ** -2
    return math.isclose(square, round(square), rel_tol=1e-9)


def _gemma_head(config: ModelConfig) -> bool:
    """Gemma multiplies the embedding, not the head that shares it, by sqrt(d_model)."""
    wanted = config.d_model**-0.5 if config.tie_word_embeddings else 1.0
    return math.isclose(1 / logits_divisor(config), wanted, rel_tol=1e-9)


def _qwen_types(written: Mapping[str, Any], n_layers: int) -> list[str]:
    full = written.get("max_window_layers", 28)
    return ["full_attention" if i < full else "sliding_attention" for i in range(n_layers)]


def _smollm_types(written: Mapping[str, Any], n_layers: int) -> list[str]:
    rotary = read_nope(written, n_layers, [])
    return ["full_attention" if rotates else "sliding_attention" for rotates in rotary]


def _llama4_types(written: Mapping[str, Any], n_layers: int) -> list[str]:
    rotary = read_nope(written, n_layers, [])
    return ["chunked_attention" if rotates else "full_attention" for rotates in rotary]


def _gemma_types(_: Mapping[str, Any], n_layers: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(n_layers)]


_LLAMA = (ROPE, RMSNORM, GLU)
_LLAMA_BIASES = {"attention_bias": "any", "mlp_bias": "other"}
_QWEN_WINDOWS = Windows(types=_qwen_types)
_ONE_WINDOW = Windows(key="sliding_window", switch=False)

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


_GRANITE_EXPERTS = expert_fields(
    "num_local_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    defaults=(8, 2, 0.001),
)

ARCHITECTURES: dict[str, Architecture] = {  # of those that fit as well, the first is written
    "MptForCausalLM": Architecture(
        "mpt",
        (
            only("attn_config.alibi", True),
            only("attn_config.alibi_bias_max", 8),
            LAYERNORM,
            NO_BIAS,
            NO_QKV_BIAS,
            MLP,
            only("ffn_config.ffn_act_fn", "gelu"),
            FOUR_TIMES,
            MHA,
            HEADS_FILL,
        ),
        (
            *MOSAIC_FIELDS,
            Field("layer_norm_epsilon", "norm_eps", 1e-5),
            Field("attn_config.softmax_scale", "attn_config.softmax_scale", None),
            shared_head(True),
        ),
        (
            Fixed("attn_config.attn_type", "multihead_attention", "multihead_attention"),
            Fixed("attn_config.alibi", True, True),
            Fixed("attn_config.alibi_bias_max", 8, 8),
            Fixed("attn_config.qk_ln", False, False),
            Fixed("attn_config.prefix_lm", False, False),
            Fixed("expansion_ratio", 4, 4),
            Fixed("no_bias", True, True),
            Fixed("logit_scale", None, None),
            Fixed("learned_pos_emb", False, ANYTHING),  # true in MPT-7B's own, beside ALiBi
        ),
        # its attn_pdrop is all of its dropouts at once, and must be a whole number
        unread=("resid_pdrop", "emb_pdrop", "attn_config.attn_pdrop"),
        advice=", because transformers passes the key over; if LLM Foundry trained the model, write"
        " architectures: [MPTForCausalLM] there, its own class",
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        (LEARNED, LAYERNORM, MLP, MHA, HEADS_FILL),
        GPT2_FIELDS,
        (*GPT2_FIXED, Fixed("scale_attn_by_inverse_layer_idx", False, False)),
    ),
    "GPTBigCodeForCausalLM": Architecture(
        "gpt_bigcode",
        (LEARNED, LAYERNORM, MLP, MQA, HEADS_FILL),
        GPT2_FIELDS,
        (*GPT2_FIXED, Fixed("multi_query", True, True)),
    ),
    "LlamaForCausalLM": Architecture(
        "llama",
        (*_LLAMA, HEADS_DIVIDE),
        LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
        partial_rotary=1.0,
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        _LLAMA,
        GRANITE_FIELDS,
        GRANITE_FIXED,
        biases=_LLAMA_BIASES,
        partial_rotary=1.0,
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        (ROPE, RMSNORM, MLP, HEADS_DIVIDE),
        LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
        partial_rotary=1.0,
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        (ROPE, LAYERNORM, MLP),
        (
            *llama_fields(eps="norm_epsilon", tied=True),
            head_dim(),
            Field("residual_dropout", "resid_pdrop", 0.0),
            Field("embedding_dropout", "emb_pdrop", 0.0),
        ),
        biases={"use_bias": "any"},
        biased=True,
        partial_rotary=1.0,
        windows=Windows(key="sliding_window", default=None, switch=False),
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm",
        (ROPE, LAYERNORM, GLU, NO_BIAS, HEADS_FILL),
        (
            *llama_fields(eps="layer_norm_eps"),
            Field("qk_layernorm", "attn_config.qk_gn", False),
        ),
        (Fixed("use_parallel_residual", False, False),),
        biases={"use_qkv_bias": "qkv"},
        partial_rotary=0.25,
        unread=("hidden_dropout",),  # of the feed-forward layer alone
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        (*_LLAMA, NO_BIAS, NO_QKV_BIAS),
        (*llama_fields(), head_dim()),
        partial_rotary=1.0,
        windows=_ONE_WINDOW,
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        (*_LLAMA, NO_BIAS),
        (*llama_fields(), head_dim()),
        partial_rotary=1.0,
        windows=_QWEN_WINDOWS,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        (*_LLAMA, only("attn_config.qk_gn", True), NO_BIAS),
        (*llama_fields(), head_dim(128)),
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        windows=_QWEN_WINDOWS,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        (ROPE_OR_NOPE, RMSNORM, GLU),
        (*llama_fields(tied=True), head_dim()),
        biases=_LLAMA_BIASES,
        partial_rotary=1.0,
        theta=2000000.0,
        windows=Windows(default=None, types=_smollm_types),
        nope=True,
    ),
    "VaultGemmaForCausalLM": Architecture(
        "vaultgemma",
        (
            *_LLAMA,
            NO_BIAS,
            HEADS_DIVIDE,
            Need("d_model", lambda c: math.isqrt(c.d_model) ** 2 == c.d_model, "a square number"),
            Need("logit_scale", _gemma_head, "inv_sqrt_d_model if tie_word_embeddings, else null"),
            Need("attn_config.softmax_scale", _is_root_of_whole, "1 / sqrt(a whole number)"),
        ),
        (
            *llama_fields(act="hidden_activation", tied=True),
            head_dim(256),
            Field(
                "query_pre_attn_scalar",
                "attn_config.softmax_scale",
                256,
                write=lambda config: round(attention_scale(config) ** -2),
                read=lambda square: square**-0.5,
            ),
            Field("attn_logit_softcapping", "attn_config.attn_logit_softcapping", 50.0),
            Field("final_logit_softcapping", "final_logit_softcapping", 30.0),
            Field(
                "tie_word_embeddings",
                "logit_scale",
                True,
                write=lambda config: config.tie_word_embeddings,
                read=lambda tied: "inv_sqrt_d_model" if tied else None,
            ),
        ),
        # before 5.23 transformers takes SDPA, which knows no softcap, unless told otherwise
        (Fixed("_attn_implementation", "eager", ANYTHING),),
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        windows=Windows(switch=False, types=_gemma_types, always=True),
    ),
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        (ROPE_OR_NOPE, RMSNORM, GLU, NO_BIAS),
        (*llama_fields(hidden="intermediate_size_mlp"), head_dim(128)),
        (Fixed("moe_layers", [], None), Fixed("use_qk_norm", False, True)),
        biases={"attention_bias": "any"},
        partial_rotary=1.0,
        theta=500000.0,
        windows=Windows(switch=False, types=_llama4_types, sizes=False),
        nope=True,
        tuned=True,
    ),
    "GPTNeoForCausalLM": Architecture(
        "gpt_neo",
        (
            LEARNED,
            LAYERNORM,
            MLP,
            MHA,
            HEADS_FILL,
            NO_QKV_BIAS,
            only("attn_config.softmax_scale", 1.0),
        ),
        (
            Field("vocab_size", "vocab_size"),
            Field("hidden_size", "d_model"),
            Field("num_heads", "n_heads"),
            Field("num_layers", "n_layers"),
            Field("max_position_embeddings", "max_seq_len"),
            Field("intermediate_size", "ffn_config.ffn_hidden_size", None),
            Field("activation_function", "ffn_config.ffn_act_fn", "gelu_new", ACTIVATIONS),
            Field("layer_norm_epsilon", "norm_eps", 1e-5),
            Field("resid_dropout", "resid_pdrop", 0.0),
            Field("embed_dropout", "emb_pdrop", 0.0),
            Field("attention_dropout", "attn_config.attn_pdrop", 0.0),
            shared_head(True),
        ),
        windows=Windows(key="attention_types", default=256, switch=False),
    ),
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
