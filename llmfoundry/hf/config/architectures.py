"""transformers' architectures that some of our settings express exactly: one table, both ways.

`settings.py` picks the one to export to, and turns a `model` section into config.json's keys and
back by its row. transformers ignores keys that it does not know, and several that it does (an MPT
always has ALiBi with exponent 8, whatever its config.json says); so a row claims only what its
class was read, and is tested, to do. Which row keeps which setting: `coverage.markdown()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmfoundry.hf.config.common import (
    ACTIVATIONS,
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
    RMSNORM,
    ROPE,
    ROPE_OR_NOPE,
    attention_scale,
    head_dim,
    llama_fields,
    logits_divisor,
    shared_head,
)
from llmfoundry.hf.config.layers import read_nope
from llmfoundry.hf.config.mixture import MIXTURES
from llmfoundry.hf.config.parts import ANYTHING, Architecture, Field, Fixed, Need, Windows, only
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
    **MIXTURES,
}
