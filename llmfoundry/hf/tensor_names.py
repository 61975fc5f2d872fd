"""Names and shapes of the decoder's weights in transformers' architectures, for both directions.

Entry points: `write_folder.py` calls `to_theirs`, `read_folder.py` calls `to_ours`. A new
architecture needs one entry of `MAPS` here and one in `hf/architectures.py`. LLM Foundry's map is
in `llm_foundry_mpt.py`. One `WeightMap` serves both directions: each `NameRule` connects a layer of
the decoder with its counterpart, and biases follow the weight. Rows are split, joined, repeated
and reordered, so that an exported model is imported bit for bit. Values are computed only for
Gemma: its norm weights are offset by one, and its embedding is scaled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
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
    """A layer of the decoder (ours) and its counterpart in an architecture (theirs).

    Attributes:
        ours: name of our layer, without `.weight`; `{i}` is the block's index.
        theirs: full names of their weights; several weights split its rows, such as queries, keys
            and values.
        bias: when their layer has a bias, see `has_bias`; zeros if our layer has none.
        transposed: their weight has the shape (in, out).
        interleaved: in their queries and keys, the two elements of a rotary pair are adjacent; in
            ours, they are half a head apart.
        heads: `q` or `k`: they store a copy of our weight for each such head; `{h}` is its index.
        less: subtracted from our weight to get theirs.
        multiplied: they multiply the weight by sqrt(d_model) in the forward pass.
    """

    ours: str
    theirs: tuple[str, ...]
    bias: str = "never"
    transposed: bool = False
    interleaved: bool = False
    heads: str = ""
    less: float = 0.0
    multiplied: bool = False


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
    """Return rules of feed-forward layers; keywords map our names to different names of theirs."""
    pairs = {name: name for name in names} | ours_theirs
    return tuple(
        NameRule(
            f"blocks.{{i}}.ffn.{ours}", (f"model.layers.{{i}}.{module}.{theirs}.weight",), bias
        )
        for ours, theirs in pairs.items()
    )


def _gpt2_like(*, transposed: bool) -> tuple[NameRule, ...]:
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
    "GPTNeoForCausalLM": WeightMap(
        _gpt_neo(), ignored=("*.attention.bias", "*.attention.masked_bias")
    ),
}


def has_bias(kind: str, config: ResolvedModelConfig) -> bool:
    """Whether their layer has a bias.

    Args:
        kind: `never`; `always`; `qkv`: where our queries, keys and values have one; `other`: where
            our other layers have; `any`: where either has.
        config: filled.
    """
    qkv, other = config.attention_bias, not config.no_bias
    return {"never": False, "always": True, "qkv": qkv, "other": other, "any": qkv or other}[kind]


def padding(weights: WeightMap, config: ResolvedModelConfig) -> int:
    """Linear layers of a block that have a bias in theirs alone: it is written as zeros."""
    return sum(
        has_bias(rule.bias, config)
        and not has_bias("qkv" if rule.ours.endswith("Wqkv") else "other", config)
        for rule in weights.rules
        if "norm" not in rule.ours
    )


def to_theirs(
    weights: WeightMap, config: ResolvedModelConfig, shapes: Mapping[str, Tensor], read: Read
) -> Iterator[LazyTensor]:
    """Their tensors, in order.

    Args:
        weights: their architecture's map.
        config: filled.
        shapes: of ours, all of them; on any device.
        read: gives one of ours.

    Raises:
        UserError: one of ours has no place among theirs, by its name.
    """
    sketch = Unread(shapes, shapes.__getitem__)
    read = last_read(read)
    for rule, layer, theirs in layers(weights, config):
        source = f"{layer}.weight"
        if layer == "lm_head" and config.tie_word_embeddings:
            if weights.own_head:
                yield lazy(theirs[0], partial(same, "wte.weight"), sketch, read)
            continue
        if source not in shapes:
            assert layer.endswith("_ln"), f"{source} is missing"
            continue
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
    """One of theirs, (number, of how many), made of our weight."""
    part = _rows(rule, computed(rule, config, read(source)), which[1], config)[which[0]]
    return part.T if rule.transposed else part


def _bias_part(
    rule: NameRule,
    config: ResolvedModelConfig,
    source: str | int,
    which: tuple[int, int],
    read: Read,
) -> Tensor:
    """The same of our bias, or of so many zeros."""
    bias = torch.zeros(source) if isinstance(source, int) else read(source)
    return _rows(rule, bias, which[1], config)[which[0]]


def computed(
    rule: NameRule, config: ResolvedModelConfig, weight: Tensor, *, back: bool = False
) -> Tensor:
    """Theirs of our weight, or, `back`, ours of theirs; in fp32 where anything is computed."""
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
    """The decoder's state, made of their tensors.

    All is compared before any weight is read, by shapes; once the last was given, all fits.

    Args:
        weights: their architecture's map.
        config: filled; says which layers the decoder has.
        names: their tensors' names.
        sketch: gives one: vectors and biases themselves, of what is larger the shape.
        read: gives one itself.
        biased: whether rules of each kind of `bias` have one, as config.json says.

    Raises:
        UserError: a tensor is missing, has another shape, or has no counterpart.
    """
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

    filled = set()
    for name, make in _ours_of_theirs(weights, config, there, names, shapes.keys(), biased):
        made = lazy(name, make, there, read)
        check_shape(name, made.shape, shapes[name])
        filled.add(name)
        yield made
    _refuse_unread(weights, file)
    assert filled == shapes.keys(), filled ^ shapes.keys()


def _expected_shapes(
    weights: WeightMap, config: ResolvedModelConfig, state: Mapping[str, Tensor]
) -> Iterator[tuple[str, torch.Size]]:
    """Yield the shape of each of their tensors that a rule makes of `state`, which is on meta.

    Queries, keys and values are compared one by one: joined, two wrong shapes can make a right one.
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
    """Those of our tensors that the map knows."""
    if weights.experts:
        yield from experts_to_ours(present(weights.experts, names), config, sketch)
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
    parts = [read(name).T if rule.transposed else read(name) for name in theirs]
    return computed(rule, config, _joined(rule, parts, config), back=True)


def _whole_bias(
    rule: NameRule,
    config: ResolvedModelConfig,
    theirs: tuple[str, ...],
    there: set[str],
    read: Read,
) -> Tensor:
    """Their biases joined, zeros where they have none."""
    parts = []
    for name in theirs:
        bias, weight = _bias_name(name), read(name)
        width = weight.shape[1 if rule.transposed else 0]
        parts.append(read(bias) if bias in there else weight.new_zeros(width))
    return _joined(rule, parts, config)


def check_shape(name: str, found: torch.Size, shape: torch.Size) -> None:
    """Raise a UserError where a tensor of ours is not as the settings make it."""
    if found != shape:
        raise UserError(
            f"config.json: makes {name} {tuple(shape)}, but the file's tensor is"
            f" {tuple(found)}; the two belong to different models"
        )


def _check_biases(
    theirs: tuple[str, ...], names: Collection[str], sketch: Read, *, biased: bool
) -> None:
    """A file has the biases that its config.json says, and no others but zeros."""
    for name in map(_bias_name, theirs):
        if biased and name not in names:
            raise UserError(f"{name}: the tensor is missing; the model cannot be read whole")
        if not biased and name in names and sketch(name).any():
            raise UserError(f"{name}: is not zero, but config.json says that there is no such bias")


def _check_same(names: tuple[str, ...], sketch: Read) -> None:
    """The weight that all heads share is one."""
    first = sketch(names[0])
    for name in names:
        if not torch.equal(sketch(name), first):
            raise UserError(f"{name}: differs from {names[0]}; the decoder's heads share one norm")


def bias_names(
    weights: WeightMap, config: ResolvedModelConfig, names: Collection[str], *, qkv: bool
) -> list[str]:
    """Biases among `names`: those of queries, keys and values, or all the others."""
    known = {
        _bias_name(name)
        for rule, _, theirs in layers(weights, config)
        for name in theirs
        if rule.ours.endswith(("Wqkv", "Wq")) == qkv
    }
    return sorted(known & set(names))


def layers(
    weights: WeightMap, config: ResolvedModelConfig
) -> Iterator[tuple[NameRule, str, tuple[str, ...]]]:
    """Each rule with our layer and their weights, block by block."""
    heads = {"q": config.n_heads, "k": config.attn_config.kv_n_heads or 1, "": 1}
    for rule in weights.rules:
        for block in range(config.n_layers) if "{i}" in rule.ours else (0,):
            numbers = range(heads[rule.heads])
            theirs = (name.format(i=block, h=h) for name in rule.theirs for h in numbers)
            yield rule, rule.ours.format(i=block), tuple(theirs)


def _rows(
    rule: NameRule, tensor: Tensor, parts: int, config: ResolvedModelConfig
) -> tuple[Tensor, ...]:
    if parts == 1 or rule.heads:
        return (tensor,) * parts
    kv_width = config.attn_config.kv_n_heads * config.head_dim
    q, k, v = tensor.split((config.n_heads * config.head_dim, kv_width, kv_width))
    if rule.interleaved:
        q, k = (swap_pairs(part, 2, config.head_dim // 2) for part in (q, k))
    return q, k, v


def swap_pairs(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Rows (heads * outer * inner, …) with outer and inner exchanged within each head."""
    return rows.unflatten(0, (-1, outer, inner)).transpose(1, 2).flatten(0, 2)


def _bias_name(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _joined(rule: NameRule, parts: list[Tensor], config: ResolvedModelConfig) -> Tensor:
    """What `_rows` takes apart."""
    if len(parts) == 1:
        return parts[0].contiguous()
    if rule.interleaved:
        pairs = [swap_pairs(part, config.head_dim // 2, 2) for part in parts[:2]]
        parts = [*pairs, *parts[2:]]
    return torch.cat(parts)


def _refuse_unread(weights: WeightMap, file: Unread) -> None:
    """What a file holds beside what was read must be a known buffer, or a bias of zeros."""
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
