"""What all processes of a run must know at the same step: to stop, and who failed or lacks memory.

SIGTERM, SIGINT, SIGUSR1 (which schedulers send ahead of their limits) and SIGHUP (a terminal is
closed) end a run after the step under way. A process that has no batch to compute (its shard is
gone) takes part in the step with an empty one, so that nobody waits for it for ever, and all of
them raise before the optimizer has seen the step. So they do where one ran out of memory, if the
step can be done again.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.exit_status import on_stops
from llmfoundry.telemetry import span
from llmfoundry.train.out_of_memory import OutOfMemory

_SAME_REQUEST = 5.0
"""Seconds in which further signals are the same request: Slurm sends SIGTERM to torchrun and to its
processes, to which torchrun passes it on."""


class StopSignal:
    """A context in which a signal asks for a stop; Ctrl-C a second time kills at once.

    So does another signal than Ctrl-C that comes later than those of one request.

    Processes agree by one all-reduce a step on the host, read before the update. It is begun before
    the step's work, so that no step waits for it; where a step can be done again, behind its
    backward passes, as it has to carry who ran out of memory in them: no process waits for a device
    there, but for the others' hosts.
    """

    def __init__(self, world: World) -> None:
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
        if self._failed or (self._world.size > 1 and isinstance(error, Exception)):
            # The launcher ends all as soon as one ends: each first reports what was wrong, also
            # who has lost another, whose end the launcher sees at the same time.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._received:
            self._received, self._since = signal.Signals(number).name, now
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif now - self._since > _SAME_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def begin(self, failure: BaseException | None, shortage: str = "") -> None:
        """Before a step is final: send the others whether to stop, and whether this process failed.

        Args:
            failure: why it has no batch.
            shortage: what it had no memory for, where the step can be done again; empty: nothing.

        Raises:
            BaseException: `failure`, where there are no others.
            OutOfMemory: the same of `shortage`.
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
        """Before the step's update: raise on every process if one of them failed.

        Raises:
            UserError: on the other processes, with the failed ones' reasons.
            BaseException: on a failed one, its own failure.
            OutOfMemory: none failed, and some had not enough memory.
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

    def _gathered(self, mine: str) -> list[str]:
        """What each process has to say, by rank."""
        reasons = [""] * self._world.size
        dist.all_gather_object(reasons, mine)
        return reasons

    def agreed(self) -> str:
        """After a step: the name of the signal that ends the run now; empty while it continues."""
        return self._received if self._world.size == 1 else self._agreed
