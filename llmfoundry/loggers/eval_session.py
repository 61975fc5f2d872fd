"""An evaluation's metrics on their way to MLflow, TensorBoard and W&B, as a run of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from llmfoundry.loggers.environment import environment
from llmfoundry.loggers.log_target import RunFacts, milliseconds
from llmfoundry.loggers.loggers import close_all, make_writers, stores
from llmfoundry.recipe.logger import LoggerConfig


class Evaluation(Protocol):
    """What is logged.

    Attributes:
        name: of the model.
        folder: where results.json is; a second evaluation there goes on in the same MLflow run.
        results: has `metrics`.
        batch: of the checkpoint.
    """

    name: str
    folder: Path
    results: dict[str, Any]
    batch: int


def log_evaluation(
    found: Evaluation,
    config: LoggerConfig,
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> list[str]:
    """Send the metrics, and results.json, to every place that the recipe names, and wait for it.

    Returns:
        The places that have got all.
    """
    config.fill()
    metrics: Mapping[str, float] = found.results["metrics"]
    facts = RunFacts(
        name=f"eval {found.name}",
        folder=found.folder,
        first_batch=0,
        began=milliseconds(),
        params={"model": found.name},
        tags=environment(),
    )
    writers = stores(make_writers(config, found.folder, note=note, warn=warn), note)
    for writer in writers:
        writer.log(found.batch, metrics)
        writer.file(found.folder / "results.json")
        writer.start(facts)
    close_all(writers, "finished")
    return [writer.label for writer in writers if writer.has_all]
