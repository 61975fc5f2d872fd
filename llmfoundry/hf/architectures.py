"""Table of the transformers architectures that the decoder can express, for export and import.

`choose_architecture.py` chooses the class of an export. `config_keys.py` converts between a `model`
section and config.json by the class's entry. `architecture.py` describes what an entry consists of.

transformers ignores unknown keys and some known ones (an MPT always has ALiBi with exponent 8,
whatever its config.json contains). An entry therefore contains only keys whose effect was read in
the class's source code and is tested.
"""

from __future__ import annotations

import math

from llmfoundry.hf.architecture import (
    ACTIVATIONS,
    ANYTHING,
    CLIP,
    EXPERTS,
    FULL,
    GATED_EXPERTS,
    GLU,
    GLU_LIMIT,
    HEADS_DIVIDE,
    HEADS_FILL,
    HIDDEN,
    JITTER,
    LAYERNORM,
    LEARNED,
    LOSS,
    MHA,
    MLP,
    MLP_TYPE,
    MQA,
    NO_BIAS,
    NO_BIAS_BALANCING,
    NO_QKV_BIAS,
    NORM_TOPK,
    NORMALIZE,
    QK_GN,
    QK_LN,
    RMSNORM,
    ROPE,
    ROPE_OR_NOPE,
    ROUTER_BIAS,
    SCALE,
    SHARED,
    SINKS,
    SLIDING,
    SUM_TO_ONE,
    TIED,
    TOP_K,
    TYPE,
    Architecture,
    ConfigField,
    FixedField,
    Requirement,
    WindowFields,
    attention_scale,
    expert_fields,
    head_dim,
    is_mixture,
    llama_fields,
    logits_divisor,
    read_nope,
)
from llmfoundry.hf.deepseek import DEEPSEEK
from llmfoundry.recipe.model import ResolvedModelConfig

GPT2_FIELDS = (
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("n_embd", "d_model"),
    ConfigField("n_head", "n_heads"),
    ConfigField("n_layer", "n_layers"),
    ConfigField("n_positions", "max_seq_len"),
    ConfigField("n_inner", HIDDEN, None),
    ConfigField("activation_function", "ffn_config.ffn_act_fn", choices=ACTIVATIONS),
    ConfigField("layer_norm_epsilon", "norm_eps"),
    ConfigField("resid_pdrop", "resid_pdrop", 0.1),
    ConfigField("embd_pdrop", "emb_pdrop", 0.1),
    ConfigField("attn_pdrop", "attn_config.attn_pdrop", 0.1),
    TIED,
)
GPT2_FIXED = (
    FixedField("scale_attn_weights", True, True),
    FixedField("add_cross_attention", False, False),
)
MOSAIC_FIELDS = (
    *(
        ConfigField(key, key)
        for key in ("vocab_size", "d_model", "n_heads", "n_layers", "max_seq_len")
    ),
    ConfigField("attn_config.clip_qkv", CLIP, None, gguf="add_clamp_kqv"),
)
FOUNDRY_OFF = ("clip_qkv",)  # of attention: LLM Foundry turns it off by 0 as well as by null


LLAMA_FIELDS = (*llama_fields(kv_heads=None), head_dim())
GRANITE_FIELDS = (
    *LLAMA_FIELDS,
    ConfigField("attention_multiplier", SCALE, 1.0, write=attention_scale),
    ConfigField(
        "logits_scaling",
        "logit_scale",
        1.0,
        write=logits_divisor,
        read=lambda said: None if said == 1 else 1 / said,
    ),
)
GRANITE_FIXED = (
    FixedField("embedding_multiplier", 1.0, 1.0),
    FixedField("residual_multiplier", 1.0, 1.0),
)


def _is_root_of_whole(config: ResolvedModelConfig) -> bool:
    square = attention_scale(config) ** -2
    return math.isclose(square, round(square), rel_tol=1e-9)


def _gemma_head(config: ResolvedModelConfig) -> bool:
    """Gemma multiplies the embedding, not the head that shares it, by sqrt(d_model)."""
    wanted = config.d_model**-0.5 if config.tie_word_embeddings else 1.0
    return math.isclose(1 / logits_divisor(config), wanted, rel_tol=1e-9)


_LLAMA = (ROPE, RMSNORM, GLU)
_LLAMA_BIASES = {"attention_bias": "any", "mlp_bias": "other"}
_QWEN_WINDOWS = WindowFields(
    types=lambda written, layers: [
        FULL if i < written.get("max_window_layers", 28) else SLIDING for i in range(layers)
    ]
)

DBRX_NORM = ConfigField(
    NORMALIZE,
    NORMALIZE,
    1.0,
    write=lambda c: c.ffn_config.moe_normalize_expert_weights if is_mixture(c) else 1.0,
)


_GRANITE_EXPERTS = expert_fields(8, 2, 0.001)

ARCHITECTURES: dict[str, Architecture] = {  # of those that fit as well, the first is written
    "MptForCausalLM": Architecture(
        "mpt",
        (
            Requirement("attn_config.alibi", True),
            Requirement("attn_config.alibi_bias_max", 8),
            LAYERNORM,
            NO_BIAS,
            NO_QKV_BIAS,
            MLP,
            Requirement("ffn_config.ffn_act_fn", "gelu"),
            Requirement(
                HIDDEN, None, lambda c: c.ffn_config.ffn_hidden_size == 4 * c.d_model, "4 * d_model"
            ),
            MHA,
            HEADS_FILL,
        ),
        (
            *MOSAIC_FIELDS,
            ConfigField("layer_norm_epsilon", "norm_eps", 1e-5),
            ConfigField("attn_config.softmax_scale", SCALE, None),
            TIED,
        ),
        (
            FixedField("attn_config.attn_type", "multihead_attention", "multihead_attention"),
            FixedField("attn_config.alibi", True, True),
            FixedField("attn_config.alibi_bias_max", 8, 8),
            FixedField("attn_config.qk_ln", False, False),
            FixedField("attn_config.prefix_lm", False, False),
            FixedField("expansion_ratio", 4, 4),
            FixedField("no_bias", True, True),
            FixedField("logit_scale", None, None),
            FixedField("learned_pos_emb", False, ANYTHING),  # true in MPT-7B's own, beside ALiBi
        ),
        partial_rotary=None,
        # its attn_pdrop is all of its dropouts at once, and must be a whole number
        unread=("resid_pdrop", "emb_pdrop", "attn_config.attn_pdrop"),
        advice=", because transformers passes the key over; if LLM Foundry trained the model, write"
        " architectures: [MPTForCausalLM] there, its own class",
    ),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        (LEARNED, LAYERNORM, MLP, MHA, HEADS_FILL),
        GPT2_FIELDS,
        (*GPT2_FIXED, FixedField("scale_attn_by_inverse_layer_idx", False, False)),
        partial_rotary=None,
    ),
    "GPTBigCodeForCausalLM": Architecture(
        "gpt_bigcode",
        (LEARNED, LAYERNORM, MLP, MQA, HEADS_FILL),
        GPT2_FIELDS,
        (*GPT2_FIXED, FixedField("multi_query", True, True)),
        partial_rotary=None,
    ),
    "LlamaForCausalLM": Architecture(
        "llama",
        (*_LLAMA, HEADS_DIVIDE),
        LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        _LLAMA,
        GRANITE_FIELDS,
        GRANITE_FIXED,
        biases=_LLAMA_BIASES,
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        (ROPE, RMSNORM, MLP, HEADS_DIVIDE),
        LLAMA_FIELDS,
        biases=_LLAMA_BIASES,
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        (ROPE, LAYERNORM, MLP),
        (
            *llama_fields(eps="norm_epsilon", tied=True),
            head_dim(),
            ConfigField("residual_dropout", "resid_pdrop", 0.0),
            ConfigField("embedding_dropout", "emb_pdrop", 0.0),
        ),
        biases={"use_bias": "any"},
        biased=True,
        windows=WindowFields(key="sliding_window", default=None, switch=False),
    ),
    "StableLmForCausalLM": Architecture(
        "stablelm",
        (ROPE, LAYERNORM, GLU, NO_BIAS, HEADS_FILL),
        (
            *llama_fields(eps="layer_norm_eps"),
            ConfigField("qk_layernorm", "attn_config.qk_gn", False),
        ),
        (FixedField("use_parallel_residual", False, False),),
        biases={"use_qkv_bias": "qkv"},
        partial_rotary=0.25,
        unread=("hidden_dropout",),  # of the feed-forward layer alone
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        (*_LLAMA, NO_BIAS, NO_QKV_BIAS),
        (*llama_fields(), head_dim()),
        windows=WindowFields(key="sliding_window", switch=False),
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        (*_LLAMA, NO_BIAS),
        (*llama_fields(), head_dim()),
        windows=_QWEN_WINDOWS,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        (*_LLAMA, Requirement(QK_GN, True), NO_BIAS),
        (*llama_fields(), head_dim(128)),
        biases={"attention_bias": "any"},
        windows=_QWEN_WINDOWS,
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        (ROPE_OR_NOPE, RMSNORM, GLU),
        (*llama_fields(tied=True), head_dim()),
        biases=_LLAMA_BIASES,
        theta=2000000.0,
        windows=WindowFields(
            default=None,
            types=lambda written, layers: [
                FULL if rotates else SLIDING for rotates in read_nope(written, layers, [])
            ],
        ),
        nope=True,
    ),
    "VaultGemmaForCausalLM": Architecture(
        "vaultgemma",
        (
            *_LLAMA,
            NO_BIAS,
            HEADS_DIVIDE,
            Requirement(
                "d_model",
                None,
                lambda c: math.isqrt(c.d_model) ** 2 == c.d_model,
                "a square number",
            ),
            Requirement(
                "logit_scale",
                None,
                _gemma_head,
                "inv_sqrt_d_model if tie_word_embeddings, else null",
            ),
            Requirement(SCALE, None, _is_root_of_whole, "1 / sqrt(a whole number)"),
        ),
        (
            *llama_fields(act="hidden_activation", tied=True),
            head_dim(256),
            ConfigField(
                "query_pre_attn_scalar",
                "attn_config.softmax_scale",
                256,
                write=lambda config: round(attention_scale(config) ** -2),
                read=lambda square: square**-0.5,
            ),
            ConfigField("attn_logit_softcapping", "attn_config.attn_logit_softcapping", 50.0),
            ConfigField("final_logit_softcapping", "final_logit_softcapping", 30.0),
            ConfigField(
                "tie_word_embeddings",
                "logit_scale",
                True,
                write=lambda config: config.tie_word_embeddings,
                read=lambda tied: "inv_sqrt_d_model" if tied else None,
            ),
        ),
        # before 5.23 transformers takes SDPA, which knows no softcap, unless told otherwise
        (FixedField("_attn_implementation", "eager", ANYTHING),),
        biases={"attention_bias": "any"},
        windows=WindowFields(
            switch=False,
            types=lambda _, layers: [FULL if i % 2 else SLIDING for i in range(layers)],
            always=True,
        ),
    ),
    "Llama4ForCausalLM": Architecture(
        "llama4_text",
        (ROPE_OR_NOPE, RMSNORM, GLU, NO_BIAS),
        (*llama_fields(hidden="intermediate_size_mlp"), head_dim(128)),
        (FixedField("moe_layers", [], None), FixedField("use_qk_norm", False, True)),
        biases={"attention_bias": "any"},
        theta=500000.0,
        windows=WindowFields(
            switch=False,
            types=lambda written, layers: [
                "chunked_attention" if rotates else FULL
                for rotates in read_nope(written, layers, [])
            ],
            sizes=False,
        ),
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
            Requirement(SCALE, 1.0),
        ),
        (
            ConfigField("vocab_size", "vocab_size"),
            ConfigField("hidden_size", "d_model"),
            ConfigField("num_heads", "n_heads"),
            ConfigField("num_layers", "n_layers"),
            ConfigField("max_position_embeddings", "max_seq_len"),
            ConfigField("intermediate_size", HIDDEN, None),
            ConfigField("activation_function", "ffn_config.ffn_act_fn", "gelu_new", ACTIVATIONS),
            ConfigField("layer_norm_epsilon", "norm_eps", 1e-5),
            ConfigField("resid_dropout", "resid_pdrop", 0.0),
            ConfigField("embed_dropout", "emb_pdrop", 0.0),
            ConfigField("attention_dropout", "attn_config.attn_pdrop", 0.0),
            TIED,
        ),
        partial_rotary=None,
        windows=WindowFields(key="attention_types", default=256, switch=False),
    ),
    "DbrxForCausalLM": Architecture(
        "dbrx",
        (
            ROPE,
            LAYERNORM,
            Requirement("norm_eps", 1e-5),
            *GATED_EXPERTS,
            NO_BIAS,
            NO_QKV_BIAS,
            HEADS_FILL,
            # transformers' DBRX fails without one
            Requirement(CLIP, None, lambda c: c.attn_config.clip_qkv is not None, "a number"),
        ),
        (
            *MOSAIC_FIELDS,
            ConfigField("attn_config.kv_n_heads", "attn_config.kv_n_heads", 1),
            ConfigField("attn_config.attn_pdrop", "attn_config.attn_pdrop", 0.0),
            ConfigField("resid_pdrop", "resid_pdrop", 0.0),
            ConfigField(HIDDEN, HIDDEN),
            # 5.17 fails at keys of ffn_config that it does not know: these are all of them
            ConfigField("ffn_config.ffn_act_fn.name", "ffn_config.ffn_act_fn", "silu", ACTIVATIONS),
            *expert_fields(4, 1, 0.01, experts=EXPERTS, top_k=TOP_K, loss=LOSS),
            DBRX_NORM,
            ConfigField(JITTER, JITTER, None, read=lambda eps: eps or None),
        ),
        (FixedField("tie_word_embeddings", False, False),),
        unread=("emb_pdrop",),  # transformers has the key, and does nothing with it
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        (ROPE, RMSNORM, *GATED_EXPERTS, Requirement(QK_LN, True), NO_BIAS, HEADS_FILL),
        (
            *llama_fields(kv_heads=None),
            *expert_fields(64, 8, 0.01, experts="num_experts"),
            NORM_TOPK,
        ),
        (
            FixedField("clip_qkv", None, None),  # theirs clamps after the norm of queries and keys
            FixedField("sliding_window", None, None),
        ),
        biases={"attention_bias": "any"},
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS, NO_QKV_BIAS),
        (
            *llama_fields(),
            head_dim(),
            *expert_fields(8, 2, 0.001),
            ConfigField(
                "router_jitter_noise",
                JITTER,
                0.0,
                write=lambda config: config.ffn_config.moe_jitter_eps or 0.0,
                read=lambda eps: eps or None,
            ),
        ),
        theta=1000000.0,
        windows=WindowFields(key="sliding_window", default=None, switch=False),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        (ROPE, RMSNORM, *GATED_EXPERTS, Requirement(QK_GN, True), NO_BIAS),
        (
            *llama_fields(hidden="moe_intermediate_size"),
            head_dim(),
            *expert_fields(128, 8, 0.001, also=("num_experts",)),
            NORM_TOPK,
        ),
        (FixedField("decoder_sparse_step", 1, 1), FixedField("mlp_only_layers", [], [])),
        biases={"attention_bias": "any"},
        windows=WindowFields(key="sliding_window"),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        (
            ROPE,
            RMSNORM,
            Requirement(TYPE, "dmoe"),
            Requirement(MLP_TYPE, "glu"),
            Requirement("ffn_config.ffn_act_fn", "quick_gelu"),
            Requirement(
                GLU_LIMIT, None, lambda c: c.ffn_config.glu_limit is not None, "a number, such as 7"
            ),
            Requirement(ROUTER_BIAS, True),
            NO_BIAS_BALANCING,
            SUM_TO_ONE,
            Requirement(SINKS, True),
        ),
        (
            *(field for field in llama_fields(kv_heads=8) if field.theirs != "hidden_act"),
            head_dim(64),
            *expert_fields(128, 4, 0.001),
            ConfigField("swiglu_limit", GLU_LIMIT, 7.0),
        ),
        (FixedField("swiglu_alpha", 1.702, 1.702), FixedField("hidden_act", "silu", ANYTHING)),
        biases={"attention_bias": "any"},
        biased=True,
        theta=150000.0,
        windows=WindowFields(
            default=128,
            switch=False,
            always=True,
            types=lambda _, layers: [FULL if i % 2 else SLIDING for i in range(layers)],
        ),
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS),
        (*GRANITE_FIELDS, *_GRANITE_EXPERTS),
        GRANITE_FIXED,
        biases={"attention_bias": "any"},
    ),
    "GraniteMoeSharedForCausalLM": Architecture(
        "granitemoeshared",
        (ROPE, RMSNORM, *GATED_EXPERTS, SUM_TO_ONE, NO_BIAS),
        (
            *GRANITE_FIELDS,
            *_GRANITE_EXPERTS,
            ConfigField(
                "shared_intermediate_size",
                SHARED,
                0,
                write=lambda config: config.ffn_config.shared_expert_hidden_size or 0,
                read=lambda hidden: hidden or None,
            ),
        ),
        GRANITE_FIXED,
        biases={"attention_bias": "any"},
    ),
    **DEEPSEEK,
}
