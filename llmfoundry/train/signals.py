"""What all processes of a run must know at the same step: that it is to stop, or that one failed.

SIGTERM, SIGINT, SIGUSR1 (which schedulers send ahead of their limits) and SIGHUP (a terminal is
closed) end a run after the step under way. A process that has no batch to compute (its shard is
gone) takes part in the step with an empty one, so that nobody waits for it for ever, and all of
them raise before the optimizer has seen the step.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.exit_status import on_stops
from llmfoundry.spans import span

_SAME_REQUEST = 5.0
"""Seconds in which further signals are the same request: Slurm sends SIGTERM to torchrun and to its
processes, to which torchrun passes it on."""


class StopSignal:
    """A context in which a signal asks for a stop; Ctrl-C a second time kills at once.

    So does another signal than Ctrl-C that comes later than those of one request.

    Processes agree by one all-reduce a step on the host, begun before the step's work and read
    after it, so no step waits.
    """

    def __init__(self, world: World) -> None:
        self._received, self._since = "", 0.0
        self._agreed = ""
        self._world = world
        self._failure: BaseException | None = None
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

    def begin(self, failure: BaseException | None) -> None:
        """Before a step: send the others whether to stop, and whether this process failed.

        Raises:
            BaseException: `failure`, where there are no others.
        """
        if self._world.size == 1:
            if failure is not None:
                raise failure
            return
        self._failure = failure
        flags = torch.tensor([bool(self._received), failure is not None], dtype=torch.int32)
        work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending = (work, flags)

    def check(self) -> None:
        """Before the step's update: raise on every process if one of them failed.

        Raises:
            UserError: on the other processes, with the failed ones' reasons.
            BaseException: on a failed one, its own failure.
        """
        if self._pending is None:
            return
        work, flags = self._pending
        self._pending = None
        with span("messages"):
            work.wait()
        stop, failed = flags.tolist()
        self._agreed = (self._received or "a signal") if stop else ""
        if failed:
            self._raise()

    def _raise(self) -> None:
        self._failed = True
        reasons: list[str | None] = [None] * self._world.size
        mine = None if self._failure is None else str(self._failure) or repr(self._failure)
        dist.all_gather_object(reasons, mine)
        if self._failure is not None:
            raise self._failure
        lines = {line for reason in reasons if reason for line in reason.splitlines()}
        where = ", ".join(str(rank) for rank, reason in enumerate(reasons) if reason)
        raise UserError(*(f"{line} (on rank {where})" for line in sorted(lines)))

    def agreed(self) -> str:
        """After a step: the name of the signal that ends the run now; empty while it continues."""
        return self._received if self._world.size == 1 else self._agreed
