"""The recipe of scripts/fetch_eval_data.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.values.bounds import PATH, out_of_bounds


@dataclass
class FetchRecipe:
    """Bring the rows that a gauntlet's tasks read into a folder."""

    gauntlet: Annotated[str | None, PATH] = None
    """A gauntlet file whose tasks' rows to fetch; unset: eval/gauntlets/v0.3.yaml."""
    tasks: list[str] = field(default_factory=list)
    """Instead of a gauntlet: labels of tasks that eval/tasks/ defines."""
    from_foundry: Annotated[str | None, PATH] = None
    """Link to the files of a clone of https://github.com/mosaicml/llm-foundry: keep it. Rows are
    exactly those of published results."""
    from_hub: bool = False
    """Take rows from the Hugging Face hub; some tasks differ there, and these are reported."""
    output: Annotated[str | None, PATH] = None
    """Folder to fill; unset: eval/local_data of the repository, or of the working folder where only
    the wheel is installed: the shipped gauntlets look there."""
    table: Annotated[str, PATH] = "eval/fetch.yaml"
    """What is known of each file: rows, checksum, data set on the hub."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        if (self.from_foundry is None) != self.from_hub:
            yield (
                "from_foundry: write from_foundry=PATH, a clone of LLM Foundry, or from_hub=true"
                + (", not both" if self.from_hub else "")
            )
        if self.gauntlet is not None and self.tasks:
            yield "tasks: has no effect beside gauntlet; remove one of them"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.gauntlet is None and not self.tasks:
            self.gauntlet = "eval/gauntlets/v0.3.yaml"
