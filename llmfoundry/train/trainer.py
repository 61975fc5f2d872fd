"""The training loop.

Entry point: `Trainer.fit`. `builders/trainer.py` builds a `Trainer`, `cli/commands/train.py` runs
it. The idea: step b (from 0) is a pure function of the weights and optimizer state before it, of
(seed, b) and of the data. Its sequences, learning rate and random numbers follow from b. A
checkpoint therefore holds little more than weights and optimizer state, and a resumed run repeats
the uninterrupted run bit for bit.
"""

from __future__ import annotations

import math
import signal
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
from llmfoundry.errors import UserError, is_out_of_memory, requested_memory
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
from llmfoundry.train.average import AveragedWeights
from llmfoundry.train.optim.schedule import build_schedule
from llmfoundry.train.out_of_memory import MicrobatchLimit, OutOfMemory, begin_again
from llmfoundry.train.own_loss import OwnLoss
from llmfoundry.train.signals import StopSignal
from llmfoundry.train.spikes import ResumeStep, RollBack, SpikeHandler
from llmfoundry.train.step import StepHooks, StepResult, StepSettings, not_a_step, train_step
from llmfoundry.train.step_metrics import LoggedStep, LossWindow, routing_metrics


class Callback:
    """Base class of callbacks, whose hooks do nothing. Subclasses override the hooks they need.

    Attributes:
        may_lag: whether `on_log` may be called after the next step was launched, when the weights
            are one step ahead of the metrics. If any callback with `on_log` may not lag, each
            logged step synchronizes with the GPU.
    """

    may_lag = False

    def on_start(self, trainer: Trainer) -> None:
        """Act before the first step, and before the evaluation that precedes it."""

    def on_gradients(self, trainer: Trainer) -> None:
        """Read the gradients of a step that will be logged: fully reduced, not yet clipped."""

    def measure(self, trainer: Trainer) -> Mapping[str, float | Tensor]:
        """Return metrics at the end of a logged step: numbers, or tensors () read later."""
        return {}

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Read the metrics of the logged step `trainer.logged_batch`, and add metrics to them."""

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Read the metrics of an evaluation."""

    def on_step(self, trainer: Trainer) -> None:
        """Act after a step, its log and its evaluation, and before its checkpoint."""

    def on_return(self, trainer: Trainer) -> None:
        """Reset counters to `trainer.batch`, which the run rolled back to after a spike."""

    def on_stop(self, trainer: Trainer) -> None:
        """Act when the run stops before its end, before its last checkpoint. Every rank calls."""

    def close(self) -> None:
        """Undo lasting changes to the process. Called at the end of a run, also after an error."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; empty: no state."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state`; empty if the run starts at batch 0."""


class LoopRecipe(Protocol):
    """The fields of a resolved `recipe.train.TrainRecipe` that the loop and callbacks read."""

    seed: int
    max_seq_len: int
    log_interval: str
    eval_interval: str
    eval_first: bool
    save_interval: str
    pause_at: str | None
    compile: bool | str
    model: ResolvedModelConfig
    optimizer: ResolvedOptimizerConfig
    schedule: ResolvedScheduleConfig
    parallel: ResolvedParallelConfig
    callbacks: ResolvedCallbacksConfig

    def training_settings(self) -> dict[str, Any]:
        """Return every setting that changes the trained weights, by key, for the checkpoint."""


class Checkpoints(Protocol):
    """The methods of `checkpoint.save.Checkpointer` that the loop calls, on every rank."""

    @property
    def saved(self) -> int:
        """The newest batch that this rank knows to be saved; -1: none."""

    @property
    def is_writing(self) -> bool:
        """Whether a save is being written in the background."""

    @property
    def waits(self) -> Any:
        """Seconds that training waited for the latest save: `total`, of which `before`."""

    def tidy(self) -> None:
        """Remove partial checkpoints of killed processes, before the first step."""

    def check(self) -> None:
        """Raise the error of a background save, before a step."""

    def before_update(self) -> None:
        """Wait until the weights of a running save are copied."""

    def save(
        self,
        batch: int,
        model: Decoder,
        optimizer: Optimizer,
        state: dict[str, Any],
        *,
        averages: Mapping[str, Tensor] | None,
        last: bool,
    ) -> object:
        """Save after `batch` steps. With `last`, the checkpoint is complete on return."""

    def wait(self) -> None:
        """Wait until the running save is written."""

    def find(self, until: int) -> Any:
        """Return the newest complete checkpoint of at most `until` steps."""

    def forget_after(self, batch: int) -> None:
        """Remove the checkpoints of more than `batch` steps."""


class TrainingLog(Protocol):
    """The methods of `loggers.tracker.Tracker`, which this layer may not import."""

    def log(self, batch: int, tokens: int, metrics: dict[str, float]) -> None:
        """Record a logged step."""

    def routing(self, batch: int, tokens: int, load: list[list[int]]) -> None:
        """Record the load of every expert of every layer, for a logged step."""

    def samples(self, batch: int, samples: list[tuple[str, ...]]) -> None:
        """Record generated text."""

    def note(self, text: str) -> None:
        """Show the user a line."""

    def rewind(self, batch: int) -> None:
        """Drop the records of steps after `batch`, which are repeated."""

    def event(
        self, kind: str, seen: str, done: str, *, step: int, action: str, **more: Any
    ) -> None:
        """Show and record an event of a step (from 1): observation, action and further facts."""


PAUSED = "pause_at"
"""The result of `Trainer.fit` if the recipe's key of this name stopped the run."""


@dataclass
class Trainer:
    """Training loop of one run, with all its components."""

    recipe: LoopRecipe
    world: World
    root: Root
    """The model, called for evaluation and generation."""
    module: nn.Module
    """The model as wrapped by DDP (without DDP: `root`), called for training."""
    optimizer: Optimizer
    loader: Loader
    clock: Clock
    settings: StepSettings
    bytes_per_token: float
    """UTF-8 bytes per token of the training text."""
    tracker: TrainingLog
    checkpointer: Checkpoints
    roll_back: Callable[[Trainer, int], ResumeStep]
    """Loads a checkpoint from before a spike, and skips the batches read since then."""
    evaluate: Callable[[int], dict[str, float]]
    """Evaluates the model after this many batches; a collective operation."""
    identity: dict[str, Any]
    """Settings that must not change when the run is resumed, by recipe key."""
    average: AveragedWeights | None = None
    """Moving average of the weights; None: the run keeps none."""
    callbacks: list[Callback] = field(default_factory=list)
    memory: MicrobatchLimit = field(default_factory=MicrobatchLimit)
    """Handles steps that run out of memory."""
    state: dict[str, Any] = field(default_factory=dict)
    """State to resume from, as written by `save`; empty: a new run."""

    def __post_init__(self) -> None:
        # progress, in steps
        self.first_batch = self.batch = self.logged_batch = self.state.get("batch", 0)
        self._launched: LoggedStep | None = None  # logged step whose values are not read yet
        self._batches: BatchPrefetcher
        self._no_batch: BaseException | None = None  # why the current step has no batch
        self._is_updating = False
        self._repeated = 0  # steps whose rows exceeded parallel.expert_capacity
        self.ended_early = self._to_stop = ""
        pause = self.recipe.pause_at
        self._pause = math.inf if pause is None else math.ceil(self.clock.batches(pause) - 1e-9)

        # measurements
        self.train_seconds = self.eval_seconds = 0.0
        self._wait_seconds = 0.0  # spent waiting for batches since the last log
        self.waited = 0.0  # seconds spent waiting for the current step's batch
        self.paused_seconds = 0.0  # spent so far in evaluation, samples and saving
        self.evaluations = 0
        self.latest_evaluation: dict[str, float] = {}
        watch, report = self.recipe.callbacks.watch, self.tracker.event
        self.spikes = SpikeHandler(watch, self.world.device, report, self.state.get("spikes", {}))
        self._losses = self._begin_losses(self.state)
        self._saves_soon = False  # save after the next step, so that a roll-back survives a kill

        # what each step is a function of
        self._lr_factor = build_schedule(self.recipe.schedule, self.clock)
        # ranks that share sequences use the same random numbers
        self._seed_rank = self.world.in_evaluation().data_rank
        self._base_lrs = [group["lr"] for group in self.optimizer.param_groups]
        self._started = time.perf_counter()
        self._training_settings = self.recipe.training_settings()
        for callback in self.callbacks:
            callback.restore(self.state.get("callbacks", {}))

    def _begin_losses(self, state: dict[str, Any]) -> LossWindow:
        only_finite = self.spikes.config.not_finite != "stop"
        window = state.get("window", (0.0, 0))
        return LossWindow(self.world.device, *window, only_finite=only_finite)

    def fit(self, interrupt_again: Any = signal.SIG_DFL) -> str:
        """Train to the end of the run, or until a signal or a callback stops it.

        Args:
            interrupt_again: handler of a second Ctrl-C; the first one saves and ends the run.

        Returns:
            The signal's name, or the reason of another stop; empty if the run is complete.

        Raises:
            UserError: a loss or a gradient was not finite. The weights are those before that step.
            NoRestart: the recipe ends the run after a spike. The weights are those before that
                step.
        """
        is_cut_off = False
        try:
            self.checkpointer.tidy()
            for callback in self._calling("on_start"):
                callback.on_start(self)
            if self.recipe.eval_first and self.batch == 0:
                self._evaluate()
            return self._fit(interrupt_again)
        except Exception as error:
            is_cut_off = failed_collective(error) is not None
            raise
        finally:
            beat("end", self.batch, saved=self.checkpointer.saved)
            if not is_cut_off:  # else the save would wait for a lost rank, and other ranks for us
                self.checkpointer.wait()
            for callback in self.callbacks:
                callback.close()

    def _fit(self, interrupt_again: Any) -> str:
        if not self.done and self.batch >= self._pause:  # the resumed run is already past pause_at
            return PAUSED
        signal_name = ""
        self._started = time.perf_counter()
        self._batches = BatchPrefetcher(self.loader, self.batch)
        with StopSignal(self.world, interrupt_again) as stop, ExitStack() as stack:
            stack.callback(lambda: self._batches.close())  # a roll-back replaces self._batches
            try:
                while not (self.done or signal_name):
                    try:
                        self._step(self._take(stop), stop)
                    except RollBack as why:
                        self._go_back(why)
                    signal_name = (stop.agreed() or self._to_stop) if not self.done else ""
            except BaseException:
                with suppress(Exception):  # log the step before the failed one
                    self._finish_log()
                raise
            if signal_name:
                for callback in self._calling("on_stop"):
                    callback.on_stop(self)
                self.save(last=True)
        return signal_name

    def _go_back(self, why: RollBack) -> None:
        """Roll back to a checkpoint from before a spike, and continue with other batches."""
        beat("start", self.batch)  # this phase has no timeout: reading a checkpoint may take long

        # load the checkpoint
        self._launched = None
        self._batches.close()
        target = self.roll_back(self, why.decision.batch)
        self.batch = self.logged_batch = target.batch

        # reset everything that counts steps
        self._losses = self._begin_losses(target.state)
        self._wait_seconds, self._saves_soon = 0.0, True
        self.spikes.go_back(why.decision, target.describe(), target.state.get("spikes"))
        for callback in self.callbacks:
            if target.name:
                callback.restore(target.state["callbacks"])
            callback.on_return(self)
        self.tracker.rewind(self.batch)
        self._batches = BatchPrefetcher(self.loader, self.batch)
        self._started = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the current step, or the one just done, is the last of the run."""
        return self.batch >= self.clock.total or bool(self.ended_early)

    def end(self, why: str) -> None:
        """Make this step the last, as if the run had this length. Every rank calls it."""
        if not self.ended_early:
            self.ended_early = why
            self.tracker.note(why)

    def stop_and_save(self, why: str) -> None:
        """Save after this step and stop, so that the run can be resumed. Every rank calls it."""
        self._to_stop = self._to_stop or why

    def is_due(self, interval: str) -> bool:
        """Return whether an event that repeats every `interval` is due after this step."""
        return falls_due(self.clock.batches(interval), self.batch)

    def _take(self, stop: StopSignal) -> Batch:
        """Return the batch of the next step.

        If reading fails, return a batch without labels. The rank then takes part in the step's
        collectives, after which all ranks learn of the failure and discard the step.
        """
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
        """Run one step, then log, evaluate, call callbacks and save as far as they are due."""
        beat("step", self.batch + 1)

        # set the learning rate
        factor = self._lr_factor(self.batch)
        for group, lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = lr * factor

        # train
        next_batch, interval = self.batch + 1, self.clock.batches(self.recipe.log_interval)
        logs = next_batch == self.clock.total or falls_due(interval, next_batch)
        result = self._until_it_fits(batch, stop, logs=logs)
        self.batch = next_batch
        if self.average is not None:
            with span("optimizer"):
                self.average.update(self.batch)
        if result.overflow:
            self._report_overflow(result.overflow)

        # record the losses
        values = [result.loss, *result.parts.values(), *result.reported.values()]
        self._losses.add(torch.stack(values))
        if not lags(self.world.device):
            self._check_guard()  # does not synchronize on a CPU
        self._log(result if logs else None)

        # evaluate, call callbacks and save
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
        """Run the step. If a rank runs out of memory, all ranks repeat it with half the microbatch.

        Raises:
            RestartNeeded: this layout cannot repeat a step; all processes must be restarted.
            UserError: the microbatch cannot be smaller, or the optimizer ran out of memory.
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
                reason = requested_memory(error)
                if self._is_updating:
                    raise UserError(_no_room_for_update(step, reason)) from error
                why = OutOfMemory({self.world.rank: reason})
                if self.world.size > 1:  # the other ranks wait for this one in a collective
                    self.memory.start_again(self.settings.microbatch, why, step)
            # every rank is here: halve the microbatch and repeat the step
            begin_again(self.module)
            beat("step", step)
            half = self.memory.halve(self.settings.microbatch, why, step, self.tracker.event)
            self.settings = replace(self.settings, microbatch=half)

    def _report_overflow(self, rows: int) -> None:
        """Report the 1st, 2nd, 4th, 8th … step that was repeated because rows had no room."""
        self._repeated += 1
        if self._repeated & (self._repeated - 1):
            return
        capacity, times = self.recipe.parallel.expert_capacity, self._repeated
        seen = f"{rows} rows exceeded parallel.expert_capacity={capacity} in step {self.batch}"
        done = "the step was repeated with exact numbers of rows"
        if times > 1:
            done += f", as {times - 1} before; a larger capacity, or none, is faster"
        more = {"rows": rows, "repeated": times}
        self.tracker.event("expert_overflow", seen, done, step=self.batch, action="redo", **more)

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
        """Exchange, after the backward passes, which ranks got a signal, failed or lack memory."""
        beat("update", self.batch + 1)
        if self.memory.in_place and (shortage or self.world.size > 1):
            stop.begin(self._no_batch, shortage)
        stop.check()

    def _before_update(self) -> None:
        self._is_updating = True
        with span("saving"):
            self.checkpointer.before_update()

    def _seed(self) -> None:
        """Make the step's random numbers (dropout) a function of seed, batch and data rank.

        torch.manual_seed is not used: on a machine without a GPU, each call stores a stack trace
        per device type that may be initialized later.
        """
        value = seed_of(self.recipe.seed, f"step/{self.batch}/{self._seed_rank}")
        torch.default_generator.manual_seed(value)
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(value)

    def _calling(self, hook: str) -> Iterator[Callback]:
        """Yield the callbacks that override this hook, in order, each named in telemetry."""
        for callback in self.callbacks:
            if overrides(callback, hook):
                with in_callback(f"{type(callback).__name__}.{hook}"):
                    yield callback

    def _on_gradients(self) -> None:
        with span("logging"):
            for callback in self._calling("on_gradients"):
                callback.on_gradients(self)

    def _log(self, result: StepResult | None) -> None:
        """Start to log this step if there is a result, and finish the log of the step before."""
        with span("logging"):
            step = None if result is None else self._begin_log(result)
        self._finish_log()
        self._launched = step
        waiting = [c for c in self.callbacks if not c.may_lag and overrides(c, "on_log")]
        if waiting or not lags(self.world.device):
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
        """Log the launched step; waits for the values of that step only."""
        if self._launched is None:
            return
        with span("logging"):
            self._log_values(self._launched)

    def _log_values(self, launched: LoggedStep) -> None:
        logged = launched.read()
        self._launched = None
        self.spikes.handle(logged.verdicts)
        self._raise_if_bad(logged.first_bad)
        self.train_seconds += time.perf_counter() - self._started
        self._started = time.perf_counter()
        self.logged_batch = logged.batch
        metrics = logged.metrics(self.settings.objective, bytes_per_token=self.bytes_per_token)
        self._log_routing(logged, metrics)
        for callback in self._calling("on_log"):
            callback.on_log(self, metrics)
        tokens = self.logged_batch * self.clock.tokens_per_batch
        self.tracker.log(self.logged_batch, tokens, metrics)

    def _log_routing(self, logged: LoggedStep, metrics: dict[str, float]) -> None:
        """Record the expert loads of a step, and add moe/* to its metrics."""
        routing, batch = logged.routing, logged.batch
        if routing is None:
            return
        tokens, top_k = self.clock.tokens_per_batch, self.recipe.model.ffn_config.moe_top_k
        metrics |= routing_metrics(routing, choices=round(routing.tokens[0].item()) * top_k)
        self.tracker.routing(batch, batch * tokens, routing.load.long().tolist())

    def _check_guard(self) -> None:
        self._raise_if_bad(self.spikes.check())

    def _raise_if_bad(self, bad: int | None) -> None:
        if bad is not None:
            objective = self.settings.objective
            own_loss = objective.name if isinstance(objective, OwnLoss) else ""
            raise not_a_step(self.root.model if bad == self.first_batch else None, bad, own_loss)

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
            spent = {"time/val": self.eval_seconds}  # logged here: no step may follow
            tokens = self.batch * self.clock.tokens_per_batch
            self.tracker.log(self.batch, tokens, metrics | spent)
        for callback in self._calling("on_evaluate"):
            callback.on_evaluate(self, metrics)

    def save(self, *, last: bool) -> None:
        """Save now. With `last`, the checkpoint is complete on return. Every rank calls it."""
        beat("save", self.batch)
        self._finish_log()
        self._check_guard()
        # the state beside weights and optimizer state
        parallel = self.recipe.parallel
        state = {
            "batch": self.batch,
            "window": [*self._losses.state()],
            "order": self.loader.state(self.batch),
            "identity": self.identity,
            "spikes": self.spikes.state(),
            "activation_checkpointing": parallel.activation_checkpointing,
            "activation_checkpointing_target": parallel.activation_checkpointing_target,
            "activation_compression": parallel.activation_compression,
            "compile": self.recipe.compile,
            "settings": self._training_settings,
            "callbacks": {k: v for callback in self.callbacks for k, v in callback.state().items()},
        }
        with self.training_paused(), span("saving"):
            self.checkpointer.save(
                self.batch,
                self.root.model,
                self.optimizer,
                state,
                averages=None if self.average is None else self.average.tensors,
                last=last,
            )
        self._saves_soon = False
        waits = self.checkpointer.waits
        metrics = {
            "time/checkpoint_blocking": waits.total,
            "time/checkpoint_wait": waits.before,
        }
        self.tracker.log(self.batch, self.batch * self.clock.tokens_per_batch, metrics)

    @contextmanager
    def training_paused(self) -> Iterator[None]:
        """Log all steps, stop the training clock and set evaluation mode inside the context."""
        self._finish_log()
        pause_start = time.perf_counter()
        self.train_seconds += pause_start - self._started
        self.root.eval()
        with span("pause"):
            yield
        self.root.train()
        self._started = time.perf_counter()
        self.paused_seconds += self._started - pause_start


def _no_room_for_update(step: int, reason: str) -> str:
    """Return the error line for an optimizer that ran out of memory, possibly in mid-update."""
    return (
        f"optimizer.name: the update of step {step} ran out of memory ({reason}); write one that"
        " keeps less beside the weights, a smaller model, or spread both over processes with"
        " parallel.data_parallel_shard_degree"
    )


def falls_due(interval: float, batch: int) -> bool:
    """Return whether an event that repeats every `interval` batches is due after `batch` batches.

    An interval of 0 disables the event. It is due at the first batch at or after each multiple of
    the interval (Composer's rule), so an interval need not be an integer.
    """
    if interval <= 0:
        return False
    # 1e-9 keeps 0.1dur of 30 batches at 3, 6, 9 … despite rounding of binary fractions
    return math.floor(batch / interval + 1e-9) > math.floor((batch - 1) / interval + 1e-9)


def lags(device: torch.device) -> bool:
    """Return whether the device runs asynchronously from the host."""
    return device.type != "cpu"


def overrides(callback: Callback, hook: str) -> bool:
    """Return whether a callback overrides a hook, in its class or on the instance."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)
