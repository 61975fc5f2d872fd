"""Agreement of all ranks, once per step, on stop signals, failures and out-of-memory errors.

Entry point: `StopSignal`. SIGTERM, SIGINT, SIGUSR1 (which schedulers send before a time limit) and
SIGHUP (the terminal was closed) end a run after the current step. A rank that cannot read its batch
(for example because its data shard is missing) runs the step with an empty batch, because the other
ranks would wait for it in a collective. Then all ranks raise before the optimizer's update. All
ranks also raise if one rank ran out of memory and the step can be repeated.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.exit_status import on_stops
from llmfoundry.telemetry import span
from llmfoundry.train.out_of_memory import OutOfMemory

_SAME_REQUEST = 5.0
"""Seconds within which further signals count as the same request: Slurm sends SIGTERM to torchrun
and to its processes, and torchrun forwards it to them."""


class StopSignal:
    """Context in which a signal requests a stop after the current step.

    A second Ctrl-C kills the process at once, or calls `interrupt_again`. Any other signal that
    arrives more than `_SAME_REQUEST` seconds after the first kills the process. In a thread other
    than the main one no signal is handled.

    Ranks agree by one all-reduce per step on the host, whose result is read before the update. It
    normally starts before the step's work and overlaps with it. If a step can be repeated, it
    starts after the backward passes, because it then also reports out-of-memory errors. Ranks wait
    for each other's hosts there, but not for a device.
    """

    def __init__(self, world: World, interrupt_again: Any = signal.SIG_DFL) -> None:
        self._interrupt_again = interrupt_again
        self._received, self._since = "", 0.0
        self._agreed = ""
        self._world = world
        self._failure: BaseException | None = None
        self._shortage = ""
        self._failed = False
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> StopSignal:
        self._before = on_stops(self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and (
            self._failed or (self._world.size > 1 and isinstance(error, Exception))
        ):
            # The launcher sends SIGTERM to all processes as soon as one exits. Ignore it, so that
            # each process can still report its own error.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._since = signal.Signals(number).name, now
            signal.signal(signal.SIGINT, self._interrupt_again)
        elif now - self._since > _SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def begin(self, failure: BaseException | None, shortage: str = "") -> None:
        """Start the all-reduce of stop requests and failures, before the step's update.

        Args:
            failure: why this rank has no batch; None: it has one.
            shortage: this rank's out-of-memory error, if the step can be repeated; empty: none.

        Raises:
            BaseException: `failure`, in a run with a single process.
            OutOfMemory: if there is a `shortage`, in a run with a single process.
        """
        if self._world.size == 1:
            if failure is not None:
                raise failure
            if shortage:
                raise OutOfMemory({0: shortage})
            return
        self._failure, self._shortage = failure, shortage
        flags = [bool(self._received), failure is not None, bool(shortage)]
        tensor = torch.tensor(flags, dtype=torch.int32)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending = (work, tensor)

    def check(self) -> None:
        """Wait for the all-reduce, and raise on every rank if any rank failed.

        Raises:
            UserError: on ranks that did not fail, with the reasons of the failed ranks.
            BaseException: on a failed rank, its failure.
            OutOfMemory: on every rank, if no rank failed and some ran out of memory.
        """
        if self._pending is None:
            return
        work, flags = self._pending
        self._pending = None
        with span("messages"):
            work.wait()
        stop, failed, short = flags.tolist()
        self._agreed = (self._received or "a signal") if stop else ""
        if failed:
            self._raise()
        if short:
            reasons = self._gathered(self._shortage)
            raise OutOfMemory({rank: reason for rank, reason in enumerate(reasons) if reason})

    def _raise(self) -> None:
        self._failed = True
        failure = self._failure
        reasons = self._gathered("" if failure is None else str(failure) or repr(failure))
        if failure is not None:
            raise failure
        lines = {line for reason in reasons if reason for line in reason.splitlines()}
        where = ", ".join(str(rank) for rank, reason in enumerate(reasons) if reason)
        raise UserError(*(f"{line} (on rank {where})" for line in sorted(lines)))

    def _gathered(self, reason: str) -> list[str]:
        """Return the reasons of all ranks, by rank."""
        reasons = [""] * self._world.size
        dist.all_gather_object(reasons, reason)
        return reasons

    def agreed(self) -> str:
        """Return the name of the signal that ends the run after this step; empty: none."""
        return self._received if self._world.size == 1 else self._agreed
