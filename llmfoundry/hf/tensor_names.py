"""Names and shapes of the decoder's weights in transformers' architectures, for export and import.

Entry points: `write_folder.py` calls `to_theirs`, `read_folder.py` calls `to_ours`. A new
architecture needs one entry of `MAPS` here and one in `hf/architectures.py`. LLM Foundry's map is
in `llm_foundry_mpt.py`. One `WeightMap` serves both directions: each `NameRule` connects a layer of
the decoder with its counterpart, and biases follow the weight. Rows are split, joined, repeated
and reordered, so that an exported model is imported bit for bit. Values are computed only for
Gemma: its norm weights are offset by one, and its embedding is scaled.

"Our" names and tensors are those of the decoder. "HF" names and tensors are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial

import torch
from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf import expert_names
from llmfoundry.hf.expert_names import ExpertNames, experts_to_ours, experts_to_theirs, present
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.lazy_tensors import LazyTensor, Make, Read, Unread, last_read, lazy, same
from llmfoundry.recipe.model import ResolvedModelConfig


@dataclass(frozen=True)
class NameRule:
    """A layer of the decoder (`ours`) and its counterpart in an HF architecture (`theirs`).

    Attributes:
        ours: name of our layer, without `.weight`; `{i}` is the index of the block.
        theirs: names of the HF weights; several weights split its rows, such as queries, keys and
            values.
        bias: when the HF layer has a bias, see `has_bias`; it is zero if our layer has none.
        transposed: the HF weight has the shape (in, out).
        interleaved: in HF queries and keys, the two elements of a rotary pair are adjacent. In
            ours, they are half a head apart. Of latent attention only the last rows of a head
            rotate, and all heads share those of a key.
        heads: `q` or `k`: HF stores a copy of our weight for each such head; `{h}` is its index.
        less: subtracted from our weight to get the HF weight.
        multiplied: HF multiplies the weight by sqrt(d_model) in the forward pass.
        where: whether a block has the layer; None: all blocks have it.
    """

    ours: str
    theirs: tuple[str, ...]
    bias: str = "never"
    transposed: bool = False
    interleaved: bool = False
    heads: str = ""
    less: float = 0.0
    multiplied: bool = False
    where: Callable[[ResolvedModelConfig, int], bool] | None = None


@dataclass(frozen=True)
class WeightMap:
    """Weight names of one architecture.

    Attributes:
        rules: its layers.
        experts: alternative namings of mixture-of-experts layers. The first one is written; the
            one that matches the file is read.
        ignored: patterns of tensors in files that are not weights: buffers that can be computed.
        own_head: the head is never tied to the embedding; a tied head is written as a copy.
    """

    rules: tuple[NameRule, ...]
    experts: tuple[ExpertNames, ...] = ()
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    own_head: bool = False


def _llama_like(
    *ffn: NameRule,
    qkv_bias: str = "any",
    out_bias: str = "any",
    norm_bias: str = "never",
    norm_2: str = "post_attention_layernorm",
    gemma: bool = False,
    interleaved: bool = False,
) -> tuple[NameRule, ...]:
    """Return Llama's rules, which most architectures share apart from the feed-forward layer."""
    layer, less = "model.layers.{i}.", 1.0 if gemma else 0.0
    qkv = tuple(f"{layer}self_attn.{part}_proj.weight" for part in "qkv")
    return (
        NameRule("wte", ("model.embed_tokens.weight",), multiplied=gemma),
        NameRule("blocks.{i}.norm_1", (f"{layer}input_layernorm.weight",), norm_bias, less=less),
        NameRule("blocks.{i}.attn.Wqkv", qkv, qkv_bias, interleaved=interleaved),
        NameRule("blocks.{i}.attn.out_proj", (f"{layer}self_attn.o_proj.weight",), out_bias),
        NameRule("blocks.{i}.norm_2", (f"{layer}{norm_2}.weight",), norm_bias, less=less),
        *ffn,
        NameRule("norm_f", ("model.norm.weight",), norm_bias, less=less),
        NameRule("lm_head", ("lm_head.weight",)),
    )


def _ffn(bias: str, *names: str, module: str = "mlp", **ours_theirs: str) -> tuple[NameRule, ...]:
    """Return rules of feed-forward layers; keywords map our names to different HF names."""
    pairs = {name: name for name in names} | ours_theirs
    return tuple(
        NameRule(
            f"blocks.{{i}}.ffn.{ours}", (f"model.layers.{{i}}.{module}.{theirs}.weight",), bias
        )
        for ours, theirs in pairs.items()
    )


def _gpt2_like(*, transposed: bool) -> tuple[NameRule, ...]:
    """Return the rules of GPT-2; its Conv1D weights are `transposed`."""
    layer = "transformer.h.{i}."
    return (
        NameRule("wte", ("transformer.wte.weight",)),
        NameRule("wpe", ("transformer.wpe.weight",)),
        NameRule("blocks.{i}.norm_1", (f"{layer}ln_1.weight",), "always"),
        NameRule("blocks.{i}.attn.Wqkv", (f"{layer}attn.c_attn.weight",), "always", transposed),
        NameRule("blocks.{i}.attn.out_proj", (f"{layer}attn.c_proj.weight",), "always", transposed),
        NameRule("blocks.{i}.norm_2", (f"{layer}ln_2.weight",), "always"),
        NameRule("blocks.{i}.ffn.up_proj", (f"{layer}mlp.c_fc.weight",), "always", transposed),
        NameRule("blocks.{i}.ffn.down_proj", (f"{layer}mlp.c_proj.weight",), "always", transposed),
        NameRule("norm_f", ("transformer.ln_f.weight",), "always"),
        NameRule("lm_head", ("lm_head.weight",)),
    )


def _mosaic_like(norms: str, *ffn: NameRule) -> tuple[NameRule, ...]:
    """Return rules of MPT and DBRX; `norms` is the module that contains attention and norms."""
    layer = "transformer.blocks.{i}."
    return (
        NameRule("wte", ("transformer.wte.weight",)),
        NameRule("blocks.{i}.norm_1", (f"{layer}{norms}norm_1.weight",)),
        NameRule("blocks.{i}.attn.Wqkv", (f"{layer}{norms}attn.Wqkv.weight",)),
        NameRule("blocks.{i}.attn.out_proj", (f"{layer}{norms}attn.out_proj.weight",)),
        NameRule("blocks.{i}.norm_2", (f"{layer}{norms}norm_2.weight",)),
        *ffn,
        NameRule("norm_f", ("transformer.norm_f.weight",)),
        NameRule("lm_head", ("lm_head.weight",)),
    )


_GLU = ("gate_proj", "up_proj", "down_proj")
_MPT_FFN = tuple(
    NameRule(f"blocks.{{i}}.ffn.{name}", (f"transformer.blocks.{{i}}.ffn.{name}.weight",))
    for name in ("up_proj", "down_proj")
)


def _qk_norms(name: str, heads: bool = False) -> tuple[NameRule, ...]:
    """Return rules for the norms of queries and keys; `{part}` in `name` becomes q or k."""
    return tuple(
        NameRule(
            f"blocks.{{i}}.attn.{part}_ln",
            ("model.layers.{i}.self_attn." + name.replace("{part}", part),),
            heads=part if heads else "",
        )
        for part in "qk"
    )


def _gpt_neo() -> tuple[NameRule, ...]:
    """Return the rules of GPT-Neo: GPT-2's with separate queries, keys and values."""
    attn, gpt2 = "transformer.h.{i}.attn.attention.", _gpt2_like(transposed=False)
    return (
        *(rule for rule in gpt2 if ".attn." not in rule.ours),
        NameRule("blocks.{i}.attn.Wqkv", tuple(f"{attn}{part}_proj.weight" for part in "qkv")),
        NameRule("blocks.{i}.attn.out_proj", (f"{attn}out_proj.weight",), "always"),
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
    "DbrxForCausalLM": WeightMap(
        _mosaic_like("norm_attn_norm."), (expert_names.DBRX,), own_head=True
    ),
    "OlmoeForCausalLM": WeightMap(_llama_like(*_qk_norms("{part}_norm.weight")), expert_names.QWEN),
    "MixtralForCausalLM": WeightMap(
        _llama_like(qkv_bias="never", out_bias="never"), expert_names.MIXTRAL
    ),
    "Qwen3MoeForCausalLM": WeightMap(
        _llama_like(*_qk_norms("{part}_norm.weight")), expert_names.QWEN
    ),
    "GraniteMoeForCausalLM": WeightMap(_llama_like(), expert_names.GRANITE),
    "GraniteMoeSharedForCausalLM": WeightMap(_llama_like(), expert_names.GRANITE),
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
    "GptOssForCausalLM": WeightMap(
        _llama_like(
            NameRule("blocks.{i}.attn.sinks", ("model.layers.{i}.self_attn.sinks",)),
        ),
        expert_names.GPT_OSS,
    ),
    "GPTNeoForCausalLM": WeightMap(
        _gpt_neo(), ignored=("*.attention.bias", "*.attention.masked_bias")
    ),
}


def _deepseek() -> tuple[NameRule, ...]:
    """Return the rules of DeepSeek-V2 and V3 outside of experts."""
    ours, theirs = "blocks.{i}.attn.", "model.layers.{i}.self_attn."
    attention = tuple(
        NameRule(
            f"{ours}{name}", (f"{theirs}{other}.weight",), interleaved=name not in FIXED_ROWS,
            where=where,
        )
        for name, other, where in (
            ("Wq", "q_proj", lambda c, _: c.attn_config.q_lora_rank is None),
            ("Wq_a", "q_a_proj", _has_query_latents),
            ("q_a_ln", "q_a_layernorm", _has_query_latents),
            ("Wq_b", "q_b_proj", _has_query_latents),
            ("Wkv_a", "kv_a_proj_with_mqa", None),
            ("kv_a_ln", "kv_a_layernorm", None),
            ("Wkv_b", "kv_b_proj", None),
        )
    )  # fmt: skip
    dense = (replace(rule, where=_is_dense) for rule in _ffn("never", *_GLU))
    others = _llama_like(*dense, qkv_bias="never", out_bias="never")
    return *(rule for rule in others if not rule.ours.endswith("Wqkv")), *attention


FIXED_ROWS = ("Wq_a", "q_a_ln", "kv_a_ln", "Wkv_b")  # of latent attention, without rotary pairs


def _has_query_latents(config: ResolvedModelConfig, block: int) -> bool:
    return config.attn_config.q_lora_rank is not None


def _is_dense(config: ResolvedModelConfig, block: int) -> bool:
    return block < (config.ffn_config.first_k_dense_replace or 0)


# transformers does not load the layer that predicts one more token either
_NEXT_TOKEN = ("*.rotary_emb.inv_freq", "model.layers.61.*")
MAPS |= {
    name: WeightMap(_deepseek(), experts, _NEXT_TOKEN)
    for name, experts in (
        ("DeepseekV2ForCausalLM", expert_names.DEEPSEEK_V2),
        ("DeepseekV3ForCausalLM", expert_names.DEEPSEEK_V3),
    )
}


def has_bias(kind: str, config: ResolvedModelConfig) -> bool:
    """Return whether an HF layer has a bias.

    Args:
        kind: `never`; `always`; `qkv`: if our queries, keys and values have one; `other`: if our
            other layers have one; `any`: if either has one.
        config: resolved model configuration.
    """
    qkv, other = config.attention_bias, not config.no_bias
    return {"never": False, "always": True, "qkv": qkv, "other": other, "any": qkv or other}[kind]


def padding(weights: WeightMap, config: ResolvedModelConfig) -> int:
    """Return the number of linear layers per block whose bias exists only in HF, as zeros."""
    return sum(
        has_bias(rule.bias, config)
        and not has_bias("qkv" if rule.ours.endswith("Wqkv") else "other", config)
        for rule in weights.rules
        if "norm" not in rule.ours
    )


def to_theirs(
    weights: WeightMap, config: ResolvedModelConfig, shapes: Mapping[str, Tensor], read: Read
) -> Iterator[LazyTensor]:
    """Yield the HF tensors in order.

    Args:
        weights: map of the HF architecture.
        config: resolved model configuration.
        shapes: all our tensors by name, on any device; only their shapes are used.
        read: returns one of our tensors by name.

    Raises:
        UserError: one of our tensors has no counterpart.
    """
    # `sketch` records which of our tensors were used
    sketch = Unread(shapes, shapes.__getitem__)
    read = last_read(read)
    for rule, layer, theirs in layers(weights, config):
        # a tied head is written only for architectures that never tie it
        source = f"{layer}.weight"
        if layer == "lm_head" and config.tie_word_embeddings:
            if weights.own_head:
                yield lazy(theirs[0], partial(same, "wte.weight"), sketch, read)
            continue
        if source not in shapes:
            assert layer.endswith("_ln"), f"{source} is missing"
            continue
        # weights, then biases
        for index, name in enumerate(theirs):
            part = partial(_part, rule, config, source, (index, len(theirs)))
            yield lazy(name, part, sketch, read)
        if has_bias(rule.bias, config):
            bias = f"{layer}.bias" if f"{layer}.bias" in shapes else len(shapes[source])
            for index, name in enumerate(theirs):
                padded = partial(_bias_part, rule, config, bias, (index, len(theirs)))
                yield lazy(_bias_name(name), padded, sketch, read)
    if weights.experts:
        for name, made in experts_to_theirs(weights.experts[0], config, shapes):
            yield lazy(name, made, sketch, read)
    for name in sketch.left():
        raise UserError(f"{name}: has no place there; write architecture=llmfoundry")


def _part(
    rule: NameRule, config: ResolvedModelConfig, source: str, which: tuple[int, int], read: Read
) -> Tensor:
    """Return one HF tensor made of our weight; `which` is (index, number of such tensors)."""
    index, count = which
    weight = computed(rule, config, read(source))
    part = _rows(rule, weight, count, config)[index]
    return part.T if rule.transposed else part


def _bias_part(
    rule: NameRule,
    config: ResolvedModelConfig,
    source: str | int,
    which: tuple[int, int],
    read: Read,
) -> Tensor:
    """Return one HF bias made of our bias `source`, or of as many zeros."""
    bias = torch.zeros(source) if isinstance(source, int) else read(source)
    return _rows(rule, bias, which[1], config)[which[0]]


def computed(
    rule: NameRule, config: ResolvedModelConfig, weight: Tensor, *, back: bool = False
) -> Tensor:
    """Return the HF value of our weight or, with `back`, our value of an HF weight.

    The result is fp32 if anything is computed.
    """
    if rule.less:
        return weight.float() + (rule.less if back else -rule.less)
    if rule.multiplied:
        root = config.d_model**0.5
        return weight.float() * root if back else weight.float() / root
    return weight


def to_ours(
    weights: WeightMap,
    config: ResolvedModelConfig,
    names: Collection[str],
    sketch: Read,
    read: Read,
    *,
    biased: Mapping[str, bool],
) -> Iterator[LazyTensor]:
    """Yield the tensors of the decoder, made of HF tensors.

    Names and shapes are compared before any weight is read. When the last tensor was yielded, all
    tensors of the file were used.

    Args:
        weights: map of the HF architecture.
        config: resolved model configuration, which determines the layers of the decoder.
        names: names of the HF tensors.
        sketch: returns an HF tensor: the values of vectors and biases, only the shape of matrices.
        read: returns the values of an HF tensor.
        biased: whether config.json gives biases to the rules with each value of `bias`.

    Raises:
        UserError: a tensor is missing, has the wrong shape, or has no counterpart.
    """
    # shapes of our tensors and of HF tensors
    with torch.device("meta"):
        state = Decoder(config).state_dict()
        expected = dict(_expected_shapes(weights, config, state))
    shapes = {name: tensor.shape for name, tensor in state.items()}
    file = Unread(names, sketch)

    def there(name: str) -> Tensor:
        if name not in names:
            raise UserError(f"{name}: the tensor is missing; the model cannot be read whole")
        tensor = file(name)
        check_shape(name, tensor.shape, expected.get(name, tensor.shape))
        return tensor

    # make our tensors, and check that all tensors of the file were used
    yielded = set()
    for name, make in _ours_of_theirs(weights, config, there, names, shapes.keys(), biased):
        tensor = lazy(name, make, there, read)
        check_shape(name, tensor.shape, shapes[name])
        yielded.add(name)
        yield tensor
    _refuse_unread(weights, file)
    assert yielded == shapes.keys(), yielded ^ shapes.keys()


def _expected_shapes(
    weights: WeightMap, config: ResolvedModelConfig, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, torch.Size]]:
    """Yield the shape of each HF tensor that a rule makes of `state`, which is on meta.

    Queries, keys and values are compared separately: two wrong shapes may add up to a right one.
    """
    for rule, layer, theirs in layers(weights, config):
        for index, name in enumerate(theirs):
            which = index, len(theirs)
            if f"{layer}.weight" in state:
                weight = _part(rule, config, f"{layer}.weight", which, state.__getitem__)
                yield name, weight.shape
            if f"{layer}.bias" in state:
                bias = _bias_part(rule, config, f"{layer}.bias", which, state.__getitem__)
                yield _bias_name(name), bias.shape


def _ours_of_theirs(
    weights: WeightMap,
    config: ResolvedModelConfig,
    sketch: Read,
    names: Collection[str],
    ours: Collection[str],
    biased: Mapping[str, bool],
) -> Iterator[tuple[str, Make]]:
    """Yield our tensors that the map covers, each with the function that makes it."""
    if weights.experts:
        yield from experts_to_ours(present(weights.experts, names, config), config, sketch)
    for rule, layer, theirs in layers(weights, config):
        if f"{layer}.weight" not in ours:
            continue
        _check_biases(theirs, names, sketch, biased=biased[rule.bias])
        if rule.heads:
            _check_same(theirs, sketch)
            theirs = theirs[:1]
        yield f"{layer}.weight", partial(_whole_weight, rule, config, theirs)
        if f"{layer}.bias" in ours:
            present_biases = {name for name in map(_bias_name, theirs) if name in names}
            yield f"{layer}.bias", partial(_whole_bias, rule, config, theirs, present_biases)


def _whole_weight(
    rule: NameRule, config: ResolvedModelConfig, theirs: tuple[str, ...], read: Read
) -> Tensor:
    """Return our weight, joined from HF weights."""
    parts = [read(name).T if rule.transposed else read(name) for name in theirs]
    return computed(rule, config, _joined(rule, parts, config), back=True)


def _whole_bias(
    rule: NameRule,
    config: ResolvedModelConfig,
    theirs: tuple[str, ...],
    there: set[str],
    read: Read,
) -> Tensor:
    """Return our bias, joined from HF biases; a missing bias is zero."""
    parts = []
    for name in theirs:
        bias, weight = _bias_name(name), read(name)
        width = weight.shape[1 if rule.transposed else 0]
        parts.append(read(bias) if bias in there else weight.new_zeros(width))
    return _joined(rule, parts, config)


def check_shape(name: str, found: torch.Size, shape: torch.Size) -> None:
    """Raise a UserError if a tensor does not have the shape that the settings imply."""
    if found != shape:
        raise UserError(
            f"config.json: makes {name} {tuple(shape)}, but the file's tensor is"
            f" {tuple(found)}; the two belong to different models"
        )


def _check_biases(
    theirs: tuple[str, ...], names: Collection[str], sketch: Read, *, biased: bool
) -> None:
    """Check that a file has the biases that config.json declares, and others only as zeros."""
    for name in map(_bias_name, theirs):
        if biased and name not in names:
            raise UserError(f"{name}: the tensor is missing; the model cannot be read whole")
        if not biased and name in names and sketch(name).any():
            raise UserError(f"{name}: is not zero, but config.json says that there is no such bias")


def _check_same(names: tuple[str, ...], sketch: Read) -> None:
    """Check that the norm weights of all heads are equal, because ours are shared."""
    first = sketch(names[0])
    for name in names:
        if not torch.equal(sketch(name), first):
            raise UserError(f"{name}: differs from {names[0]}; the decoder's heads share one norm")


def bias_names(
    weights: WeightMap, config: ResolvedModelConfig, names: Collection[str], *, qkv: bool
) -> list[str]:
    """Return the biases among `names`: those of queries, keys and values (`qkv`), or all others."""
    biases = set()
    for rule, _, theirs in layers(weights, config):
        if rule.ours.endswith(("Wqkv", "Wq")) == qkv:
            biases |= {_bias_name(name) for name in theirs}
    if not qkv:
        biases |= {name for each in weights.experts for name in each.biases(config)}
    return sorted(biases & set(names))


def layers(
    weights: WeightMap, config: ResolvedModelConfig
) -> Iterator[tuple[NameRule, str, tuple[str, ...]]]:
    """Yield each rule with our layer name and the HF weight names, block by block."""
    heads = {"q": config.n_heads, "k": config.attn_config.kv_n_heads or 1, "": 1}
    for rule in weights.rules:
        for block in range(config.n_layers) if "{i}" in rule.ours else (0,):
            if rule.where is not None and not rule.where(config, block):
                continue
            numbers = range(heads[rule.heads])
            theirs = (name.format(i=block, h=h) for name in rule.theirs for h in numbers)
            yield rule, rule.ours.format(i=block), tuple(theirs)


def _rows(
    rule: NameRule, tensor: Tensor, parts: int, config: ResolvedModelConfig
) -> tuple[Tensor, ...]:
    """Split the rows of our weight into its HF parts."""
    if rule.interleaved and parts == 1:
        return (rotated_rows(rule.ours, tensor, config),)
    if parts == 1 or rule.heads:
        return (tensor,) * parts
    kv_width = config.attn_config.kv_n_heads * config.head_dim
    q, k, v = tensor.split((config.n_heads * config.head_dim, kv_width, kv_width))
    if rule.interleaved:
        q, k = swap_pairs(q, 2, config.head_dim // 2), swap_pairs(k, 2, config.head_dim // 2)
    return q, k, v


def rotated_rows(
    layer: str, rows: Tensor, config: ResolvedModelConfig, *, back: bool = False
) -> Tensor:
    """Reorder the rotary rows of a projection of latent attention from ours to HF's, or back.

    Args:
        layer: name of our layer; the queries have a rotated part for each head.
        rows: (heads * (others + rotary), …), of which the last rows of a head rotate.
        config: resolved model configuration.
        back: from HF's order to ours.
    """
    heads, width = 1 if layer.endswith("Wkv_a") else config.n_heads, config.rotary_dim
    by_head = rows.unflatten(0, (heads, -1))
    others, rotary = by_head.split((by_head.shape[1] - width, width), dim=1)
    pairs = (width // 2, 2) if back else (2, width // 2)
    rotary = swap_pairs(rotary.flatten(0, 1), *pairs).unflatten(0, (heads, width))
    return torch.cat([others, rotary], dim=1).flatten(0, 1)


def swap_pairs(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Exchange the two inner axes of rows (heads * outer * inner, …) within each head."""
    return rows.unflatten(0, (-1, outer, inner)).transpose(1, 2).flatten(0, 2)


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _joined(rule: NameRule, parts: list[Tensor], config: ResolvedModelConfig) -> Tensor:
    """Join HF parts into our weight; the inverse of `_rows`."""
    if len(parts) == 1 and rule.interleaved:
        return rotated_rows(rule.ours, parts[0], config, back=True)
    if len(parts) == 1:
        return parts[0].contiguous()
    if rule.interleaved:
        pairs = [swap_pairs(part, config.head_dim // 2, 2) for part in parts[:2]]
        parts = [*pairs, *parts[2:]]
    return torch.cat(parts)


def _refuse_unread(weights: WeightMap, file: Unread) -> None:
    """Raise a UserError if a file has an unused tensor other than a known buffer or a zero bias."""
    unread = [n for n in file.left() if not any(fnmatch(n, p) for p in weights.ignored)]
    read = set(file.names) - set(unread)
    unknown = [
        name
        for name in unread
        if name.removesuffix("bias") + "weight" not in read or file(name).any()
    ]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(f"{unknown[0]}{more}: the decoder has no such weights")
