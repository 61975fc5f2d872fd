"""Choice between the training and the fine-tuning recipe of a script by its command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llmfoundry.cli.command_line import CommandLine
from llmfoundry.errors import UserError
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
    PrepareFinetuneRecipe,
    PrepareRecipe,
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


prepared = either(PrepareRecipe, PrepareFinetuneRecipe)
inspected = either(InspectRecipe, InspectFinetuneRecipe)
_planned = either(PlanRecipe, PlanFinetuneRecipe)
launched = either(LaunchRecipe, LaunchFinetuneRecipe)
supervised = either(TrainRecipe, FinetuneRecipe)


def planned(command: CommandLine) -> type[PlanRecipe]:
    """Choose the recipe of a plan. `eval RECIPE` plans inference with the model of a recipe.

    Raises:
        UserError: the recipe's file cannot be read, or `eval` stands alone.
    """
    if command.recipe == "eval":
        if not command.more:
            raise UserError("eval: of which recipe? write plan.py eval mpt-30b hardware=8xh100")
        command.recipe = command.more.pop(0)
        command.overrides.append("inference=true")
        if not any(word.startswith("precision=") for word in command.overrides):
            command.overrides.append("precision=bf16")
    return _planned(command)


def checked_for(command: CommandLine) -> type[Checked]:
    """Choose the recipe type of `scripts/check.py`.

    Raises:
        UserError: the file of the recipe cannot be read.
    """
    if is_finetuning(command.recipe, command.overrides):
        return CheckFinetuneRecipe
    return CheckRecipe if command.recipe is None else CheckRunRecipe
