"""Conversion of a Hugging Face folder's tensors to the state of transformers' class.

Entry point: `class_tensors`. transformers 5 merges experts that files store separately, and renames
other tensors. Its conversion table is applied here one tensor at a time, to tensors or to shapes on
the meta device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.errors import UserError, one_line
from llmfoundry.hf.causal_lm import HFCausalLM, read_hf_config
from llmfoundry.hf.read_folder import open_weights
from llmfoundry.models.adapter import is_added, plain_name
from llmfoundry.recipe.model import HFModelConfig, ResolvedHFModelConfig

Read = Callable[[str], Tensor]
PREFIX = "hf."  # before the class's own names in ours
COMPUTED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$", r"\.attention\.bias$")


def class_tensors(
    model: HFCausalLM, names: Collection[str], read: Read, *, may_grow: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The state of `model` by its names; tied ones by each of theirs.

    Args:
        model: on any device.
        names: of the folder's tensors.
        read: reads one, or gives its shape on the meta device.
        may_grow: the model may have more rows for tokens than the folder.

    Raises:
        UserError: a tensor is missing, has another shape, or has no place.
    """
    names_in_class = {plain_name(name): name for name, _ in model.hf.named_parameters()}
    every = model.hf.state_dict(keep_vars=True)
    base_values = {plain_name(name): value for name, value in every.items() if not is_added(name)}
    ties, grows = model.ties, model.vocabulary() if may_grow else set()
    first_of = {other: first for first, others in ties.items() for other in others}
    left = {plain for plain, name in names_in_class.items() if not is_added(name)}
    groups, unknown = _groups(model.hf, names, base_values)
    _refuse_unknown(model.hf, unknown)
    for target, (converter, sources) in groups.items():
        for name, value in _converted(model.hf, target, converter, sources, read):
            if name not in base_values:
                raise UserError(f"{name}: {type(model.hf).__name__} has no such weights")
            _check_shape(name, value, base_values[name], grows=f"{PREFIX}{name}" in grows)
            name = first_of.get(name, name)
            left.discard(name)
            for each in (name, *ties.get(name, ())):
                yield f"{PREFIX}{names_in_class.get(each, each)}", value
    if left:
        name = min(left)
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UserError(f"{name}{more}: the tensor is missing; the model cannot be read whole")


Groups = dict[str, tuple[Any, list[tuple[str, str]]]]  # converter, and pattern and name of sources


def _groups(hf: Any, names: Collection[str], own: dict[str, Any]) -> tuple[Groups, list[str]]:
    """Which tensors of the file make which of the class, and those that make none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(hf)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = hf.base_model_prefix
    groups: Groups = {}
    unknown = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = name, None
        if target not in own:
            unknown.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        groups.setdefault(target, (converter, []))[1].append((pattern or name, name))
    return groups, unknown


def _refuse_unknown(hf: Any, names: list[str]) -> None:
    patterns = (*COMPUTED, *(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ()))
    names = [name for name in names if not any(re.search(p, name) for p in patterns)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(f"{names[0]}{more}: {type(hf).__name__} has no such weights")


def _converted(
    hf: Any, target: str, converter: Any, sources: list[tuple[str, str]], read: Read
) -> Iterator[tuple[str, Tensor]]:
    if converter is None:
        yield target, read(sources[-1][1])
        return
    converter_copy = copy.deepcopy(converter)
    for pattern, name in sources:
        converter_copy.add_tensor(target, name, pattern, partial(read, name))
    try:
        converted = converter_copy.convert(target, model=hf, config=hf.config)
    except RuntimeError as error:  # torch's, of shapes that cannot be joined
        raise UserError(
            f"{sources[0][1]}: cannot become {target}: {one_line(error)}; its shape, or that of a"
            " tensor beside it, is another model's"
        ) from error
    for name, value in converted.items():
        yield name, value[0] if isinstance(value, list) else value


def _check_shape(name: str, value: Tensor, wanted: Tensor, *, grows: bool) -> None:
    """Of shape and kind; where it `grows`, the loader knows what rows to add."""
    shape = value.shape
    if grows and value.ndim and len(value) < len(wanted):
        shape = wanted.shape[:1] + value.shape[1:]
    if shape != wanted.shape:
        raise UserError(
            f"config.json: makes {name} {tuple(wanted.shape)}, but the file's tensor is"
            f" {tuple(value.shape)}; the two belong to different models"
        )
    if wanted.is_floating_point() and not value.is_floating_point():
        raise UserError(
            f"{name}: is {value.dtype}, and the model computes with it; write a folder that is not"
            " quantised"
        )


LONGEST = 2048  # rows of a class whose configuration knows no longest one
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
HIDDEN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_ROWS = 4096  # of an embedding that are added up at a time


def class_config(
    written: dict[str, Any], *, attn_impl: str | None, code: str | None
) -> ResolvedHFModelConfig:
    """The shape of the model that a config.json describes, filled.

    Args:
        written: config.json, with what is overridden.
        attn_impl: transformers' attn_implementation; None: its own choice.
        code: the folder whose Python code may run; None: none.

    Raises:
        UserError: transformers has no such causal language model.
    """
    theirs = read_hf_config(written, code=code)

    def first(names: Iterable[str], default: Any = None) -> Any:
        values = (getattr(theirs, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), default)

    width, heads = first(["hidden_size"]), first(["num_attention_heads"], 1)
    layers, rows = first(["num_hidden_layers"]), first(["vocab_size"])
    if not width or not layers or not rows:
        raise UserError(
            "config.json: has no hidden_size, num_hidden_layers and vocab_size, as a causal"
            " language model has; write the folder of one"
        )
    config = HFModelConfig(
        d_model=width,
        n_heads=heads,
        n_layers=layers,
        head_dim=first(["head_dim"]),
        vocab_size=rows,
        max_seq_len=first(LENGTHS, LONGEST),
        tie_word_embeddings=bool(getattr(theirs, "tie_word_embeddings", False)),
        hf_config=written,
        hf_attn_impl=attn_impl,
        code=code,
    )
    config.attn_config.attn_type = "grouped_query_attention"
    config.attn_config.kv_n_heads = first(["num_key_value_heads"], heads)
    config.ffn_config.ffn_hidden_size = first(HIDDEN, 4 * width)
    _count(config, theirs)
    return config.resolve()


def _count(config: HFModelConfig, theirs: Any) -> None:
    """Write in place what only the class itself can say."""
    model = HFCausalLM(config)
    embedding = model.hf.get_input_embeddings().weight
    tables = [
        module.weight
        for module in model.hf.modules()
        if isinstance(module, nn.Embedding) and module.weight is not embedding
    ]
    longest = config.max_seq_len or 0
    config.learned_pos_emb = any(longest <= len(table) <= longest + 8 for table in tables)
    config.attn_config.rope = not config.learned_pos_emb
    counts = (getattr(theirs, name, None) for name in EXPERTS)
    experts = next((n for n in counts if isinstance(n, int) and n > 0), 1)
    chosen = getattr(theirs, "num_experts_per_tok", 1) or 1
    config.hf_parameters = sum(p.numel() for p in model.parameters())
    matrices = 0
    for p in model.parameters():
        if p is embedding and not config.tie_word_embeddings:
            continue
        if any(p is table for table in tables) or p.ndim < 2:
            continue
        matrices += round(p.numel() * chosen / experts) if p.ndim == 3 else p.numel()
    config.hf_matrices = matrices


def check_class(config: ResolvedHFModelConfig, folder: Path) -> bool:
    """Go through a folder's tensors by shapes alone.

    Returns:
        Whether head and embedding differ although config.json ties them.

    Raises:
        UserError: a tensor is missing, has another shape, or has no place.
    """
    model = HFCausalLM(config)
    with open_weights(folder) as weights:
        for _ in class_tensors(model, weights.names, weights.sketch):
            pass
        both = [
            (first, other)
            for first, others in model.ties.items()
            for other in others
            if {first, other} <= weights.names
        ]
        return any(not _equal(weights.get(a), weights.get(b)) for a, b in both)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    parts = zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    return all(torch.equal(a, b) for a, b in parts)
