"""The `logger` and `callbacks` sections: what a run tells, to whom, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from llmfoundry.recipe.checks import at_least, inert
from llmfoundry.recipe.duration import check_duration


@dataclass
class LoggerConfig:
    """Beside the console, metrics.jsonl and report.html, which every run writes."""

    mlflow: bool = True
    """Record parameters, metrics, tags and the recipe in MLflow."""
    tracking_uri: str | None = None
    """MLflow's store; sqlite:///runs/mlflow.db unless a server's address is given."""
    experiment_name: str | None = None
    """MLflow's experiment; llmfoundry there."""

    def check(self, key: str = "logger.") -> Iterator[str]:
        """Lines for values that have no effect."""
        if not self.mlflow:
            yield from inert(key, self, ["tracking_uri", "experiment_name"], "with mlflow: false")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.mlflow:
            self.tracking_uri = self.tracking_uri or "sqlite:///runs/mlflow.db"
            self.experiment_name = self.experiment_name or "llmfoundry"


@dataclass
class GenerateConfig:
    """Samples during training, shown on the console and kept in the report."""

    prompts: list[str] = field(default_factory=list)
    """Texts to continue; none: no samples."""
    interval: str = "0.25dur"
    """How often."""
    max_new_tokens: int = 64
    """Length of a continuation, in tokens, unless end-of-text comes first."""
    temperature: float = 0.8
    """0 takes the likeliest token; more is more random."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from check_duration(f"{key}interval", self.interval)
        yield from at_least(f"{key}max_new_tokens", self.max_new_tokens, 1)
        yield from at_least(f"{key}temperature", self.temperature, 0)


@dataclass
class CallbacksConfig:
    """Small observers of the training loop; false or an empty list switches one off."""

    speed_monitor: bool = True
    """Throughput, and model FLOPs utilisation where the device's peak is known."""
    speed_window: int = 10
    """Logged steps over which throughput is averaged."""
    memory_monitor: bool = True
    """Peak memory of the device (GPU) or the process (CPU)."""
    runtime_estimator: bool = True
    """Time that remains."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Samples of text."""

    def check(self, key: str = "callbacks.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from at_least(f"{key}speed_window", self.speed_window, 1)
        yield from self.generate.check(f"{key}generate.")
