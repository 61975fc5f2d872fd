"""Generation with a model that is sharded over ranks: rank 0 leads, the other ranks follow.

Entry points: `PassChannel`, `LeadingSlots` on rank 0, and `follow` on all other ranks. Rank 0 alone
reads prompts, schedules requests and samples tokens. A sharded model needs the collectives of all
ranks in every forward pass, so rank 0 broadcasts the arguments of each pass before it runs it, and
the other ranks run the same pass and discard its logits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from llmfoundry.distributed.process_group import World, unbounded_group
from llmfoundry.inference.engine import SlotModel
from llmfoundry.models.kv_cache import TokenChunk

OPEN, PASS, END = "open", "pass", "end"
"""Calls beside those of `SlotModel`: allocate a KV cache, run a pass without one, and end."""
_SLOT_CALLS = ("read", "copy", "clear")


class PassChannel:
    """Broadcasts of rank 0 to all other ranks, in a process group of their own.

    The group has no practical timeout. It fails at once if a rank is killed.
    """

    def __init__(self, world: World) -> None:
        """Create the group; every rank calls it."""
        self.is_leader = world.is_main
        self._group = unbounded_group()

    @contextmanager
    def announced(self, name: str, *arguments: Any) -> Iterator[None]:
        """Announce a call to all other ranks, and make it in the block; called on rank 0.

        Ctrl-C takes effect after the block, because all ranks must finish a forward pass.
        """
        with delayed_interrupt():
            dist.broadcast_object_list([(name, arguments)], src=0, group=self._group)
            yield

    def end(self) -> None:
        """Let all other ranks end; called on rank 0, outside of forward passes."""
        with self.announced(END):
            pass

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next call of rank 0; called on all other ranks."""
        announced: list[Any] = [None]
        dist.broadcast_object_list(announced, src=0, group=self._group)
        name, arguments = announced[0]
        return name, arguments


class LeadingSlots:
    """`SlotModel` of rank 0: announces each call before it is made. See `engine.SlotModel`."""

    def __init__(self, channel: PassChannel, slot_model: SlotModel) -> None:
        self._channel, self._slot_model = channel, slot_model
        self.slots, self.length = slot_model.slots, slot_model.length
        self.n_tokens = slot_model.n_tokens
        self.keeps_ended, self.in_one_piece = slot_model.keeps_ended, slot_model.in_one_piece

    def read(self, pieces: Sequence[TokenChunk]) -> Tensor:
        """See SlotModel."""
        with self._channel.announced("read", pieces):
            return self._slot_model.read(pieces)

    def copy(self, source: int, target: int, length: int) -> None:
        """See SlotModel."""
        with self._channel.announced("copy", source, target, length):
            self._slot_model.copy(source, target, length)

    def clear(self, slot: int) -> None:
        """See SlotModel."""
        with self._channel.announced("clear", slot):
            self._slot_model.clear(slot)


def follow(
    channel: PassChannel,
    open_slots: Callable[[int, int], SlotModel],
    run_pass: Callable[[Sequence[int]], object],
) -> None:
    """Make every call that rank 0 announces, until it ends.

    Args:
        channel: the channel of rank 0.
        open_slots: allocates a KV cache, from the number and length of its slots.
        run_pass: runs a forward pass over the tokens of a sequence, without a KV cache.
    """
    slot_model: SlotModel | None = None
    while True:
        name, arguments = channel.receive()
        if name == END:
            return
        if name == OPEN:
            slot_model = None  # before the next cache takes memory
            slot_model = open_slots(*arguments)
        elif name == PASS:
            run_pass(*arguments)
        else:
            assert slot_model is not None and name in _SLOT_CALLS, name
            getattr(slot_model, name)(*arguments)


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block, where it raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals arrive in the main thread only
        return
    handler = signal.getsignal(signal.SIGINT)
    received: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received and callable(handler):
        handler(*received[0])
