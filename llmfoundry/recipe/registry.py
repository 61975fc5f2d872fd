"""The `registry` section: versions of a registered model, kept in MLflow.

Of a training run (`RegistryConfig`), of a script that reads versions (`RegistryPlace`), and of one
that writes them (`ExportRegistry`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.checks import set_defaults
from llmfoundry.recipe.logger import STOP_MODES, better_way
from llmfoundry.recipe.schema import Only, choice, out_of_bounds

VERSION = "models:/"
"""What the name of a version begins with."""
CROSS_ENTROPY = "metrics/eval/LanguageCrossEntropy"
_NAME = re.compile(r"[\w.-][\w. -]{0,199}")


def name_problem(name: str) -> str | None:
    """Why no registered model of ours can have a name, and what to write; None: it can."""
    if _NAME.fullmatch(name):
        return None
    return f"{name!r} can be no model's name; write letters, digits, '.', '-' and '_' alone"


@dataclass
class BestConfig:
    """Which version of a registered model has the alias `best`."""

    metric: str | None = None
    """A metric's name as metrics.jsonl has it, measured at a checkpoint's own step, such as
    icl/metrics/eval_gauntlet/core_average; unset: metrics/eval/LanguageCrossEntropy where held-out
    text is measured."""
    mode: Annotated[str | None, choice(STOP_MODES)] = None
    """min: smaller is better; max: greater is. Unset: min for losses, perplexity and bits per byte,
    max for all else."""


@dataclass
class RegistryConfig:
    """Each checkpoint of a run becomes a version of a registered model, where MLflow has the run.

    Its weights stay where they are. `models:/NAME@best`, `models:/NAME/latest` and `models:/NAME/3`
    are then names of checkpoints.
    """

    name: str | None = None
    """The registered model; unset: none. Several runs may share one."""
    best: Annotated[BestConfig, Only("name")] = field(default_factory=BestConfig)
    """Which of the compared versions is the best. The best checkpoint of a run is not pruned."""

    def check(self, key: str = "registry.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        yield from out_of_bounds(f"{key}best.", self.best)
        if self.name is not None and (problem := name_problem(self.name)):
            yield f"{key}name: {problem}"
        if self.best.metric is not None and not self.best.metric.strip():
            yield f"{key}best.metric: is empty; write a metric's name, such as {CROSS_ENTROPY}"

    def fill(self, *, has_validation: bool) -> None:
        """Write derived values in place."""
        if self.name is not None and has_validation:
            set_defaults(self.best, metric=CROSS_ENTROPY)
        if self.best.metric is not None:
            set_defaults(self.best, mode=better_way(self.best.metric))


@dataclass
class RegistryPlace:
    """Where versions of registered models are found."""

    uri: str | None = None
    """MLflow's store, such as http://HOST:5000; unset: MLFLOW_REGISTRY_URI or MLFLOW_TRACKING_URI
    of the environment, else sqlite:///runs/mlflow.db."""


@dataclass
class ExportRegistry(RegistryPlace):
    """Where an export becomes a version."""

    name: str | None = None
    """The registered model that the export becomes a version of; unset: of none."""
    upload: Annotated[bool | None, Only("name")] = None
    """Also copy the export to MLflow's artifacts; default false."""

    def check(self, key: str = "registry.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.name is not None and (problem := name_problem(self.name)):
            yield f"{key}name: {problem}"
