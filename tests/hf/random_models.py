"""Small decoders whose every weight, bias and norm matters, and a tokenizer to export with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from llmfoundry.hf import write_folder
from llmfoundry.hf.card import CardInfo
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.counts import active_parameter_count, parameter_count
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.attention import (
    LATENT,
    AttentionOverride,
    BlockOverride,
    BlockOverridesConfig,
    BlockRun,
    RopeConfig,
    TemperatureConfig,
)
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig

WIDTH, HEADS, ROWS, LENGTH = 32, 4, 128, 24
EOS = 90
CARD = CardInfo(name="small", data="words", parameters=1, active=1)
ROPE: dict[str, Any] = {"rope": True, "rope_theta": 500000.0}
ALIBI: dict[str, Any] = {"alibi": True}


def settings(
    *, attn: dict[str, Any] | None = None, ffn: dict[str, Any] | None = None, **top: Any
) -> ModelConfig:
    """A filled `model` section of a small decoder; `attn` may give kv_n_heads alone."""
    attn, heads = dict(attn or {}), top.get("n_heads", HEADS)
    kinds = {None: "multihead_attention", heads: "multihead_attention", 1: "multiquery_attention"}
    kind = kinds.get(attn.get("kv_n_heads"), "grouped_query_attention")
    attn["attn_type"] = LATENT if "kv_lora_rank" in attn else kind
    shape = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2}
    config = ModelConfig(
        **{**shape, "vocab_size": ROWS, "max_seq_len": LENGTH, **top},
        attn_config=AttentionConfig(**attn),
        ffn_config=FFNConfig(**(ffn or {})),
    )
    assert not list(config.check()), list(config.check())
    config = config.resolve()
    return config


def decoder(config: ModelConfig) -> Decoder:
    """Weights large enough that nothing, left out or swapped, goes unnoticed in the logits."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            matrix = 0.15 if name.startswith(("wte", "wpe", "lm_head")) else 0.3
            parameter.normal_(0, matrix if parameter.ndim > 1 else 0.3, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter += 1
        for name, buffer in model.named_buffers():  # of routers: enough to choose others
            if name.endswith("bias_steps"):
                buffer.random_(-300, 300, generator=generator)
    return model


def stack(names: str, **kinds: dict[str, Any]) -> dict[str, Any]:
    """`block_overrides` and n_layers of a stack such as `default local local`."""
    runs = [BlockRun(name=name) for name in names.split()]
    overrides = {name: BlockOverride(AttentionOverride(**kind)) for name, kind in kinds.items()}
    return {"block_overrides": BlockOverridesConfig(runs, overrides), "n_layers": len(runs)}


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval().head(model(tokens))


def rows(length: int = LENGTH) -> Tensor:
    """Two rows, by default of full length."""
    return torch.randint(0, ROWS, (2, length), generator=torch.Generator().manual_seed(5))


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of 91 words, fewer than the embedding's rows, the last its end of text."""
    words = {f"w{i}": i for i in range(EOS)} | {"<|endoftext|>": EOS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def card_of(config: ModelConfig) -> CardInfo:
    """`CARD` with the model's number of parameters."""
    counts = parameter_count(config), active_parameter_count(config)
    return CardInfo("small", "words", *counts)


def to_hf(model: Decoder, tokenizer: Path, out: Path, **more: Any) -> str:
    """`llmfoundry.hf.write_folder.to_hf` with a tokenizer's folder."""
    note = {"note": more.pop("note")} if "note" in more else {}
    files, export = write_folder.TokenizerFiles.load(tokenizer), write_folder.Export(**more)
    return write_folder.to_hf(model.config, MergedState(model), files, out, export, **note)


def written(name: str, tmp_path: Path, case: int = 0) -> tuple[Path, dict[str, Any]]:
    """An exported folder and its config.json."""
    out, wanted = tmp_path / "out", name
    model = decoder(settings(**CASES[name][case]))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    to_hf(model, tokenizer, out, dtype="fp32", card=CARD, architecture=wanted)
    return out, json.loads((out / "config.json").read_text())


def rewrite(folder: Path, config: dict[str, Any], key: str, value: Any) -> None:
    config = json.loads(json.dumps(config))
    section = config
    *parents, last = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value
    (folder / "config.json").write_text(json.dumps(config))


GLU = {"ffn_type": "mptglu", "ffn_act_fn": "silu", "ffn_hidden_size": 48}
MLP = {"ffn_type": "mptmlp", "ffn_act_fn": "gelu_tanh", "ffn_hidden_size": 48}
RMS = {"norm_type": "rmsnorm", "norm_eps": 1e-3}
BARE, UNTIED = {"no_bias": True}, {"tie_word_embeddings": False}
GQA, MQA = {"kv_n_heads": 2}, {"kv_n_heads": 1}
CLIP, SCALE = {"clip_qkv": 0.5}, {"softmax_scale": 0.3}
WINDOW = {"sliding_window_size": 5}
LLAMA: dict[str, Any] = {"attn": ROPE | GQA, "ffn": GLU, **RMS, **BARE}  # a start for variations
LINEAR = {"rope": True, "rope_hf_config": RopeConfig(type="linear", factor=2.5)}
DYNAMIC = {"rope": True, "rope_hf_config": RopeConfig(type="dynamic", factor=3.0)}
LLAMA3 = {  # one frequency in the band between kept and stretched, two above, one below
    "rope": True,
    "rope_hf_config": RopeConfig(
        type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=1000,
    ),
}
YARN = {
    "rope": True,
    "rope_hf_config": RopeConfig(
        type="yarn",
        factor=4.0,
        original_max_position_embeddings=60,
        beta_fast=20.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.4,
    ),
}
MSCALE = {  # as published configurations of DeepSeek have it
    "rope": True,
    "rope_hf_config": RopeConfig(
        type="yarn",
        factor=8.0,
        original_max_position_embeddings=100,
        mscale=0.7,
        mscale_all_dim=1.3,
    ),
}
WARM = {  # YaRN with a factor of attention alone, as llama.cpp computes it
    "rope": True,
    "rope_hf_config": RopeConfig(
        type="yarn", factor=8.0, original_max_position_embeddings=100, attention_factor=1.6
    ),
}
DROPOUTS = {"emb_pdrop": 0.2, "resid_pdrop": 0.3}
ALL = {"sliding_window_size": -1}
LOCAL = {"local": {"sliding_window_size": 5}}
NOPES = {"free": {"nope": True}}
BOTH = {"local": {"sliding_window_size": 5, "nope": True}}
SQUARE = {"d_model": 64}
CAPS = {"attn_logit_softcapping": 1.5}
TUNED = {"attn_temperature_tuning": TemperatureConfig(floor_scale=5, attn_scale=0.7)}
SHARP = {"free": {"nope": True} | TUNED}
INVERSE = {"logit_scale": "inv_sqrt_d_model"}
QKV = {"attention_bias": True, **BARE}
NO_QKV = {"attention_bias": False}
MOE: dict[str, Any] = {
    "ffn_type": "dmoe",
    "mlp_type": "glu",
    "ffn_act_fn": "silu",
    "ffn_hidden_size": 24,
    "moe_num_experts": 5,
    "moe_top_k": 2,
}
SUM: dict[str, Any] = MOE | {"moe_normalize_expert_weights": 1.0}
SHARED: dict[str, Any] = {"shared_expert_hidden_size": 40}
JITTER: dict[str, Any] = {"moe_jitter_eps": 0.1}
LATENTS = ROPE | {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8}
DEEPSEEK: dict[str, Any] = {**BARE, "norm_type": "rmsnorm", "norm_eps": 1e-6, "attn": LATENTS}
DEEP: dict[str, Any] = MOE | {
    "moe_num_experts": 8,
    "shared_expert_hidden_size": 48,
    "moe_balancing": "none",
}
GROUPED = {"moe_n_group": 4, "moe_topk_group": 2}
FIRST = {"first_k_dense_replace": 1, "dense_hidden_size": 40}
SIGMOID: dict[str, Any] = {
    "moe_scoring_func": "sigmoid",
    "moe_balancing": "bias",
    "moe_normalize_expert_weights": 1.0,
}
MIXTURE: dict[str, Any] = {**RMS, **BARE, "ffn": SUM}
OSS: dict[str, Any] = SUM | {
    "ffn_act_fn": "quick_gelu",
    "glu_limit": 0.4,
    "moe_router_bias": True,
}
SINKS = ROPE | GQA | {"sinks": True}

CASES: dict[str, list[dict[str, Any]]] = {  # architecture: models that it is the first to express
    "MptForCausalLM": [
        {"attn": ALIBI, **BARE},
        {"attn": ALIBI | CLIP, "norm_eps": 1e-3, **BARE, **UNTIED},
        {"attn": ALIBI | SCALE, "n_heads": 2, **BARE},
        {"attn": ALIBI, "d_model": 36, "n_heads": 6, **BARE},
    ],
    "GPT2LMHeadModel": [
        {},
        {"ffn": MLP, **BARE, **UNTIED},
        {"ffn": {"ffn_act_fn": "relu"}, "norm_eps": 1e-3},
        {"ffn": {"ffn_act_fn": "quick_gelu"}, **UNTIED},
        {"ffn": {"ffn_act_fn": "mish"}, **NO_QKV},
        {"ffn": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}}, **QKV},
        {"attn": {"attn_pdrop": 0.1}, **DROPOUTS},
    ],
    "GPTBigCodeForCausalLM": [
        {"attn": MQA},
        {"attn": MQA, "ffn": MLP, **BARE, **UNTIED},
        {"attn": MQA | {"attn_pdrop": 0.1}, "ffn": {"ffn_act_fn": "relu2"}, **DROPOUTS},
    ],
    "LlamaForCausalLM": [
        {"attn": ROPE, "ffn": GLU, **RMS},
        {**LLAMA, **UNTIED},
        {"attn": ROPE | MQA, "ffn": GLU | {"ffn_act_fn": "gelu"}, "head_dim": 16, **RMS},
        {**LLAMA, "attn": LINEAR},
        {**LLAMA, "attn": DYNAMIC},
        {**LLAMA, "attn": LLAMA3, "no_bias": False, **NO_QKV},
        {**LLAMA, "attn": ROPE | {"attn_pdrop": 0.1}},
        {**LLAMA, "attn": YARN, "head_dim": 16},
        {**LLAMA, "attn": MSCALE},
    ],
    "GraniteForCausalLM": [
        {**LLAMA, "attn": ROPE | SCALE, "no_bias": False},
        {**LLAMA, "attn": ROPE | GQA | SCALE, "head_dim": 16, **UNTIED},
        {**LLAMA, "logit_scale": 0.3},
        {**LLAMA, "attn": LLAMA3 | SCALE, **INVERSE, **QKV},
    ],
    "ArceeForCausalLM": [
        {"attn": ROPE, "ffn": MLP, **RMS},
        {"attn": ROPE | GQA, "ffn": MLP, "head_dim": 16, **RMS, **BARE, **UNTIED},
        {"attn": LINEAR, "ffn": MLP | {"ffn_act_fn": "relu2"}, **RMS, **QKV},
    ],
    "Starcoder2ForCausalLM": [
        {"attn": ROPE, "ffn": MLP, "norm_eps": 1e-3},
        {"attn": ROPE | GQA, "ffn": MLP, **BARE, **UNTIED},
        {"attn": ROPE | MQA, "head_dim": 16},
        {"attn": ROPE | WINDOW, "ffn": {"ffn_act_fn": "leaky_relu"}},
        {"attn": LLAMA3 | {"attn_pdrop": 0.1}, "ffn": {"ffn_act_fn": "tanh"}, **DROPOUTS},
        {"attn": ROPE | WINDOW | GQA, **stack("local default local", local=WINDOW), **QKV},
    ],
    "StableLmForCausalLM": [
        {"attn": ROPE, "ffn": GLU, "norm_eps": 1e-3, **BARE},
        {"attn": ROPE | GQA, "ffn": GLU, **BARE, **UNTIED},
        {"attn": ROPE | GQA | {"qk_gn": True}, "ffn": GLU, **BARE},
        {"attn": LINEAR | {"qk_gn": True}, "ffn": GLU, **QKV},
    ],
    "DbrxForCausalLM": [
        {"attn": ROPE | CLIP | GQA, "ffn": SUM, **BARE, **UNTIED},
        {"attn": ROPE | CLIP, "ffn": MOE, **BARE, **UNTIED},
        {
            "attn": LLAMA3 | CLIP | MQA,
            "ffn": MOE
            | {"moe_normalize_expert_weights": 2.0, "moe_top_k": 3}
            | {"moe_jitter_eps": 0.1},
            "resid_pdrop": 0.3,
            **BARE,
            **UNTIED,
        },
        {
            "attn": ROPE | GQA | CLIP,
            "ffn": SUM | {"moe_num_experts": 16, "moe_top_k": 4, "ffn_act_fn": "gelu_tanh"},
            "n_layers": 3,
            **BARE,
            **UNTIED,
        },
        {
            "attn": ROPE | CLIP,
            "ffn": MOE | {"moe_top_k": 1, "moe_balancing": "none"},
            **BARE,
            **UNTIED,
        },
        {
            "attn": ROPE | CLIP,
            "ffn": SUM | {"moe_top_k": 5, "moe_loss_weight": 0.7},
            **BARE,
            **UNTIED,
        },
        {"attn": ROPE | CLIP, "ffn": GLU, **BARE, **UNTIED},
        {"attn": ROPE | CLIP | GQA, "ffn": GLU, **BARE, **UNTIED},
        {
            "attn": LLAMA3 | CLIP | {"attn_pdrop": 0.1},
            "ffn": GLU | {"ffn_act_fn": "sigmoid"},
            "resid_pdrop": 0.3,
            **BARE,
            **UNTIED,
        },
    ],
    "OlmoeForCausalLM": [
        {**MIXTURE, "attn": ROPE | {"qk_ln": True}, "ffn": MOE},
        {**MIXTURE, "attn": LINEAR | {"qk_ln": True}, **QKV, **UNTIED},
        {"attn": ROPE | {"qk_ln": True}, "ffn": GLU, **RMS, **BARE},
        {"attn": ROPE | GQA | {"qk_ln": True}, "ffn": GLU, **RMS, **BARE, **UNTIED},
        {"attn": LLAMA3 | {"qk_ln": True, "attn_pdrop": 0.1}, "ffn": GLU, **RMS, **QKV},
    ],
    "MistralForCausalLM": [
        {**LLAMA, "attn": ROPE | WINDOW, "head_dim": 16},
        {**LLAMA, "attn": LLAMA3 | WINDOW | GQA, **UNTIED},
        {**LLAMA, "attn": ROPE, **stack("local local", local=WINDOW)},
    ],
    "Qwen2ForCausalLM": [
        {**LLAMA, "head_dim": 16, **QKV},
        {**LLAMA, "attn": LLAMA3 | GQA | WINDOW, **QKV, **UNTIED},
        {**LLAMA, **stack("default local local", local=WINDOW), **QKV},
        {**LLAMA, "attn": ROPE | WINDOW, **stack("full default", full=ALL), **QKV},
        {**LLAMA, "attn": YARN | GQA, **QKV, **UNTIED},
    ],
    "Qwen3ForCausalLM": [
        {**LLAMA, "attn": ROPE | GQA | {"qk_gn": True}, "head_dim": 16},
        {**LLAMA, "attn": LINEAR | {"qk_gn": True, "attn_pdrop": 0.1}, **QKV, **UNTIED},
        {**LLAMA, "attn": ROPE | {"qk_gn": True}, **stack("local default default", **LOCAL)},
        {**LLAMA, "attn": MSCALE | GQA | {"qk_gn": True}, "head_dim": 16},
    ],
    "MixtralForCausalLM": [
        {**MIXTURE, "attn": ROPE | GQA},
        {**MIXTURE, "attn": LLAMA3 | WINDOW, "head_dim": 16, **UNTIED},
        {
            **MIXTURE,
            "attn": ROPE | MQA | {"attn_pdrop": 0.1},
            "ffn": SUM | {"moe_num_experts": 8, "moe_top_k": 3, **JITTER},
        },
    ],
    "Qwen3MoeForCausalLM": [
        {**MIXTURE, "attn": ROPE | GQA | {"qk_gn": True}, "ffn": MOE},
        {**MIXTURE, "attn": DYNAMIC | {"qk_gn": True}, "head_dim": 16, **QKV, **UNTIED},
        {**MIXTURE, "attn": ROPE | WINDOW | {"qk_gn": True, "attn_pdrop": 0.1}},
    ],
    "GptOssForCausalLM": [
        {"attn": SINKS, "ffn": OSS, **RMS, **UNTIED, **stack("local default", **LOCAL)},
        {"attn": SINKS, "ffn": OSS | {"glu_limit": 7.0}, **RMS, **BARE},
        {"attn": SINKS | WINDOW, "ffn": OSS | {"moe_top_k": 1}, **RMS, **QKV},
        {"attn": SINKS | LINEAR, "ffn": OSS, "head_dim": 16, **RMS, **NO_QKV},
    ],
    "GraniteMoeForCausalLM": [
        {**MIXTURE, "attn": ROPE | GQA | SCALE},
        {**MIXTURE, "attn": ROPE, "logit_scale": 0.3, **UNTIED},
        {**MIXTURE, "attn": LLAMA3, "ffn": SUM | {"moe_top_k": 1}, **QKV},
    ],
    "GraniteMoeSharedForCausalLM": [
        {**MIXTURE, "attn": ROPE | GQA, "ffn": SUM | SHARED},
        {**MIXTURE, "attn": ROPE | SCALE, "ffn": SUM | SHARED, **INVERSE, **QKV, **UNTIED},
        {**MIXTURE, "attn": ROPE, "ffn": SUM | SHARED | {"moe_num_experts": 1, "moe_top_k": 1}},
    ],
    "DeepseekV2ForCausalLM": [
        {**DEEPSEEK, "ffn": DEEP},
        {
            **DEEPSEEK,
            "attn": LATENTS | {"q_lora_rank": 12, "rope_hf_config": LINEAR["rope_hf_config"]},
            "ffn": DEEP | GROUPED | {"moe_routed_scaling_factor": 3.0},
        },
    ],
    "DeepseekV3ForCausalLM": [
        {**DEEPSEEK, "ffn": DEEP | SIGMOID | FIRST, "n_layers": 3},
        {
            **DEEPSEEK,
            "attn": LATENTS | {"q_lora_rank": 12, "v_head_dim": 12, "attn_pdrop": 0.1},
            "ffn": DEEP | SIGMOID | GROUPED | {"moe_routed_scaling_factor": 2.5},
            **UNTIED,
        },
    ],
    "SmolLM3ForCausalLM": [
        {**LLAMA, **stack("default free default", **NOPES)},
        {**LLAMA, "attn": {"nope": True}},
        {**LLAMA, "attn": {"nope": True} | WINDOW, "head_dim": 16, **UNTIED, **QKV},
        {**LLAMA, "attn": LLAMA3, "no_bias": False, **stack("local default", **BOTH)},
        {**LLAMA, "attn": ROPE | WINDOW, "no_bias": False},
        {**LLAMA, **stack("default free local free", **NOPES, **LOCAL)},
        {**LLAMA, **stack("local default local", **LOCAL)},
    ],
    "VaultGemmaForCausalLM": [
        {**LLAMA, "attn": ROPE | GQA | CAPS, **SQUARE, **UNTIED},
        {**LLAMA, "final_logit_softcapping": 2.0, **SQUARE, **UNTIED, **QKV},
        {
            **LLAMA,
            "attn": LLAMA3 | CAPS | {"softmax_scale": 24**-0.5},
            "final_logit_softcapping": 2.0,
            **SQUARE,
            **INVERSE,
            **stack("local local default", **LOCAL),
        },
    ],
    "Llama4ForCausalLM": [
        {**LLAMA, "attn": {"nope": True} | TUNED},
        {**LLAMA, "attn": {"nope": True} | TUNED | GQA, "head_dim": 16, **QKV, **UNTIED},
        {**LLAMA, **stack("default free default free", **SHARP), **QKV},
        {**LLAMA, "attn": LLAMA3 | {"attn_pdrop": 0.1}, **stack("free default", **SHARP)},
    ],
    "GPTNeoForCausalLM": [
        {"attn": {"softmax_scale": 1.0}, **NO_QKV},
        {
            "attn": {"softmax_scale": 1.0, "attn_pdrop": 0.1},
            "ffn": MLP,
            **stack("default local local default", **LOCAL),
            **DROPOUTS,
            **BARE,
            **UNTIED,
        },
    ],
    "llmfoundry": [
        {"attn": ROPE | GQA | SCALE | {"qk_ln": True}, "ffn": GLU},
        {"attn": ALIBI | {"alibi_bias_max": 4}, "ffn": GLU, **UNTIED},
        {"attn": MQA | CLIP, **RMS},
        {"attn": {"nope": True}},
        {
            "attn": LLAMA3 | TUNED | CAPS | GQA | {"qk_gn": True},
            "ffn": {"ffn_act_fn": {"name": "leaky_relu", "negative_slope": 0.3}},
            "logit_scale": 0.7,
            "final_logit_softcapping": 3.0,
            **stack(
                "local default again free",
                **LOCAL,
                **NOPES,
                again={"reuse_kv_layer_idx": -1, "attn_temperature_tuning": TemperatureConfig()},
            ),
            **NO_QKV,
        },
        {
            "attn": ROPE | GQA,
            "ffn": MOE | SHARED | {"mlp_type": "mlp", "moe_balancing": "bias"},
            "norm_eps": 1e-3,
        },
        {"attn": ALIBI, "ffn": SUM | SHARED | JITTER | {"moe_zloss_weight": 0.1}, **BARE},
        {**DEEPSEEK, "attn": LATENTS | {"v_head_dim": 20}, "norm_eps": 1e-3, **UNTIED},
        {"attn": DYNAMIC | WINDOW, "norm_type": "low_precision_layernorm", **DROPOUTS},
    ],
}
ASKED_FOR = ("llmfoundry",)  # never the first to fit
