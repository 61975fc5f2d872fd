"""Small observers of the training loop; `build.py` makes those that the recipe asks for.

A callback sees the trainer after every step, and may add metrics whenever the trainer logs.
"""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from llmfoundry.recipe.logger import GenerateConfig

if TYPE_CHECKING:
    from llmfoundry.train.trainer import Trainer

GIB = 2**30


class Callback:
    """Does nothing; subclasses override what they need."""

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add to the metrics of a logged step."""

    def on_step(self, trainer: Trainer) -> None:
        """Act after a step (on every process)."""


class SpeedMonitor(Callback):
    """Throughput over the last logged steps, evaluation and saving left out, and MFU.

    Model FLOPs utilisation: FLOPs of the model (models/counts.py's convention) over the devices'
    peak; only where the peak is known.
    """

    def __init__(self, *, window: int, flops_per_token: float, peak_flops: float | None) -> None:
        self._flops, self._peak = flops_per_token, peak_flops
        self._points: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add throughput/*."""
        if not self._points:
            self._points.append((trainer.first_batch, 0.0))
        self._points.append((trainer.batch, trainer.train_seconds))
        (then_batch, then), (batch, now) = self._points[0], self._points[-1]
        rate = (batch - then_batch) / max(now - then, 1e-9)
        tokens = rate * trainer.clock.tokens_per_batch
        device = tokens / trainer.world.size
        metrics["throughput/batches_per_sec"] = rate
        metrics["throughput/tokens_per_sec"] = tokens
        metrics["throughput/device/tokens_per_sec"] = device
        metrics["throughput/device/flops_per_sec"] = device * self._flops
        if self._peak is not None:
            metrics["throughput/device/mfu"] = device * self._flops / self._peak
        metrics["time/train"] = now


class MemoryMonitor(Callback):
    """Peak memory in GiB: the device's on a GPU, the process's resident set on a CPU."""

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add memory/peak_allocated_mem."""
        metrics["memory/peak_allocated_mem"] = peak_memory(trainer.world.device) / GIB


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class RuntimeEstimator(Callback):
    """Seconds that remain: steps at their mean time, and evaluations at theirs."""

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add time/remaining_estimate."""
        done = trainer.batch - trainer.first_batch
        left = trainer.clock.total - trainer.batch
        remaining = left * trainer.train_seconds / max(done, 1)
        if trainer.evaluations:
            interval = trainer.clock.batches(trainer.recipe.eval_interval)
            evaluations = 1 + (left // interval if interval > 0 else 0)
            remaining += evaluations * trainer.eval_seconds / trainer.evaluations
        metrics["time/remaining_estimate"] = remaining


class GenerateSamples(Callback):
    """Continues the recipe's prompts every interval, and at the end."""

    def __init__(self, config: GenerateConfig, generate: Callable[[str], str]) -> None:
        self._config, self._generate = config, generate

    def on_step(self, trainer: Trainer) -> None:
        """Generate, if due; every process takes part, for shards' sake."""
        last = trainer.batch == trainer.clock.total
        if not (last or trainer.clock.is_due(self._config.interval, trainer.batch)):
            return
        with trainer.aside():
            samples = [(prompt, self._generate(prompt)) for prompt in self._config.prompts]
        trainer.tracker.samples(trainer.batch, samples)
