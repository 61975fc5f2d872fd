"""Conversion of a Hugging Face folder's tensors to the state of transformers' class.

Entry point: `class_tensors`. transformers 5 merges experts that files store separately, and renames
other tensors. This module applies its conversion table to one tensor at a time: to real tensors, or
to tensors on the meta device to check shapes.
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
PREFIX = "hf."  # names in HFCausalLM: this prefix and the name in transformers' class
# buffers that old folders store and that the class computes: RoPE frequencies and causal masks
COMPUTED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$", r"\.attention\.bias$")


def class_tensors(
    model: HFCausalLM, names: Collection[str], read: Read, *, may_grow: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each tensor of the model's state; a tied tensor under each name.

    Args:
        model: model on any device.
        names: names of the folder's tensors.
        read: function that returns a tensor of the folder, or its shape on the meta device.
        may_grow: accept a vocabulary of the model that is larger than the folder's.

    Raises:
        UserError: a tensor is missing, has a wrong shape, or is not in the model.
    """
    # names and shapes of the model without its adapter
    names_in_class = {plain_name(name): name for name, _ in model.hf.named_parameters()}
    state = model.hf.state_dict(keep_vars=True)
    base_values = {plain_name(name): value for name, value in state.items() if not is_added(name)}
    ties, growing = model.ties, model.vocabulary() if may_grow else set()
    first_of = {other: first for first, others in ties.items() for other in others}
    missing = {plain for plain, name in names_in_class.items() if not is_added(name)}

    # convert the tensors of the folder
    groups, unknown = _groups(model.hf, names, base_values)
    _refuse_unknown(model.hf, unknown)
    for target, (converter, sources) in groups.items():
        for name, value in _converted(model.hf, target, converter, sources, read):
            if name not in base_values:
                raise UserError(f"{name}: {type(model.hf).__name__} has no such weights")
            _check_shape(name, value, base_values[name], grows=f"{PREFIX}{name}" in growing)
            first_name = first_of.get(name, name)
            missing.discard(first_name)
            for tied_name in (first_name, *ties.get(first_name, ())):
                yield f"{PREFIX}{names_in_class.get(tied_name, tied_name)}", value
    if missing:
        first_missing = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            f"{first_missing}{more}: the tensor is missing; the model cannot be read whole"
        )


Groups = dict[str, tuple[Any, list[tuple[str, str]]]]
"""Converter (None: unchanged) and (pattern, name) of its source tensors, by name in the class."""


def _groups(hf: Any, names: Collection[str], state: dict[str, Any]) -> tuple[Groups, list[str]]:
    """Group the tensors of a folder by the tensor of the class that they are converted to.

    Args:
        hf: transformers' model.
        names: names of the folder's tensors.
        state: state of the model without its adapter.

    Returns:
        The groups, and the names of tensors that the class does not have.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    # the conversion table of the architecture
    mapping = get_model_conversion_mapping(hf)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}

    # the target of each tensor; experts in natural order (2 before 10)
    prefix = hf.base_model_prefix
    groups: Groups = {}
    unknown = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            unknown.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        _, sources = groups.setdefault(target, (converter, []))
        sources.append((pattern or name, name))
    return groups, unknown


def _refuse_unknown(hf: Any, names: list[str]) -> None:
    """Raise a UserError for tensors that the class does not have, except buffers it computes."""
    patterns = (*COMPUTED, *(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or ()))
    names = [name for name in names if not any(re.search(p, name) for p in patterns)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(f"{names[0]}{more}: {type(hf).__name__} has no such weights")


def _converted(
    hf: Any, target: str, converter: Any, sources: list[tuple[str, str]], read: Read
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values that transformers' converter makes of a group's sources."""
    if converter is None:
        _, name = sources[-1]
        yield target, read(name)
        return
    converter_copy = copy.deepcopy(converter)  # a converter collects tensors
    for pattern, name in sources:
        converter_copy.add_tensor(target, name, pattern, partial(read, name))
    try:
        converted = converter_copy.convert(target, model=hf, config=hf.config)
    except RuntimeError as error:  # PyTorch cannot concatenate the shapes
        raise UserError(
            f"{sources[0][1]}: cannot become {target}: {one_line(error)}; its shape, or that of a"
            " tensor beside it, is another model's"
        ) from error
    for name, value in converted.items():
        yield name, value[0] if isinstance(value, list) else value


def _check_shape(name: str, value: Tensor, wanted: Tensor, *, grows: bool) -> None:
    """Check shape and dtype of a tensor.

    Args:
        name: name in the class.
        value: converted tensor of the folder.
        wanted: tensor of the model.
        grows: accept fewer rows than in the model; the loader adds the missing rows.

    Raises:
        UserError: the shape differs, or the tensor is quantized.
    """
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


LONGEST = 2048  # max_seq_len if config.json has none of LENGTHS
# the names of one setting in config.json of different architectures
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len")
HIDDEN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_MOST_EXTRA_POSITIONS = 8
"""Rows of a position embedding beyond max_seq_len, such as the 2 of OPT."""
_ROWS = 4096  # rows of an embedding that are compared at a time


def class_config(
    written: dict[str, Any], *, attn_impl: str | None, code: str | None
) -> ResolvedHFModelConfig:
    """Return the resolved `model` section for the model that a config.json describes.

    Args:
        written: content of config.json, with overrides.
        attn_impl: attn_implementation of transformers; None: transformers chooses.
        code: folder whose Python code may run; None: no code may run.

    Raises:
        UserError: transformers has no such causal language model.
    """
    # dimensions by the names of any architecture
    hf_config = read_hf_config(written, code=code)

    def first(names: Iterable[str], default: Any = None) -> Any:
        """Return the first of the settings that is an integer."""
        values = (getattr(hf_config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), default)

    width, heads = first(["hidden_size"]), first(["num_attention_heads"], 1)
    layers, vocabulary = first(["num_hidden_layers"]), first(["vocab_size"])
    if not width or not layers or not vocabulary:
        raise UserError(
            "config.json: has no hidden_size, num_hidden_layers and vocab_size, as a causal"
            " language model has; write the folder of one"
        )

    # the section
    config = HFModelConfig(
        d_model=width,
        n_heads=heads,
        n_layers=layers,
        head_dim=first(["head_dim"]),
        vocab_size=vocabulary,
        max_seq_len=first(LENGTHS, LONGEST),
        tie_word_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),
        hf_config=written,
        hf_attn_impl=attn_impl,
        code=code,
    )
    config.attn_config.attn_type = "grouped_query_attention"
    config.attn_config.kv_n_heads = first(["num_key_value_heads"], heads)
    config.ffn_config.ffn_hidden_size = first(HIDDEN, 4 * width)
    _set_counts(config, hf_config)
    return config.resolve()


def _set_counts(config: HFModelConfig, hf_config: Any) -> None:
    """Build the model and set the fields of `config` that its modules determine, in place.

    These are the kind of position embedding, and the numbers of parameters and of the weights of
    matmuls that a token uses.
    """
    model = HFCausalLM(config)
    embedding = model.hf.get_input_embeddings().weight
    other_embeddings = [
        module.weight
        for module in model.hf.modules()
        if isinstance(module, nn.Embedding) and module.weight is not embedding
    ]

    # learned positions: an embedding with one row per position, and a few rows more in some classes
    longest = config.max_seq_len or 0
    most_rows = longest + _MOST_EXTRA_POSITIONS
    config.learned_pos_emb = any(longest <= len(e) <= most_rows for e in other_embeddings)
    config.attn_config.rope = not config.learned_pos_emb

    # experts in all, and experts that a token uses
    expert_numbers = (getattr(hf_config, name, None) for name in EXPERTS)
    experts = next((n for n in expert_numbers if isinstance(n, int) and n > 0), 1)
    active_experts = getattr(hf_config, "num_experts_per_tok", 1) or 1

    # parameters; an embedding counts as a matmul only if it is also the head
    config.hf_parameters = sum(p.numel() for p in model.parameters())
    matmul_weights = 0
    for parameter in model.parameters():
        if parameter is embedding and not config.tie_word_embeddings:
            continue
        if any(parameter is other for other in other_embeddings) or parameter.ndim < 2:
            continue
        if parameter.ndim == 3:  # stacked matrices of all experts
            matmul_weights += round(parameter.numel() * active_experts / experts)
        else:
            matmul_weights += parameter.numel()
    config.hf_matrices = matmul_weights


def check_class(
    config: ResolvedHFModelConfig, folder: Path, *, note: Callable[[str], None] = print
) -> bool:
    """Check names and shapes of a folder's tensors without reading large tensors.

    Args:
        config: resolved configuration.
        folder: folder with config.json and weights.
        note: reports layers that are left out.

    Returns:
        Whether head and embedding differ although config.json ties them.

    Raises:
        UserError: a tensor is missing, has a wrong shape, or is not in the model.
    """
    model = HFCausalLM(config)
    with open_weights(folder) as weights:
        for line in weights.notes:
            note(line)
        for _ in class_tensors(model, weights.names, weights.sketch):
            pass
        stored_pairs = [
            (first, other)
            for first, others in model.ties.items()
            for other in others
            if {first, other} <= weights.names
        ]
        return any(not _equal(weights.get(a), weights.get(b)) for a, b in stored_pairs)


def _equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal; _ROWS rows of each are in memory at a time."""
    if first.shape != second.shape:
        return False
    parts = zip(first.split(_ROWS), second.split(_ROWS), strict=True)
    return all(torch.equal(a, b) for a, b in parts)
