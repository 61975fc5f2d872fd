"""The callbacks that a recipe asks for: one function for each of the table `CALLBACKS`."""

from __future__ import annotations

from typing import Any

from llmfoundry.builders.job import Job
from llmfoundry.builders.samples import build_samples
from llmfoundry.models.counts import peak_flops, trained_flops_per_token
from llmfoundry.recipe.logger import CALLBACKS
from llmfoundry.train.callbacks import (
    GarbageCollection,
    GenerateSamples,
    LRMonitor,
    MemoryMonitor,
    RuntimeEstimator,
    SpeedMonitor,
)
from llmfoundry.train.early_stopper import EarlyStopper
from llmfoundry.train.optimizer_monitor import OptimizerMonitor
from llmfoundry.train.trainer import Callback


def build_callbacks(job: Job, state: dict[str, Any]) -> list[Callback]:
    """Those that the recipe asks for, in the order in which they are called.

    Args:
        job: the run.
        state: what they left in the checkpoint that the run goes on from; else empty.
    """
    config = job.recipe.callbacks
    callbacks: list[Callback] = [
        CALLBACKS[name].load()(job, **(config.plugins.get(name) or {})) for name in config.chosen()
    ]
    for callback in callbacks:
        callback.restore(state)
    return callbacks


def speed_monitor(job: Job) -> Callback:
    """Throughput, of the FLOPs of what trains."""
    flops = trained_flops_per_token(job.root.model, job.recipe.max_seq_len)
    window, peak = job.recipe.callbacks.speed_window, peak_flops(job.world.device)
    return SpeedMonitor(window=window, flops_per_token=flops, peak_flops=peak)


def lr_monitor(job: Job) -> Callback:
    """Learning rates."""
    return LRMonitor()


def optimizer_monitor(job: Job) -> Callback:
    """Norms of parameters, gradients and moments."""
    return OptimizerMonitor()


def memory_monitor(job: Job) -> Callback:
    """Peak memory."""
    return MemoryMonitor()


def runtime_estimator(job: Job) -> Callback:
    """Time that remains."""
    return RuntimeEstimator()


def generate(job: Job) -> Callback:
    """Samples of text."""
    return GenerateSamples(job.recipe.callbacks.generate, build_samples(job))


def early_stopper(job: Job) -> Callback:
    """The end of a run that no longer improves."""
    return EarlyStopper(job.recipe.callbacks.early_stopper)


def garbage_collection(job: Job) -> Callback:
    """Collections at the same batch on all processes."""
    return GarbageCollection(job.recipe.callbacks.gc_interval)
