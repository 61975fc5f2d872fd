"""Tensors that are made when they are read: what a folder is written from, and a model filled from.

`hf/tensor_names.py` makes them for both directions; `hf/write_folder.py`, `checkpoint/streamed.py`
and `builders/pretrained.py` read them. The idea: a tensor under one naming is a function of tensors
under the other, which is run twice: on the meta device for its shape, before any weight is read,
and on real tensors when its turn comes. So all shapes are known first, and memory is that of one
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Read = Callable[[str], Tensor]
Make = Callable[[Read], Tensor]
"""Makes a tensor of others, which it asks for by name."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor by its name.

    Attributes:
        name: of it.
        shape: of it.
        dtype: that `read` gives it in.
        sources: names of the tensors that it is made of; none: it is zeros.
        read: makes it, on the CPU; it may share memory with what it was made of.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    sources: tuple[str, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return self.shape.numel() * self.dtype.itemsize

    def like(self) -> Tensor:
        """Its shape and dtype, on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def lazy(name: str, make: Make, sketch: Read, read: Read) -> LazyTensor:
    """A tensor that `make` makes.

    Args:
        name: of it.
        make: asks for its sources; it neither looks at their numbers nor changes them.
        sketch: gives a source's shape and dtype.
        read: gives a source.
    """
    sources = dict[str, None]()

    def noted(source: str) -> Tensor:
        sources[source] = None
        return sketch(source).to("meta")

    with torch.device("meta"):
        like = make(noted)
    return LazyTensor(name, like.shape, like.dtype, (*sources,), partial(make, read))


def same(source: str, read: Read) -> Tensor:
    """Makes a tensor that is its source; `functools.partial` gives its name."""
    return read(source)


def by_source(tensors: Iterable[LazyTensor]) -> list[LazyTensor]:
    """The order in which each source is read once, where `last_read` keeps the last."""
    places: dict[tuple[str, ...], int] = {}
    listed = list(tensors)
    for tensor in listed:
        places.setdefault(tensor.sources, len(places))
    return sorted(listed, key=lambda tensor: places[tensor.sources])


def last_read(read: Read) -> Read:
    """`read` that keeps the tensor that it gave last, as several are made of one."""
    kept: list[tuple[str, Tensor]] = []

    def reading(name: str) -> Tensor:
        if not kept or kept[0][0] != name:
            kept.clear()  # before the next takes memory
            kept.append((name, read(name)))
        return kept[0][1]

    return reading


class Unread:
    """Gives sources by name, and knows which of them nobody has asked for."""

    def __init__(self, names: Collection[str], read: Read) -> None:
        self._unread, self.names, self._read = set(names), names, read

    def __call__(self, name: str) -> Tensor:
        """One of them."""
        self._unread.discard(name)
        return self._read(name)

    def left(self) -> list[str]:
        """Those names."""
        return sorted(self._unread)
