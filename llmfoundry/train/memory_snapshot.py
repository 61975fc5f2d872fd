"""Snapshots of memory: `profile.memory_snapshot`.

`builders/callbacks.py` makes the callback `MemorySnapshots`. On a GPU PyTorch's allocator keeps a
history, which is written after a step, or at the moment at which an allocation fails: when the
error has been raised, what it was about is gone. A CPU's allocator keeps none: the snapshot is that
of one step, as torch.profiler sees it, in the same format (PyTorch's own conversion).
"""

from __future__ import annotations

import pickle
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from torch.profiler import profile

from llmfoundry.errors import one_line
from llmfoundry.heartbeat import STACKS
from llmfoundry.ops.torch_private import (
    memory_history,
    memory_of_profile,
    on_out_of_memory,
    record_memory,
)
from llmfoundry.recipe.profile import ProfileConfig
from llmfoundry.train.profile_files import ProfileFiles
from llmfoundry.train.profiler import start_profiler
from llmfoundry.train.trainer import Callback, Trainer

REQUEST = getattr(signal, "SIGUSR2", None)
"""The signal that asks for one; SIGUSR1 is a scheduler's, and ends the run."""
_MOST = 3  # of failed allocations: a convolution may fail for several algorithms, and then succeed
_newest: Path | None = None  # of a failed allocation


def out_of_memory_snapshot() -> Path | None:
    """The snapshot of the newest allocation of this process that failed, if there is one."""
    return _newest


def contents(snapshot: dict[str, Any]) -> tuple[int, int]:
    """Blocks in use, and allocations and frees in the history, over all devices."""
    blocks = (b for segment in snapshot["segments"] for b in segment["blocks"])
    in_use = sum(block["state"].startswith("active") for block in blocks)
    return in_use, sum(map(len, snapshot["device_traces"]))


class MemorySnapshots(Callback):
    """Keeps a history of memory, and writes it when asked."""

    def __init__(self, config: ProfileConfig, files: ProfileFiles) -> None:
        """`config`: filled."""
        self._config, self._files = config, files
        self._on_device = files.world.device.type == "cuda"
        self._is_chosen = config.has_rank(files.world.rank)
        self._steps = 0  # of this process
        self._failed = 0  # allocations of which there is a snapshot
        self._is_asked = False
        self._before: Any = None  # the handler of REQUEST
        self._profiler: profile | None = None
        self._batch = 0

    def on_start(self, trainer: Trainer) -> None:
        """Begin the history, and listen."""
        self._files.tidy()
        self._batch = trainer.batch
        if not self._is_chosen:
            return
        if self._on_device:
            record_memory(self._config.memory_snapshot_entries)
            on_out_of_memory(self._allocation_failed)
        if REQUEST is not None and REQUEST != STACKS:
            self._before = signal.signal(REQUEST, self._ask)
        self._before_step(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """Write one, where it was asked for."""
        self._steps += 1
        self._batch = trainer.batch
        is_due = self._steps == self._config.memory_snapshot_step
        if not self._is_chosen:
            return
        if self._on_device and (is_due or self._is_asked):
            self._is_asked = False
            self._write(trainer, memory_history())
        elif self._profiler is not None:
            profiler = self._stop()
            self._write(trainer, memory_of_profile(profiler))
        self._before_step(trainer)

    def close(self) -> None:
        """End the history."""
        if self._profiler is not None:
            self._stop()
        if self._before is not None and REQUEST is not None:
            signal.signal(REQUEST, self._before)
            self._before = None
        if self._on_device and self._is_chosen:
            record_memory(None)
            self._is_chosen = False  # an observer cannot be removed

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _before_step(self, trainer: Trainer) -> None:
        """On a CPU: profile the next step, if that is the one."""
        is_due = self._steps + 1 == self._config.memory_snapshot_step
        if self._on_device or trainer.done or not (is_due or self._is_asked):
            return
        self._is_asked = False
        try:
            self._profiler = start_profiler(
                trainer.world.device, profile_memory=True, record_shapes=True, with_stack=True
            )
        except RuntimeError as error:
            line = f"profile.memory_snapshot: none of step {trainer.batch + 1}: {one_line(error)}"
            self._files.report(trainer.tracker.note, line)

    def _stop(self) -> profile:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        return profiler

    def _write(self, trainer: Trainer, snapshot: dict[str, Any]) -> None:
        name = self._files.name("memory", trainer.batch, ".pickle")
        self._files.report(trainer.tracker.note, self._keep(name, snapshot))

    def _keep(self, name: str, snapshot: dict[str, Any]) -> str:
        """Write a snapshot; what to report of it."""
        in_use, history = contents(snapshot)
        if not in_use and not history:
            return f"profile.memory_snapshot: {name} would be empty: PyTorch has kept no history"
        problem = self._files.write(name, lambda file: pickle.dump(snapshot, file))
        return problem or (
            f"memory: {in_use:,} blocks in use, {history:,} allocations and frees before:"
            f" {self._files.folder / name} (open it at https://pytorch.org/memory_viz)"
        )

    def _allocation_failed(self, device: int, asked: int, allowed: int, free: int) -> None:
        """The allocator calls it before the error is raised, while all that it holds is there."""
        global _newest
        if not self._is_chosen or self._failed == _MOST:
            return
        self._failed += 1
        step = self._batch + 1
        name = self._files.name(f"memory-out-{self._failed}", step, ".pickle")
        try:
            line = self._keep(name, memory_history())
        except Exception as error:  # not instead of the error that follows
            line = f"profile.memory_snapshot: none of step {step}: {one_line(error)}"
        if (self._files.folder / name).exists():
            _newest = self._files.folder / name
        size = f"{asked / 2**20:,.0f} MiB"
        print(f"out of memory in step {step}: {size} asked for; {line}", file=sys.stderr)
