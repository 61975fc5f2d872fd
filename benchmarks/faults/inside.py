"""A plugin for the runs that faults are injected into: what is done, noted, and faults from within.

`runs.Place` names it in every run's recipe. With `pace`, rank 0 adds a line a step to steps.txt in
the run's folder: the process, the step, the time. A step that is there twice was lost, and a new
process is a return: nothing of what watches the run is asked. A fault from within adds its time to
struck.txt there, and happens once, also where the run begins again.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.faults.noise import reading_noise
from llmfoundry.builders.job import Job
from llmfoundry.checkpoint.run_folder import run_folder
from llmfoundry.data.loader import Loader
from llmfoundry.data.sources import OrderedStream
from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.trainer import Callback, Trainer

STEPS, STRUCK = "steps.txt", "struck.txt"


class Pace(Callback):
    """Makes steps long enough to be struck in, and notes each of them."""

    def __init__(self, job: Job, *, seconds: float) -> None:
        """Begin.

        Args:
            job: of the run.
            seconds: that each step takes longer, on every process.
        """
        self._seconds, self._notes = seconds, job.world.is_main
        self._path: Path = run_folder(job.recipe) / STEPS

    def on_step(self, trainer: Trainer) -> None:
        """Wait, and note the step."""
        time.sleep(self._seconds)
        if self._notes:
            with suppress(OSError), self._path.open("a") as file:  # the disk may be the fault
                file.write(f"{os.getpid()} {trainer.batch} {time.time():.3f}\n")


class _Fault(Callback):
    """Of one process, from a step (from 1) on."""

    def __init__(self, job: Job, *, rank: int, step: int) -> None:
        self._path: Path = run_folder(job.recipe) / STRUCK
        self._is_here, self._step = job.world.rank == rank, step

    def _strikes(self, trainer: Trainer) -> bool:
        """Whether it happens now; it does once in the life of a run."""
        if not self._is_here or trainer.batch + 1 != self._step or self._path.exists():
            return False
        self._path.write_text(f"{time.time():.3f}\n")
        return True


class Poison(_Fault):
    """Makes the activations of a step NaN on one process, as a machine's silent error would."""

    def on_start(self, trainer: Trainer) -> None:
        """Look at what the last block gives."""

        def spoil(module: nn.Module, given: Any, made: torch.Tensor) -> torch.Tensor:
            return made * float("nan") if self._strikes(trainer) else made

        trainer.root.model.norm_f.register_forward_hook(spoil)


class OutOfMemory(_Fault):
    """Has PyTorch ask for more memory than there is, in the forward pass of one process."""

    def on_start(self, trainer: Trainer) -> None:
        """Ask in the first block."""

        def ask(module: nn.Module, given: Any) -> None:
            if self._strikes(trainer):
                torch.empty(2**45)

        block: Any = trainer.root.model.blocks[0]
        block.attn.register_forward_pre_hook(ask)


class Stuck(_Fault):
    """A callback that does not return, on one process."""

    def on_step(self, trainer: Trainer) -> None:
        """Wait for what never comes, before the step."""
        while self._strikes(trainer):
            time.sleep(1e6)


class BadWeights(Callback):
    """Makes the weights NaN after a step of the first attempt, before they are saved."""

    def __init__(self, job: Job, *, step: int) -> None:
        """After this step (from 1)."""
        self._step, self._notes = step, job.world.is_main
        self._path: Path = run_folder(job.recipe) / STRUCK

    def on_step(self, trainer: Trainer) -> None:
        """Spoil them, on every process."""
        if trainer.batch != self._step or trainer.first_batch > 0:
            return
        if self._notes:
            self._path.write_text(f"{time.time():.3f}\n")
        with torch.no_grad():
            for weight in trainer.root.model.parameters():
                weight.fill_(float("nan"))


class SlowRank(_Fault):
    """From a step on one process takes twice as long for its blocks' forward passes."""

    def on_start(self, trainer: Trainer) -> None:
        """Wait in each block for as long as it has computed."""
        if self._is_here:
            for block in trainer.root.model.blocks:
                self._slow_down(trainer, block)

    def _slow_down(self, trainer: Trainer, block: Any) -> None:
        began = 0.0

        def begin(module: nn.Module, given: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def end(module: nn.Module, given: Any, made: Any) -> None:
            self._strikes(trainer)
            if trainer.batch + 1 >= self._step:
                time.sleep(time.perf_counter() - began)

        block.attn.register_forward_pre_hook(begin)
        block.ffn.register_forward_hook(end)


class BadRows(Callback):
    """Makes noise, which nothing that was learned foretells, of the rows of some steps."""

    def __init__(self, job: Job, *, step: int, steps: int) -> None:
        """Begin.

        Args:
            job: of the run.
            step: the first (from 1).
            steps: how many.
        """
        self._steps = range(step - 1, step - 1 + steps)

    def on_start(self, trainer: Trainer) -> None:
        """Spoil these rows wherever they are read."""
        places = set[int]()
        for step in self._steps:
            plan = trainer.loader._plan_of(step)
            places.update(plan.places[step - plan.step])
        setattr(OrderedStream, "read", reading_noise(places))  # noqa: B010


class WithoutRows(Callback):
    """Gives later batches from a step (from 1) on: a run that never had those between."""

    def __init__(self, job: Job, *, step: int, steps: int) -> None:
        """Leave out the batches of so many steps."""
        rows = Loader.rows

        def later(loader: Loader, n: int) -> Any:
            return rows(loader, n + (steps if n >= step - 1 else 0))

        setattr(Loader, "rows", later)  # noqa: B010


CALLBACKS["pace"] = CallbackType(Pace, keys={"seconds": 0.1})
CALLBACKS["poison"] = CallbackType(Poison, keys={"rank": 2, "step": 0})
CALLBACKS["out_of_memory"] = CallbackType(OutOfMemory, keys={"rank": 2, "step": 0})
CALLBACKS["stuck"] = CallbackType(Stuck, keys={"rank": 2, "step": 0})
CALLBACKS["bad_weights"] = CallbackType(BadWeights, keys={"step": 0})
CALLBACKS["slow_rank"] = CallbackType(SlowRank, keys={"rank": 2, "step": 0})
CALLBACKS["bad_rows"] = CallbackType(BadRows, keys={"step": 0, "steps": 3})
CALLBACKS["without_rows"] = CallbackType(WithoutRows, keys={"step": 0, "steps": 0})
