"""The recipe of scripts/track.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.values.bounds import PATH, out_of_bounds


@dataclass
class TrackRecipe:
    """Send what a run's metrics.jsonl has to MLflow, TensorBoard and W&B, where they lack it."""

    FOLDER_KEY: ClassVar[str] = "run"

    run: Annotated[str | None, PATH] = None
    """The run's folder or URL; it must have ended, as a running one sends its values itself."""
    logger: LoggerConfig | None = None
    """Where to (group logger/); unset: as in the run's own recipe."""
    plugins: list[str] = field(default_factory=list)
    """Python files or modules that what is opened here needs; its own recipe's are not imported."""

    def check(self) -> Iterator[str]:
        """Every problem, a line each."""
        yield from out_of_bounds("", self)
        if self.run is None:
            yield "run: is required; write run=runs/NAME, a run's folder"
        if self.logger is not None:
            yield from self.logger.check()

    def fill(self) -> None:
        """Nothing is derived before the run's recipe is read."""
