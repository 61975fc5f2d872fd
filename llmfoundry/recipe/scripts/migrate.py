"""The recipe of scripts/migrate.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmfoundry.recipe.values.bounds import PATH, out_of_bounds


@dataclass
class MigrateRecipe:
    """Make a recipe of another tool's file."""

    FILE_KEY: ClassVar[str] = "theirs"

    theirs: Annotated[str | None, PATH] = None
    """LLM Foundry's YAML: pretraining, fine-tuning, evaluation, tasks or categories, or MCLI's; or
    axolotl's: SFT, LoRA, preferences."""
    output: Annotated[str | None, PATH] = None
    """The recipe to write, which must not exist; unset: the same name in the working folder, with
    -migrated behind it where that is taken. Tasks of the file's own go beside it,
    NAME-gauntlet.yaml."""
    overwrite: bool = False
    """Write over a file that is there."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        if self.theirs is None:
            yield "theirs: is required; write the path of LLM Foundry's YAML, or axolotl's"
        if self.output is not None and not self.output.endswith((".yaml", ".yml")):
            yield f"output: {self.output} is no recipe's name; write {self.output}.yaml"

    def fill(self) -> None:
        """Nothing is derived."""
