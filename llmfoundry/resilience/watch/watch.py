"""`Watch`: callback that measures step times, compares them across ranks and reports anomalies.

`cli/commands/train.py` adds it to a run. Every `interval` steps, an all-gather collects one row of
measurements per rank. It starts after one step and is read after the next, so no step waits for it.
All ranks judge the same table by the same rule (`anomalies.py`), and act at the same step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmfoundry.builders.run_context import RunContext
from llmfoundry.distributed.collectives import all_gather_object
from llmfoundry.errors import RunFailure
from llmfoundry.exit_status import own_node
from llmfoundry.ops.torch_private import start_all_gather
from llmfoundry.recipe.resilience import WatchConfig
from llmfoundry.resilience.check.nvml import GpuReader, GpuState
from llmfoundry.resilience.check.outliers import LEAST
from llmfoundry.resilience.watch.anomalies import Anomaly, History, RankTimes, find_anomalies
from llmfoundry.resilience.watch.rapl import RaplReader
from llmfoundry.train.trainer import Callback, Trainer

ENERGY = "gpu/energy_kwh"
"""Energy of all GPUs of the run since its processes started."""
CPU_ENERGY = "cpu/energy_kwh"
"""Energy of the processors and memory of all machines of the run since its processes started."""
KWH = 3.6e6  # joules
_WARM = 3  # first steps, which compile, tune and fill caches
_SAMPLES = 10  # steps of a round whose forward passes are timed
_STRETCHES = 20  # intervals between logs, whose median is the usual time


def watch(job: RunContext) -> Callback:
    """Return the callback of a run."""
    recipe, world = job.recipe, job.world
    configuration = {
        "processes": world.size,
        "device": _device_name(world.device),
        "microbatch": job.microbatch,
        "compile": str(recipe.compile_mode),
        "batch": recipe.global_train_batch_size,
        "length": recipe.max_seq_len,
        "parallel": {k: v for k, v in vars(recipe.parallel).items() if isinstance(v, int | str)},
    }
    return Watch(recipe.callbacks.watch, configuration)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


class Watch(Callback):
    """Callback that reports slow ranks, speed drops, waits for data, stalls and GPU errors."""

    may_lag = True

    def __init__(self, config: WatchConfig, configuration: dict[str, Any]) -> None:
        """Create the callback; times are only compared between equal configurations."""
        self._config, self._configuration = config, configuration
        self._history = History(configuration)
        self._timer: ForwardTimer | None = None
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None
        self._last = self._paused = 0.0  # time and pauses at the previous step
        self._was_writing = False
        self._stretch: tuple[int, float, float] | None = None  # step, time, pauses at the last log
        self._usual: deque[float] = deque(maxlen=_STRETCHES)  # seconds of a step between logs
        self._ratio = float("nan")  # slowest rank's compute time, divided by the median
        self._gpu: GpuReader | None = None
        self._state = GpuState()  # GPU state in the last round
        self._rapl: RaplReader | None = None  # one rank of each machine has it
        # of all GPUs, and of the processors of all machines, in the rounds so far
        self._joules = self._cpu_joules = 0.0
        self._begin_round()

    def _begin_round(self) -> None:
        self._step_seconds = self._wait_seconds = self._stall = self._stall_wait = 0.0
        self._quiet = self._steps = 0

    def on_start(self, trainer: Trainer) -> None:
        """Start the measurements."""
        if self._config.slow_rank != "off" and trainer.world.size >= LEAST:
            self._timer = ForwardTimer(trainer.root.model.blocks, trainer.world.device)
        self._last, self._paused = time.perf_counter(), trainer.paused_seconds
        if trainer.world.local_rank == 0:
            self._rapl = RaplReader()

        device = trainer.world.device
        if self._config.gpu != "off" and device.type == "cuda":
            self._gpu = GpuReader(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            if self._gpu.problem:
                trainer.tracker.note(
                    f"callbacks.watch.gpu: GPUs are not watched; {self._gpu.problem}"
                )
                self._gpu = None

    def on_step(self, trainer: Trainer) -> None:
        """Measure the step, judge the previous round, and share times at the end of a round."""
        # quiet steps: no pause and no checkpoint is being written
        now, paused = time.perf_counter(), trainer.paused_seconds
        is_writing = trainer.checkpointer.is_writing
        is_quiet = paused == self._paused and not (is_writing or self._was_writing)
        if is_quiet and trainer.batch > trainer.first_batch + _WARM:
            self._step_seconds += now - self._last - trainer.waited
            self._quiet += 1
        self._wait_seconds += trainer.waited
        self._steps += 1
        if self._rapl is not None:  # its counters overflow within a long round
            self._rapl.read()
        self._last, self._paused, self._was_writing = now, paused, is_writing

        # judge the round that was shared after the previous step, then share this round
        interval = self._config.interval
        if self._timer is not None:
            self._time_next(self._timer, trainer.batch, interval)
        self._judge_round(trainer)
        if trainer.batch % interval == 0:
            self._share(trainer)
            if trainer.done:
                self._judge_round(trainer)
        if trainer.done:
            self._log_energy(trainer)

    def on_stop(self, trainer: Trainer) -> None:
        """Log the energy until a signal or a pause stopped the run."""
        self._finish_round()
        self._log_energy(trainer)

    def _log_energy(self, trainer: Trainer) -> None:
        """Log the energy of the run, with the steps since the last round; collective."""
        gpu = 0.0 if self._gpu is None else self._gpu.take().energy
        rows = all_gather_object(trainer.world, (gpu, self._take_cpu_energy()))
        self._joules += sum(of_gpu for of_gpu, _ in rows)
        self._cpu_joules += sum(of_cpu for _, of_cpu in rows)
        metrics = self._energy()
        if metrics:
            tokens = trainer.batch * trainer.clock.tokens_per_batch
            trainer.tracker.log(trainer.batch, tokens, metrics)

    def _take_cpu_energy(self) -> float:
        return 0.0 if self._rapl is None else self._rapl.take()

    def _energy(self) -> dict[str, float]:
        """Return the energy so far, of what reports it."""
        joules = {ENERGY: self._joules, CPU_ENERGY: self._cpu_joules}
        return {name: value / KWH for name, value in joules.items() if value}

    def _time_next(self, timer: ForwardTimer, batch: int, interval: int) -> None:
        if timer.is_on:
            timer.end_step()
        timer.is_on = (batch + 1) % max(1, interval // _SAMPLES) == 0

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Measure the delay since the previous log, and add metrics."""
        batch, now, paused = trainer.logged_batch, time.perf_counter(), trainer.paused_seconds

        # compare the time since the previous log with the usual time per step
        if self._stretch is not None and batch > self._stretch[0]:
            last_batch, last_time, last_paused = self._stretch
            steps = batch - last_batch
            seconds = now - last_time - (paused - last_paused)
            if len(self._usual) >= 5:  # fewer have no reliable median
                excess = seconds - steps * median(self._usual)
                if excess > self._stall:
                    self._stall = excess
                    self._stall_wait = metrics.get("time/data_wait", 0.0) * steps
            self._usual.append(seconds / steps)
        self._stretch = (batch, now, paused)

        # add the metrics of the last round
        if not math.isnan(self._ratio):
            metrics["time/slowest_rank"] = self._ratio
        if self._state.temperature:
            metrics["gpu/temperature"] = self._state.temperature
            metrics["gpu/power"] = self._state.power
        metrics |= self._energy()

    def close(self) -> None:
        """Stop reading the GPU."""
        if self._gpu is not None:
            self._gpu.close()

    def state(self) -> dict[str, Any]:
        """Return the history of earlier rounds for the checkpoint."""
        return {"watch": self._history.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the history; it is empty if the configuration has changed."""
        self._history = History.restored(state.get("watch", {}), self._configuration)

    def on_return(self, trainer: Trainer) -> None:
        """Start a new round after a roll-back."""
        self._stretch = None
        self._begin_round()
        self._last, self._paused = time.perf_counter(), trainer.paused_seconds

    def _share(self, trainer: Trainer) -> None:
        """Start the all-gather of the round's measurements."""
        compute = float("nan") if self._timer is None else self._timer.take()
        self._state = gpu = GpuState() if self._gpu is None else self._gpu.take()
        times = RankTimes(
            compute,
            self._wait_seconds / max(1, self._steps),
            self._step_seconds / self._quiet if 2 * self._quiet >= self._steps else float("nan"),
            self._stall,
            self._stall_wait,
            trainer.spikes.record.skipped,
            gpu.xid,
            gpu.slowed,
            gpu.lost,
            gpu.energy,
            self._take_cpu_energy(),
        )
        self._begin_round()
        local_row = torch.tensor([astuple(times)], dtype=torch.float64)  # (1, fields)
        if trainer.world.size == 1:
            self._pending = (None, local_row)
            return
        table = local_row.new_empty(trainer.world.size, local_row.shape[1])  # (ranks, fields)
        work = start_all_gather(table, local_row)  # on the host
        self._pending = (work, table)

    def _finish_round(self) -> list[RankTimes]:
        """Return the measurements of the round that was shared, by rank; empty: there is none."""
        if self._pending is None:
            return []
        work, rows = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        table = [RankTimes(*row) for row in rows.tolist()]
        self._joules += sum(times.energy for times in table)
        self._cpu_joules += sum(times.cpu_energy for times in table)
        return table

    def _judge_round(self, trainer: Trainer) -> None:
        """Find and handle the anomalies of the round that was shared one step ago."""
        table = self._finish_round()
        if not table:
            return
        if len({times.skipped for times in table}) > 1:
            raise RunFailure(
                "callbacks.watch: the processes skipped different updates, so that their weights"
                f" differ: {[int(times.skipped) for times in table]}; start from the newest"
                " checkpoint, and find the machine that computes wrong values (scripts/check.py)"
            )
        compute_times = [times.compute for times in table if times.compute > 0]
        nan = float("nan")
        self._ratio = max(compute_times) / median(compute_times) if compute_times else nan
        anomalies, self._history = find_anomalies(table, self._history, self._config)
        if not anomalies:
            return
        hosts = all_gather_object(trainer.world, own_node())
        for anomaly in anomalies:
            self._act(trainer, anomaly, "" if anomaly.rank is None else hosts[anomaly.rank])

    def _act(self, trainer: Trainer, anomaly: Anomaly, host: str) -> None:
        """Report an anomaly, and stop the run if the recipe sets that."""
        description = anomaly.seen.replace("{host}", host)

        # the recipe has an action for each kind; the end of an anomaly is only logged
        action = "log" if anomaly.has_ended else getattr(self._config, anomaly.kind)
        setting = f"callbacks.watch.{anomaly.kind}: {action}"
        if action == "stop":
            reaction = f"the run saves and ends ({setting})"
        else:
            reaction = f"nothing is done ({setting})"

        fields: dict[str, Any] = {"action": action, "rank": anomaly.rank, "host": host}
        if anomaly.is_bad:
            fields["is_bad"] = True
        trainer.tracker.event(anomaly.kind, description, reaction, step=trainer.batch, **fields)
        if action == "stop":
            trainer.stop_and_save(description)


class ForwardTimer:
    """Timer of the blocks' forward passes, active while `is_on`.

    Ranks wait for each other in collectives, so the time of a step is the same on all ranks and
    does not show which one is slow. The collectives of FSDP and DDP are in hooks around a block's
    `forward`, so the time inside is local to the rank. Tensor, expert and context parallelism have
    collectives inside; there all ranks of a group are as slow as the slowest. Only some steps are
    timed. In other steps a block's call costs one test of a flag.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        """Wrap the forward pass of each block in place, inside FSDP's hooks."""
        self.is_on = False
        self._on_device = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._steps: list[float] = []
        self._waiting: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        for block in blocks:
            block.forward = self._timed(block.forward)

    def end_step(self) -> None:
        """End a timed step."""
        if self._on_device:
            self._waiting.append(self._events)
            self._events = []
        elif self._seconds:
            self._steps.append(self._seconds)
        self._seconds, self.is_on = 0.0, False

    def take(self) -> float:
        """Return the median seconds of timed steps since the last call; NaN: none.

        Steps that the GPU has not completed are left out, so that the host does not wait.
        """
        for pairs in self._waiting:
            if pairs and pairs[-1][1].query():
                self._steps.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
        seconds = median(self._steps) if self._steps else float("nan")
        self._waiting, self._steps = [], []
        return seconds

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*inputs: Any, **named: Any) -> Any:
            if not self.is_on:
                return forward(*inputs, **named)
            if self._on_device:
                return self._on_stream(forward, inputs, named)
            began = time.perf_counter()
            output = forward(*inputs, **named)
            self._seconds += time.perf_counter() - began
            return output

        return timed

    def _on_stream(
        self, forward: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Run a forward pass between two CUDA events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        output = forward(*inputs, **named)
        end.record()
        self._events.append((begin, end))
        return output
