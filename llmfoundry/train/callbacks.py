"""Callbacks of the training loop: speed, step times, memory, norms, samples, early stopping.

`builders/callbacks.py` creates the callbacks that the recipe names. Every rank has the same
callbacks, and calls each hook at the same batch in the order of `Trainer.callbacks`.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.distributed.collectives import on_rank0
from llmfoundry.errors import UserError
from llmfoundry.ops.shard_layout import l2_norms
from llmfoundry.ops.torch_private import watch_fsdp
from llmfoundry.recipe.checks import nearest
from llmfoundry.recipe.logger import ResolvedEarlyStopperConfig, ResolvedGenerateConfig
from llmfoundry.recipe.optimizer import OPTIMIZERS
from llmfoundry.telemetry import OTHER, SPANS, SpanClock, observe_spans, span, stop_observing
from llmfoundry.train.trainer import Callback, Trainer

GIB = 2**30


class SpeedMonitor(Callback):
    """Throughput over the last logged steps without evaluation and saving, and MFU.

    FLOPs are counted by the convention of PaLM and LLM Foundry (models/counts.py): two per
    multiply-add, the backward pass as two forward passes, attention over the full sequence (not
    halved for causality), without embedding lookups and recomputation. Model FLOPs utilization is
    their rate divided by the device's dense bf16 peak, if that is known.
    """

    may_lag = True

    def __init__(self, *, window: int, flops_per_token: float, peak_flops: float | None) -> None:
        self._flops, self._peak = flops_per_token, peak_flops
        self._points: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def on_return(self, trainer: Trainer) -> None:
        """Restart the measurement."""
        self._points.clear()
        self._points.append((trainer.batch, trainer.train_seconds))

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add throughput/* and the total seconds of steps and evaluations: time/train, time/val."""
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


REPORTED = (*SPANS, OTHER)  # pauses are in time/val and time/checkpoint_blocking
PREFIX = "time/step/"


class StepTimes(Callback):
    """time/step/*: mean seconds of a step by span (`SpanClock`) since the last log.

    `messages` is the time in which the stream (on a CPU, the host) waits for other ranks or packs
    data for them: in FSDP's hooks, at the end of DDP's backward pass, in expert and context
    parallelism, and in the reductions of losses, norms and signals. Communication that overlaps
    with computation is not counted. Tensor parallelism communicates inside DTensor operators, and
    compiled blocks inside their graphs. Both count as forward and backward pass.
    """

    may_lag = True

    def __init__(self, device: torch.device) -> None:
        """Create the callback for the computing device."""
        is_cuda = device.type == "cuda"
        self._new_event = partial(torch.Event, device, enable_timing=True) if is_cuda else None
        self._clock: SpanClock | None = None
        self._undo: list[Callable[[], None]] = []
        self._since = 0  # batch of the last cut
        self._steps: deque[int] = deque()  # steps of the intervals that were not read yet

    def on_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self._undo = [watch_fsdp(partial(span, "messages")), self._watch_ddp(trainer.module)]
        self.on_return(trainer)

    def on_return(self, trainer: Trainer) -> None:
        """Start a new clock."""
        if self._clock is not None:
            stop_observing(self._clock)
        self._clock = SpanClock(self._new_event)
        observe_spans(self._clock)
        self._since = trainer.batch
        self._steps.clear()

    def measure(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """End an interval. It is read in `on_log`, when the device has completed it."""
        assert self._clock is not None
        self._clock.cut()
        self._steps.append(trainer.batch - self._since)
        self._since = trainer.batch
        return {}

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add time/step/*."""
        assert self._clock is not None
        seconds, steps = self._clock.take(), self._steps.popleft()
        metrics |= {f"{PREFIX}{name}": seconds.get(name, 0.0) / steps for name in REPORTED}

    def on_step(self, trainer: Trainer) -> None:
        """Read the marks that the device has reached."""
        assert self._clock is not None
        self._clock.read_done()

    def close(self) -> None:
        """Stop the clock."""
        if self._clock is not None:
            stop_observing(self._clock)
        for undo in self._undo:
            undo()
        self._clock, self._undo = None, []

    def _watch_ddp(self, module: nn.Module) -> Callable[[], None]:
        """Count the rest of DDP's backward pass after the first parameter's gradient as messages.

        The first parameter's gradient is the last to be computed. After it, the backward pass only
        waits for the all-reduce of gradients.

        Returns:
            A function that removes the hook.
        """
        if not isinstance(module, DistributedDataParallel):
            return lambda: None
        first = next(p for p in module.parameters() if p.requires_grad)

        def waits(_: Tensor) -> None:
            if self._clock is not None and module.require_backward_grad_sync:
                self._clock.turn("messages")

        return first.register_post_accumulate_grad_hook(waits).remove


class LRMonitor(Callback):
    """Learning rate of each parameter group, with the optimizer's name in Composer."""

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Return lr-<class>/group<i>."""
        recipe_name = trainer.recipe.optimizer.name
        name = OPTIMIZERS[recipe_name].title or recipe_name
        groups = enumerate(trainer.optimizer.param_groups)
        return {f"lr-{name}/group{index}": group["lr"] for index, group in groups}


CUDA_MEMORY = {  # Composer's names for PyTorch's statistics
    "current_allocated_mem": "allocated_bytes.all.current",
    "peak_allocated_mem": "allocated_bytes.all.peak",
    "current_reserved_mem": "reserved_bytes.all.current",
    "peak_reserved_mem": "reserved_bytes.all.peak",
}


class MemoryMonitor(Callback):
    """Memory in GiB: of rank 0's GPU; on a CPU, the peak resident set of the process.

    Reserved memory is held by the allocator, allocated memory is used by tensors. A retry is an
    allocation that had to free cached blocks first, which waits for the device.
    """

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Return memory/*."""
        device = trainer.world.device
        metrics = {"memory/peak_allocated_mem": peak_memory(device) / GIB}
        if device.type == "cuda":
            statistics = torch.cuda.memory_stats(device)
            for name, statistic in CUDA_MEMORY.items():
                metrics[f"memory/{name}"] = statistics.get(statistic, 0) / GIB
            metrics["memory/alloc_retries"] = statistics.get("num_alloc_retries", 0)
        return metrics


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process so far in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        # on Linux, ru_maxrss below includes the process that started this one
        for line in lines:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class RuntimeEstimator(Callback):
    """Estimate of the remaining seconds from the mean times of steps and evaluations."""

    may_lag = True
    _since: tuple[int, float] | None = None  # batch and seconds from which steps are counted

    def on_return(self, trainer: Trainer) -> None:
        """Restart the mean time of steps."""
        self._since = (trainer.batch, trainer.train_seconds)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add time/remaining_estimate."""
        first, before = self._since or (trainer.first_batch, 0.0)
        left = trainer.clock.total - trainer.logged_batch
        seconds = trainer.train_seconds - before
        remaining = left * seconds / max(trainer.logged_batch - first, 1)
        if trainer.evaluations:
            evaluations, interval = 1, trainer.clock.batches(trainer.recipe.eval_interval)
            if interval > 0:  # includes an evaluation that is due after this step
                evaluations += math.ceil(trainer.clock.total / interval)
                evaluations -= math.ceil(trainer.logged_batch / interval)
            remaining += evaluations * trainer.eval_seconds / trainer.evaluations
        metrics["time/remaining_estimate"] = remaining


class GenerateSamples(Callback):
    """Generates text samples every interval and at the end."""

    def __init__(
        self, config: ResolvedGenerateConfig, write: Callable[[int], list[tuple[str, ...]]]
    ) -> None:
        """Create the callback.

        Args:
            config: resolved.
            write: generates samples after a batch: prompts, texts, and expected texts if known.
        """
        self._config, self._write = config, write

    def on_step(self, trainer: Trainer) -> None:
        """Generate samples if due. All ranks take part, because the model may be sharded."""
        if not (trainer.done or trainer.is_due(self._config.interval)):
            return
        with trainer.training_paused():
            samples = self._write(trainer.batch)
        trainer.tracker.samples(trainer.batch, samples)


class GarbageCollection(Callback):
    """Garbage collection at the same batch on all ranks, in place of Python's automatic one.

    Python's collector runs whenever a rank has created enough objects, and all other ranks then
    wait for it. Objects that exist after the first step, such as modules, are frozen: they are
    excluded from later collections. If the program had frozen objects before training, the objects
    remain frozen after the run.
    """

    def __init__(self, interval: int) -> None:
        """Collect young objects every `interval` batches, and all objects where the run pauses."""
        self._interval = interval
        self._was_on = gc.isenabled()
        self._was_frozen = gc.get_freeze_count() > 0

    def on_start(self, trainer: Trainer) -> None:
        """Disable Python's automatic collection."""
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
        """Restore Python's automatic collection."""
        if not self._was_frozen:
            gc.unfreeze()
        if self._was_on:
            gc.enable()


class EarlyStopper(Callback):
    """Ends a run whose metric does not improve; the last callback, so that it sees all metrics."""

    def __init__(self, config: ResolvedEarlyStopperConfig) -> None:
        """`config` names a metric."""
        assert config.metric is not None, "else the recipe has no such callback"
        self._config, self._metric, self._patience = config, config.metric, config.patience
        self._best: float | None = None
        self._since = 0  # measurements since the best value
        self._names: set[str] = set()  # names of all metrics that this rank has seen
        self._logged = self._evaluated = False
        # for metrics of evaluations, no logged step ends the run
        self.may_lag = self._metric.startswith("metrics/") and "/train/" not in self._metric

    def on_start(self, trainer: Trainer) -> None:
        """End a resumed run that had stopped early before."""
        self._end_if_exhausted(trainer)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Check the metrics of a logged step."""
        self._logged = True
        self._check(trainer, metrics, evaluated=False)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Check the metrics of an evaluation."""
        self._evaluated = True
        self._check(trainer, metrics, evaluated=True)

    def state(self) -> dict[str, Any]:
        """Return the metric, its best value, and the measurements since then."""
        best = {"metric": self._metric, "mode": self._config.mode, "best": self._best}
        return {"early_stopper": {**best, "since": self._since}}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state; with another metric or mode, the count starts over."""
        seen = state.get("early_stopper", {})
        if (seen.get("metric"), seen.get("mode")) == (self._metric, self._config.mode):
            self._best, self._since = seen["best"], seen["since"]

    def _check(self, trainer: Trainer, metrics: dict[str, float], *, evaluated: bool) -> None:
        """Compare the metric with its best value, and end the run if the patience is exhausted."""
        self._names |= metrics.keys()
        value = metrics.get(self._metric)
        if evaluated or value is not None or not self.may_lag:  # otherwise no rank has a value
            local_value = value  # use rank 0's value, because throughput differs between ranks
            value = on_rank0(trainer.world, lambda: local_value)
        if value is None:
            was_measured = self._best is not None or self._since > 0
            if self._logged and self._evaluated and not was_measured:
                self._refuse(trainer)
        elif self._is_better(value):
            self._best, self._since = value, 0
        else:
            self._since += 1
            self._end_if_exhausted(trainer)

    def _is_better(self, value: float) -> bool:
        if self._best is None or math.isnan(value):
            return not math.isnan(value)
        gain = self._best - value if self._config.mode == "min" else value - self._best
        return gain > self._config.min_delta

    def _end_if_exhausted(self, trainer: Trainer) -> None:
        if self._since >= self._patience:
            best = "a number" if self._best is None else f"{self._best:.6g}"
            trainer.end(
                f"stopped early after batch {trainer.batch:,}: {self._metric} has not improved on"
                f" {best} in {self._since} measurements"
            )

    def _refuse(self, trainer: Trainer) -> None:
        """Report a metric that is never measured, and end the run unless it is complete."""
        problem = (
            f"callbacks.early_stopper.metric: {self._metric} is not among what the run has logged"
            f" and evaluated{nearest(self._metric, sorted(self._names))}"
        )
        if trainer.done:
            trainer.tracker.note(f"{problem}; nothing could end the run early")
            return
        trainer.save(last=True)
        raise UserError(
            f"{problem}; write a name of metrics.jsonl, and run the same command: batch"
            f" {trainer.batch:,} is saved"
        )


MOMENTS = ("exp_avg", "momentum_buffer")  # names of the running mean of gradients in optimizers


class OptimizerMonitor(Callback):
    """Composer's l2_norm/{grad,param,moment}/<parameter>, and the /global norm of each kind.

    Gradients are measured before clipping, weights and optimizer state after the step. Composer's
    l2_norm/update is left out, because it needs a second copy of all weights.
    """

    def on_gradients(self, trainer: Trainer) -> None:
        """Measure the gradients before the step clips and frees them."""
        parameters = trainer.root.model.named_parameters()
        gradients = {f"grad/{name}": p.grad for name, p in parameters if p.grad is not None}
        self._names, self._norms = list(gradients), l2_norms(list(gradients.values()))

    def measure(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return l2_norm/*; the global norm of gradients is measured elsewhere."""
        # weights, and the running means of gradients in the optimizer state
        parameters = [(n, p.detach()) for n, p in trainer.root.model.named_parameters()]
        state = trainer.optimizer.state
        moments = list[tuple[str, Tensor]]()
        for name, parameter in trainer.root.model.named_parameters():
            for key in MOMENTS:
                if key in state.get(parameter, {}):
                    moments.append((name, state[parameter][key]))
        tensor_norms = l2_norms([tensor for _, tensor in parameters + moments])
        kinds = {"param": tensor_norms[: len(parameters)]}
        kinds["moment"] = tensor_norms[len(parameters) :]

        # norms by name, and the global norm of each kind
        names = [f"param/{name}" for name, _ in parameters]
        names += [f"moment/{name}" for name, _ in moments]
        values = [*self._norms.unbind(), *tensor_norms.unbind()]
        norms = dict(zip([*self._names, *names], values, strict=True))
        for kind, kind_norms in kinds.items():
            norms[f"{kind}/global"] = torch.linalg.vector_norm(kind_norms.double())
        return {f"l2_norm/{name}": value for name, value in norms.items()}
