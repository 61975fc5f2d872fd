"""Small decoders whose every weight, bias and norm matters, and a tokenizer to export with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from llmfoundry.export.card import CardInfo
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.model import AttentionConfig, FFNConfig, ModelConfig

WIDTH, HEADS, ROWS, LENGTH = 32, 4, 128, 24
EOS = 90
CARD = CardInfo(name="small", recipe="seed: 17\n", data="words")
ROPE: dict[str, Any] = {"rope": True, "rope_theta": 500000.0}
ALIBI: dict[str, Any] = {"alibi": True}


def settings(
    *, attn: dict[str, Any] | None = None, ffn: dict[str, Any] | None = None, **top: Any
) -> ModelConfig:
    """A filled `model` section of a small decoder; `attn` may give kv_n_heads alone."""
    attn = dict(attn or {})
    kinds = {None: "multihead_attention", HEADS: "multihead_attention", 1: "multiquery_attention"}
    attn["attn_type"] = kinds.get(attn.get("kv_n_heads"), "grouped_query_attention")
    shape = {"d_model": WIDTH, "n_heads": HEADS, "n_layers": 2}
    config = ModelConfig(
        **{**shape, "vocab_size": ROWS, "max_seq_len": LENGTH, **top},
        attn_config=AttentionConfig(**attn),
        ffn_config=FFNConfig(**(ffn or {})),
    )
    assert not list(config.check()), list(config.check())
    config.fill()
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
    return model


def logits(model: Decoder, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.head(model(tokens))


def rows() -> Tensor:
    """Two rows of full length."""
    return torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(5))


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


_GLU = {"ffn_type": "mptglu", "ffn_act_fn": "silu", "ffn_hidden_size": 48}
_MLP = {"ffn_type": "mptmlp", "ffn_act_fn": "gelu_tanh", "ffn_hidden_size": 48}
_RMS = {"norm_type": "rmsnorm", "norm_eps": 1e-3}
_BARE = {"no_bias": True}
_UNTIED = {"tie_word_embeddings": False}
_GQA, _MQA = {"kv_n_heads": 2}, {"kv_n_heads": 1}
_CLIP, _SCALE = {"clip_qkv": 0.5}, {"softmax_scale": 0.3}

CASES: dict[str, list[dict[str, Any]]] = {  # architecture: models that it is the first to express
    "MptForCausalLM": [
        {"attn": ALIBI, **_BARE},
        {"attn": ALIBI | _CLIP, "norm_eps": 1e-3, **_BARE, **_UNTIED},
        {"attn": ALIBI | _SCALE, "n_heads": 2, **_BARE},
        {"attn": ALIBI, "d_model": 36, "n_heads": 6, **_BARE},
    ],
    "GPT2LMHeadModel": [
        {},
        {"ffn": _MLP, **_BARE, **_UNTIED},
        {"ffn": {"ffn_act_fn": "relu"}, "norm_eps": 1e-3},
        {"ffn": {"ffn_act_fn": "silu"}, **_UNTIED},
    ],
    "GPTBigCodeForCausalLM": [
        {"attn": _MQA},
        {"attn": _MQA, "ffn": _MLP, **_BARE, **_UNTIED},
    ],
    "LlamaForCausalLM": [
        {"attn": ROPE, "ffn": _GLU, **_RMS},
        {"attn": ROPE | _GQA, "ffn": _GLU, **_RMS, **_BARE, **_UNTIED},
        {"attn": ROPE | _MQA, "ffn": _GLU | {"ffn_act_fn": "gelu"}, "head_dim": 16, **_RMS},
    ],
    "GraniteForCausalLM": [
        {"attn": ROPE | _SCALE, "ffn": _GLU, **_RMS},
        {"attn": ROPE | _GQA | _SCALE, "ffn": _GLU, "head_dim": 16, **_RMS, **_BARE, **_UNTIED},
    ],
    "ArceeForCausalLM": [
        {"attn": ROPE, "ffn": _MLP, **_RMS},
        {"attn": ROPE | _GQA, "ffn": _MLP, "head_dim": 16, **_RMS, **_BARE, **_UNTIED},
    ],
    "Starcoder2ForCausalLM": [
        {"attn": ROPE, "ffn": _MLP, "norm_eps": 1e-3},
        {"attn": ROPE | _GQA, "ffn": _MLP, **_BARE, **_UNTIED},
        {"attn": ROPE | _MQA, "head_dim": 16},
    ],
    "StableLmForCausalLM": [
        {"attn": ROPE, "ffn": _GLU, "norm_eps": 1e-3, **_BARE},
        {"attn": ROPE | _GQA, "ffn": _GLU, **_BARE, **_UNTIED},
    ],
    "DbrxForCausalLM": [
        {"attn": ROPE | _CLIP, "ffn": _GLU, **_BARE, **_UNTIED},
        {"attn": ROPE | _CLIP | _GQA, "ffn": _GLU, **_BARE, **_UNTIED},
    ],
    "OlmoeForCausalLM": [
        {"attn": ROPE | {"qk_ln": True}, "ffn": _GLU, **_RMS, **_BARE},
        {"attn": ROPE | _GQA | {"qk_ln": True}, "ffn": _GLU, **_RMS, **_BARE, **_UNTIED},
    ],
    "MistralForCausalLM": [
        {"attn": ROPE, "ffn": _GLU, "head_dim": 16, **_RMS, **_BARE},
        {"attn": ROPE | _GQA, "ffn": _GLU, **_RMS, **_BARE, **_UNTIED},
    ],
    "Qwen2ForCausalLM": [
        {"attn": ROPE, "ffn": _GLU, "head_dim": 16, **_RMS, **_BARE},
        {"attn": ROPE | _GQA, "ffn": _GLU, **_RMS, **_BARE, **_UNTIED},
    ],
    "llmfoundry": [
        {"attn": ROPE | _GQA | _SCALE | {"qk_ln": True}, "ffn": _GLU},
        {"attn": ALIBI | {"alibi_bias_max": 4}, "ffn": _GLU, **_UNTIED},
        {"attn": _MQA | _CLIP, **_RMS},
        {"learned_pos_emb": False},
    ],
}
ASKED_FOR = ("MistralForCausalLM", "Qwen2ForCausalLM", "llmfoundry")  # never the first to fit
