"""What the parts of a run share, and the smallest of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from llmfoundry.data.prepare import Prepared
from llmfoundry.data.tokenizer import Tokenizer
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.parallel.launch import World
from llmfoundry.recipe.train import TrainRecipe


@dataclass(frozen=True)
class Job:
    """What the parts of a run share."""

    recipe: TrainRecipe
    """Filled, the vocabulary's size included."""
    world: World
    tokenizer: Tokenizer
    prepared: Prepared
    root: Root
    microbatch: int
    note: Callable[[str], None]
    """Tells the user what was decided."""

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context of a forward pass in the recipe's precision."""
        return build_autocast(self.recipe.precision, self.world.device)


def filled(written: TrainRecipe) -> TrainRecipe:
    """A copy with derived values."""
    recipe = copy.deepcopy(written)
    recipe.fill()
    return recipe


def build_root(recipe: TrainRecipe) -> Root:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Root(Decoder(recipe.model))


def build_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context of a forward pass: bf16 matrix products, or none at all."""
    return partial(
        torch.autocast, device.type, dtype=torch.bfloat16, enabled=precision == "amp_bf16"
    )
