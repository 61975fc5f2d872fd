"""Bytes that tensors hold, or would if they were not fake, as what makes them is watched."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it made and that something still holds.

    A storage counts with the bytes that it has when it is asked about: FSDP frees what it gathered
    by resizing it to nothing.

    Attributes:
        most: the most bytes after any operation since it was last set to 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
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
        if any([self._watch(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]):
            self.most = max(self.most, self.now())
        return made

    def _watch(self, tensor: Tensor) -> bool:
        """Whether it is a storage that was not known."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(tensor) not in (Tensor, FakeTensor) or tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        known = self._held.get(storage._cdata)
        if known is not None and known() is storage:
            return False
        self._held[storage._cdata] = weakref.ref(storage)
        return True

    def now(self) -> int:
        """Bytes alive."""
        alive = {key: storage for key, ref in self._held.items() if (storage := ref()) is not None}
        self._held = {key: self._held[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def settled(self) -> int:
        """Bytes alive once cycles are collected and threads of collectives let go of theirs."""
        gc.collect()
        found = self.now()
        for _ in range(10):
            time.sleep(0.01)
            found = min(found, self.now())
        return found
