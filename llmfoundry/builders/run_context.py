"""`RunContext`: objects that the components of a run share; and the batch size of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from llmfoundry.builders.data import RunData
from llmfoundry.builders.model import build_autocast
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Root
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.train.own_loss import LossFunction
from llmfoundry.train.trainer import Callback


@dataclass(frozen=True)
class Additions:
    """What a program adds to a recipe: objects that no YAML can hold.

    Attributes:
        loss: minimized in place of the recipe's loss; None: the recipe's.
        callbacks: called after the recipe's callbacks.
    """

    loss: LossFunction | None = None
    callbacks: Sequence[Callback] = field(default_factory=tuple)


NOTHING = Additions()


@dataclass(frozen=True)
class RunContext:
    """Objects that the components of a run share."""

    recipe: ResolvedTrainRecipe
    """Resolved recipe, including the vocabulary size."""
    world: World
    tokenizer: Tokenizer
    prepared: RunData
    root: Root
    microbatch: int
    note: Callable[[str], None]
    """Reports a decision to the user."""
    run: Storage
    """Storage of the run, or of the model under evaluation."""

    @property
    def autocast(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that creates the autocast context of the recipe's precision."""
        return build_autocast(self.recipe.precision, self.world.device)


def eval_rows(recipe: ResolvedTrainRecipe, microbatch: int) -> int:
    """Return the microbatch size of evaluation; it fits, because there are no gradients."""
    rows = recipe.device_eval_batch_size
    return rows if isinstance(rows, int) else microbatch
