"""SIGTERM and SIGINT end a run after the step under way, on every process at the same step."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from llmfoundry.parallel.launch import World


class StopSignal:
    """A context in which a signal asks for a stop; a second one kills at once.

    Processes agree by an all-reduce on the host that is read one step later, so no step waits.
    """

    def __init__(self, world: World) -> None:
        self._received = ""
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __enter__(self) -> StopSignal:
        self._before = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)

    def agreed(self) -> str:
        """The name of the signal that ends the run now; empty while it goes on."""
        if self._group is None:
            return self._received
        agreed = False
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            agreed = bool(flag.item())
        flag = torch.tensor([1 if self._received else 0])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._pending = (work, flag)
        return (self._received or "a signal") if agreed else ""
