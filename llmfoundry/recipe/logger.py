"""The `logger` and `callbacks` sections: what a run tells, to whom, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.values.bounds import (
    NEW_TOKENS,
    TEMPERATURE,
    TOP_P,
    Range,
    choice,
    out_of_bounds,
)
from llmfoundry.recipe.values.checks import fill, inert
from llmfoundry.recipe.values.duration import check_duration

WANDB_MODES = ("online", "offline")
STOP_MODES = ("min", "max")
DEFAULT_TOP_P = 0.9  # the last tenth, of thousands of tokens, is where small models' garbage lies


@dataclass
class LoggerConfig:
    """Beside the console, metrics.jsonl and report.html, which every run writes."""

    mlflow: bool = True
    """Record parameters, metrics, tags and the recipe in MLflow."""
    tracking_uri: str | None = None
    """MLflow's store; sqlite:///runs/mlflow.db unless a server's address is given."""
    experiment_name: str | None = None
    """MLflow's experiment; llmfoundry there."""
    tensorboard: bool = False
    """Write TensorBoard event files to save_folder/tensorboard (extra tensorboard)."""
    wandb: bool = False
    """Record in Weights & Biases (extra wandb)."""
    wandb_mode: Annotated[str | None, choice(WANDB_MODES)] = None
    """online (needs a login), or offline: kept in save_folder/wandb, for `wandb sync`; online."""
    wandb_project: str | None = None
    """Weights & Biases' project; llmfoundry."""
    wandb_entity: str | None = None
    """Weights & Biases' team or user; unset: the login's default."""
    in_memory: bool = False
    """Keep every metric in the tracker, for a Python program that calls the trainer."""

    def check(self, key: str = "logger.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if not self.mlflow:
            yield from inert(key, self, ["tracking_uri", "experiment_name"], "with mlflow: false")
        if not self.wandb:
            names = ["wandb_mode", "wandb_project", "wandb_entity"]
            yield from inert(key, self, names, "without wandb: true")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.mlflow:
            self.tracking_uri = self.tracking_uri or "sqlite:///runs/mlflow.db"
            self.experiment_name = self.experiment_name or "llmfoundry"
        if self.wandb:
            fill(self, wandb_mode="online", wandb_project="llmfoundry")


@dataclass
class GenerateConfig:
    """Samples during training, shown on the console and kept in the report."""

    prompts: list[str] = field(default_factory=list)
    """Texts to continue; none: no samples."""
    from_validation: Annotated[int, Range(0, 1000, "each is written at every interval")] = 0
    """Validation rows, from the first, whose prompts are answered, the right answer beside it; of
    fine-tuning runs."""
    interval: str = "0.25dur"
    """How often."""
    max_new_tokens: Annotated[int, NEW_TOKENS] = 64
    """Length of a continuation, in tokens, unless end-of-text comes first."""
    temperature: Annotated[float, TEMPERATURE] = 0.8
    """0 takes the likeliest token; more is more random."""
    top_p: Annotated[float | None, TOP_P] = None
    """Draw from the likeliest tokens that together reach this probability, 1 from all; 0.9."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        yield from check_duration(f"{key}interval", self.interval)
        if self.temperature == 0:
            yield from inert(key, self, ["top_p"], f"with {key}temperature: 0")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.temperature > 0:
            fill(self, top_p=DEFAULT_TOP_P)


@dataclass
class EarlyStopperConfig:
    """Ends a run whose metric has stopped improving; the last state is saved as at any end."""

    metric: str | None = None
    """A metric's name as metrics.jsonl has it, such as
    metrics/eval/LanguageCrossEntropy; unset: never stop."""
    mode: Annotated[str | None, choice(STOP_MODES)] = None
    """min: smaller is better; max: greater is. min for losses, perplexity and bits per byte, max
    for all else."""
    patience: Annotated[int | None, Range(1)] = None
    """Measurements without improvement after which the run ends; 3."""
    min_delta: Annotated[float | None, Range(0)] = None
    """What counts as improvement, in the metric's unit; 0."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        if self.metric is None:
            names = ["mode", "patience", "min_delta"]
            yield from inert(key, self, names, f"without {key}metric")
        yield from out_of_bounds(key, self)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.metric is not None:
            small = ("loss", "CrossEntropy", "Perplexity", "bits_per_byte")
            mode = "min" if any(word in self.metric for word in small) else "max"
            fill(self, mode=mode, patience=3, min_delta=0.0)


@dataclass
class CallbacksConfig:
    """Small observers of the training loop; false or an empty list switches one off."""

    speed_monitor: bool = True
    """Throughput, and model FLOPs utilisation where the device's peak is known."""
    speed_window: Annotated[int, Range(1, 2**20, "each is kept in memory")] = 10
    """Logged steps over which throughput is averaged."""
    memory_monitor: bool = True
    """Peak memory of the device (GPU) or the process (CPU)."""
    runtime_estimator: bool = True
    """Time that remains."""
    lr_monitor: bool = True
    """The learning rate of every parameter group."""
    optimizer_monitor: bool = False
    """Norms of each parameter, its gradient and the optimizer's moments, and of all together."""
    gc_interval: Annotated[int, Range(0)] = 1000
    """Batches between garbage collections, at the same batch on all processes; Python's own, which
    comes at any time and makes the others wait, is off. 0 leaves Python's own on."""
    early_stopper: EarlyStopperConfig = field(default_factory=EarlyStopperConfig)
    """Ends a run that no longer improves."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    """Samples of text."""

    def check(self, key: str = "callbacks.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)
        yield from self.early_stopper.check(f"{key}early_stopper.")
        yield from self.generate.check(f"{key}generate.")

    def fill(self) -> None:
        """Write derived values in place."""
        self.early_stopper.fill()
        self.generate.fill()
