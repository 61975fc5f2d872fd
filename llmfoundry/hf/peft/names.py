"""Modules of a Hugging Face architecture that can have an adapter, and our matrices in them.

`write.py` and `read.py` iterate over `peft_modules`, one for each direction. A `PeftModule` is a
module or parameter of the folder that `convert.py to=hf` writes for the base model. The file names
and name prefixes of an adapter folder are defined here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from llmfoundry.bounded import first_to_match, match_all, run_bounded
from llmfoundry.errors import UserError
from llmfoundry.files import read_object
from llmfoundry.hf.architectures import OWN, is_mixture
from llmfoundry.hf.choose_architecture import choose_architecture
from llmfoundry.hf.expert_names import ExpertNames
from llmfoundry.hf.tensor_names import MAPS, NameRule, layers, swap_pairs
from llmfoundry.recipe.model import ResolvedModelConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ROUTER = "weight"
DEFINED = (ROUTER, "gate_up_proj", "down_proj")  # as classes of experts and routers define them
OWN_TYPE = "LLMFOUNDRY_LORA"  # in place of LORA, where peft would leave something out
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
    """

    module: str
    parameter: str
    rows: int
    sources: tuple[RowRange, ...]
    experts: int = 1
    order: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    factor: float = 1.0
    kind: str = "linear"


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
    modules = [p for rule, ours, theirs in layers(weights, config)
             for p in _linear(rule, ours, theirs, config)]  # fmt: skip
    if weights.experts and is_mixture(config):
        names = weights.experts[0] if separate else weights.experts[-1]
        for block in range(config.n_layers):
            modules += _experts(names.of(block), f"blocks.{block}.ffn.", config, architecture)
    return modules


def _linear(
    rule: NameRule, ours: str, theirs: tuple[str, ...], config: ResolvedModelConfig
) -> Iterator[PeftModule]:
    """Yield the linear modules or the embedding of a rule."""
    if rule.ours in ("wte", "wpe"):
        if rule.ours == "wte":
            factor = config.d_model**-0.5 if rule.multiplied else 1.0
            source = RowRange(ours, 0, config.d_model)
            yield PeftModule(module_name(theirs[0]), "", config.d_model, (source,), factor=factor,
                        kind="embedding")  # fmt: skip
        return
    if "norm" in rule.ours or rule.ours.endswith("_ln"):
        return
    heights = [_height(ours, config)]
    if len(theirs) == 3:
        kv = config.attn_config.kv_n_heads * config.head_dim
        heights = [config.n_heads * config.head_dim, kv, kv]
    begin = 0
    for index, (name, rows) in enumerate(zip(theirs, heights, strict=True)):
        order = _pairs(config) if rule.interleaved and index < 2 else None
        source = RowRange(ours, begin, begin + rows)
        yield PeftModule(module_name(name), "", rows, (source,), order=order)
        begin += rows


def _pairs(
    config: ResolvedModelConfig,
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions that reorder rotary pairs from ours to HF's, and back."""
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
    return config.ffn_config.ffn_hidden_size


def _experts(
    names: ExpertNames, at: str, config: ResolvedModelConfig, architecture: str
) -> Iterator[PeftModule]:
    """Yield the router, the experts and the shared expert of a block."""
    ffn, d = config.ffn_config, config.d_model
    n, f = ffn.moe_num_experts or 0, ffn.ffn_hidden_size or 0
    router = module_name(names.router)
    is_linear = architecture in PLAIN_ROUTERS
    yield PeftModule(router, "" if is_linear else "weight", n, (RowRange(f"{at}router", 0, n),))
    w1, v1, w2 = (RowRange(f"{at}experts.{name}", 0, f) for name in ("w1", "v1", "w2"))
    down = RowRange(w2.ours, 0, d)
    if names.form == "joint":
        both = (w1, RowRange(v1.ours, 0, f, at=f))
        for name, rows, sources in ((names.gate, 2 * f, both), (names.down, d, (down,))):
            module, _, parameter = name.rpartition(".")
            yield PeftModule(module, parameter, rows, sources, experts=n)
    elif names.form == "each":
        for name, source, rows in ((names.gate, w1, f), (names.up, v1, f), (names.down, down, d)):
            yield PeftModule(module_name(name), "", rows, (source,), experts=n)
    if names.shared and ffn.shared_expert_hidden_size:
        hidden = ffn.shared_expert_hidden_size
        gate, up, out = (f"{at}shared.{name}_proj" for name in ("gate", "up", "down"))
        both = (RowRange(gate, 0, hidden), RowRange(up, 0, hidden, at=hidden))
        yield PeftModule(module_name(names.shared[0]), "", 2 * hidden, both)
        yield PeftModule(module_name(names.shared[1]), "", d, (RowRange(out, 0, d),))


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


_NAME = re.compile(r"[\w.\-]*")


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
    matches = {name: [end for end in ends(name) if end in order] for name in names}
    return {name: min(of_it, key=order.__getitem__) for name, of_it in matches.items() if of_it}


def _expressions(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the regular expressions that peft 0.18 compiles; plain names are omitted."""
    forms = {"target_modules": "({})$", "exclude_modules": "({})$", "rank_pattern": r"(.*\.)?({})$",
             "alpha_pattern": r"(.*\.)?({})$", "modules_to_save": r"(^|.*\.){}($|\..*)",
             "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\."}  # fmt: skip
    for key, form in forms.items():
        values = config.get(key)
        if isinstance(values, list) and key in ("target_modules", "exclude_modules"):
            continue  # compared as names
        for pattern in [values] if isinstance(values, str) else values or ():
            if isinstance(pattern, str) and not _NAME.fullmatch(pattern):
                yield form.replace("{}", pattern)
