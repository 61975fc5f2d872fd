"""Tensors of a Hugging Face folder under the names of transformers' class, one at a time.

transformers 5 holds experts together that files have apart, and has renamed much else; its own
table of conversions says how, here it is run tensor by tensor, on real ones or on shapes alone.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from llmfoundry.errors import UserError
from llmfoundry.hf.transformers_models.causal_lm import HFCausalLM
from llmfoundry.models.adapters.adapt import is_added, plain_name

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
    held = {plain_name(name): name for name, _ in model.hf.named_parameters()}
    every = model.hf.state_dict(keep_vars=True)
    own = {plain_name(name): value for name, value in every.items() if not is_added(name)}
    ties, grows = model.ties, model.vocabulary() if may_grow else set()
    first_of = {other: first for first, others in ties.items() for other in others}
    left = {plain for plain, name in held.items() if not is_added(name)}
    groups, unknown = _groups(model.hf, names, own)
    _refuse_unknown(model.hf, unknown)
    for target, (converter, sources) in groups.items():
        for name, value in _converted(model.hf, target, converter, sources, read):
            if name not in own:
                raise UserError(f"{name}: {type(model.hf).__name__} has no such weights")
            _check_shape(name, value, own[name], grows=f"{PREFIX}{name}" in grows)
            name = first_of.get(name, name)
            left.discard(name)
            for each in (name, *ties.get(name, ())):
                yield f"{PREFIX}{held.get(each, each)}", value
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
    own = copy.deepcopy(converter)
    for pattern, name in sources:
        own.add_tensor(target, name, pattern, partial(read, name))
    for name, value in own.convert(target, model=hf, config=hf.config).items():
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
