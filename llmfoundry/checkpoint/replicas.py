"""Which of the processes that hold the same values writes them, reads them, and passes them on.

A checkpoint's bytes are written once and read once, however many replicas a run has. What is cut by
a device mesh belongs to the first process along each dimension over which it is replicated: under
HSDP the first replica writes and reads, and the others neither plan nor copy nor touch a file. What
is whole on every process belongs to the first of all, where a run cuts its weights; where nothing
is cut (DDP) the first replica is one process, and the tensors are dealt out among all of them by
size: each reads and writes its part of the bytes at the same time, and the network, which is faster
than any disk, takes each part to the others.

Every rule here looks at names, shapes and meshes alone: all processes decide alike without a word.
`safe_load.py` and `tensor_files.py` call it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmfoundry.distributed.launch import World

_MESSAGE = 1 << 28  # bytes of a broadcast at most, and of the copy that it is made from


def own_names(state: Mapping[str, Any], world: World) -> set[str]:
    """The values of a state that this process writes, or reads for those that hold them as well.

    Args:
        state: tensors and other values by their names, the same names on every process.
        world: this process.
    """
    owners = _owners(state, world)
    return {
        name
        for name, value in state.items()
        if (_is_first(value) if isinstance(value, DTensor) else owners[name] == world.rank)
    }


def pass_on(state: Mapping[str, Any], world: World) -> None:
    """Fill the tensors that others have read, in place; every process calls it after reading."""
    if world.size == 1:
        return
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    owners = _owners(tensors, world)
    whole, cut = dict[_Route, list[Tensor]](), list[tuple[Tensor, list[dist.ProcessGroup]]]()
    assert dist.group.WORLD is not None
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            cut.append((tensor.to_local().detach(), _replicated(tensor)))
        else:
            route = _Route(dist.group.WORLD, owners[name], tensor.device, tensor.dtype)
            whole.setdefault(route, []).append(tensor.detach())
    _send(whole)
    for step in range(max((len(groups) for _, groups in cut), default=0)):
        routes: dict[_Route, list[Tensor]] = {}
        for held, groups in cut:
            # Who has not got it yet along a later dimension has nothing to give along this one.
            if step < len(groups) and all(dist.get_rank(g) == 0 for g in groups[step + 1 :]):
                source = dist.get_global_rank(groups[step], 0)
                route = _Route(groups[step], source, held.device, held.dtype)
                routes.setdefault(route, []).append(held)
        _send(routes)


class _Route(NamedTuple):
    """From whom to whom; tensors of one route travel together."""

    group: dist.ProcessGroup
    source: int
    device: torch.device
    dtype: torch.dtype


def _owners(state: Mapping[str, Any], world: World) -> dict[str, int]:
    """The process that each value belongs to which is whole on all of them."""
    whole = [name for name, value in state.items() if not isinstance(value, DTensor)]
    owners = dict.fromkeys(whole, 0)
    if len(whole) < len(state):  # the others are cut
        return owners
    sizes = {name: _bytes(value) for name in whole if isinstance(value := state[name], Tensor)}
    load = [(0, rank) for rank in range(world.size)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        held, rank = heapq.heappop(load)
        owners[name] = rank
        heapq.heappush(load, (held + sizes[name], rank))
    return owners


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _replicated(tensor: DTensor) -> list[dist.ProcessGroup]:
    """The groups of processes along each mesh dimension over which a tensor is replicated."""
    mesh = tensor.device_mesh
    axes = [axis for axis, place in enumerate(tensor.placements) if place.is_replicate()]
    return [mesh.get_group(axis) for axis in axes if mesh.size(axis) > 1]


def _is_first(tensor: DTensor) -> bool:
    return all(dist.get_rank(group) == 0 for group in _replicated(tensor))


def _send(routes: Mapping[_Route, list[Tensor]]) -> None:
    """Broadcasts; every process meets those that it takes part in, in the order of names."""
    for route, tensors in routes.items():
        for part in _messages(tensors):
            _broadcast(part, route)


def _messages(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in rows of at most `_MESSAGE` bytes, or of one that is larger."""
    row: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if row and size + _bytes(tensor) > _MESSAGE:
            yield row
            row, size = [], 0
        row.append(tensor)
        size += _bytes(tensor)
    if row:
        yield row


def _broadcast(tensors: list[Tensor], route: _Route) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.broadcast(tensors[0], route.source, group=route.group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, route.source, group=route.group)
    if dist.get_rank() != route.source:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))
