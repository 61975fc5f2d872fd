"""Bytes on one of many ranks, by kind, beside the estimate: one training step on fake tensors.

    python -m benchmarks.memory.fake_ranks [mpt-7b mpt-70b dbrx] [--ranks 512] [--layers 8]

One process is rank 0 of a process group whose others do not exist, and tensors have shapes but no
memory. The model is built and wrapped as a run builds and wraps it, and the step is the trainer's:
only what allocates is left, and all of it is counted while something holds it. Attention over whole
rows keeps the same on a CPU as on a GPU; where other code differs, the GPU's is taken.

What it cannot see: temporaries inside of kernels and of the experts' operator, the allocator's
gaps, and what NCCL and CUDA take for themselves.
"""

from __future__ import annotations

import argparse
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations under it made and that something still holds.

    A storage counts with the bytes that it has when it is asked about: FSDP frees what it gathered
    by resizing it to nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0
        self.log = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        grown = False
        for leaf in tree_leaves(made):
            leaf = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if isinstance(leaf, FakeTensor) and leaf.device.type != "meta":
                grown |= self.watch(leaf)
        if grown:
            n = self.now()
            if n > self.most:
                self.most = n
                self.where = func
        return made

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._held.get(key)
        if held is not None and held() is storage:
            return False
        self._held[key] = weakref.ref(storage)
        return storage.nbytes() > 0

    def now(self):
        alive = {k: r for k, r in self._held.items() if r() is not None}
        self._held = alive
        total = 0
        for r in alive.values():
            s = r()
            if s is not None:
                total += s.nbytes()
        return total

    def biggest(self, n=30):
        sizes = sorted((r().nbytes() for r in self._held.values() if r() is not None), reverse=True)
        return sizes[:n]
