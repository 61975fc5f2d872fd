"""Weights of one of our runs in a model that begins with them, whole or in shards.

`pretrained.py` calls it. The model may have more rows for tokens than the run had, and those of an
adapter's run are merged: the sum is `convert.py to=hf`'s, of the base as it was held in training.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from llmfoundry.builders.adapters.adapter import FOLDER, check_base, choose_trained, hold_frozen
from llmfoundry.builders.job import build_root, with_defaults
from llmfoundry.builders.weights.fill import fill_quantized, fill_tensor
from llmfoundry.builders.weights.hf_folder import Pretrained
from llmfoundry.checkpoint.load import load_weights
from llmfoundry.checkpoint.safe_load import load_tensors
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.hf.peft.read import read_adapter
from llmfoundry.models.adapters.merge import merge_into
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.init import grown
from llmfoundry.models.linear import whole
from llmfoundry.models.quantized import as_held, is_quantized
from llmfoundry.models.shard_layout import assign
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe


def fill_from_run(model: Decoder, folder: Path, rows: int, world: World) -> None:
    """Fill a model from a checkpoint, whose embedding and head have `rows` rows."""
    names = model.vocabulary() & get_model_state_dict(model).keys()  # of tied ones the first
    grows = [name for name in sorted(names) if len(model.get_parameter(name)) > rows]
    load_weights(folder, model, world=world, left=grows)
    for name in grows:
        shape = model.get_parameter(name).shape
        own = torch.empty(rows, *shape[1:])
        load_tensors({"model": {name: own}}, folder)
        fill_tensor(model, name, grown(own, shape[0]))
    fill_quantized(model, folder)


def merge_run(
    model: Decoder, base: Pretrained, folder: Path, written: FinetuneRecipe, config: ModelConfig
) -> None:
    """Fill a model with an adapter's base, and add the adapter of that checkpoint.

    Args:
        model: with memory.
        base: what the adapter's run began with.
        folder: its checkpoint.
        written: its recipe as written.
        config: the shape of its model.
    """
    if is_quantized(model):
        raise UserError(
            f"model.quantize: {folder} is an adapter, and is not added to weights of 4 bits; merge"
            " it first by scripts/convert.py to=hf, and write its output as model.pretrained"
        )
    base.fill(model)
    check_base(model, folder / FOLDER, "model.pretrained", rows=config.vocab_size)
    with torch.device("meta"):
        plain = Decoder(config)
    read = read_adapter(folder / FOLDER, plain, dropout=0.0)
    for name, hold in as_held(_trained(written, config, folder)):
        parameter = model.get_parameter(name)
        assign(parameter, hold(whole(parameter)))
    merge_into(model, read.plan, read.tensors, rows=config.vocab_size)


def _trained(written: FinetuneRecipe, config: ModelConfig, folder: Path) -> Decoder:
    """The run's model on the meta device, held as it was trained."""
    recipe = with_defaults(written)
    recipe.model = config  # type: ignore[assignment]
    model = build_root(recipe).model
    choose_trained(model, recipe, lambda line: None, checkpoint=folder)
    hold_frozen(model, recipe, written, lambda line: None)
    return model
