"""Names and shapes of the decoder's weights in transformers' architectures, both ways.

`export/hf.py` reads and writes the folders; here is only which tensor becomes which. One table
serves both directions: a `Rule` ties one of our layers to theirs, and biases follow its weight.
Nothing is computed, only split, joined and transposed, so what goes out comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.model import ModelConfig


@dataclass(frozen=True)
class Rule:
    """One of our layers and its counterpart.

    Attributes:
        ours: our layer, without `.weight`; `{i}` is the block's number.
        theirs: the weight's full names; several share its rows as queries, keys and values do.
        bias: whether theirs has one: `never`, `follow` (where ours has), `always` (zeros if ours
            has none).
        transposed: theirs is (in, out).
    """

    ours: str
    theirs: tuple[str, ...]
    bias: str = "never"
    transposed: bool = False


@dataclass(frozen=True)
class WeightMap:
    """How one architecture names the decoder's weights.

    Attributes:
        rules: its layers.
        router: its router, (1, D), where feed-forward layers are a mixture of one expert: zeros,
            since any value gives that expert all of the weight.
        ignored: patterns of what files may hold beside weights: buffers that can be computed.
    """

    rules: tuple[Rule, ...]
    router: str | None = None
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)


def to_theirs(
    weights: WeightMap, config: ModelConfig, ours: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, in order; all but zeros are views of `ours`."""
    like = ours["wte.weight"]
    for rule, layer, theirs in _layers(weights, config):
        if layer == "lm_head" and config.tie_word_embeddings:
            continue
        weight = ours[f"{layer}.weight"]
        parts = _rows(weight, len(theirs), config)
        for name, part in zip(theirs, parts, strict=True):
            yield name, part.T if rule.transposed else part
        bias = ours.get(f"{layer}.bias")
        assert bias is None or rule.bias != "never", f"{layer}.bias has no place to go"
        if bias is None and rule.bias == "always":
            bias = like.new_zeros(len(weight))
        if bias is not None:
            for name, part in zip(theirs, _rows(bias, len(theirs), config), strict=True):
                yield _bias_name(name), part
    if weights.router is not None:
        for block in range(config.n_layers):
            yield weights.router.format(i=block), like.new_zeros(1, config.d_model)


def to_ours(
    weights: WeightMap, config: ModelConfig, names: Collection[str], get: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The decoder's state from their tensors, read one by one.

    Args:
        weights: their architecture's map.
        config: filled; says which layers the decoder has.
        names: their tensors' names.
        get: reads one.

    Raises:
        UserError: a tensor is missing, has another shape, or has no counterpart.
    """
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    _refuse_unknown(weights, config, names)
    state: dict[str, Tensor] = {}
    for rule, layer, theirs in _layers(weights, config):
        if f"{layer}.weight" not in shapes:
            continue
        for name in theirs:
            if name not in names:
                raise UserError(f"{name}: the tensor is missing; the model cannot be read whole")
        parts = [get(name).T if rule.transposed else get(name) for name in theirs]
        state[f"{layer}.weight"] = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
        if f"{layer}.bias" in shapes:
            state[f"{layer}.bias"] = _join_biases(theirs, parts, names, get)
    for name, tensor in state.items():
        if tensor.shape != shapes[name]:
            raise UserError(
                f"config.json: makes {name} {tuple(shapes[name])}, but the file's tensor is"
                f" {tuple(tensor.shape)}; the two belong to different models"
            )
    assert state.keys() == shapes.keys(), state.keys() ^ shapes.keys()
    return state


def bias_names(weights: WeightMap, config: ModelConfig, names: Collection[str]) -> list[str]:
    """Biases among `names` that the map knows."""
    known = {_bias_name(name) for _, _, theirs in _layers(weights, config) for name in theirs}
    return sorted(known & set(names))


def _layers(weights: WeightMap, config: ModelConfig) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
    """Each rule with our layer and their weights, block by block."""
    for rule in weights.rules:
        for block in range(config.n_layers) if "{i}" in rule.ours else (0,):
            yield rule, rule.ours.format(i=block), tuple(t.format(i=block) for t in rule.theirs)


def _rows(tensor: Tensor, parts: int, config: ModelConfig) -> tuple[Tensor, ...]:
    if parts == 1:
        return (tensor,)
    assert config.head_dim is not None and config.attn_config.kv_n_heads is not None
    kv_width = config.attn_config.kv_n_heads * config.head_dim
    return tensor.split((config.n_heads * config.head_dim, kv_width, kv_width))


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _join_biases(
    theirs: tuple[str, ...],
    weights: list[Tensor],
    names: Collection[str],
    get: Callable[[str], Tensor],
) -> Tensor:
    """Their biases, zeros where they have none."""
    parts = []
    for name, weight in zip(theirs, weights, strict=True):
        bias = _bias_name(name)
        parts.append(get(bias) if bias in names else weight.new_zeros(len(weight)))
    return torch.cat(parts)


def _refuse_unknown(weights: WeightMap, config: ModelConfig, names: Collection[str]) -> None:
    known = {name for _, _, theirs in _layers(weights, config) for name in theirs}
    known |= {_bias_name(name) for name in known}
    if weights.router is not None:
        known |= {weights.router.format(i=block) for block in range(config.n_layers)}
    unknown = sorted(
        name
        for name in names
        if name not in known and not any(fnmatch(name, pattern) for pattern in weights.ignored)
    )
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{unknown[0]}{more}: the decoder has no such weights")


def _llama_like(
    *ffn: Rule, norm_bias: str = "never", qkv_bias: str = "follow", out_bias: str = "follow"
) -> tuple[Rule, ...]:
    """Llama's names, which most architectures share up to the feed-forward layer."""
    layer = "model.layers.{i}."
    qkv = tuple(f"{layer}self_attn.{part}_proj.weight" for part in "qkv")
    return (
        Rule("wte", ("model.embed_tokens.weight",)),
        Rule("blocks.{i}.norm_1", (f"{layer}input_layernorm.weight",), norm_bias),
        Rule("blocks.{i}.attn.Wqkv", qkv, qkv_bias),
        Rule("blocks.{i}.attn.out_proj", (f"{layer}self_attn.o_proj.weight",), out_bias),
        Rule("blocks.{i}.norm_2", (f"{layer}post_attention_layernorm.weight",), norm_bias),
        *ffn,
        Rule("norm_f", ("model.norm.weight",), norm_bias),
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
_EXPERT = "transformer.blocks.{i}.ffn.experts.mlp."
_DBRX_FFN = (
    Rule("blocks.{i}.ffn.gate_proj", (f"{_EXPERT}w1",)),
    Rule("blocks.{i}.ffn.up_proj", (f"{_EXPERT}v1",)),
    Rule("blocks.{i}.ffn.down_proj", (f"{_EXPERT}w2",), transposed=True),
)
_OLMOE_NORMS = tuple(
    Rule(f"blocks.{{i}}.attn.{part}_ln", (f"model.layers.{{i}}.self_attn.{part}_norm.weight",))
    for part in "qk"
)

MAPS: dict[str, WeightMap] = {
    "MptForCausalLM": WeightMap(_mosaic_like("", *_MPT_FFN)),
    "GPT2LMHeadModel": WeightMap(
        _gpt2_like(transposed=True), ignored=("*.attn.bias", "*.attn.masked_bias")
    ),
    "GPTBigCodeForCausalLM": WeightMap(_gpt2_like(transposed=False), ignored=("*.attn.bias",)),
    "LlamaForCausalLM": WeightMap(_llama_like(*_ffn("follow", *_GLU))),
    "GraniteForCausalLM": WeightMap(_llama_like(*_ffn("follow", *_GLU))),
    "ArceeForCausalLM": WeightMap(_llama_like(*_ffn("follow", "up_proj", "down_proj"))),
    "Starcoder2ForCausalLM": WeightMap(
        _llama_like(*_ffn("follow", up_proj="c_fc", down_proj="c_proj"), norm_bias="always")
    ),
    "StableLmForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), norm_bias="always", out_bias="never")
    ),
    "DbrxForCausalLM": WeightMap(
        _mosaic_like("norm_attn_norm.", *_DBRX_FFN),
        router="transformer.blocks.{i}.ffn.router.layer.weight",
    ),
    "OlmoeForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU, module="mlp.experts.0"), *_OLMOE_NORMS),
        router="model.layers.{i}.mlp.gate.weight",
    ),
    "MistralForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), qkv_bias="never", out_bias="never")
    ),
    "Qwen2ForCausalLM": WeightMap(
        _llama_like(*_ffn("never", *_GLU), qkv_bias="always", out_bias="never")
    ),
}
