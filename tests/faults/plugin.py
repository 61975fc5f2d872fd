"""A plugin of the runs that faults are injected into: notes each step, and faults from within.

`runs.RECIPE` names it. `pace` makes rank 0 write a line a step to steps.txt in the run's folder:
the process, the step, the time. A step that is there twice was lost, and a new process is a
restart: nothing that watches the run is involved. A fault from within writes its time to
injected.txt there, and happens once, also where the run is started again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from llmfoundry.builders.run_context import RunContext
from llmfoundry.data.batch import TrainingSequence
from llmfoundry.data.loader import Loader
from llmfoundry.data.sources import OrderedStream
from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.trainer import Callback, Trainer

STEPS, INJECTED = "steps.txt", "injected.txt"


class Pace(Callback):
    """Makes steps `seconds` longer on every process, long enough for a fault, and notes each."""

    def __init__(self, job: RunContext, *, seconds: float) -> None:
        self._seconds, self._is_main = seconds, job.world.is_main
        self._path: Path = job.run.folder / STEPS

    def on_step(self, trainer: Trainer) -> None:
        time.sleep(self._seconds)
        if self._is_main:
            with suppress(OSError), self._path.open("a") as file:  # the disk may be the fault
                file.write(f"{os.getpid()} {trainer.batch} {time.time():.3f}\n")


class _Fault(Callback):
    """Of one process, from a step (from 1) on."""

    def __init__(self, job: RunContext, *, rank: int, step: int) -> None:
        self._path: Path = job.run.folder / INJECTED
        self._is_here, self._step = job.world.rank == rank, step

    def _is_due(self, trainer: Trainer) -> bool:
        """Whether it happens now: once in the life of a run."""
        if not self._is_here or trainer.batch + 1 != self._step or self._path.exists():
            return False
        self._path.write_text(f"{time.time():.3f}\n")
        return True


class Poison(_Fault):
    """Makes the activations of a step NaN on one process, as a silent error of a machine would."""

    def on_start(self, trainer: Trainer) -> None:
        def spoil(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * float("nan") if self._is_due(trainer) else output

        trainer.root.model.norm_f.register_forward_hook(spoil)


class OutOfMemory(_Fault):
    """Requests more memory than there is, in the forward pass of one process."""

    def on_start(self, trainer: Trainer) -> None:
        def request(module: nn.Module, inputs: Any) -> None:
            if self._is_due(trainer):
                torch.empty(2**45)

        block: Any = trainer.root.model.blocks[0]
        block.attn.register_forward_pre_hook(request)


class Stuck(_Fault):
    """A callback that does not return, on one process."""

    def on_step(self, trainer: Trainer) -> None:
        while self._is_due(trainer):
            time.sleep(1e6)


class BadWeights(Callback):
    """Makes the weights NaN after a step (from 1) of the first attempt, before they are saved."""

    def __init__(self, job: RunContext, *, step: int) -> None:
        self._step, self._is_main = step, job.world.is_main
        self._path: Path = job.run.folder / INJECTED

    def on_step(self, trainer: Trainer) -> None:
        if trainer.batch != self._step or trainer.first_batch > 0:
            return
        if self._is_main:
            self._path.write_text(f"{time.time():.3f}\n")
        with torch.no_grad():
            for weight in trainer.root.model.parameters():
                weight.fill_(float("nan"))


class SlowRank(_Fault):
    """From a step on the blocks' forward passes take twice as long on one process."""

    def on_start(self, trainer: Trainer) -> None:
        if self._is_here:
            for block in trainer.root.model.blocks:
                self._slow_down(trainer, block)

    def _slow_down(self, trainer: Trainer, block: Any) -> None:
        began = 0.0

        def begin(module: nn.Module, inputs: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            self._is_due(trainer)
            if trainer.batch + 1 >= self._step:
                time.sleep(time.perf_counter() - began)

        block.attn.register_forward_pre_hook(begin)
        block.ffn.register_forward_hook(end)


class BadRows(Callback):
    """Replaces the rows of `steps` steps from `step` (from 1) on by noise, unlike the text."""

    def __init__(self, job: RunContext, *, step: int, steps: int) -> None:
        self._steps = range(step - 1, step - 1 + steps)

    def on_start(self, trainer: Trainer) -> None:
        places = set[int]()
        for step in self._steps:
            plan = trainer.loader._plan_of(step)
            places.update(plan.places[step - plan.step])
        setattr(OrderedStream, "read", reading_noise(places))  # noqa: B010


def reading_noise(places: Container[int]) -> Callable[[OrderedStream, int], TrainingSequence]:
    """What reads as `OrderedStream.read` does now, but noise for these rows of the source."""
    read = OrderedStream.read

    def spoilt(stream: OrderedStream, place: int) -> TrainingSequence:
        row = read(stream, place)
        if place not in places:
            return row
        noise = np.random.default_rng(place).integers(128, 256, len(row.ids))
        return row._replace(ids=noise.astype(row.ids.dtype))

    return spoilt


class WithoutRows(Callback):
    """Leaves out the batches of `steps` steps from `step` (from 1) on, as if never there."""

    def __init__(self, job: RunContext, *, step: int, steps: int) -> None:
        rows = Loader.rows

        def later(loader: Loader, n: int) -> Any:
            return rows(loader, n + (steps if n >= step - 1 else 0))

        setattr(Loader, "rows", later)  # noqa: B010


class FakeGpus(Callback):
    """Gives each rank the GPU of its number in tests/resilience/fake_nvml.cpp, read by the watch.

    What watches a GPU starts where PyTorch trains on one; here each rank trains on a CPU.
    """

    def __init__(self, job: RunContext) -> None:
        from llmfoundry.resilience.check.nvml import GpuReader
        from llmfoundry.resilience.watch.watch import Watch

        start = Watch.on_start

        def with_gpu(watch: Watch, trainer: Trainer) -> None:
            start(watch, trainer)
            watch._gpu = GpuReader(f"GPU-0000-{trainer.world.rank + 1}", seconds=0.5)
            assert not watch._gpu.problem, watch._gpu.problem

        setattr(Watch, "on_start", with_gpu)  # noqa: B010


ONE_RANK = {"rank": 2, "step": 0}
CALLBACKS["pace"] = CallbackType(Pace, keys={"seconds": 0.1})
CALLBACKS["poison"] = CallbackType(Poison, keys=ONE_RANK)
CALLBACKS["out_of_memory"] = CallbackType(OutOfMemory, keys=ONE_RANK)
CALLBACKS["stuck"] = CallbackType(Stuck, keys=ONE_RANK)
CALLBACKS["bad_weights"] = CallbackType(BadWeights, keys={"step": 0})
CALLBACKS["slow_rank"] = CallbackType(SlowRank, keys=ONE_RANK)
CALLBACKS["bad_rows"] = CallbackType(BadRows, keys={"step": 0, "steps": 3})
CALLBACKS["without_rows"] = CallbackType(WithoutRows, keys={"step": 0, "steps": 0})
CALLBACKS["fake_gpus"] = CallbackType(FakeGpus, keys={})
