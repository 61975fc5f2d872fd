"""Writers for the loggers of a recipe's `logger` section.

The tracker sends a run to them. `scripts/eval.py` calls `log_evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmfoundry.loggers.background_queue import (
    PATIENCE,
    BackgroundWriter,
    DeferredTask,
    LogTarget,
    RunFacts,
    milliseconds,
)
from llmfoundry.loggers.environment import environment
from llmfoundry.recipe.choice_table import load_code
from llmfoundry.recipe.logger import LOGGERS, LoggerConfig

_TARGETS = {
    name: f"llmfoundry.loggers.{name}_logger:{name}_target"
    for name in ("mlflow", "tensorboard", "wandb", "trackio", "prometheus")
}
"""Factory of each logger in LOGGERS that comes with the project; it imports its client library."""


def make_writers(
    config: LoggerConfig,
    folder: Path,
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> list[BackgroundWriter]:
    """Return one writer for each logger of a resolved `logger` section.

    Raises:
        UserError: the address or the package of a logger is missing.
    """
    targets = [make_target(name, config, folder) for name in config.chosen()]
    return [BackgroundWriter(target, note=note, warn=warn) for target in targets]


def stores(
    writers: Sequence[BackgroundWriter], note: Callable[[str], None]
) -> list[BackgroundWriter]:
    """Return the writers whose loggers store values; print a note about each of the others.

    The others, such as Prometheus, show only the current values of a run that is training.
    """
    for writer in writers:
        if not writer.is_store:
            note(f"{writer.label} shows a run that is under way; nothing is sent there")
    return [writer for writer in writers if writer.is_store]


def make_target(name: str, config: LoggerConfig, folder: Path) -> LogTarget:
    """Return the target of a logger by its name in LOGGERS, for a resolved section."""
    make = load_code(LOGGERS[name].make, _TARGETS.get(name))
    target: LogTarget = make(config, folder, **(config.plugins.get(name) or {}))
    return target


def close_all(
    writers: Sequence[BackgroundWriter], status: str, *, timeout: float = PATIENCE
) -> None:
    """Close a run in all loggers; the writers send the rest of their queues concurrently."""
    for writer in writers:
        writer.end(status, timeout=timeout)
    for writer in writers:
        writer.close()


class LoggedEvaluation(Protocol):
    """Results of an evaluation, as `log_evaluation` needs them.

    Attributes:
        name: name of the model.
        folder: folder of results.json; a second evaluation in it is logged as another run.
        results: contents of results.json, with `metrics`.
        batch: training step of the checkpoint.
        link: task that links the results to a registered model version; None: no version.
    """

    name: str
    folder: Path
    results: dict[str, Any]
    batch: int
    link: DeferredTask | None


def log_evaluation(
    evaluation: LoggedEvaluation,
    config: LoggerConfig,
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> list[str]:
    """Send the metrics and results.json to every logger of the recipe, and wait.

    Returns:
        Labels of the loggers that have the complete results.
    """
    config.fill()
    metrics: Mapping[str, float] = evaluation.results["metrics"]
    facts = RunFacts(
        name=f"eval {evaluation.name}",
        folder=evaluation.folder,
        first_batch=0,
        began=milliseconds(),
        params={"model": evaluation.name},
        tags=environment(),
    )
    writers = stores(make_writers(config, evaluation.folder, note=note, warn=warn), note)
    for writer in writers:
        writer.log(evaluation.batch, metrics)
        writer.file(evaluation.folder / "results.json")
        if evaluation.link is not None:
            writer.registry(evaluation.link)
        writer.start(facts)
    close_all(writers, "finished")
    return [writer.label for writer in writers if writer.has_all]
