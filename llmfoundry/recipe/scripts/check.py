"""The recipes of scripts/check.py: none, or the recipe of a run whose paths are looked at too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.recipe.front.argv import CommandLine
from llmfoundry.recipe.health_check import HealthCheckConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe, is_finetuning
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.values.bounds import PATH, choice, out_of_bounds

LEVELS = ("full", "quick")


@dataclass
class CheckRecipe:
    """Check this machine, or all that a launcher started it on, without a run's recipe."""

    FOLDER: ClassVar[str] = "check"

    level: Annotated[str, choice(LEVELS)] = "full"
    """full, or quick: without products, memory bandwidth and pairs."""
    output: Annotated[str, PATH] = "check"
    """The folder of check.json and check.html."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How many processes (nproc_per_node); its degrees do not matter here."""
    health_check: HealthCheckConfig = field(default_factory=HealthCheckConfig)
    """What is looked at, and the limits."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules; imported before anything is checked."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        yield from self.parallel.check()
        yield from self.health_check.check()

    def fill(self) -> None:
        """Write derived values in place."""
        self.parallel.fill()


@dataclass
class CheckRunRecipe(TrainRecipe):
    """Check machines for a training run: every key of its recipe, and these."""

    level: Annotated[str, choice(LEVELS)] = "full"
    """full, or quick: without products, memory bandwidth and pairs."""
    output: Annotated[str, PATH] = "check"
    """The folder of check.json and check.html."""


@dataclass
class CheckFinetuneRecipe(FinetuneRecipe, CheckRunRecipe):
    """Check machines for a fine-tuning run: every key of its recipe, and these."""


Checked = CheckRecipe | CheckRunRecipe


def checked_for(command: CommandLine) -> type[Checked]:
    """The kind of recipe that a command line names.

    Raises:
        UserError: its file cannot be read.
    """
    if is_finetuning(command.recipe, command.overrides):
        return CheckFinetuneRecipe
    return CheckRecipe if command.recipe is None else CheckRunRecipe
