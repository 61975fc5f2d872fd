"""Modules of a Hugging Face architecture that can have an adapter, and our matrices in them.

`write.py` and `read.py` iterate over `peft_modules`, one for each direction. A `PeftModule` is a
module or parameter of the folder that `convert.py to=hf` writes for the base model. The file names
and name prefixes of an adapter folder are defined here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from llmfoundry.bounded import first_to_match, match_all, run_bounded
from llmfoundry.errors import UserError
from llmfoundry.files import read_object
from llmfoundry.hf.architecture import OWN, is_mixture
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.hf.expert_names import DENSE, ExpertNames, blocks_with_experts
from llmfoundry.hf.tensor_names import MAPS, NameRule, layers, rotated_rows, swap_pairs
from llmfoundry.recipe.model import ResolvedModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ROUTER = "weight"
EMBEDDING = "embedding"
TOKEN_ROWS = "token_adapter.trainable_tokens_delta"  # despite its name, the rows themselves
DEFINED = (ROUTER, "gate_up_proj", "down_proj")  # as classes of experts and routers define them
OWN_TYPE = "LLMFOUNDRY_LORA"  # in place of LORA, where peft would leave something out
JOINING = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Classes whose feed-forward layers peft 0.21 takes for routed experts, and joins."""
PLAIN_ROUTERS = ("DbrxForCausalLM",)  # nn.Linear; the others' are a parameter of their own class


@dataclass(frozen=True)
class RowRange:
    """A range of rows of one of our matrices, and its position in an HF matrix.

    Attributes:
        ours: name of our matrix: `blocks.0.attn.Wqkv`, `blocks.0.ffn.experts.w1`.
        begin, end: range of rows in our matrix.
        at: first row in the HF matrix.
    """

    ours: str
    begin: int
    end: int
    at: int = 0


@dataclass(frozen=True)
class PeftModule:
    """A matrix of the Hugging Face model.

    Attributes:
        module: name of the module.
        parameter: name of the parameter if peft targets it by `target_parameters`; else "".
        rows: number of rows.
        sources: ranges of our matrices that it contains.
        experts: number of stacked matrices; 1 for a plain matrix.
        order: functions that reorder rows from ours to HF's, and back.
        factor: the HF matrix is our matrix times this factor.
        kind: `linear` or `embedding`.
        is_lost: peft takes the module for a part of the routed experts, and loses its adapter.
    """

    module: str
    parameter: str
    rows: int
    sources: tuple[RowRange, ...]
    experts: int = 1
    order: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    factor: float = 1.0
    kind: str = "linear"
    is_lost: bool = False


def adapter_architecture(config: ResolvedModelConfig, architecture: str | None = None) -> str:
    """Return the architecture whose names an adapter uses: that of the export, else our own."""
    if architecture is not None:
        return choose_architecture(config, architecture)
    try:
        return choose_architecture(config, None)
    except UserError:
        return OWN


def splits_qkv(config: ResolvedModelConfig) -> bool:
    """Return whether that architecture has separate queries, keys and values.

    Each of them then has a separate adapter.
    """
    name = adapter_architecture(config)
    if name == OWN:
        return False
    return any(len(rule.theirs) == 3 for rule in MAPS[name].rules if rule.ours.endswith("Wqkv"))


def peft_modules(
    config: ResolvedModelConfig, architecture: str, *, separate: bool = False
) -> list[PeftModule]:
    """Return every matrix of the architecture that can have an adapter.

    Args:
        config: resolved model configuration.
        architecture: transformers class, or `llmfoundry`.
        separate: whether each expert has separate matrices, as in files.
    """
    if architecture == OWN:
        return []
    weights = MAPS[architecture]
    modules: list[PeftModule] = []
    for rule, ours, theirs in layers(weights, config):
        modules += _linear(rule, ours, theirs, config)
    if weights.experts and is_mixture(config):
        names = weights.experts[0] if separate else weights.experts[-1]
        for block in blocks_with_experts(config):
            modules += _experts(names.of(block), f"blocks.{block}.ffn.", config, architecture)
    if architecture in JOINING:
        modules = [replace(module, is_lost=_is_plain_ffn(module)) for module in modules]
    return modules


def _is_plain_ffn(module: PeftModule) -> bool:
    """Return whether a module is a projection of a feed-forward layer, not of routed experts."""
    names = (".gate_proj", ".up_proj", ".down_proj")
    return ".experts." not in module.module and module.module.endswith(names)


def _linear(
    rule: NameRule, ours: str, theirs: tuple[str, ...], config: ResolvedModelConfig
) -> Iterator[PeftModule]:
    """Yield the linear modules or the embedding of a rule; nothing for norms, positions, sinks."""
    # the embedding
    if rule.ours in ("wte", "wpe"):
        if rule.ours == "wte":
            factor = config.d_model**-0.5 if rule.multiplied else 1.0
            source = RowRange(ours, 0, config.d_model)
            yield PeftModule(module_name(theirs[0]), "", config.d_model, (source,), factor=factor,
                        kind="embedding")  # fmt: skip
        return
    if "norm" in rule.ours or rule.ours.endswith(("_ln", "sinks")):
        return

    # linear layers; three of them are the queries, keys and values of our fused Wqkv
    heights = [_height(ours, config)]
    if len(theirs) == 3:
        kv = config.attn_config.kv_n_heads * config.head_dim
        heights = [config.n_heads * config.head_dim, kv, kv]
    begin = 0
    for index, (name, rows) in enumerate(zip(theirs, heights, strict=True)):
        is_rotated = index < 2  # queries and keys
        order = _pairs(ours, config, len(theirs)) if rule.interleaved and is_rotated else None
        source = RowRange(ours, begin, begin + rows)
        yield PeftModule(module_name(name), "", rows, (source,), order=order)
        begin += rows


def _pairs(
    layer: str, config: ResolvedModelConfig, parts: int
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions that reorder rotary pairs from ours to HF's, and back.

    A layer of one part is one of latent attention.
    """
    if parts == 1:
        to_theirs = partial(rotated_rows, layer, config=config)
        return to_theirs, partial(rotated_rows, layer, config=config, back=True)
    half = (config.head_dim or 0) // 2
    return lambda rows: swap_pairs(rows, 2, half), lambda rows: swap_pairs(rows, half, 2)


def module_name(weight: str) -> str:
    """Return the name of the module that contains a weight."""
    return weight.removesuffix(".weight")


def _height(layer: str, config: ResolvedModelConfig) -> int:
    """Return the number of rows of one of our linear layers."""
    assert config.head_dim and config.attn_config.kv_n_heads and config.vocab_size
    if layer == "lm_head":
        return config.vocab_size
    if layer.endswith("Wqkv"):
        return (config.n_heads + 2 * config.attn_config.kv_n_heads) * config.head_dim
    if layer.endswith(("out_proj", "down_proj")):
        return config.d_model
    if ".attn." in layer:
        return _latent_height(layer.rpartition(".")[2], config)
    if is_mixture(config):  # one of the first layers, without experts
        return config.ffn_config.dense_hidden_size or 0
    return config.ffn_config.ffn_hidden_size


def _latent_height(name: str, config: ResolvedModelConfig) -> int:
    """Return the number of rows of a projection of latent attention."""
    attn, heads = config.attn_config, config.n_heads
    heights = {
        "Wq_a": attn.q_lora_rank or 0,
        "Wkv_a": attn.kv_lora_rank + attn.qk_rope_head_dim,
        "Wkv_b": heads * (attn.qk_nope_head_dim + attn.v_head_dim),
    }
    return heights.get(name, heads * config.head_dim)


def _experts(
    names: ExpertNames, at: str, config: ResolvedModelConfig, architecture: str
) -> Iterator[PeftModule]:
    """Yield the router, the experts and the shared expert of a block."""
    # router
    ffn, d_model = config.ffn_config, config.d_model
    n_experts, hidden = ffn.moe_num_experts or 0, ffn.ffn_hidden_size or 0
    parameter = "" if architecture in PLAIN_ROUTERS else "weight"
    router = (RowRange(f"{at}router", 0, n_experts),)
    yield PeftModule(module_name(names.router), parameter, n_experts, router)

    # experts: gate and up projection in one parameter, or a module for each matrix and expert
    gate = RowRange(f"{at}experts.w1", 0, hidden)
    up = RowRange(f"{at}experts.v1", 0, hidden)
    down = RowRange(f"{at}experts.w2", 0, d_model)
    if names.form == "joint":
        gate_up = (gate, RowRange(up.ours, 0, hidden, at=hidden))
        matrices = ((names.gate, 2 * hidden, gate_up), (names.down, d_model, (down,)))
        for name, rows, sources in matrices:
            module, _, parameter = name.rpartition(".")
            yield PeftModule(module, parameter, rows, sources, experts=n_experts)
    elif names.form == "each":
        yield PeftModule(module_name(names.gate), "", hidden, (gate,), experts=n_experts)
        yield PeftModule(module_name(names.up), "", hidden, (up,), experts=n_experts)
        yield PeftModule(module_name(names.down), "", d_model, (down,), experts=n_experts)

    # shared expert
    if names.shared and ffn.shared_expert_hidden_size:
        hidden = ffn.shared_expert_hidden_size
        if len(names.shared) == len(DENSE):
            heights = (hidden, hidden, d_model)
            for name, ours, rows in zip(names.shared, DENSE.values(), heights, strict=True):
                source = RowRange(f"{at}shared.{ours}", 0, rows)
                yield PeftModule(module_name(name), "", rows, (source,))
            return
        shared_gate = RowRange(f"{at}shared.gate_proj", 0, hidden)
        shared_up = RowRange(f"{at}shared.up_proj", 0, hidden, at=hidden)
        shared_down = RowRange(f"{at}shared.down_proj", 0, d_model)
        gate_up_name, down_name = map(module_name, names.shared)
        yield PeftModule(gate_up_name, "", 2 * hidden, (shared_gate, shared_up))
        yield PeftModule(down_name, "", d_model, (shared_down,))


def depth(parameter: str, parameters: Iterable[str]) -> int:
    """Return the number of peft wrappers around the wrapper of a parameter.

    peft wraps the parameters of a class in the order of their definition.
    """
    return sum(DEFINED.index(parameter) < DEFINED.index(other) for other in parameters)


def read_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of a folder.

    Raises:
        UserError: the file is missing or invalid.
    """
    return read_object(folder / CONFIG, instead="write a folder that peft saved")


def token_tables(folder: Path, config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return the ids of the tokens whose rows an adapter trains, by the end of a module's name.

    A list in place of the names is of the embedding, `EMBEDDING`.

    Args:
        folder: folder of the adapter.
        config: contents of adapter_config.json.

    Raises:
        UserError: they are not ids of tokens.
    """
    written = config.get("trainable_token_indices") or {}
    tables = {EMBEDDING: written} if isinstance(written, list) else written
    if not isinstance(tables, dict) or not all(map(_are_ids, tables.values())):
        raise UserError(
            f"{folder / CONFIG}: trainable_token_indices is not a list of ids, each once, or one"
            " for each table; correct it"
        )
    return tables


def _are_ids(value: Any) -> bool:
    """Return whether a value is a list of different ids of tokens."""
    if not isinstance(value, list) or not all(type(entry) is int for entry in value):
        return False
    return bool(value) and min(value) >= 0 and len({*value}) == len(value)


def trained_tokens(folder: Path, config: Mapping[str, Any]) -> set[int]:
    """Return the ids of the tokens whose rows an adapter trains in every table that it names."""
    tables = token_tables(folder, config).values()
    return set.intersection(*map(set, tables)) if tables else set()


def saved_tables(config: Mapping[str, Any], model: ResolvedModelConfig) -> set[str]:
    """Return which of wte and lm_head an adapter trains in full, by its modules_to_save."""
    architecture, written = adapter_architecture(model), config.get("modules_to_save")
    saved = written if isinstance(written, list) else []
    tables = ("wte", "lm_head")
    names = [(table, f"model.{table}") for table in tables]
    if architecture in MAPS:
        for _, ours, theirs in layers(MAPS[architecture], model):
            names += [(ours, module_name(theirs[0]))] if ours in tables else []
    return {ours for ours, name in names if any(end in saved for end in ends(name))}


_NAME = re.compile(r"[\w.\-]*")  # a plain name, not a regular expression


def first_matches(patterns: Sequence[str], names: Sequence[str], *, file: str) -> dict[str, str]:
    """Return the first pattern of alpha_pattern that matches each name, by peft's rule.

    Args:
        patterns: each matches the end of a name, after a dot or from its beginning.
        names: names of modules.
        file: origin of the patterns, for error messages.

    Raises:
        UserError: a pattern is not a regular expression, or takes too long.
    """
    if all(map(_NAME.fullmatch, patterns)):
        return _by_end(patterns, names)
    return run_bounded(partial(first_to_match, patterns), [names], file=file)[0]


def check_patterns(config: Mapping[str, Any], names: Sequence[str], *, file: str) -> None:
    """Check that peft can match all patterns of a configuration with a model's module names.

    Raises:
        UserError: a pattern is not a regular expression, or takes too long.
    """
    expressions = [*_expressions(config)]
    if expressions:
        run_bounded(partial(match_all, expressions), [names], file=file)


def ends(name: str) -> Iterator[str]:
    """Yield a name, and the rest of it after each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def _by_end(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the first pattern that is an end of each name, for patterns that are plain names."""
    order = {pattern: n for n, pattern in enumerate(patterns)}
    first_patterns = {}
    for name in names:
        matches = [end for end in ends(name) if end in order]
        if matches:
            first_patterns[name] = min(matches, key=order.__getitem__)
    return first_patterns


def _expressions(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the regular expressions that peft 0.18 compiles; plain names are omitted."""
    forms = {"target_modules": "({})$", "exclude_modules": "({})$", "rank_pattern": r"(.*\.)?({})$",
             "alpha_pattern": r"(.*\.)?({})$", "modules_to_save": r"(^|.*\.){}($|\..*)",
             "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\."}  # fmt: skip
    for key, form in forms.items():
        patterns = config.get(key) or ()
        if isinstance(patterns, list) and key in ("target_modules", "exclude_modules"):
            continue  # compared as names
        if isinstance(patterns, str):
            patterns = [patterns]
        for pattern in patterns:
            if isinstance(pattern, str) and not _NAME.fullmatch(pattern):
                yield form.replace("{}", pattern)
