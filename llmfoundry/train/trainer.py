"""The training loop. `builders/trainer.py` makes its parts, `cli/commands/train.py` starts it.

Step number b (from 0) is a pure function of the weights before it, of (seed, b) and of the data:
its rows, its learning rate and its random draws. So a checkpoint needs to hold little more than
weights and optimizer, and a resumed run repeats the uninterrupted one bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llmfoundry.data.loader import BatchPrefetcher, Loader
from llmfoundry.distributed.failures import failed_collective
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError, is_out_of_memory, what_was_asked
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.devices import seed_of
from llmfoundry.ops.packed_layout import IGNORE, Batch
from llmfoundry.recipe.checks import Clock
from llmfoundry.recipe.logger import ResolvedCallbacksConfig
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.optimizer import ResolvedOptimizerConfig
from llmfoundry.recipe.parallel import ResolvedParallelConfig
from llmfoundry.recipe.schedule import ResolvedScheduleConfig
from llmfoundry.telemetry import beat, in_callback, span
from llmfoundry.train.optim.schedule import build_schedule
from llmfoundry.train.out_of_memory import MicrobatchLimit, OutOfMemory, begin_again
from llmfoundry.train.signals import StopSignal
from llmfoundry.train.spikes import Return, RollBack, SpikeHandler
from llmfoundry.train.step import StepHooks, StepResult, StepSettings, not_a_step, train_step
from llmfoundry.train.step_metrics import LoggedStep, LossWindow, routing_metrics


class Callback:
    """Observes the loop. Does nothing; subclasses override what they need.

    Attributes:
        may_lag: whether `on_log` may be called when the next step has been launched, and the model
            is a step on. Where one that is called may not, each logged step waits for the GPU.
    """

    may_lag = False

    def on_start(self, trainer: Trainer) -> None:
        """Act before the first step, or the evaluation before it."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Read the gradients, complete and not yet clipped, of a step that will be logged."""

    def measure(self, trainer: Trainer) -> Mapping[str, float | Tensor]:
        """Metrics of a logged step, at its end: numbers, or tensors () that nobody waits for."""
        return {}

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look at the metrics of a logged step, `trainer.logged_batch`, and add to them."""

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look at what an evaluation measured."""

    def on_step(self, trainer: Trainer) -> None:
        """Act after a step, its log and its evaluation, before its checkpoint."""

    def on_return(self, trainer: Trainer) -> None:
        """Count anew from `trainer.batch`: after a spike the run went back there."""

    def close(self) -> None:
        """Undo what outlives the run; called at its end, also after an error."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON; empty: nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned; empty where a run starts at batch 0."""


class LoopRecipe(Protocol):
    """What the loop and its callbacks need of `recipe.train.TrainRecipe`, filled."""

    seed: int
    max_seq_len: int
    log_interval: str
    eval_interval: str
    eval_first: bool
    save_interval: str
    pause_at: str | None
    model: ResolvedModelConfig
    optimizer: ResolvedOptimizerConfig
    schedule: ResolvedScheduleConfig
    parallel: ResolvedParallelConfig
    callbacks: ResolvedCallbacksConfig

    def training_settings(self) -> dict[str, Any]:
        """Every setting that changes what is learned, by key; a checkpoint keeps them."""


class Checkpoints(Protocol):
    """What the loop needs of `checkpoint.save.Checkpointer`; every process calls all of it."""

    @property
    def saved(self) -> int:
        """The newest batch that this process knows to be saved; -1: none."""

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written in the background."""

    @property
    def waits(self) -> Any:
        """Seconds that training waited for the latest save: `total`, and of it `before`."""

    def tidy(self) -> None:
        """Remove what killed saves left, before the first step."""

    def check(self) -> None:
        """Raise what went wrong in the background, before a step."""

    def before_update(self) -> None:
        """Wait until the weights of a save are copied."""

    def save(
        self, batch: int, model: Decoder, optimizer: Optimizer, state: dict[str, Any], *, last: bool
    ) -> object:
        """Save after `batch` steps; the last is complete when this returns."""

    def wait(self) -> None:
        """Return when what is under way is written."""

    def find(self, until: int) -> Any:
        """The newest complete checkpoint saved after at most so many steps."""

    def forget_after(self, batch: int) -> None:
        """Remove what was saved after more steps."""


class TrainingLog(Protocol):
    """What the loop reports to: `loggers.tracker.Tracker`, which this layer may not import."""

    def log(self, batch: int, tokens: int, metrics: dict[str, float]) -> None:
        """Record a logged step."""

    def routing(self, batch: int, tokens: int, load: list[list[int]]) -> None:
        """Record the load of every expert of every layer, at a logged step."""

    def samples(self, batch: int, samples: list[tuple[str, ...]]) -> None:
        """Record generated text."""

    def note(self, text: str) -> None:
        """Show the user a line."""

    def rewind(self, batch: int) -> None:
        """Drop what was recorded of steps after `batch`, which are repeated."""

    def event(
        self, kind: str, seen: str, done: str, *, step: int, action: str, **more: Any
    ) -> None:
        """Show and record what was seen in a step (from 1), what was done, and further facts."""


PAUSED = "pause_at"
"""What `fit` returns where the recipe's key of this name has ended the run."""


@dataclass
class Trainer:
    """All parts of a run, and the loop over them."""

    recipe: LoopRecipe
    world: World
    root: Root
    """The model, called for evaluation and generation."""
    module: nn.Module
    """The same as DDP wraps it (or the same object), called for training."""
    optimizer: Optimizer
    loader: Loader
    clock: Clock
    settings: StepSettings
    bytes_per_token: float
    """Of the training text."""
    tracker: TrainingLog
    checkpointer: Checkpoints
    roll_back: Callable[[Trainer, int], Return]
    """Loads a checkpoint from before a spike, and skips the batches read since."""
    evaluate: Callable[[int], dict[str, float]]
    """Measures the model after this many batches; every process takes part."""
    identity: dict[str, Any]
    """Settings that a continuation of the run may not change, by recipe key."""
    callbacks: list[Callback] = field(default_factory=list)
    memory: MicrobatchLimit = field(default_factory=MicrobatchLimit)
    """What is done where a step does not fit into memory."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the run resumes from, as `save` wrote it; empty: nothing."""

    def __post_init__(self) -> None:
        self.first_batch = self.batch = self.logged_batch = self.state.get("batch", 0)
        self._launched: LoggedStep | None = None  # whose values are not read yet
        self.train_seconds = self.eval_seconds = 0.0
        self._wait_seconds = 0.0  # for batches, since the last log
        self.waited = 0.0  # for the step's batch, in seconds
        self.paused_seconds = 0.0  # in evaluation, samples and saving, so far
        self._batches: BatchPrefetcher
        self._no_batch: BaseException | None = None  # why the step under way has none
        self._is_updating = False
        self.evaluations = 0
        self.latest_evaluation: dict[str, float] = {}
        self.ended_early = self._to_stop = ""
        pause = self.recipe.pause_at
        self._pause = math.inf if pause is None else math.ceil(self.clock.batches(pause) - 1e-9)
        watch, report = self.recipe.callbacks.watch, self.tracker.event
        self.spikes = SpikeHandler(watch, self.world.device, report, self.state.get("spikes", {}))
        self._losses = self._begin_losses(self.state)
        self._saves_soon = False  # what the run went back to is to outlive a kill
        self._lr_factor = build_schedule(self.recipe.schedule, self.clock)
        self._draws_as = self.world.in_evaluation().data_rank  # those that share rows draw alike
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._started = time.perf_counter()
        self._training_settings = self.recipe.training_settings()
        for callback in self.callbacks:
            callback.restore(self.state.get("callbacks", {}))

    def _begin_losses(self, state: dict[str, Any]) -> LossWindow:
        only_finite = self.spikes.config.not_finite != "stop"
        window = state.get("window", (0.0, 0))
        return LossWindow(self.world.device, *window, only_finite=only_finite)

    def fit(self) -> str:
        """Train to the end, or until a signal.

        Returns:
            The signal's name, or what else asked for a stop; empty when the run is complete.

        Raises:
            UserError: a loss or a gradient was not finite; the weights are those before it.
            GivenUp: a spike ends the run, by the recipe; the same holds.
        """
        is_cut_off = False
        try:
            self.checkpointer.tidy()
            for callback in self._calling("on_start"):
                callback.on_start(self)
            if self.recipe.eval_first and self.batch == 0:
                self._evaluate()
            return self._fit()
        except Exception as error:
            is_cut_off = failed_collective(error) is not None
            raise
        finally:
            beat("end", self.batch, saved=self.checkpointer.saved)
            if not is_cut_off:  # or a save would wait for who is lost, and the others for this one
                self.checkpointer.wait()
            for callback in self.callbacks:
                callback.close()

    def _fit(self) -> str:
        if not self.done and self.batch >= self._pause:  # it was paused here before, or later
            return PAUSED
        signal_name = ""
        self._started = time.perf_counter()
        self._batches = BatchPrefetcher(self.loader, self.batch)
        with StopSignal(self.world) as stop, ExitStack() as stack:
            stack.callback(lambda: self._batches.close())  # the newest, where the run goes back
            try:
                while not (self.done or signal_name):
                    try:
                        self._step(self._take(stop), stop)
                    except RollBack as why:
                        self._go_back(why)
                    signal_name = (stop.agreed() or self._to_stop) if not self.done else ""
            except BaseException:
                with suppress(Exception):  # the step before the one that failed was sound
                    self._finish_log()
                raise
            if signal_name:
                self.save(last=True)
        return signal_name

    def _go_back(self, why: RollBack) -> None:
        """Begin again before a spike, with other batches."""
        beat("start", self.batch)  # reading a checkpoint takes as long as it takes
        self._launched = None
        self._batches.close()
        to = self.roll_back(self, why.decision.batch)
        self.batch = self.logged_batch = to.batch
        self._losses = self._begin_losses(to.state)
        self._wait_seconds, self._saves_soon = 0.0, True
        self.spikes.go_back(why.decision, to.describe(), to.state.get("spikes"))
        for callback in self.callbacks:
            if to.name:
                callback.restore(to.state["callbacks"])
            callback.on_return(self)
        self.tracker.rewind(self.batch)
        self._batches = BatchPrefetcher(self.loader, self.batch)
        self._started = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the step under way, or the one before, is the run's last."""
        return self.batch >= self.clock.total or bool(self.ended_early)

    def end(self, why: str) -> None:
        """Make this step the last, as if the run were that long; every process calls it."""
        if not self.ended_early:
            self.ended_early = why
            self.tracker.note(why)

    def stop_and_save(self, why: str) -> None:
        """Save after this step, and end, to be started again elsewhere; every process calls it."""
        self._to_stop = self._to_stop or why

    def is_due(self, interval: str) -> bool:
        """Whether something that happens every `interval` happens after this step."""
        return falls_due(self.clock.batches(interval), self.batch)

    def _take(self, stop: StopSignal) -> Batch:
        """The step's rows; where they cannot be had, empty ones for a step that all will undo."""
        failure: BaseException | None = None
        beat("data", self.batch + 1, saved=self.checkpointer.saved)
        started = time.perf_counter()
        try:
            self.checkpointer.check()
            with span("data"):
                batch = next(self._batches)
        except (Exception, StopIteration) as error:
            failure = error
            shape = (self.clock.samples_per_batch // self.world.data_size, self.recipe.max_seq_len)
            labels = torch.full(shape, IGNORE)
            batch = Batch(torch.zeros_like(labels), labels, None)
        self.waited = time.perf_counter() - started
        self._wait_seconds += self.waited
        self._no_batch = failure
        if not self.memory.in_place or self.world.size == 1:
            stop.begin(failure)
        return batch

    def _step(self, batch: Batch, stop: StopSignal) -> None:
        beat("step", self.batch + 1)
        factor = self._lr_factor(self.batch)
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * factor
        following, interval = self.batch + 1, self.clock.batches(self.recipe.log_interval)
        logs = following == self.clock.total or falls_due(interval, following)
        result = self._until_it_fits(batch, stop, logs=logs)
        self.batch = following
        values = [result.loss, *result.parts.values(), *result.reported.values()]
        self._losses.add(torch.stack(values))
        if not lags(self.world.device):
            self._check_guard()  # nothing to wait for there
        self._log(result if logs else None)
        if not self.done and self.batch == self._pause:
            self.stop_and_save(PAUSED)
        if self.done or self._to_stop == PAUSED or self.is_due(self.recipe.eval_interval):
            self._evaluate()
        beat("callbacks", self.batch)
        for callback in self._calling("on_step"):
            callback.on_step(self)
        if self.done or self._saves_soon or self.is_due(self.recipe.save_interval):
            self.save(last=self.done)

    def _until_it_fits(self, batch: Batch, stop: StopSignal, *, logs: bool) -> StepResult:
        """The step; if any process runs out of memory, all do it again with half the microbatch.

        Raises:
            StartAgain: this layout's processes cannot, and are to be started again for it.
            UserError: it cannot be smaller, or it was the optimizer that ran out of memory.
        """
        hooks = StepHooks(
            after_backward=partial(self._agree, stop),
            on_gradients=self._on_gradients if logs else None,
            before_update=self._before_update,
            can_redo=self.memory.in_place,
        )
        step = self.batch + 1
        while True:
            try:
                return self._try_step(batch, hooks)
            except OutOfMemory as error:
                why = error.with_traceback(None)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = what_was_asked(error)
                if self._is_updating:
                    raise UserError(_no_room_for_update(step, reason)) from error
                why = OutOfMemory({self.world.rank: reason})
                if self.world.size > 1:  # the others wait somewhere for this one
                    self.memory.start_again(self.settings.microbatch, why, step)
            begin_again(self.module)
            beat("step", step)
            half = self.memory.halve(self.settings.microbatch, why, step, self.tracker.event)
            self.settings = replace(self.settings, microbatch=half)

    def _try_step(self, batch: Batch, hooks: StepHooks) -> StepResult:
        self._is_updating = False
        self._seed()
        with span("data"):
            batch = batch.to(self.world.device)
        return train_step(
            self.module,
            self.optimizer,
            batch,
            self.settings,
            number=self.batch,
            guard=self.spikes.guard,
            hooks=hooks,
        )

    def _agree(self, stop: StopSignal, shortage: str) -> None:
        """Behind the backward passes: who is to stop, failed, or ran out of memory."""
        beat("update", self.batch + 1)
        if self.memory.in_place and (shortage or self.world.size > 1):
            stop.begin(self._no_batch, shortage)
        stop.check()

    def _before_update(self) -> None:
        self._is_updating = True
        with span("saving"):
            self.checkpointer.before_update()

    def _seed(self) -> None:
        """Make the step's draws (dropout) a function of the seed, the batch and the data rank.

        Not torch.manual_seed: on a machine without a GPU it leaves behind, at every call, a stack
        trace for each kind of device that might still come.
        """
        value = seed_of(self.recipe.seed, f"step/{self.batch}/{self._draws_as}")
        torch.default_generator.manual_seed(value)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(value)

    def _calling(self, hook: str) -> Iterator[Callback]:
        """The callbacks that have this hook, in order; a monitor knows the name of each."""
        for callback in self.callbacks:
            if overrides(callback, hook):
                with in_callback(f"{type(callback).__name__}.{hook}"):
                    yield callback

    def _on_gradients(self) -> None:
        with span("logging"):
            for callback in self._calling("on_gradients"):
                callback.on_gradients(self)

    def _log(self, result: StepResult | None) -> None:
        """Begin to log this step, where there is a result, and log the one before."""
        with span("logging"):
            step = None if result is None else self._begin_log(result)
        self._finish_log()
        self._launched = step
        waits = [c for c in self.callbacks if not c.may_lag and overrides(c, "on_log")]
        if waits or not lags(self.world.device):
            self._finish_log()

    def _begin_log(self, result: StepResult) -> LoggedStep:
        measured: dict[str, float | Tensor] = {
            "time/epoch": self.batch / self.clock.batches_per_epoch,
            "time/data_wait": self._wait_seconds / self._losses.steps,
            **self._batches.metrics(),
        }
        for callback in self._calling("measure"):
            measured |= callback.measure(self)
        self._wait_seconds = 0.0
        losses, guard = self._losses.take(), self.spikes.guard
        return LoggedStep(self.batch, result, losses, guard, measured)

    def _finish_log(self) -> None:
        """Log the step whose values are on their way; waits for that step alone."""
        if self._launched is None:
            return
        with span("logging"):
            self._log_values(self._launched)

    def _log_values(self, launched: LoggedStep) -> None:
        found = launched.read()
        self._launched = None
        self.spikes.handle(found.verdicts)
        self._refuse(found.first_bad)
        self.train_seconds += time.perf_counter() - self._started
        self._started = time.perf_counter()
        self.logged_batch = found.batch
        metrics = found.metrics(self.settings.objective, bytes_per_token=self.bytes_per_token)
        self._log_routing(found, metrics)
        for callback in self._calling("on_log"):
            callback.on_log(self, metrics)
        tokens = self.logged_batch * self.clock.tokens_per_batch
        self.tracker.log(self.logged_batch, tokens, metrics)

    def _log_routing(self, found: LoggedStep, metrics: dict[str, float]) -> None:
        routing, batch = found.routing, found.batch
        if routing is None:
            return
        tokens, top_k = self.clock.tokens_per_batch, self.recipe.model.ffn_config.moe_top_k
        metrics |= routing_metrics(routing, choices=round(routing.tokens[0].item()) * top_k)
        self.tracker.routing(batch, batch * tokens, routing.load.long().tolist())

    def _check_guard(self) -> None:
        self._refuse(self.spikes.check())

    def _refuse(self, bad: int | None) -> None:
        if bad is not None:
            raise not_a_step(self.root.model if bad == self.first_batch else None, bad)

    def _evaluate(self) -> None:
        self._finish_log()
        self._check_guard()
        started = time.perf_counter()
        beat("evaluation", self.batch)
        with self.training_paused(), span("evaluation"):
            metrics = self.evaluate(self.batch)
        self.eval_seconds += time.perf_counter() - started
        self.evaluations += 1
        self.latest_evaluation = metrics
        if metrics:
            spent = {"time/val": self.eval_seconds}  # no step may follow that would report it
            tokens = self.batch * self.clock.tokens_per_batch
            self.tracker.log(self.batch, tokens, metrics | spent)
        for callback in self._calling("on_evaluate"):
            callback.on_evaluate(self, metrics)

    def save(self, *, last: bool) -> None:
        """Save now; the last checkpoint is complete when this returns. Every process calls it."""
        beat("save", self.batch)
        self._finish_log()
        self._check_guard()
        state = {
            "batch": self.batch,
            "window": [*self._losses.state()],
            "order": self.loader.state(self.batch),
            "identity": self.identity,
            "spikes": self.spikes.state(),
            "activation_checkpointing": self.recipe.parallel.activation_checkpointing,
            "activation_compression": self.recipe.parallel.activation_compression,
            "settings": self._training_settings,
            "callbacks": {k: v for callback in self.callbacks for k, v in callback.state().items()},
        }
        with self.training_paused(), span("saving"):
            self.checkpointer.save(self.batch, self.root.model, self.optimizer, state, last=last)
        self._saves_soon = False
        waits = self.checkpointer.waits
        waited = {
            "time/checkpoint_blocking": waits.total,
            "time/checkpoint_wait": waits.before,
        }
        self.tracker.log(self.batch, self.batch * self.clock.tokens_per_batch, waited)

    @contextmanager
    def training_paused(self) -> Iterator[None]:
        """The model in evaluation mode, the training clock stopped, all steps logged."""
        self._finish_log()
        began = time.perf_counter()
        self.train_seconds += began - self._started
        self.root.eval()
        with span("pause"):
            yield
        self.root.train()
        self._started = time.perf_counter()
        self.paused_seconds += self._started - began


def _no_room_for_update(step: int, reason: str) -> str:
    """What to write where the optimizer's update does not fit, of which a part may be done."""
    return (
        f"optimizer.name: the update of step {step} ran out of memory ({reason}); write one that"
        " keeps less beside the weights, a smaller model, or spread both over processes with"
        " parallel.data_parallel_shard_degree"
    )


def falls_due(interval: float, batch: int) -> bool:
    """Whether an event every `interval` batches happens after `batch` of them; 0 switches it off.

    It does at the first batch at or after each multiple (Composer's rule), so that an interval need
    not be a whole number of batches.
    """
    if interval <= 0:
        return False
    # The small number keeps 0.1dur of 30 batches at 3, 6, 9 … in spite of binary fractions.
    return math.floor(batch / interval + 1e-9) > math.floor((batch - 1) / interval + 1e-9)


def lags(device: torch.device) -> bool:
    """Whether a device works on while the host launches what follows."""
    return device.type != "cpu"


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback has a hook of its own, of its class or set on itself."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
