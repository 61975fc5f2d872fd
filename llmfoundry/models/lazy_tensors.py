"""Tensors that are computed when they are read, for export and for loading.

`hf/tensor_names.py` creates them for both directions. `hf/write_folder.py`,
`checkpoint/streamed.py` and `builders/pretrained.py` read them.

A tensor in one naming scheme is a function of tensors in the other. The function runs twice: on the
meta device, which gives the shape before any weight is read, and later on the real tensors. All
shapes are therefore known in advance, and only one tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Read = Callable[[str], Tensor]
Make = Callable[[Read], Tensor]
"""Computes a tensor from source tensors, which it reads by name."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that `read` computes.

    Attributes:
        name: name of the tensor.
        shape: shape of the tensor.
        dtype: dtype of the result of `read`.
        sources: names of the source tensors; empty: the tensor is zero.
        read: computes the tensor on the CPU. The result may share memory with a source.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    sources: tuple[str, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def like(self) -> Tensor:
        """Return an empty tensor of the same shape and dtype on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def lazy(name: str, make: Make, sketch: Read, read: Read) -> LazyTensor:
    """Return the tensor that `make` computes.

    Args:
        name: name of the tensor.
        make: reads its sources by name. It must not depend on their values or change them in place.
        sketch: returns a tensor with a source's shape and dtype.
        read: returns a source.
    """
    sources = dict[str, None]()

    def record(source: str) -> Tensor:
        sources[source] = None
        return sketch(source).to("meta")

    with torch.device("meta"):
        like = make(record)
    return LazyTensor(name, like.shape, like.dtype, (*sources,), partial(make, read))


def same(source: str, read: Read) -> Tensor:
    """Return the source itself; a `Make` once `functools.partial` binds the name."""
    return read(source)


def by_source(tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
    """Sort tensors so that those of the same sources are adjacent, for `last_read`."""
    tensors = list(tensors)
    order: dict[tuple[str, ...], int] = {}
    for tensor in tensors:
        order.setdefault(tensor.sources, len(order))
    return sorted(tensors, key=lambda tensor: order[tensor.sources])


def last_read(read: Read) -> Read:
    """Return `read` with a cache of one tensor, as several tensors may have one source."""
    cache: list[tuple[str, Tensor]] = []

    def cached_read(name: str) -> Tensor:
        if not cache or cache[0][0] != name:
            cache.clear()  # free the memory before the next read
            cache.append((name, read(name)))
        return cache[0][1]

    return cached_read


class Unread:
    """Reader of source tensors that records which of them were never read."""

    def __init__(self, names: Collection[str], read: Read) -> None:
        self._unread, self.names, self._read = set(names), names, read

    def __call__(self, name: str) -> Tensor:
        """Read one source."""
        self._unread.discard(name)
        return self._read(name)

    def left(self) -> list[str]:
        """Return the names of the sources that were not read."""
        return sorted(self._unread)
