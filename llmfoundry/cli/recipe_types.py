"""Choice between the training and the fine-tuning recipe of a script by its command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llmfoundry.cli.command_line import CommandLine
from llmfoundry.recipe.before_training import (
    Checked,
    CheckFinetuneRecipe,
    CheckRecipe,
    CheckRunRecipe,
    InspectFinetuneRecipe,
    InspectRecipe,
    LaunchFinetuneRecipe,
    LaunchRecipe,
    PlanFinetuneRecipe,
    PlanRecipe,
)
from llmfoundry.recipe.finetune import FinetuneRecipe, is_finetuning
from llmfoundry.recipe.train import TrainRecipe

AnyRecipe = TypeVar("AnyRecipe", bound=TrainRecipe)


def either(
    plain: type[AnyRecipe], finetune: type[AnyRecipe]
) -> Callable[[CommandLine], type[AnyRecipe]]:
    """Return a function that chooses the recipe type: a fine-tuning recipe has model.pretrained.

    The function raises a UserError if the file of the recipe cannot be read.
    """

    def chosen(command: CommandLine) -> type[AnyRecipe]:
        return finetune if is_finetuning(command.recipe, command.overrides) else plain

    return chosen


inspected = either(InspectRecipe, InspectFinetuneRecipe)
planned = either(PlanRecipe, PlanFinetuneRecipe)
launched = either(LaunchRecipe, LaunchFinetuneRecipe)
supervised = either(TrainRecipe, FinetuneRecipe)


def checked_for(command: CommandLine) -> type[Checked]:
    """Choose the recipe type of `scripts/check.py`.

    Raises:
        UserError: the file of the recipe cannot be read.
    """
    if is_finetuning(command.recipe, command.overrides):
        return CheckFinetuneRecipe
    return CheckRecipe if command.recipe is None else CheckRunRecipe
