"""The recipes of scripts/plan.py: a run's own, and the hardware that it is planned for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.errors import UserError
from llmfoundry.recipe.front.argv import CommandLine
from llmfoundry.recipe.front.hardware import Hardware
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe, is_finetuning
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.values.bounds import PATH, Range, choice

FORMATS = ("text", "json")


@dataclass
class PlanRecipe(TrainRecipe):
    """What a training run would take on other hardware: every key of its recipe, and these."""

    hardware: str = "8xh100"
    """How many GPUs and which: 8xh100, 64xa100-80gb, 72xgb200, or a file of your own GPU's numbers,
    64xmy-gpu.yaml (keys of `recipe/hardware.py`, `like: h100` for those left out)."""
    tokens: Annotated[float | None, Range(1, 1e18)] = None
    """Tokens that the run trains on, 1e12; unset: those of max_duration."""
    price: Annotated[float | None, Range(above=0)] = None
    """What a GPU costs an hour, in any currency; unset: no money is computed."""
    failures: Annotated[float | None, Range(above=0)] = None
    """GPU-hours from one failure that stops a run to the next; unset: none is expected. Llama 3's
    run on 16,384 H100 had one in 50,000 (Dubey et al., 2024, table 5)."""
    layouts: Annotated[int, Range(0, 1000)] = 8
    """Layouts to show, the fastest first; 0: the recipe's own alone, none is searched."""
    gpu_check: Annotated[str | None, PATH] = None
    """A gpu-check.json of such a GPU (`make gpu-check`), whose measured speeds replace the data
    sheet's; unset: gpu-check/gpu-check.json, where that measured the same GPU."""
    format: Annotated[str, choice(FORMATS)] = "text"
    """text, or json: one object, for programs."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        try:
            hardware = Hardware.parse(self.hardware, "hardware")
        except UserError as error:
            yield from error.lines()
        else:
            if not hardware.is_timed:
                yield (
                    f"hardware: {self.hardware} names no GPU, whose speed a plan needs; write such"
                    f" as {hardware.gpus}xh100, or --dry-run={self.hardware} for memory alone"
                )
        yield from super().check()


@dataclass
class PlanFinetuneRecipe(FinetuneRecipe, PlanRecipe):
    """What a fine-tuning run would take on other hardware: every key of its recipe, and these."""


def planned(command: CommandLine) -> type[PlanRecipe]:
    """The kind of recipe that a command line names: fine-tuning's has model.pretrained.

    Raises:
        UserError: its file cannot be read.
    """
    is_finetuned = is_finetuning(command.recipe, command.overrides)
    return PlanFinetuneRecipe if is_finetuned else PlanRecipe
