"""Copies of what a process writes, in memory of the host that is kept from one save to the next.

Training waits for these copies and for no file. Memory that is new costs a page fault for each
4 KiB of it, more than the copy itself: hence one buffer, as large as the largest save so far. From
a GPU the copies run on a stream of their own, beside the next step's forward and backward passes,
which change no weight; `Copies.before_update` makes the device, and not the host, wait for them
before the optimizer does.

Each tensor's copy is a storage of its own within that buffer, so that PyTorch writes it as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from llmfoundry.ops.pinned_memory import host_buffer

_ALIGNED = 256  # bytes; no copy begins within a cache line of another


@dataclass
class HostCopies:
    """Tensors as they were when a save began.

    Attributes:
        tensors: on the host, in order.
        done: recorded behind the last copy from a GPU; None: they are there.
        sources: kept until then.
    """

    tensors: list[Tensor]
    done: torch.cuda.Event | None = None
    sources: Sequence[Tensor] = field(default=(), repr=False)

    def before_update(self) -> None:
        """Let what this thread launches on the GPU from now on wait for the copies."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)

    def wait(self) -> None:
        """Until the copies are there; in the thread that writes them."""
        if self.done is not None:
            self.done.synchronize()
        self.sources = ()


class Staging:
    """The buffer of a process, which serves one save at a time."""

    def __init__(self) -> None:
        self._buffer = host_buffer(0)
        self._stream: torch.cuda.Stream | None = None

    def copy(self, sources: Sequence[Tensor]) -> HostCopies:
        """Begin to copy tensors; those of an earlier call are overwritten.

        Returns at once where they lie on a GPU, else when they are copied.
        """
        held = [source.detach() for source in sources]
        tensors = self._places(held)
        on_gpu = [pair for pair in zip(tensors, held, strict=True) if pair[1].is_cuda]
        for place, source in zip(tensors, held, strict=True):
            if not source.is_cuda:
                place.copy_(source)
        if not on_gpu:
            return HostCopies(tensors)
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for place, source in on_gpu:
                place.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return HostCopies(tensors, done, held)

    def _places(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous tensors of these shapes and dtypes in the buffer, each its own storage."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        rooms = [math.ceil(size / _ALIGNED) * _ALIGNED for size in sizes]
        if sum(rooms) > self._buffer.nbytes:
            self._buffer = host_buffer(0)  # let go before there is another
            self._buffer = host_buffer(sum(rooms))
        begin, places = 0, list[Tensor]()
        for tensor, size, room in zip(like, sizes, rooms, strict=True):
            if size:
                flat = torch.frombuffer(self._buffer[begin : begin + size], dtype=tensor.dtype)
            else:
                flat = torch.empty(0, dtype=tensor.dtype)
            places.append(flat.view(tensor.shape))
            begin += room
        return places
