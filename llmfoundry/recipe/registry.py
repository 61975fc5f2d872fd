"""The `registry` section: versions of a registered model in MLflow.

`RegistryConfig` belongs to a training run, `RegistryPlace` to a script that reads versions, and
`ExportRegistry` to a script that writes versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.checks import set_defaults
from llmfoundry.recipe.logger import STOP_MODES, better_way
from llmfoundry.recipe.schema import Only, check_fields, choice

VERSION = "models:/"
"""Prefix of the name of a version."""
CROSS_ENTROPY = "metrics/eval/LanguageCrossEntropy"
_NAME = re.compile(r"[\w.-][\w. -]{0,199}")


def name_problem(name: str) -> str | None:
    """Return why a registered model cannot have this name, and what to write; None if it can."""
    if _NAME.fullmatch(name):
        return None
    return f"{name!r} can be no model's name; write letters, digits, '.', '-' and '_' alone"


@dataclass
class BestConfig:
    """Which version of a registered model has the alias `best`."""

    metric: str | None = None
    """Name of a metric in metrics.jsonl that is measured at the step of the checkpoint, such as
    icl/metrics/eval_gauntlet/core_average; unset: metrics/eval/LanguageCrossEntropy if validation
    text is evaluated."""
    mode: Annotated[str | None, choice(STOP_MODES)] = None
    """min: smaller is better; max: larger is better. Unset: min for losses, perplexity and bits per
    byte, max for all other metrics."""


@dataclass
class RegistryConfig:
    """Each checkpoint of a run becomes a version of a registered model in MLflow.

    The weights stay in the checkpoint. `models:/NAME@best`, `models:/NAME/latest` and
    `models:/NAME/3` are then names of checkpoints.
    """

    name: str | None = None
    """The registered model; unset: none. Several runs may share one."""
    best: Annotated[BestConfig, Only("name")] = field(default_factory=BestConfig)
    """Which of the compared versions is the best. The best checkpoint of a run is not pruned."""

    def check(self, key: str = "registry.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        yield from check_fields(f"{key}best.", self.best)
        if self.name is not None and (problem := name_problem(self.name)):
            yield f"{key}name: {problem}"
        if self.best.metric is not None and not self.best.metric.strip():
            yield f"{key}best.metric: is empty; write a metric's name, such as {CROSS_ENTROPY}"

    def fill(self, *, has_validation: bool) -> None:
        """Resolve defaults in place."""
        if self.name is not None and has_validation:
            set_defaults(self.best, metric=CROSS_ENTROPY)
        if self.best.metric is not None:
            set_defaults(self.best, mode=better_way(self.best.metric))


@dataclass
class RegistryPlace:
    """The store of registered models."""

    uri: str | None = None
    """MLflow's store, such as http://HOST:5000; unset: the environment variable MLFLOW_REGISTRY_URI
    or MLFLOW_TRACKING_URI, else sqlite:///runs/mlflow.db."""


@dataclass
class ExportRegistry(RegistryPlace):
    """The registered model that receives an export."""

    name: str | None = None
    """The registered model of which the export becomes a version; unset: none."""
    upload: Annotated[bool | None, Only("name")] = None
    """Also copy the export to MLflow's artifacts; default false."""

    def check(self, key: str = "registry.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self.name is not None and (problem := name_problem(self.name)):
            yield f"{key}name: {problem}"
