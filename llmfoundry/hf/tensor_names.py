"""Names of the decoder's weights in transformers' architectures: a `WeightMap` for each.

A new architecture is one entry of `MAPS` here and one of `hf/architectures.py`.
"""

from __future__ import annotations

from llmfoundry.hf import experts
from llmfoundry.hf.weight_map import Rule, WeightMap


def _llama_like(
    *ffn: Rule,
    qkv_bias: str = "any",
    out_bias: str = "any",
    norm_bias: str = "never",
    norm_2: str = "post_attention_layernorm",
    gemma: bool = False,
    interleaved: bool = False,
) -> tuple[Rule, ...]:
    """Llama's names, which most architectures share up to the feed-forward layer."""
    layer, less = "model.layers.{i}.", 1.0 if gemma else 0.0
    qkv = tuple(f"{layer}self_attn.{part}_proj.weight" for part in "qkv")
    return (
        Rule("wte", ("model.embed_tokens.weight",), multiplied=gemma),
        Rule("blocks.{i}.norm_1", (f"{layer}input_layernorm.weight",), norm_bias, less=less),
        Rule("blocks.{i}.attn.Wqkv", qkv, qkv_bias, interleaved=interleaved),
        Rule("blocks.{i}.attn.out_proj", (f"{layer}self_attn.o_proj.weight",), out_bias),
        Rule("blocks.{i}.norm_2", (f"{layer}{norm_2}.weight",), norm_bias, less=less),
        *ffn,
        Rule("norm_f", ("model.norm.weight",), norm_bias, less=less),
        Rule("lm_head", ("lm_head.weight",)),
    )


def _ffn(bias: str, *names: str, module: str = "mlp", **ours_theirs: str) -> tuple[Rule, ...]:
    """Feed-forward layers called as ours, or as the keywords say."""
    pairs = {name: name for name in names} | ours_theirs
    return tuple(
        Rule(f"blocks.{{i}}.ffn.{ours}", (f"model.layers.{{i}}.{module}.{theirs}.weight",), bias)
        for ours, theirs in pairs.items()
    )


def _gpt2_like(*, transposed: bool) -> tuple[Rule, ...]:
    layer = "transformer.h.{i}."
    return (
        Rule("wte", ("transformer.wte.weight",)),
        Rule("wpe", ("transformer.wpe.weight",)),
        Rule("blocks.{i}.norm_1", (f"{layer}ln_1.weight",), "always"),
        Rule("blocks.{i}.attn.Wqkv", (f"{layer}attn.c_attn.weight",), "always", transposed),
        Rule("blocks.{i}.attn.out_proj", (f"{layer}attn.c_proj.weight",), "always", transposed),
        Rule("blocks.{i}.norm_2", (f"{layer}ln_2.weight",), "always"),
        Rule("blocks.{i}.ffn.up_proj", (f"{layer}mlp.c_fc.weight",), "always", transposed),
        Rule("blocks.{i}.ffn.down_proj", (f"{layer}mlp.c_proj.weight",), "always", transposed),
        Rule("norm_f", ("transformer.ln_f.weight",), "always"),
        Rule("lm_head", ("lm_head.weight",)),
    )


def _mosaic_like(norms: str, *ffn: Rule) -> tuple[Rule, ...]:
    """MPT's and DBRX's names; `norms` is the module that holds attention and norms."""
    layer = "transformer.blocks.{i}."
    return (
        Rule("wte", ("transformer.wte.weight",)),
        Rule("blocks.{i}.norm_1", (f"{layer}{norms}norm_1.weight",)),
        Rule("blocks.{i}.attn.Wqkv", (f"{layer}{norms}attn.Wqkv.weight",)),
        Rule("blocks.{i}.attn.out_proj", (f"{layer}{norms}attn.out_proj.weight",)),
        Rule("blocks.{i}.norm_2", (f"{layer}{norms}norm_2.weight",)),
        *ffn,
        Rule("norm_f", ("transformer.norm_f.weight",)),
        Rule("lm_head", ("lm_head.weight",)),
    )


_GLU = ("gate_proj", "up_proj", "down_proj")
_MPT_FFN = tuple(
    Rule(f"blocks.{{i}}.ffn.{name}", (f"transformer.blocks.{{i}}.ffn.{name}.weight",))
    for name in ("up_proj", "down_proj")
)


def _qk_norms(name: str, heads: bool = False) -> tuple[Rule, ...]:
    """Norms of queries and keys; `name` has {part}, q or k."""
    return tuple(
        Rule(
            f"blocks.{{i}}.attn.{part}_ln",
            ("model.layers.{i}.self_attn." + name.replace("{part}", part),),
            heads=part if heads else "",
        )
        for part in "qk"
    )


def _gpt_neo() -> tuple[Rule, ...]:
    attn, gpt2 = "transformer.h.{i}.attn.attention.", _gpt2_like(transposed=False)
    return (
        *(rule for rule in gpt2 if ".attn." not in rule.ours),
        Rule("blocks.{i}.attn.Wqkv", tuple(f"{attn}{part}_proj.weight" for part in "qkv")),
        Rule("blocks.{i}.attn.out_proj", (f"{attn}out_proj.weight",), "always"),
    )


MAPS: dict[str, WeightMap] = {
    "MptForCausalLM": WeightMap(_mosaic_like("", *_MPT_FFN)),
    "GPT2LMHeadModel": WeightMap(
        _gpt2_like(transposed=True), ignored=("*.attn.bias", "*.attn.masked_bias")
    ),
    "GPTBigCodeForCausalLM": WeightMap(_gpt2_like(transposed=False), ignored=("*.attn.bias",)),
    "LlamaForCausalLM": WeightMap(_llama_like(*_ffn("other", *_GLU))),
    "GraniteForCausalLM": WeightMap(_llama_like(*_ffn("other", *_GLU))),
    "ArceeForCausalLM": WeightMap(_llama_like(*_ffn("other", "up_proj", "down_proj"))),
    "Starcoder2ForCausalLM": WeightMap(
        _llama_like(*_ffn("any", up_proj="c_fc", down_proj="c_proj"), norm_bias="always")
    ),
    "StableLmForCausalLM": WeightMap(
        _llama_like(
            *_ffn("never", *_GLU),
            *_qk_norms("{part}_layernorm.norms.{h}.weight", heads=True),
            qkv_bias="qkv",
            out_bias="never",
            norm_bias="always",
        )
    ),
    "DbrxForCausalLM": WeightMap(_mosaic_like("norm_attn_norm."), (experts.DBRX,), own_head=True),
    "OlmoeForCausalLM": WeightMap(_llama_like(*_qk_norms("{part}_norm.weight")), experts.QWEN),
    "MixtralForCausalLM": WeightMap(
        _llama_like(qkv_bias="never", out_bias="never"), experts.MIXTRAL
    ),
    "Qwen3MoeForCausalLM": WeightMap(_llama_like(*_qk_norms("{part}_norm.weight")), experts.QWEN),
    "GraniteMoeForCausalLM": WeightMap(_llama_like(), experts.GRANITE),
    "GraniteMoeSharedForCausalLM": WeightMap(_llama_like(), experts.GRANITE),
    "MistralForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), qkv_bias="never", out_bias="never")
    ),
    "Qwen2ForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), qkv_bias="always", out_bias="never")
    ),
    "Qwen3ForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), *_qk_norms("{part}_norm.weight"))
    ),
    "SmolLM3ForCausalLM": WeightMap(_llama_like(*_ffn("other", *_GLU))),
    "VaultGemmaForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), norm_2="pre_feedforward_layernorm", gemma=True)
    ),
    "Llama4ForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU, module="feed_forward"), interleaved=True)
    ),
    "GPTNeoForCausalLM": WeightMap(
        _gpt_neo(), ignored=("*.attention.bias", "*.attention.masked_bias")
    ),
}
