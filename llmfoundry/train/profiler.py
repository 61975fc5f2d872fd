"""Traces of steps by torch.profiler, on a schedule: `profile.trace`.

`builders/callbacks.py` makes the callback `Tracer`. The idea: a profiler exists only while a cycle
is under way, so that all other steps are those of a run without one. Spans (`llmfoundry/spans.py`)
are record_function's then, and the trace shows forward, backward, messages and the rest above
PyTorch's own operations.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from llmfoundry.errors import one_line
from llmfoundry.recipe.profile import ProfileConfig
from llmfoundry.spans import observe_spans, stop_observing
from llmfoundry.train.profile_files import BoundedFile, ProfileFiles
from llmfoundry.train.trainer import Callback, Trainer

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

    def __init__(self, config: ProfileConfig, files: ProfileFiles) -> None:
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
        assert config.warmup is not None and config.active is not None, "the recipe was not filled"
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
