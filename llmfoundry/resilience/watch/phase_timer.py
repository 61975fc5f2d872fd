"""How long a process computes before it waits for others: the blocks' forward passes, timed.

`watch.py` starts one where ranks are compared. The idea: in lockstep every process takes as long as
the slowest for a step, so a step's time says nothing; but FSDP's and DDP's collectives are in hooks
around a block's `forward`, and what is inside is this process's own. (Not so under tensor, expert
and context parallelism, whose collectives are inside: there a group is as slow as its slowest.)
Only some steps are timed; in all others a block's call costs one look at a flag.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Stopwatch:
    """Times the forward passes of blocks while `is_on`."""

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        """Wrap each block's forward pass, inside of FSDP's hooks, in place."""
        self.is_on = False
        self._on_device = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._steps: list[float] = []
        self._waiting: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        for block in blocks:
            block.forward = self._timed(block.forward)

    def end_step(self) -> None:
        """The step whose blocks were timed is over."""
        if self._on_device:
            self._waiting.append(self._events)
            self._events = []
        elif self._seconds:
            self._steps.append(self._seconds)
        self._seconds, self.is_on = 0.0, False

    def take(self) -> float:
        """Seconds of a timed step since the last call, the median; NaN where there is none.

        Of a GPU those that it has done; the host does not wait.
        """
        for pairs in self._waiting:
            if pairs and pairs[-1][1].query():
                self._steps.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
        found = statistics.median(self._steps) if self._steps else float("nan")
        self._waiting, self._steps = [], []
        return found

    def _timed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*inputs: Any, **named: Any) -> Any:
            if not self.is_on:
                return forward(*inputs, **named)
            if self._on_device:
                return self._on_stream(forward, inputs, named)
            began = time.perf_counter()
            made = forward(*inputs, **named)
            self._seconds += time.perf_counter() - began
            return made

        return timed

    def _on_stream(
        self, forward: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = forward(*inputs, **named)
        end.record()
        self._events.append((begin, end))
        return made
