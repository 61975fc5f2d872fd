"""Callbacks that write traces of steps and memory snapshots to the folder `profile` of the run.

Created by `builders/callbacks.py`. The size of the folder is limited, and a profile never ends the
run: files are written completely or not at all, and a failure is reported in one line.

`Tracer` (`profile.trace`) runs torch.profiler on a schedule. The profiler only exists during a
cycle, so other steps have no overhead. Spans (`llmfoundry/telemetry.py`) become record_function
ranges, so the trace shows forward, backward, messages and others above PyTorch's operations.

`MemorySnapshots` (`profile.memory_snapshot`): on a GPU, PyTorch's allocator records a history. It
is written after a step, or when an allocation fails, before the error is raised and the memory is
freed. The CPU allocator has no history. There the snapshot is that of one step by torch.profiler,
converted to the same format by PyTorch. A process has one profiler at a time: a snapshot that
would meet a cycle of `Tracer` is of the first step after the cycle instead.
"""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from llmfoundry.distributed.process_group import World
from llmfoundry.errors import one_line
from llmfoundry.files import atomic_file, remove_partials
from llmfoundry.ops.torch_private import (
    memory_history,
    memory_of_profile,
    on_out_of_memory,
    record_memory,
)
from llmfoundry.recipe.logger import ResolvedProfileConfig
from llmfoundry.telemetry import STACKS, observe_spans, stop_observing
from llmfoundry.train.trainer import Callback, Trainer

FOLDER = "profile"
"""Subfolder of a run's folder."""
GIB = 2**30


class TooLargeError(Exception):
    """A file would exceed the size limit of the folder."""


class BoundedFile:
    """A file with a limited size; `room` is the limit in bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        """Write all data, or raise TooLargeError."""
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise TooLargeError
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


class ProfileFiles:
    """Writer of one rank's files to the folder of a run."""

    def __init__(self, run_folder: Path, world: World, *, max_gib: float) -> None:
        """Create the writer; `max_gib` limits all files together, including earlier attempts."""
        self.folder, self.world, self._max_gib = run_folder / FOLDER, world, max_gib

    def tidy(self) -> None:
        """Remove partial files of killed processes."""
        if self.folder.is_dir():
            remove_partials(self.folder)

    def name(self, kind: str, step: int, suffix: str) -> str:
        """Return a file name with step (from 1) and rank."""
        return f"{kind}-step-{step}-rank-{self.world.rank}{suffix}"

    def write(self, name: str, fill: Callable[[BoundedFile], None]) -> str:
        """Write a file; return an error message, empty on success."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sizes = (path.stat().st_size for path in self.folder.iterdir() if path.name != name)
            room = int(self._max_gib * GIB) - sum(sizes)
            with atomic_file(self.folder / name) as file:
                fill(BoundedFile(file, room))
        except TooLargeError:
            return (
                f"profile.max_gib: {name} is left out, as {self.folder} would hold more than"
                f" {self._max_gib:g} GiB; remove files there, or write more"
            )
        except OSError as error:
            return f"{self.folder / name} could not be written: {one_line(error)}"
        return ""

    def report(self, note: Callable[[str], None], line: str) -> None:
        """Report a line: rank 0 on its console, other ranks on standard error."""
        if self.world.is_main:
            note(line)
        else:
            print(f"rank {self.world.rank}: {line}", file=sys.stderr, flush=True)


LARGEST = 10
"""Number of operations in the table."""


class TracedSpans:
    """Observer that shows spans in traces."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def enter(self, name: str) -> None:
        """A span begins."""
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def leave(self) -> None:
        """The innermost span ends."""
        self._open.pop().__exit__(None, None, None)


def start_profiler(device: torch.device, **settings: Any) -> profile:
    """Start a profiler of this process and its device.

    Raises:
        RuntimeError: another profiler of this process is running.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no log lines
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    if torch.autograd.profiler._is_profiler_enabled:
        raise RuntimeError("another profiler of this process is under way")
    profiler = profile(activities=activities, **settings)
    profiler.start()
    return profiler


def trace_schedule(config: ResolvedProfileConfig) -> Callable[[int], ProfilerAction]:
    """Return the action of `profile.trace` by step of this process, from 0."""
    names = ("skip_first", "wait", "warmup", "active", "repeat")
    return schedule(**{name: getattr(config, name) for name in names})


class Tracer(Callback):
    """Callback that traces steps on a schedule. All ranks pause while chosen ranks write."""

    def __init__(self, config: ResolvedProfileConfig, files: ProfileFiles) -> None:
        """Create the callback; `config` is resolved."""
        self._config, self._files = config, files
        self._is_chosen = config.has_rank(files.world.rank)
        self._action = trace_schedule(config)
        self._steps = 0  # steps of this process
        self._profiler: profile | None = None
        self._spans = TracedSpans()

    def on_start(self, trainer: Trainer) -> None:
        """Start to trace if the schedule begins with the first step."""
        self._files.tidy()
        self._before_step(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """Advance the schedule, and write the trace at the end of a cycle."""
        ends = self._action(self._steps) == ProfilerAction.RECORD_AND_SAVE
        self._steps += 1
        if self._profiler is not None:
            self._profiler.step()
        if ends or (trainer.done and self._profiler is not None):
            with trainer.training_paused():
                self._finish(trainer)
        if not trainer.done:
            self._before_step(trainer)

    def close(self) -> None:
        """Discard an unfinished cycle."""
        self._stop()

    def _before_step(self, trainer: Trainer) -> None:
        if not (self._is_chosen and self._begins_cycle()):
            return
        config = self._config
        names = ("record_shapes", "profile_memory", "with_stack", "with_flops")
        cycle = schedule(wait=0, warmup=config.warmup, active=config.active, repeat=1)
        try:
            self._profiler = start_profiler(
                trainer.world.device,
                schedule=cycle,
                **{name: getattr(config, name) for name in names},
            )
        except RuntimeError as error:
            line = f"profile.trace: step {trainer.batch + 1} is not traced: {one_line(error)}"
            self._files.report(trainer.tracker.note, line)
            return
        observe_spans(self._spans)

    def _begins_cycle(self) -> bool:
        """Return whether the next step is the first of a cycle."""
        between = (ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE)
        before = self._action(self._steps - 1) if self._steps else ProfilerAction.NONE
        return before in between and self._action(self._steps) != ProfilerAction.NONE

    def _stop(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        stop_observing(self._spans)
        if profiler is not None:
            with suppress(RuntimeError):  # stopped by another profiler of the program
                profiler.stop()
        return profiler

    def _finish(self, trainer: Trainer) -> None:
        """Write the trace and the table of operations of the cycle that ends with this step."""
        profiler = self._stop()
        if profiler is None:
            return
        step, files, note = trainer.batch, self._files, trainer.tracker.note
        if profiler.profiler is None or profiler.profiler.kineto_results is None:
            return  # the run ended during the warm-up of a cycle, so there is no trace

        # the trace
        name = files.name("trace", step, ".json.gz")
        problem = files.write(name, lambda file: write_trace(profiler, file, files.folder / name))

        # the table of operations
        lines = list(largest_operations(profiler, trainer.world.device))
        text = "".join(f"{line}\n" for line in lines).encode()
        table_name = files.name("operations", step, ".txt")
        table_problem = files.write(table_name, lambda file: _write(file, text))

        problem = problem or table_problem
        files.report(note, problem or f"traced up to step {step}: {files.folder / name}")
        if files.world.is_main:
            for line in lines:
                note(line)


def _write(file: BoundedFile, text: bytes) -> None:
    file.write(text)


def write_trace(profiler: profile, file: BoundedFile, near: Path) -> None:
    """Write a compressed Chrome trace.

    Args:
        profiler: stopped.
        file: target.
        near: path next to which PyTorch writes the uncompressed trace.

    Raises:
        OSError: the trace could not be written.
    """
    folder = near.with_name(f"{near.name}.{os.getpid()}.partial")  # also for PyTorch's other files
    folder.mkdir(exist_ok=True)
    raw = folder / "trace.json"
    try:
        profiler.export_chrome_trace(str(raw))
        if not _is_complete(raw):
            raise OSError(f"no room for the {near.name} that torch.profiler writes there")
        with (
            raw.open("rb") as text,
            gzip.GzipFile("", "wb", 6, fileobj=file) as packed,
        ):
            shutil.copyfileobj(text, packed, 1 << 20)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_complete(path: Path) -> bool:
    """Return whether a file ends like JSON, because PyTorch does not report write errors."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")
    return False


def largest_operations(profiler: profile, device: torch.device) -> Iterator[str]:
    """Yield the lines of a table of GPU kernels, or CPU operators, sorted by their own time."""
    # own time of each operation, in microseconds
    on_device = device.type == "cuda"
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    operations = [
        (event.self_device_time_total if on_device else event.self_cpu_time_total, event)
        for event in profiler.key_averages()
        if event.device_type == kind and not _is_ours(event)
    ]
    operations.sort(key=lambda pair: pair[0], reverse=True)

    total = sum(time for time, _ in operations) or 1.0
    yield f"{'ms':>10}  {'share':>6}  {'calls':>7}  {'kernel' if on_device else 'operator'}"
    for time, event in operations[:LARGEST]:
        yield f"{time / 1e3:10.2f}  {time / total:6.1%}  {event.count:7d}  {event.key[:100]}"


def _is_ours(event: Any) -> bool:
    """Return whether an event is a span or another annotation, and not an operation."""
    return bool(getattr(event, "is_user_annotation", False)) or event.key.startswith("ProfilerStep")


REQUEST = getattr(signal, "SIGUSR2", None)
"""Signal that requests a snapshot. SIGUSR1 is used by schedulers, and ends the run."""
_MOST = 3  # snapshots of failed allocations; a convolution tries several algorithms
_newest: Path | None = None  # newest snapshot of a failed allocation


def out_of_memory_snapshot() -> Path | None:
    """Return the snapshot of this process's last failed allocation; None: there is none."""
    return _newest


def contents(snapshot: dict[str, Any]) -> tuple[int, int]:
    """Return the number of blocks in use, and of events in the history, over all devices."""
    blocks = (block for segment in snapshot["segments"] for block in segment["blocks"])
    in_use = sum(block["state"].startswith("active") for block in blocks)
    return in_use, sum(map(len, snapshot["device_traces"]))


class MemorySnapshots(Callback):
    """Callback that writes memory snapshots: at a step, at a signal, at a failed allocation."""

    def __init__(self, config: ResolvedProfileConfig, files: ProfileFiles) -> None:
        """Create the callback; `config` is resolved."""
        self._config, self._files = config, files
        self._on_device = files.world.device.type == "cuda"
        self._is_chosen = config.has_rank(files.world.rank)
        self._steps = 0  # steps of this process
        self._failed = 0  # snapshots of failed allocations
        self._is_requested = False  # by the signal REQUEST; on a CPU also by a step
        self._is_postponed = False  # until the end of a cycle of `Tracer`
        self._before: Any = None  # the handler of REQUEST
        self._profiler: profile | None = None
        self._batch = 0

    def on_start(self, trainer: Trainer) -> None:
        """Start the history, and set the signal handler."""
        self._files.tidy()
        self._batch = trainer.batch
        if not self._is_chosen:
            return
        if self._on_device:
            record_memory(self._config.memory_snapshot_entries)
            on_out_of_memory(self._allocation_failed)
        if REQUEST is not None and REQUEST != STACKS:
            self._before = signal.signal(REQUEST, self._request)
        self._before_step(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """Write a snapshot if it is due or was requested."""
        self._steps += 1
        self._batch = trainer.batch
        is_due = self._steps == self._config.memory_snapshot_step
        if not self._is_chosen:
            return
        if self._on_device and (is_due or self._is_requested):
            self._is_requested = False
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
            self._is_chosen = False  # PyTorch cannot remove the out-of-memory observer

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

    def _before_step(self, trainer: Trainer) -> None:
        """On a CPU, start to profile the next step if its snapshot is due or requested."""
        if self._on_device:
            return
        self._is_requested |= self._steps + 1 == self._config.memory_snapshot_step
        if not self._is_requested:
            return
        next_step = trainer.batch + 1
        if trainer.done:
            self._report(trainer, "none, as the run ends first")
            return
        if self._meets_trace():
            if not self._is_postponed:
                self._report(trainer, f"that of step {next_step} waits for the end of the trace")
            self._is_postponed = True
            return
        self._is_requested = self._is_postponed = False
        try:
            self._profiler = start_profiler(
                trainer.world.device, profile_memory=True, record_shapes=True, with_stack=True
            )
        except RuntimeError as error:
            self._report(trainer, f"none of step {next_step}: {one_line(error)}")

    def _meets_trace(self) -> bool:
        """Return whether `Tracer` profiles the next step, or starts before the snapshot ends."""
        if not self._config.trace:
            return False
        action = trace_schedule(self._config)
        steps = (self._steps, self._steps + 1)
        return any(action(step) != ProfilerAction.NONE for step in steps)

    def _report(self, trainer: Trainer, line: str) -> None:
        self._files.report(trainer.tracker.note, f"profile.memory_snapshot: {line}")

    def _stop(self) -> profile:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        profiler.stop()
        return profiler

    def _write(self, trainer: Trainer, snapshot: dict[str, Any]) -> None:
        name = self._files.name("memory", trainer.batch, ".pickle")
        self._files.report(trainer.tracker.note, self._keep(name, snapshot))

    def _keep(self, name: str, snapshot: dict[str, Any]) -> str:
        """Write a snapshot, and return a line to report."""
        in_use, history = contents(snapshot)
        if not in_use and not history:
            return f"profile.memory_snapshot: {name} would be empty: PyTorch has kept no history"
        problem = self._files.write(name, lambda file: pickle.dump(snapshot, file))
        return problem or (
            f"memory: {in_use:,} blocks in use, {history:,} allocations and frees before:"
            f" {self._files.folder / name} (open it at https://pytorch.org/memory_viz)"
        )

    def _allocation_failed(self, device: int, requested: int, allowed: int, free: int) -> None:
        """Write a snapshot. PyTorch's allocator calls this before it raises the error."""
        global _newest
        if not self._is_chosen or self._failed == _MOST:
            return
        self._failed += 1
        step = self._batch + 1
        name = self._files.name(f"memory-out-{self._failed}", step, ".pickle")
        try:
            line = self._keep(name, memory_history())
        except Exception as error:  # must not replace the out-of-memory error
            line = f"profile.memory_snapshot: none of step {step}: {one_line(error)}"
        if (self._files.folder / name).exists():
            _newest = self._files.folder / name
        size = f"{requested / 2**20:,.0f} MiB"
        print(f"out of memory in step {step}: {size} asked for; {line}", file=sys.stderr)
