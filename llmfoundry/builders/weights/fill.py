"""Weights that stream by, written into the shards that this process holds.

Every process reads the same files. Tensors are views of mapped files, so of one that is not
reordered a process touches its own rows only. What is kept in 4 bits is quantised as it comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from llmfoundry.checkpoint.safe_load import load_tensors
from llmfoundry.errors import UserError
from llmfoundry.models.adapters.adapt import is_added
from llmfoundry.models.init import grown
from llmfoundry.models.quantized import place, quantized_shapes


def fill_model(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, computed: Collection[str] = ()
) -> None:
    """Fill every parameter and buffer that `model` saves, whole or in shards, one at a time.

    Args:
        model: with memory, and names as `tensors` has them; an adapter's are left alone.
        tensors: all of its state, each of them whole.
        computed: what has its values already, where `tensors` lacks it.

    Raises:
        UserError: a tensor that is to be quantised holds values that are not finite.
    """
    left = {name for name in model.state_dict(keep_vars=True) if not is_added(name)}
    for name, whole in tensors:
        fill_tensor(model, name, whole)
        left.remove(name)
    left -= set(computed)
    assert not left, f"not filled: {sorted(left)}"


def fill_tensor(model: nn.Module, name: str, whole: Tensor) -> None:
    """`place`, and what it refuses said to the user."""
    try:
        place(model, name, whole)
    except ValueError as error:
        raise UserError(
            f"model.quantize: {name} {error}, and 4 bits are scaled by the largest; write none, or"
            " mend the weights"
        ) from error


def fill_quantized(model: nn.Module, folder: Path) -> None:
    """Fill what is kept in 4 bits from a checkpoint of ours; every process reads for itself."""
    for name, whole in _whole_tensors(folder, quantized_shapes(model)):
        fill_tensor(model, name, whole)


def _whole_tensors(
    folder: Path, shapes: Iterable[tuple[str, tuple[int, int]]]
) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes:
        whole = torch.empty(shape)
        load_tensors({"model": {name: whole}}, folder)
        yield name, whole


def with_new_rows(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Embeddings and heads of fewer rows than the model's, as `grown` makes them.

    Args:
        model: with the rows that it is to have.
        tensors: its state, one by one.
        names: those that may grow.
    """
    names = set(names)
    for name, whole in tensors:
        yield name, grown(whole, len(model.get_parameter(name))) if name in names else whole
