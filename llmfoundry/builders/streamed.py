"""A checkpoint's weights one at a time, in place of a model that holds them all.

`commands/convert.py` exports what `streamed_state` reads. The model stays on the meta device: it
says which tensors there are. Each is read when it is asked for, from the checkpoint, or from an
adapter's base and then merged, by the same functions that fill and merge a whole model; so what is
read here is bit for bit what that model would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.builders.adapter import FOLDER, BaseCheck, choose_trained, has_adapter, hold_frozen
from llmfoundry.builders.pretrained import base_of, fill_tensor, open_pretrained
from llmfoundry.builders.resume import Loaded
from llmfoundry.checkpoint.load import check_weights, load_tensors, read_table
from llmfoundry.distributed.launch import ALONE
from llmfoundry.models.adapter import MergedState, is_added, saved_names
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe, load_run

ReadParameter = Callable[[str], Tensor]
"""Gives a parameter or buffer of a model that is on the meta device, in its shape and dtype."""


def streamed_state(loaded: Loaded, *, note: Callable[[str], None]) -> StreamedState:
    """The weights of the plain decoder that does what a checkpoint's model does.

    Args:
        loaded: `open_checkpoint`'s, without its weights; an adapter is added to its model.
        note: reports what an adapter's base is.

    Raises:
        UserError: the checkpoint is not of its recipe's model, or an adapter's base is not there.
    """
    read = _adapted(loaded, note) if has_adapter(loaded.recipe) else _plain(loaded)
    return StreamedState(loaded.root.model, read)


def fill_adapter_alone(loaded: Loaded) -> None:
    """Add an adapter's parameters, with their values, to a model that stays without weights.

    Raises:
        UserError: the checkpoint lacks one.
    """
    model = loaded.root.model
    written = load_run(loaded.folder / "recipe.yaml")
    choose_trained(model, loaded.recipe, lambda line: None, checkpoint=loaded.folder)
    hold_frozen(model, loaded.recipe, written, lambda line: None)
    own = set(saved_names(model))
    like = {name: p for name, p in model.named_parameters() if name in own}
    tensors = {name: torch.empty_like(p, device="cpu") for name, p in like.items()}
    load_tensors({"model": tensors}, loaded.checkpoint)
    for name, tensor in tensors.items():
        path, _, last = name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=like[name].requires_grad)
        model.get_submodule(path)._parameters[last] = parameter


class StreamedState(MergedState):
    """`MergedState` of a model on the meta device, whose layers have weights while one is made."""

    def __init__(self, model: Decoder, read: ReadParameter) -> None:
        super().__init__(model)
        self._read = read

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        make = self._make(name)
        if make is None:
            return self._read(name)
        with self._with_weights(name):
            return make()

    @contextmanager
    def _with_weights(self, name: str) -> Iterator[None]:
        """The parameters of a layer that the weight `name` is made of have their values."""
        path, _, kind = name.rpartition(".")
        module = self._model.get_submodule(path)
        stacked = f"{kind}_"  # an expert stack's adapter is called after it
        mine = {
            key: parameter
            for key, parameter in module._parameters.items()
            if key == kind or (is_added(key) and (key.startswith((stacked, "lora_"))))
        }
        try:
            for key in mine:
                value = self._read(f"{path}.{key}")
                module._parameters[key] = nn.Parameter(value, requires_grad=False)
            yield
        finally:
            module._parameters |= mine


def _plain(loaded: Loaded) -> ReadParameter:
    """Parameters of a checkpoint that holds all of its model."""
    checkpoint, model = loaded.checkpoint, loaded.root.model
    table = check_weights(checkpoint, model)
    like = model.state_dict()

    def read(name: str) -> Tensor:
        tensor = torch.empty_like(like[name], device="cpu")
        load_tensors({"model": {name: tensor}}, checkpoint, table=table)
        return tensor

    return read


def _adapted(loaded: Loaded, note: Callable[[str], None]) -> ReadParameter:
    """Parameters of an adapter's checkpoint, and of the base that it was trained on."""
    folder, model = loaded.folder, loaded.root.model
    written = load_run(folder / "recipe.yaml")
    assert isinstance(written, FinetuneRecipe)
    choose_trained(model, loaded.recipe, lambda line: None, checkpoint=folder)
    hold_frozen(model, loaded.recipe, written, lambda line: None)
    own, like = set(saved_names(model)), model.state_dict()
    base = open_pretrained(base_of(written, folder), ALONE, note=note)
    check, table = BaseCheck(folder / FOLDER, "model.pretrained"), read_table(loaded.checkpoint)
    read_base = base.read
    assert read_base is not None
    check.check_names(like.keys() - own)

    def read(name: str) -> Tensor:
        if name in own:
            tensor = torch.empty_like(like[name], device="cpu")
            load_tensors({"model": {name: tensor}}, loaded.checkpoint, table=table)
            return tensor
        value = _held(model, name, read_base(model, name))
        check.compare_tensor(name, value)
        return value

    return read


def _held(model: Decoder, name: str, tensor: Tensor) -> Tensor:
    """A tensor as the model holds it: in its dtype, or in 4 bits."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    values: dict[str, Any] = module._parameters if last in module._parameters else module._buffers
    like = values[last]
    if (tensor.dtype, tensor.shape) == (like.dtype, like.shape):
        return tensor
    try:
        values[last] = nn.Parameter(torch.empty_like(like, device="cpu"), requires_grad=False)
        fill_tensor(model, name, tensor)
        return values[last].detach()
    finally:
        values[last] = like
