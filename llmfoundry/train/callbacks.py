"""Small observers of the training loop: speed, time of each span, memory, norms, samples and more.

`builders/callbacks.py` makes those that the recipe names. Every process has the same callbacks, and
calls each hook at the same batch, in the order of `Trainer.callbacks`.
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
    """Throughput over the last logged steps, evaluation and saving left out, and MFU.

    FLOPs are the model's, by the convention of PaLM and LLM Foundry (models/counts.py): two for a
    multiply-add, the backward pass as two forward passes, attention over the full row (causality
    not discounted), embedding look-ups and recomputation (activation checkpointing) not counted.
    Model FLOPs utilization is their rate over the device's dense bf16 peak, where that is known.
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


REPORTED = (*SPANS, OTHER)  # time/val and time/checkpoint_blocking report pauses
PREFIX = "time/step/"


class StepTimes(Callback):
    """time/step/*: seconds of a step by span (`SpanClock`), the mean since the last log.

    `messages` is the time that the stream, or a CPU, waits for other processes, packs and unpacks
    for them: in FSDP's hooks, at the end of DDP's backward pass, in expert and context parallelism,
    and where losses, norms and signals are agreed upon. Communication that overlaps with
    computation is not counted. Tensor parallelism communicates inside of DTensor's operators, and
    compiled blocks inside of their graphs: both count as the forward and backward pass.
    """

    may_lag = True

    def __init__(self, device: torch.device) -> None:
        """`device`: that which computes."""
        is_cuda = device.type == "cuda"
        self._new_event = partial(torch.Event, device, enable_timing=True) if is_cuda else None
        self._clock: SpanClock | None = None
        self._undo: list[Callable[[], None]] = []
        self._since = 0  # batches at the last cut
        self._steps: deque[int] = deque()  # of the pieces that are not yet taken

    def on_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        self._undo = [watch_fsdp(partial(span, "messages")), self._watch_ddp(trainer.module)]
        self.on_return(trainer)

    def on_return(self, trainer: Trainer) -> None:
        """Count anew."""
        if self._clock is not None:
            stop_observing(self._clock)
        self._clock = SpanClock(self._new_event)
        observe_spans(self._clock)
        self._since = trainer.batch
        self._steps.clear()

    def measure(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """Nothing yet: the device has still to compute what is counted up to here."""
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
        """Read what is there."""
        assert self._clock is not None
        self._clock.read_done()

    def close(self) -> None:
        """Stop counting."""
        if self._clock is not None:
            stop_observing(self._clock)
        for undo in self._undo:
            undo()
        self._clock, self._undo = None, []

    def _watch_ddp(self, module: nn.Module) -> Callable[[], None]:
        """The backward pass of replicas ends with the first parameter's gradient.

        What is left of it is the wait for gradients that are still being added up.
        """
        if not isinstance(module, DistributedDataParallel):
            return lambda: None
        first = next(p for p in module.parameters() if p.requires_grad)

        def waits(_: Tensor) -> None:
            if self._clock is not None and module.require_backward_grad_sync:
                self._clock.turn("messages")

        return first.register_post_accumulate_grad_hook(waits).remove


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
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as lines:
        # Linux: the resource usage below begins with that of the process that started this one.
        for line in lines:
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
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
        self, config: ResolvedGenerateConfig, write: Callable[[int], list[tuple[str, ...]]]
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


class EarlyStopper(Callback):
    """Looks at every logged step and evaluation; comes last among callbacks, to see all metrics."""

    def __init__(self, config: ResolvedEarlyStopperConfig) -> None:
        """`config` names a metric."""
        assert config.metric is not None, "else the recipe has no such callback"
        self._config, self._metric, self._patience = config, config.metric, config.patience
        self._best: float | None = None
        self._since = 0  # measurements since the best
        self._names: set[str] = set()  # of all metrics seen by this process
        self._logged = self._evaluated = False
        # what evaluations measure: no logged step ends the run
        self.may_lag = self._metric.startswith("metrics/") and "/train/" not in self._metric

    def on_start(self, trainer: Trainer) -> None:
        """End at once a run that had ended so already."""
        self._end_if_exhausted(trainer)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look at a logged step."""
        self._logged = True
        self._look(trainer, metrics, evaluated=False)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look at an evaluation."""
        self._evaluated = True
        self._look(trainer, metrics, evaluated=True)

    def state(self) -> dict[str, Any]:
        """The best value so far, of which metric, and how long ago it was."""
        best = {"metric": self._metric, "mode": self._config.mode, "best": self._best}
        return {"early_stopper": {**best, "since": self._since}}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume; with another metric or mode the count starts over."""
        seen = state.get("early_stopper", {})
        if (seen.get("metric"), seen.get("mode")) == (self._metric, self._config.mode):
            self._best, self._since = seen["best"], seen["since"]

    def _look(self, trainer: Trainer, metrics: dict[str, float], *, evaluated: bool) -> None:
        self._names |= metrics.keys()
        value = metrics.get(self._metric)
        if evaluated or value is not None or not self.may_lag:  # else nobody has one
            measured = value  # throughput, for one, is another on every process
            value = on_rank0(trainer.world, lambda: measured)
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
        """A metric that never comes would stop nothing, in silence."""
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


MOMENTS = ("exp_avg", "momentum_buffer")  # what optimizers call the running mean of gradients


class OptimizerMonitor(Callback):
    """Composer's l2_norm/{grad,param,moment}/<parameter>, and /global of each.

    Gradients are those before clipping; weights and moments those after the step. Composer's
    l2_norm/update is left out: it takes a second copy of all weights, whatever the optimizer.
    """

    def on_gradients(self, trainer: Trainer) -> None:
        """Measure the gradients, which the step is about to clip and drop."""
        parameters = trainer.root.model.named_parameters()
        found = {f"grad/{name}": p.grad for name, p in parameters if p.grad is not None}
        self._names, self._norms = list(found), l2_norms(list(found.values()))

    def measure(self, trainer: Trainer) -> dict[str, Tensor]:
        """l2_norm/*; the gradient's global norm is there already."""
        parameters = [(n, p.detach()) for n, p in trainer.root.model.named_parameters()]
        state = trainer.optimizer.state
        moments = [
            (name, state[p][key])
            for name, p in trainer.root.model.named_parameters()
            for key in MOMENTS
            if key in state.get(p, {})
        ]
        found = l2_norms([tensor for _, tensor in parameters + moments])
        kinds = {"param": found[: len(parameters)], "moment": found[len(parameters) :]}
        names = [f"param/{name}" for name, _ in parameters]
        names += [f"moment/{name}" for name, _ in moments]
        values = [*self._norms.unbind(), *found.unbind()]
        norms = dict(zip([*self._names, *names], values, strict=True))
        for kind, each in kinds.items():
            norms[f"{kind}/global"] = torch.linalg.vector_norm(each.double())
        return {f"l2_norm/{name}": value for name, value in norms.items()}
