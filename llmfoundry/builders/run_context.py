"""`RunContext`: what the parts of a run share; and rows evaluated at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from llmfoundry.builders.data import RunData
from llmfoundry.builders.model import build_autocast
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Root
from llmfoundry.recipe.train import ResolvedTrainRecipe


@dataclass(frozen=True)
class RunContext:
    """What the parts of a run share."""

    recipe: ResolvedTrainRecipe
    """Filled, the vocabulary's size included."""
    world: World
    tokenizer: Tokenizer
    prepared: RunData
    root: Root
    microbatch: int
    note: Callable[[str], None]
    """Shows the user what was decided."""
    run: Storage
    """Where the run, or what is evaluated, is kept."""

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context of a forward pass in the recipe's precision."""
        return build_autocast(self.recipe.precision, self.world.device)


def eval_rows(recipe: ResolvedTrainRecipe, microbatch: int) -> int:
    """Rows evaluated at a time; without gradients a microbatch always fits."""
    rows = recipe.device_eval_batch_size
    return rows if isinstance(rows, int) else microbatch
