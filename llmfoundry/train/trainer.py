"""The training loop. `build.py` makes its parts, `commands/train.py` starts it.

Step number b (from 0) is a pure function of the weights before it, of (seed, b) and of the data:
its rows, its learning rate and its random draws. So a checkpoint needs to hold little more than
weights and optimizer, and a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry.data.loader import Loader
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.parallel.launch import World
from llmfoundry.recipe.duration import Clock
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.train.callbacks import Callback
from llmfoundry.train.checkpoint import Checkpointer
from llmfoundry.train.optim import CLASS_NAMES
from llmfoundry.train.schedule import lr_factor
from llmfoundry.train.signals import StopSignal
from llmfoundry.train.step import Guard, StepResult, train_step


class Tracker(Protocol):
    """What the loop tells (track.Tracker)."""

    def log(self, batch: int, tokens: int, metrics: dict[str, float]) -> None:
        """Record a logged step."""

    def samples(self, batch: int, samples: list[tuple[str, str]]) -> None:
        """Record generated text."""

    def note(self, text: str) -> None:
        """Tell the user something."""


@dataclass
class Trainer:
    """All parts of a run, and the loop over them."""

    recipe: TrainRecipe
    """Filled."""
    world: World
    root: Root
    """The model, called for evaluation and generation."""
    module: nn.Module
    """The same as DDP wraps it (or the same object), called for training."""
    optimizer: Optimizer
    loader: Loader
    clock: Clock
    microbatch: int
    autocast: Callable[[], AbstractContextManager[None]]
    bytes_per_token: float
    """Of the training text."""
    tracker: Tracker
    checkpointer: Checkpointer
    evaluate: Callable[[int], dict[str, float]]
    """Measures the model after so many batches; every process takes part."""
    identity: dict[str, Any]
    """Settings that a continuation of the run may not change, by recipe key."""
    callbacks: list[Callback] = field(default_factory=list)
    first_batch: int = 0
    """Steps done before this process started."""
    window: tuple[float, int] = (0.0, 0)
    """Sum and number of the losses since the last log before it."""

    def __post_init__(self) -> None:
        self.batch = self.first_batch
        self.train_seconds = self.eval_seconds = 0.0
        self.evaluations = 0
        self.latest_evaluation: dict[str, float] = {}
        self.guard = Guard(self.world.device)
        self._loss_sum = torch.tensor(self.window[0], device=self.world.device)
        self._loss_count = self.window[1]
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._started = time.perf_counter()

    def fit(self) -> str:
        """Train to the end, or until a signal.

        Returns:
            The signal's name; empty when the run is complete.

        Raises:
            UserError: a loss or a gradient was not finite; the weights are those before it.
        """
        if self.recipe.eval_first and self.batch == 0:
            self._evaluate()
        self._started = time.perf_counter()
        with StopSignal(self.world) as stop, closing(self.loader.prefetch(self.batch)) as batches:
            while self.batch < self.clock.total:
                self._step(next(batches))
                signal_name = stop.agreed()
                if signal_name and self.batch < self.clock.total:
                    self._save()
                    break
                signal_name = ""
        self.checkpointer.wait()
        return signal_name if self.batch < self.clock.total else ""

    def _step(self, batch: Any) -> None:
        torch.manual_seed(hash((self.recipe.seed, self.batch, self.world.rank)))
        factor = lr_factor(self.recipe.schedule, self.clock, self.batch)
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * factor
        result = train_step(
            self.module,
            self.optimizer,
            batch.to(self.world.device),
            number=self.batch,
            microbatch=self.microbatch,
            autocast=self.autocast,
            clipping=self.recipe.gradient_clipping,
            guard=self.guard,
        )
        self.batch += 1
        self._loss_sum += result.loss
        self._loss_count += 1
        if self.world.device.type == "cpu":
            self._check_guard()  # nothing to wait for there
        last = self.batch == self.clock.total
        if last or self._due(self.recipe.log_interval):
            self._log(result)
        if last or self._due(self.recipe.eval_interval):
            self._evaluate()
        for callback in self.callbacks:
            callback.on_step(self)
        if last or self._due(self.recipe.save_interval):
            self._save()

    def _due(self, interval: str) -> bool:
        return self.clock.is_due(interval, self.batch)

    def _log(self, result: StepResult) -> None:
        self._check_guard()
        loss = self._loss_sum.item() / self._loss_count
        self._loss_sum.zero_()
        self._loss_count = 0
        self.train_seconds += time.perf_counter() - self._started
        self._started = time.perf_counter()
        name = CLASS_NAMES[self.recipe.optimizer.name]
        metrics = {
            "loss/train/total": loss,
            "metrics/train/bits_per_byte": loss / math.log(2) / self.bytes_per_token,
            "l2_norm/grad/global": result.grad_norm.item(),
            f"lr-{name}/group0": self.optimizer.param_groups[0]["lr"],
            "time/epoch": self.batch / self.clock.batches_per_epoch,
        }
        for callback in self.callbacks:
            callback.on_log(self, metrics)
        self.tracker.log(self.batch, self.batch * self.clock.tokens_per_batch, metrics)

    def _check_guard(self) -> None:
        bad = self.guard.first_bad()
        if bad is None:
            return
        raise UserError(
            f"optimizer.lr: the loss or its gradient was not finite in step {bad + 1}; the"
            " optimizer did not see it, and the newest checkpoint is sound; write a smaller lr, a"
            " longer schedule.t_warmup, or precision=fp32, and run the same command"
        )

    def _evaluate(self) -> None:
        self._check_guard()
        started = time.perf_counter()
        with self.aside():
            metrics = self.evaluate(self.batch)
        self.eval_seconds += time.perf_counter() - started
        self.evaluations += 1
        self.latest_evaluation = metrics
        if metrics:
            self.tracker.log(self.batch, self.batch * self.clock.tokens_per_batch, metrics)

    def _save(self) -> None:
        self._check_guard()
        state = {
            "batch": self.batch,
            "window": [self._loss_sum.item(), self._loss_count],
            "order": self.loader.state(self.batch),
            "identity": self.identity,
        }
        with self.aside():
            self.checkpointer.save(self.batch, self.root.model, self.optimizer, state)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent here is not training time."""
        self.train_seconds += time.perf_counter() - self._started
        self.root.eval()
        yield
        self.root.train()
        self._started = time.perf_counter()
