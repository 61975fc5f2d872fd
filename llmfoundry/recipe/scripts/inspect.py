"""The recipes of scripts/inspect_data.py: a training recipe, and the moment to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.front.argv import CommandLine
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe, is_finetuning
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.values.bounds import Range
from llmfoundry.recipe.values.duration import check_duration


@dataclass
class InspectRecipe(TrainRecipe):
    """What a training run reads at some time: every key of its recipe, and these."""

    at: str = "0ba"
    """The time from the run's start, a duration: 1e9tok, 0.8dur, 500ba; the step that it falls in
    is shown."""
    n: Annotated[int, Range(0)] = 4
    """Rows of that step to show, at most; 0: none."""
    json: bool = False
    """Print lines of JSON, one for each row, stream and phase, in place of tables."""

    def check(self) -> Iterator[str]:
        """Every problem of the recipe, a line each."""
        yield from check_duration("at", self.at)
        yield from super().check()


@dataclass
class InspectFinetuneRecipe(FinetuneRecipe, InspectRecipe):
    """What a fine-tuning run reads at some time: every key of its recipe, and these."""


def inspected(command: CommandLine) -> type[InspectRecipe]:
    """The kind of recipe that a command line names: fine-tuning's has model.pretrained.

    Raises:
        UserError: its file cannot be read.
    """
    is_finetuned = is_finetuning(command.recipe, command.overrides)
    return InspectFinetuneRecipe if is_finetuned else InspectRecipe
