"""Traces of steps, and snapshots of memory, in a folder of the run: `profile`.

`builders/callbacks.py` makes the callbacks. The folder is bounded, and never a reason for the run
to end: a file is there as a whole or not at all, and what could not be written is a line.

`Tracer` (`profile.trace`) is torch.profiler on a schedule. It exists only while a cycle is under
way, so that all other steps are those of a run without one. Spans (`llmfoundry/telemetry.py`) are
record_function's then, and the trace shows forward, backward, messages and the rest above PyTorch's
own operations.

`MemorySnapshots` (`profile.memory_snapshot`): on a GPU PyTorch's allocator keeps a history, which
is written after a step, or at the moment at which an allocation fails: when the error has been
raised, what it was about is gone. A CPU's allocator keeps none: the snapshot is that of one step,
as torch.profiler sees it, in the same format (PyTorch's own conversion).
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
"""Below a run's folder."""
GIB = 2**30


class TooLargeError(Exception):
    """The folder has no room for what is being written."""


class BoundedFile:
    """A file that takes so many bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        """Write all of it, or raise TooLargeError."""
        self._room -= memoryview(data).nbytes
        if self._room < 0:
            raise TooLargeError
        return self._file.write(data)

    def flush(self) -> None:
        """Pass it on."""
        self._file.flush()


class ProfileFiles:
    """Writes files of one process to the folder of a run."""

    def __init__(self, run_folder: Path, world: World, *, max_gib: float) -> None:
        """`max_gib`: all files together, those of earlier attempts too."""
        self.folder, self.world, self._max_gib = run_folder / FOLDER, world, max_gib

    def tidy(self) -> None:
        """Remove what a killed process left half written."""
        if self.folder.is_dir():
            remove_partials(self.folder)

    def name(self, kind: str, step: int, suffix: str) -> str:
        """A file's name: of which step (from 1) and rank."""
        return f"{kind}-step-{step}-rank-{self.world.rank}{suffix}"

    def write(self, name: str, fill: Callable[[BoundedFile], None]) -> str:
        """Write a file; why it could not be written, empty where it was."""
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
        """Show a line; only the main process has a console, others write to standard error."""
        if self.world.is_main:
            note(line)
        else:
            print(f"rank {self.world.rank}: {line}", file=sys.stderr, flush=True)


LARGEST = 10
"""Operations that are listed."""


class TracedSpans:
    """Shows spans in traces."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def enter(self, name: str) -> None:
        """A span begins."""
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def leave(self) -> None:
        """The span that began last ends."""
        self._open.pop().__exit__(None, None, None)


def start_profiler(device: torch.device, **settings: Any) -> profile:
    """A profiler of this process and its device that has begun.

    Raises:
        RuntimeError: another one of this process is under way.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it writes lines of its own
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    if torch.autograd.profiler._is_profiler_enabled:
        raise RuntimeError("another profiler of this process is under way")
    profiler = profile(activities=activities, **settings)
    profiler.start()
    return profiler


class Tracer(Callback):
    """Traces the steps of a schedule; all processes pause while those chosen write."""

    def __init__(self, config: ResolvedProfileConfig, files: ProfileFiles) -> None:
        """`config`: filled."""
        self._config, self._files = config, files
        self._is_chosen = config.has_rank(files.world.rank)
        names = ("skip_first", "wait", "warmup", "active", "repeat")
        self._action = schedule(**{name: getattr(config, name) for name in names})
        self._steps = 0  # of this process
        self._profiler: profile | None = None
        self._spans = TracedSpans()

    def on_start(self, trainer: Trainer) -> None:
        """Begin with the first step, if that is asked for."""
        self._files.tidy()
        self._before_step(trainer)

    def on_step(self, trainer: Trainer) -> None:
        """Go on to the next step of the schedule; write at the end of a cycle."""
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
        """Forget a cycle that did not end."""
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
        """Whether the next step is the first of a cycle."""
        between = (ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE)
        before = self._action(self._steps - 1) if self._steps else ProfilerAction.NONE
        return before in between and self._action(self._steps) != ProfilerAction.NONE

    def _stop(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        stop_observing(self._spans)
        if profiler is not None:
            with suppress(RuntimeError):  # a profiler that the program itself started ended it
                profiler.stop()
        return profiler

    def _finish(self, trainer: Trainer) -> None:
        """Write the trace, and the table, of the steps up to this one."""
        profiler = self._stop()
        if profiler is None:
            return
        step, files, note = trainer.batch, self._files, trainer.tracker.note
        if profiler.profiler is None or profiler.profiler.kineto_results is None:
            return  # the run ends in the first steps of a cycle: nothing was kept
        name = files.name("trace", step, ".json.gz")
        problem = files.write(name, lambda file: write_trace(profiler, file, files.folder / name))
        lines = list(largest_operations(profiler, trainer.world.device))
        text = "".join(f"{line}\n" for line in lines).encode()
        listed = files.name("operations", step, ".txt")
        also = files.write(listed, lambda file: _write(file, text))
        problem = problem or also
        files.report(note, problem or f"traced up to step {step}: {files.folder / name}")
        if files.world.is_main:
            for line in lines:
                note(line)


def _write(file: BoundedFile, text: bytes) -> None:
    file.write(text)


def write_trace(profiler: profile, file: BoundedFile, near: Path) -> None:
    """Write a Chrome trace, compressed; PyTorch writes the text of it beside `near` before.

    Raises:
        OSError: it could not be written.
    """
    folder = near.with_name(f"{near.name}.{os.getpid()}.partial")  # PyTorch leaves others there
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
    """Whether it ends as JSON does: PyTorch does not report what it could not write."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().rstrip().endswith(b"}")
    return False


def largest_operations(profiler: profile, device: torch.device) -> Iterator[str]:
    """Lines of a table: on a GPU its kernels, elsewhere operators, by the time spent in each."""
    on_device = device.type == "cuda"
    kind = DeviceType.CUDA if on_device else DeviceType.CPU
    found = [
        (event.self_device_time_total if on_device else event.self_cpu_time_total, event)
        for event in profiler.key_averages()
        if event.device_type == kind and not _is_ours(event)
    ]
    found.sort(key=lambda pair: pair[0], reverse=True)
    whole = sum(time for time, _ in found) or 1.0
    yield f"{'ms':>10}  {'share':>6}  {'calls':>7}  {'kernel' if on_device else 'operator'}"
    for time, event in found[:LARGEST]:
        yield f"{time / 1e3:10.2f}  {time / whole:6.1%}  {event.count:7d}  {event.key[:100]}"


def _is_ours(event: Any) -> bool:
    """Whether it is a span, or another annotation, and no operation."""
    return bool(getattr(event, "is_user_annotation", False)) or event.key.startswith("ProfilerStep")


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

    def __init__(self, config: ResolvedProfileConfig, files: ProfileFiles) -> None:
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
