"""Small models and tokenizers of every kind that llama.cpp knows, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from llmfoundry.data.text.bpe import END_OF_TEXT, byte_alphabet, bytes_backend, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.hf.gguf.write import GGUFModel, to_gguf
from llmfoundry.models.adapter import MergedState
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.attention import RopeConfig
from tests.hf.random_models import (
    ALIBI,
    BARE,
    CLIP,
    DEEP,
    DEEPSEEK,
    FIRST,
    GLU,
    GQA,
    GROUPED,
    LINEAR,
    LLAMA3,
    MLP,
    MSCALE,
    OSS,
    RMS,
    ROPE,
    SIGMOID,
    SINKS,
    SUM,
    UNTIED,
    WARM,
    stack,
)

ROWS = 512
SHAPE = {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": ROWS, "max_seq_len": 128}
MPT: dict[str, Any] = {"ffn_type": "mptmlp", "ffn_act_fn": "gelu"}
EXPERTS = SUM | {"ffn_hidden_size": 64}
LAYERNORM = {"norm_type": "layernorm"}
OSS_FFN = {"ffn_hidden_size": 64, "glu_limit": 7.0}
OSS_YARN = {
    "rope_hf_config": RopeConfig(
        type="yarn", factor=8.0, original_max_position_embeddings=16, truncate=False
    )
}
ALTERNATE = stack("local default local default", local={"sliding_window_size": 7})
LATENT_SIZES = {"rope": True, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                "v_head_dim": 32}  # fmt: skip
LATENT = DEEPSEEK | {"attn": LATENT_SIZES | {"q_lora_rank": 32}}
WIDE = {"ffn_hidden_size": 32, "shared_expert_hidden_size": 64}
GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' class, and the settings
    "llama": ("LlamaForCausalLM", {"attn": ROPE | GQA, "ffn": GLU, **RMS, **BARE, **UNTIED}),
    "llama-biased": ("LlamaForCausalLM", {"attn": ROPE | GQA, "ffn": GLU, **RMS}),
    "llama-3": ("LlamaForCausalLM", {"attn": LLAMA3 | GQA, "ffn": GLU, **RMS, **BARE}),
    "llama-linear": ("LlamaForCausalLM", {"attn": LINEAR | GQA, "ffn": GLU, **RMS, **BARE}),
    "llama-yarn": ("LlamaForCausalLM", {"attn": MSCALE | GQA, "ffn": GLU, **RMS, **BARE}),
    "qwen2-yarn": (
        "Qwen2ForCausalLM",
        {"attn": WARM | GQA, "ffn": GLU, **RMS, **BARE, "attention_bias": True},
    ),
    "gpt-2": ("GPT2LMHeadModel", {"ffn": MLP | {"ffn_hidden_size": 256}, **LAYERNORM}),
    "starcoder2": ("Starcoder2ForCausalLM", {"attn": ROPE | GQA, "ffn": MLP, **LAYERNORM, **BARE}),
    "mpt": (
        "MptForCausalLM",
        {"attn": ALIBI | CLIP, "learned_pos_emb": False, "ffn": MPT, **LAYERNORM, **BARE},
    ),
    "mpt-6-heads": (  # ALiBi's slopes are another formula where heads are no power of two
        "MptForCausalLM",
        {
            **{"attn": ALIBI, "learned_pos_emb": False, "ffn": MPT, **LAYERNORM, **BARE},
            **{"d_model": 96, "n_heads": 6, **UNTIED},
        },
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"attn": ROPE | GQA, "ffn": GLU, **RMS, **BARE, "attention_bias": True},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"attn": {**ROPE, **GQA, "qk_gn": True}, "ffn": GLU, **RMS, **BARE, "head_dim": 32},
    ),
    "mixtral": ("MixtralForCausalLM", {"attn": ROPE | GQA, "ffn": EXPERTS, **RMS, **BARE}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"attn": {**ROPE, **GQA, "qk_gn": True}, "ffn": EXPERTS, **RMS, **BARE},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"attn": SINKS, "ffn": OSS | OSS_FFN, **RMS, **UNTIED, **ALTERNATE},
    ),
    "gpt-oss-yarn": (
        "GptOssForCausalLM",
        {"attn": SINKS | OSS_YARN, "ffn": OSS | OSS_FFN, **RMS, **UNTIED, **ALTERNATE},
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        {**LATENT, "ffn": DEEP | WIDE | FIRST | {"moe_routed_scaling_factor": 3.0}},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        {**LATENT, "attn": LATENT_SIZES, "ffn": DEEP | WIDE, "n_layers": 27},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {**LATENT, "ffn": DEEP | WIDE | SIGMOID | GROUPED | FIRST, **UNTIED},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {"attn": ROPE | GQA | CLIP, "ffn": EXPERTS, **LAYERNORM, **BARE},
    ),
}

TEXTS = (
    "The model is trained on 123456 tokens; it's theirs, we'LL see.\n\n\tdef f(x):\n    return x\n",
    " é ünï 漢字 🙂\u200d🌫️ नमस्ते \r\n  3.14 ''' ------ \t\n x",
    "<|endoftext|> spelled out [PAD7]",
    "a\u00a0b  c   ",
)


def trained() -> Tokenizer:
    """The recipes' own: `tokenizer.name: train`."""
    return Tokenizer(train_backend(list(TEXTS) * 9, 400, progress=False), END_OF_TEXT)


def byte_level(*steps: Any, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    """Learned from `TEXTS`, with these pre-tokenizers."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=byte_alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(list(TEXTS) * 9, trainer)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    written = json.loads(backend.to_str())
    written["model"]["ignore_merges"] = ignore_merges
    return Tokenizer(Backend.from_str(json.dumps(written)), END_OF_TEXT)


def sentencepiece(prefix: bool) -> Tokenizer:
    """Llama 2's kind: merges of characters, bytes for those that no piece has."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁")] * prefix + parts)
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, limit_alphabet=30, show_progress=False
    )
    backend.train_from_iterator([TEXTS[0]] * 9, trainer)
    written = json.loads(backend.to_str())
    pieces = [piece for piece in written["model"]["vocab"] if piece not in special]
    names = [*special, *bytes_, *pieces]
    written["model"]["vocab"] = {name: place for place, name in enumerate(names)}
    return Tokenizer(Backend.from_str(json.dumps(written)), "</s>")


def tokenizers() -> dict[str, Tokenizer]:
    """By llama.cpp's name for how they split."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    after = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(digits: str) -> Any:
        words = (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
            + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        return pre_tokenizers.Split(Regex(words), behavior="isolated")

    return {
        "dbrx": trained(),
        "dbrx, bytes": Tokenizer(bytes_backend(), END_OF_TEXT),
        "gpt-2": byte_level(plain),
        "starcoder": byte_level(pre_tokenizers.Digits(individual_digits=True), plain),
        "llama-bpe": byte_level(split(r"\p{N}{1,3}"), after, ignore_merges=True),
        "qwen2": byte_level(split(r"\p{N}"), after, nfc=True),
        "default": sentencepiece(prefix=True),
        "default, no prefix": sentencepiece(prefix=False),
    }


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    """Its folder."""
    tokenizer.save(folder)
    return folder


def write_file(
    model: Decoder,
    tokenizer: Tokenizer,
    file: Path,
    *,
    dtype: str = "fp32",
    architecture: str | None = None,
) -> list[str]:
    """Write the model, as one trained here; lines about differences."""
    notes: list[str] = []
    state, stops = MergedState(model), tokenizer.end_ids
    parts = GGUFModel(
        "small",
        model.config,
        state.shapes(),
        state.__getitem__,
        tokenizer,
        starts=True,
        stops=stops,
    )
    to_gguf(parts, file, dtype=dtype, architecture=architecture, note=notes.append)
    return notes
