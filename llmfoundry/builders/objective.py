"""What a run minimises: the cross-entropy, or an objective of preference tuning.

`build_trainer` and the evaluation ask here.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from llmfoundry.builders.data import Data
from llmfoundry.builders.job import Job
from llmfoundry.data.sources import OrderedStream
from llmfoundry.data.supervised.source import SupervisedSource
from llmfoundry.errors import UserError
from llmfoundry.models.adapters.adapt import switched_off
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.train.preference.losses import Preference, build_preference


def check_sides(data: Data, recipe: TrainRecipe) -> None:
    """What kto learns must be of both kinds.

    Raises:
        UserError: all answers are desirable, or none is.
    """
    if not isinstance(recipe, FinetuneRecipe) or recipe.preference.name != "kto":
        return
    sources = [s.source for s in data.streams if isinstance(s, OrderedStream)]
    sides = [source.sides for source in sources if isinstance(source, SupervisedSource)]
    kinds = np.unique(np.concatenate(sides)) if sides else np.zeros(0)
    if len(kinds) == 1:
        there, missing = ("true", "false") if kinds[0] > 0 else ("false", "true")
        raise UserError(
            f"data: the label of every row is {there}, and kto learns from both kinds; add rows"
            f" with label: {missing}"
        )


def build_objective(job: Job) -> Preference | None:
    """The recipe's method of preference tuning; None: the cross-entropy."""
    recipe = job.recipe
    if not isinstance(recipe, FinetuneRecipe):
        return None
    by_adapter = recipe.preference.reference == "adapter"
    return build_preference(
        recipe.preference, partial(switched_off, job.root.model) if by_adapter else None
    )
