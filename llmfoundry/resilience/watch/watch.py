"""`Watch`: times steps, lets processes compare their times, and tells what is unusual.

`recipe/logger.py` names it. The idea: every `interval` steps each process adds one row of six
numbers to an all-gather that is begun after one step and read after the next, so that nobody waits
for it; all judge the same table by the same rule (`rounds.py`), and act at the same step.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry.builders.job import Job
from llmfoundry.distributed.collectives import from_all
from llmfoundry.errors import RunFailure
from llmfoundry.exit_status import own_node
from llmfoundry.ops.torch_private import gather
from llmfoundry.recipe.resilience.watch import WatchConfig
from llmfoundry.resilience.check.outliers import LEAST
from llmfoundry.resilience.watch.gpu_reader import GpuReader, GpuState
from llmfoundry.resilience.watch.phase_timer import Stopwatch
from llmfoundry.resilience.watch.slow_ranks import History, RankTimes, RoundFinding, judge
from llmfoundry.train.trainer import Callback, Trainer

_WARM = 3  # first steps of a process: they compile, tune and fill caches
_SAMPLES = 10  # timed steps in a round
_STRETCHES = 20  # between logs, that say what is usual


def watch(job: Job) -> Callback:
    """The callback of a run."""
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
    """Times steps, and tells of slow processes, drops of speed, waits and stalls."""

    may_lag = True

    def __init__(self, config: WatchConfig, configuration: dict[str, Any]) -> None:
        """`configuration` is what must be equal for times to be compared."""
        self._config, self._configuration = config, configuration
        self._history = History(configuration)
        self._stopwatch: Stopwatch | None = None
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None
        self._last = self._paused = 0.0  # of the step before
        self._was_writing = False
        self._stretch: tuple[int, float, float] | None = None  # of the log before
        self._usual: deque[float] = deque(maxlen=_STRETCHES)  # seconds of a step between logs
        self._ratio = float("nan")
        self._gpu: GpuReader | None = None
        self._state = GpuState()  # of the GPU in the last round
        self._begin_round()

    def _begin_round(self) -> None:
        self._step_seconds = self._wait_seconds = self._stall = self._stall_wait = 0.0
        self._quiet = self._steps = 0

    def on_start(self, trainer: Trainer) -> None:
        """Begin to time."""
        if self._config.slow_rank != "off" and trainer.world.size >= LEAST:
            self._stopwatch = Stopwatch(trainer.root.model.blocks, trainer.world.device)
        self._last, self._paused = time.perf_counter(), trainer.paused_seconds

        device = trainer.world.device
        if self._config.gpu != "off" and device.type == "cuda":
            self._gpu = GpuReader(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            if self._gpu.problem:
                trainer.tracker.note(
                    f"callbacks.watch.gpu: GPUs are not watched; {self._gpu.problem}"
                )
                self._gpu = None

    def on_step(self, trainer: Trainer) -> None:
        """Time the step that ended, tell at the end of a round, and judge the round before."""
        now, paused = time.perf_counter(), trainer.paused_seconds
        is_writing = trainer.checkpointer.is_writing
        is_quiet = paused == self._paused and not (is_writing or self._was_writing)
        if is_quiet and trainer.batch > trainer.first_batch + _WARM:
            self._step_seconds += now - self._last - trainer.waited
            self._quiet += 1
        self._wait_seconds += trainer.waited
        self._steps += 1
        self._last, self._paused, self._was_writing = now, paused, is_writing
        interval = self._config.interval
        if self._stopwatch is not None:
            self._time_next(self._stopwatch, trainer.batch, interval)
        self._finish(trainer)
        if trainer.batch % interval == 0:
            self._tell(trainer)
            if trainer.done:
                self._finish(trainer)

    def _time_next(self, stopwatch: Stopwatch, batch: int, interval: int) -> None:
        if stopwatch.is_on:
            stopwatch.end_step()
        stopwatch.is_on = (batch + 1) % max(1, interval // _SAMPLES) == 0

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look for a stall since the log before."""
        batch, now, paused = trainer.logged_batch, time.perf_counter(), trainer.paused_seconds
        if self._stretch is not None and batch > self._stretch[0]:
            steps = batch - self._stretch[0]
            seconds = now - self._stretch[1] - (paused - self._stretch[2])
            if len(self._usual) >= 5:
                excess = seconds - steps * median(self._usual)
                if excess > self._stall:
                    self._stall = excess
                    self._stall_wait = metrics.get("time/data_wait", 0.0) * steps
            self._usual.append(seconds / steps)
        self._stretch = (batch, now, paused)
        if self._ratio == self._ratio:
            metrics["time/slowest_rank"] = self._ratio
        if self._state.temperature:
            metrics["gpu/temperature"] = self._state.temperature
            metrics["gpu/power"] = self._state.power

    def close(self) -> None:
        """Read the GPU no more."""
        if self._gpu is not None:
            self._gpu.close()

    def state(self) -> dict[str, Any]:
        """What is usual."""
        return {"watch": self._history.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume; on other devices, or in another layout, nothing is known."""
        self._history = History.restored(state.get("watch", {}), self._configuration)

    def on_return(self, trainer: Trainer) -> None:
        """Time anew."""
        self._stretch = None
        self._begin_round()
        self._last, self._paused = time.perf_counter(), trainer.paused_seconds

    def _tell(self, trainer: Trainer) -> None:
        """Begin to tell the others what this process measured in the round."""
        compute = float("nan") if self._stopwatch is None else self._stopwatch.take()
        self._state = gpu = GpuState() if self._gpu is None else self._gpu.take()
        times = RankTimes(
            compute,
            self._wait_seconds / max(1, self._steps),
            self._step_seconds / self._quiet if 2 * self._quiet >= self._steps else float("nan"),
            self._stall,
            self._stall_wait,
            trainer.watch.record.skipped,
            gpu.xid,
            gpu.slowed,
            gpu.lost,
        )
        self._begin_round()
        own = torch.tensor([times.row()], dtype=torch.float64)
        if trainer.world.size == 1:
            self._pending = (None, own)
            return
        every = own.new_empty(trainer.world.size, own.shape[1])
        work = gather(every, own)  # on the host
        self._pending = (work, every)

    def _finish(self, trainer: Trainer) -> None:
        """Judge the round that was told a step ago."""
        if self._pending is None:
            return
        work, every = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        table = [RankTimes(*row) for row in every.tolist()]
        if len({times.left_out for times in table}) > 1:
            raise RunFailure(
                "callbacks.watch: the processes left out different updates, so that their weights"
                f" differ: {[int(times.left_out) for times in table]}; start from the newest"
                " checkpoint, and look for a machine that computes other values (scripts/check.py)"
            )
        known = [times.compute for times in table if times.compute > 0]
        self._ratio = max(known) / median(known) if known else float("nan")
        found, self._history = judge(table, self._history, self._config)
        if not found:
            return
        hosts = from_all(trainer.world, own_node())
        for finding in found:
            self._act(trainer, finding, "" if finding.rank is None else hosts[finding.rank])

    def _act(self, trainer: Trainer, finding: RoundFinding, host: str) -> None:
        seen = finding.seen.replace("{host}", host)
        action = "log" if finding.is_over else getattr(self._config, finding.kind)
        key = f"callbacks.watch.{finding.kind}: {action}"
        done = {"log": f"nothing is done ({key})", "stop": f"the run saves and ends ({key})"}
        trainer.tracker.event(
            finding.kind,
            seen,
            done[action],
            step=trainer.batch,
            action=action,
            rank=finding.rank,
            host=host,
            **({"is_bad": True} if finding.is_bad else {}),
        )
        if action == "stop":
            trainer.stop_and_save(seen)
