"""Bytes that a process sends by each kind of collective, as what it calls is watched.

Torch's own CommDebugMode sees as many calls (`tests/test_communication.py`); it counts no bytes,
and loses its way among blocks whose forward pass is replaced.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {  # by the operator: those of FSDP and DDP, and the functional ones of all else
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
SMALL = 1 << 10
"""Bytes of a message under which it is left out: counts, losses, norms."""


class SentBytes(TorchDispatchMode):
    """Counts the bytes that collectives under it send.

    An all_gather sends a process's part to the p - 1 others, a reduce_scatter all but its own part,
    an all_reduce is one behind the other, as a ring has them; an all_to_all sends all but what the
    process keeps.

    Attributes:
        calls: of every kind.
        sent: bytes by kind and number of processes.
        groups: kind, number of processes and the ranks from one to the next, where they are even.
        small: bytes of messages under SMALL, which `sent` leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[tuple[str, int]] = Counter()
        self.groups: set[tuple[str, int, int]] = set()
        self.small = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and note what it sends."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # which becomes collectives of plain tensors
        name = func.name().partition(".")[0] if callable(getattr(func, "name", None)) else ""
        if name in KINDS:
            kind, group = KINDS[name], _group(args)
            self.calls[kind] += 1
            size = _sent(kind, group, _operand(args), _splits(args))
            if size < SMALL:
                self.small += size
            else:
                self.sent[kind, group.size()] += size
                self.groups.add((kind, group.size(), _apart(group)))
        return func(*args, **(kwargs or {}))


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """The group that an operator was given: an object, or behind all else its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    return _resolve_process_group(args[-1])


def _apart(group: dist.ProcessGroup) -> int:
    """Ranks from one process of a group to the next; 0: not alike."""
    ranks = dist.get_process_group_ranks(group)
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    return steps.pop() if len(steps) == 1 else 0


def _operand(args: Sequence[Any]) -> int:
    """Bytes of what a process brings: the last tensor, in front of which some have their result."""
    alone = [arg for arg in args if isinstance(arg, Tensor)]
    if alone:
        return alone[-1].nbytes
    lists = [arg for arg in args if isinstance(arg, list) and isinstance(arg[0], Tensor)]
    return sum(tensor.nbytes for tensor in lists[-1])


def _splits(args: Sequence[Any]) -> Sequence[int]:
    """How many rows go to each process; empty: as many to each."""
    lists = [arg for arg in args if isinstance(arg, list) and isinstance((*arg, 0)[0], int)]
    return lists[-1] if lists else []


def _sent(kind: str, group: dist.ProcessGroup, operand: int, splits: Sequence[int]) -> int:
    others, all_, given = group.size() - 1, group.size(), sum(splits)
    if kind == "all_gather":
        return others * operand
    if kind == "all_reduce":
        return 2 * others * operand // all_
    if kind == "all_to_all" and given:
        return operand * (given - splits[group.rank()]) // given
    return others * operand // all_
