"""Small observers of the training loop; `builders/trainer.py` makes those that the recipe asks for.

Every process has them, and calls each hook at the same batch, in the order of `Trainer.callbacks`.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
from collections import deque
from collections.abc import Callable

import torch

from llmfoundry.recipe.logger import GenerateConfig
from llmfoundry.recipe.optimizer import OPTIMIZERS
from llmfoundry.train.trainer import Callback, Trainer

GIB = 2**30


class SpeedMonitor(Callback):
    """Throughput over the last logged steps, evaluation and saving left out, and MFU.

    FLOPs are the model's, by the convention of PaLM and LLM Foundry (models/counts.py): two for a
    multiply-add, the backward pass as two forward passes, attention over the whole row (causality
    not discounted), embedding look-ups and recomputation (activation checkpointing) not counted.
    Model FLOPs utilisation is their rate over the device's dense bf16 peak, where that is known.
    """

    may_lag = True

    def __init__(self, *, window: int, flops_per_token: float, peak_flops: float | None) -> None:
        self._flops, self._peak = flops_per_token, peak_flops
        self._points: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def on_return(self, trainer: Trainer) -> None:
        """Measure anew."""
        self._points.clear()
        self._points.append((trainer.batch, trainer.train_seconds))

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add throughput/*, and seconds so far of steps, time/train, and evaluations, time/val."""
        if not self._points:
            self._points.append((trainer.first_batch, 0.0))
        self._points.append((trainer.logged_batch, trainer.train_seconds))
        (then_batch, then), (batch, now) = self._points[0], self._points[-1]
        rate = (batch - then_batch) / max(now - then, 1e-9)
        tokens = rate * trainer.clock.tokens_per_batch
        device = tokens / trainer.world.size
        metrics["throughput/batches_per_sec"] = rate
        metrics["throughput/samples_per_sec"] = rate * trainer.clock.samples_per_batch
        metrics["throughput/tokens_per_sec"] = tokens
        metrics["throughput/device/tokens_per_sec"] = device
        metrics["throughput/device/flops_per_sec"] = device * self._flops
        if self._peak is not None:
            metrics["throughput/device/mfu"] = device * self._flops / self._peak
        metrics["time/train"] = now
        metrics["time/val"] = trainer.eval_seconds


class LRMonitor(Callback):
    """The learning rate of every parameter group, under the optimizer's name in Composer."""

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """lr-<class>/group<i>."""
        chosen = trainer.recipe.optimizer.name
        name = OPTIMIZERS[chosen].title or chosen
        groups = enumerate(trainer.optimizer.param_groups)
        return {f"lr-{name}/group{index}": group["lr"] for index, group in groups}


CUDA_MEMORY = {  # Composer's names of PyTorch's statistics
    "current_allocated_mem": "allocated_bytes.all.current",
    "peak_allocated_mem": "allocated_bytes.all.peak",
    "current_reserved_mem": "reserved_bytes.all.current",
    "peak_reserved_mem": "reserved_bytes.all.peak",
}


class MemoryMonitor(Callback):
    """Memory in GiB: a GPU's, of process 0; on a CPU the peak of the process's resident set.

    Reserved is what the allocator holds, allocated what tensors use of it; a retry is an
    allocation that had to give cached blocks back first, which waits for the device.
    """

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """memory/*."""
        device = trainer.world.device
        metrics = {"memory/peak_allocated_mem": peak_memory(device) / GIB}
        if device.type == "cuda":
            found = torch.cuda.memory_stats(device)
            for name, statistic in CUDA_MEMORY.items():
                metrics[f"memory/{name}"] = found.get(statistic, 0) / GIB
            metrics["memory/alloc_retries"] = found.get("num_alloc_retries", 0)
        return metrics


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process so far, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class RuntimeEstimator(Callback):
    """Seconds that remain: steps at their mean time, and evaluations at theirs."""

    may_lag = True
    _since: tuple[int, float] | None = None  # batch and seconds from which steps are counted

    def on_return(self, trainer: Trainer) -> None:
        """Count anew."""
        self._since = (trainer.batch, trainer.train_seconds)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add time/remaining_estimate."""
        first, before = self._since or (trainer.first_batch, 0.0)
        left = trainer.clock.total - trainer.logged_batch
        seconds = trainer.train_seconds - before
        remaining = left * seconds / max(trainer.logged_batch - first, 1)
        if trainer.evaluations:
            evaluations, interval = 1, trainer.clock.batches(trainer.recipe.eval_interval)
            if interval > 0:  # this step's own, where it is due, is still to come
                evaluations += math.ceil(trainer.clock.total / interval)
                evaluations -= math.ceil(trainer.logged_batch / interval)
            remaining += evaluations * trainer.eval_seconds / trainer.evaluations
        metrics["time/remaining_estimate"] = remaining


class GenerateSamples(Callback):
    """Writes texts every interval, and at the end."""

    def __init__(
        self, config: GenerateConfig, write: Callable[[int], list[tuple[str, ...]]]
    ) -> None:
        """Take over what writes after a batch: prompts, texts, and where known the right ones."""
        self._config, self._write = config, write

    def on_step(self, trainer: Trainer) -> None:
        """Generate, if due; every process takes part, for shards' sake."""
        if not (trainer.done or trainer.is_due(self._config.interval)):
            return
        with trainer.training_paused():
            samples = self._write(trainer.batch)
        trainer.tracker.samples(trainer.batch, samples)


class GarbageCollection(Callback):
    """Collects at the same batch on all processes, in place of Python's own collector.

    Python's comes whenever a process has made enough objects, and then all others wait for it.
    What the first step leaves, modules and weights, stays for good and is never looked at again.
    A program that froze what it had before it trains keeps that, and what the run added, frozen.
    """

    def __init__(self, interval: int) -> None:
        """Collect young objects every `interval` batches, and all where a run pauses anyway."""
        self._interval = interval
        self._was_on = gc.isenabled()
        self._was_frozen = gc.get_freeze_count() > 0

    def on_start(self, trainer: Trainer) -> None:
        """Switch Python's collector off."""
        gc.disable()

    def on_step(self, trainer: Trainer) -> None:
        """Collect, if due."""
        recipe = trainer.recipe
        if trainer.batch == trainer.first_batch + 1:
            gc.collect()
            gc.freeze()
        elif trainer.is_due(recipe.eval_interval) or trainer.is_due(recipe.save_interval):
            gc.collect()
        elif trainer.batch % self._interval == 0:
            gc.collect(1)

    def close(self) -> None:
        """Leave Python's collector as it was."""
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()
