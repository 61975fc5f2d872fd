"""Bytes that tensors hold, as the operations that make them are watched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it made and that something still holds.

    A storage counts with the bytes that it has at the moment it is asked about: FSDP frees what it
    gathered by resizing it to nothing.

    Attributes:
        most: the most bytes after any operation since the last `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and note what it made."""
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and type(leaf) is torch.Tensor:
                self._storages.add(leaf.untyped_storage())
        self.most = max(self.most, self.now())
        return made

    def now(self) -> int:
        """Bytes alive."""
        return sum(storage.nbytes() for storage in self._storages)
