"""Where a step's time goes: seconds of each span, which are metrics and a bar of the report.

`builders/callbacks.py` makes the callback `StepTimes`. The idea: time has no gaps, and what passes
between two marks, which are where spans begin and end, is the innermost span's; so the parts add
up to the whole. On a CPU marks are wall-clock times. On a GPU they are CUDA events of the stream
that computes, read when the step's losses are, so that nobody waits: a span lasts as long as the
stream computes what was launched in it, and stands idle meanwhile.

`messages` are what that stream, or a CPU, waits for other processes, and packs and unpacks for
them: in FSDP's hooks, at the end of DDP's backward pass, in expert and context parallelism, and
where losses, norms and signals are agreed upon. What hides behind computation is not in it. Tensor
parallelism's, in the middle of DTensor's operators, and those of compiled blocks count as the
forward and backward pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.ops.torch_private import watch_fsdp
from llmfoundry.spans import OTHER, SPANS, observe_spans, span, stop_observing
from llmfoundry.train.trainer import Callback, Trainer

REPORTED = (*SPANS, OTHER)  # time/val and time/checkpoint_blocking report pauses
PREFIX = "time/step/"


class TimedEvent(Protocol):
    """What a clock needs of torch.Event(device, enable_timing=True)."""

    def record(self) -> None:
        """Be done when the stream comes to here."""

    def query(self) -> bool:
        """Whether it is done."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds until a later one that is done."""


class SpanClock:
    """Adds up the time of each span, between cuts."""

    def __init__(self, new_event: Callable[[], TimedEvent] | None = None) -> None:
        """Begin to count, in no span; `new_event` makes events of a device, None: wall clock."""
        self._new_event = new_event
        self._spare: list[TimedEvent] = []  # those that were read
        self._open = [OTHER]
        self._marks: deque[tuple[str, Any, bool]] = deque()  # what ended where; whether it is a cut
        self._seconds: dict[str, float] = {}
        self._ended: deque[dict[str, float]] = deque()  # between cuts, not yet taken
        self._last = self._now()

    def enter(self, name: str) -> None:
        """A span begins."""
        self._mark()
        self._open.append(name)

    def leave(self) -> None:
        """The span that began last ends."""
        self._mark()
        self._open.pop()

    def turn(self, name: str) -> None:
        """The rest of the span that is under way is another's."""
        self._mark()
        self._open[-1] = name

    def cut(self) -> None:
        """End what `take` returns in one piece."""
        self._mark(is_cut=True)

    def take(self) -> dict[str, float]:
        """Seconds of each span from one cut to the next; the device has computed up to there."""
        while not self._ended:
            self._read()
        return self._ended.popleft()

    def read_done(self) -> None:
        """Read the marks that the device has come to: their events are used again."""
        while self._marks and (self._new_event is None or self._marks[0][1].query()):
            self._read()

    def _mark(self, *, is_cut: bool = False) -> None:
        self._marks.append((self._open[-1], self._now(), is_cut))

    def _now(self) -> Any:
        if self._new_event is None:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        return event

    def _read(self) -> None:
        name, mark, is_cut = self._marks.popleft()
        if self._new_event is None:
            passed = mark - self._last
        else:
            passed = self._last.elapsed_time(mark) / 1e3
            self._spare.append(self._last)
        self._seconds[name] = self._seconds.get(name, 0.0) + passed
        self._last = mark
        if is_cut:
            self._ended.append(self._seconds)
            self._seconds = {}


class StepTimes(Callback):
    """time/step/*: seconds of a step by what they went into, the mean since the last log."""

    may_lag = True

    def __init__(self, device: torch.device) -> None:
        """`device`: that which computes."""
        is_cuda = device.type == "cuda"
        self._new_event = partial(torch.Event, device, enable_timing=True) if is_cuda else None
        self._clock: SpanClock | None = None
        self._undo: list[Callable[[], None]] = []
        self._since = 0  # batches at the last cut
        self._steps: deque[int] = deque()  # of the pieces that are not yet taken

    def on_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        self._undo = [watch_fsdp(partial(span, "messages")), self._watch_ddp(trainer.module)]
        self.on_return(trainer)

    def on_return(self, trainer: Trainer) -> None:
        """Count anew."""
        if self._clock is not None:
            stop_observing(self._clock)
        self._clock = SpanClock(self._new_event)
        observe_spans(self._clock)
        self._since = trainer.batch
        self._steps.clear()

    def measure(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """Nothing yet: the device has still to compute what is counted up to here."""
        assert self._clock is not None
        self._clock.cut()
        self._steps.append(trainer.batch - self._since)
        self._since = trainer.batch
        return {}

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add time/step/*."""
        assert self._clock is not None
        seconds, steps = self._clock.take(), self._steps.popleft()
        metrics |= {f"{PREFIX}{name}": seconds.get(name, 0.0) / steps for name in REPORTED}

    def on_step(self, trainer: Trainer) -> None:
        """Read what is there."""
        assert self._clock is not None
        self._clock.read_done()

    def close(self) -> None:
        """Stop counting."""
        if self._clock is not None:
            stop_observing(self._clock)
        for undo in self._undo:
            undo()
        self._clock, self._undo = None, []

    def _watch_ddp(self, module: nn.Module) -> Callable[[], None]:
        """The backward pass of replicas ends with the first parameter's gradient.

        What is left of it is the wait for gradients that are still being added up.
        """
        if not isinstance(module, DistributedDataParallel):
            return lambda: None
        first = next(p for p in module.parameters() if p.requires_grad)

        def waits(_: Tensor) -> None:
            if self._clock is not None and module.require_backward_grad_sync:
                self._clock.turn("messages")

        return first.register_post_accumulate_grad_hook(waits).remove
