"""The places that a recipe's `logger` section names: opened, ended, and given an evaluation.

The tracker writes a run to them; `scripts/eval.py` calls `log_evaluation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmfoundry.loggers.background_queue import (
    PATIENCE,
    BackgroundWriter,
    LogTarget,
    RunFacts,
    Task,
    milliseconds,
)
from llmfoundry.loggers.environment import environment
from llmfoundry.recipe.choice_table import load_code
from llmfoundry.recipe.logger import LOGGERS, LoggerConfig

_TARGETS = {
    name: f"llmfoundry.loggers.{name}_logger:{name}_target"
    for name in ("mlflow", "tensorboard", "wandb", "trackio", "prometheus")
}
"""The code of the entries of LOGGERS that come with the project; each imports its own package."""


def make_writers(
    config: LoggerConfig,
    folder: Path,
    *,
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> list[BackgroundWriter]:
    """One for each place that a `logger` section with its defaults names.

    Raises:
        UserError: a place's address or package is missing.
    """
    return [
        BackgroundWriter(make_target(name, config, folder), note=note, warn=warn)
        for name in config.chosen()
    ]


def stores(
    writers: Sequence[BackgroundWriter], note: Callable[[str], None]
) -> list[BackgroundWriter]:
    """Those that keep what they get; a note names the others, which show a run under way."""
    for writer in writers:
        if not writer.is_store:
            note(f"{writer.label} shows a run that is under way; nothing is sent there")
    return [writer for writer in writers if writer.is_store]


def make_target(name: str, config: LoggerConfig, folder: Path) -> LogTarget:
    """The place of a name in LOGGERS that a section with its defaults chooses."""
    make = load_code(LOGGERS[name].make, _TARGETS.get(name))
    target: LogTarget = make(config, folder, **(config.plugins.get(name) or {}))
    return target


def close_all(
    writers: Sequence[BackgroundWriter], status: str, *, timeout: float = PATIENCE
) -> None:
    """End a run everywhere; all send their rest at the same time."""
    for writer in writers:
        writer.end(status, timeout=timeout)
    for writer in writers:
        writer.close()


class Evaluation(Protocol):
    """What is logged.

    Attributes:
        name: of the model.
        folder: where results.json is; a second evaluation there is another run.
        results: has `metrics`.
        batch: of the checkpoint.
        link: gives them to the version of a registered model; None: there is none.
    """

    name: str
    folder: Path
    results: dict[str, Any]
    batch: int
    link: Task | None


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
        if found.link is not None:
            writer.registry(found.link)
        writer.start(facts)
    close_all(writers, "finished")
    return [writer.label for writer in writers if writer.has_all]
