"""How a tensor is sharded: which part this process has, and which processes have the rest.

This is the one description. Initialization and weights that stream by fill what `local_blocks`
lists, checkpoints save and load the same blocks, gradient norms and Muon add up and gather over the
groups of `ShardLayout`. The idea: axes of the mesh divide a tensor sequentially,
each as torch.chunk does: expert parallelism rows, tensor parallelism rows or columns, and FSDP rows
of what these left. Of each dimension a process then has a few ranges; mostly one, and of a fused
Wqkv under tensor parallelism three: its heads' queries, keys and values, one after another, so that
one product makes all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmfoundry.telemetry import span

TENSOR = "tensor_parallel"  # the mesh's axis
Range = tuple[int, int]  # from and to
Stacked = Mapping[str, Sequence[int]]
"""Heights of what dimension 0 of a parameter stacks, by its name: tensor ranks share each."""


@dataclass(frozen=True)
class ShardAxis:
    """An axis of the mesh that divides a tensor, as torch.chunk does: the last parts may be short.

    Attributes:
        dim: of the tensor.
        n: how many parts it makes.
        rank: the one that this process has.
        group: the processes that have these parts.
        is_tensor: whether it is tensor parallelism's.
        number: of the axis in the tensor's mesh.
    """

    dim: int
    n: int
    rank: int
    group: dist.ProcessGroup
    is_tensor: bool
    number: int = field(compare=False)

    def bounds(self, length: int, rank: int) -> Range:
        """Where part `rank` of so many rows or columns begins and ends."""
        step = -(-length // self.n)
        return min(rank * step, length), min((rank + 1) * step, length)


@dataclass(frozen=True)
class ShardLayout:
    """All axes that divide a tensor, in order; none: each process has all of it."""

    axes: tuple[ShardAxis, ...] = ()

    @staticmethod
    def of(tensor: Tensor) -> ShardLayout:
        """The layout of a tensor: full, or a DTensor sharded along any dimensions."""
        if not isinstance(tensor, DTensor):
            return ShardLayout()
        mesh, found = tensor.device_mesh, list[tuple[bool, int, ShardAxis]]()
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        for axis, placement in enumerate(tensor.placements):
            dim = getattr(placement, "dim", None)  # of Shard and _StridedShard
            if dim is not None:
                here = mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis)
                # FSDP divides last what others have divided: its placement then is a strided one
                is_last = hasattr(placement, "split_factor")
                found.append((is_last, axis, ShardAxis(dim, *here, names[axis] == TENSOR, axis)))
        return ShardLayout(tuple(axis for *_, axis in sorted(found, key=lambda each: each[:2])))

    @property
    def fsdp(self) -> ShardAxis | None:
        """FSDP's, of rows; None: the tensor is not sharded."""
        *_, last = [None, *(axis for axis in self.axes if not axis.is_tensor)]
        assert last is None or last.dim == 0, "FSDP shards rows"
        return last

    @property
    def experts(self) -> ShardAxis | None:
        """Expert parallelism's, into equal parts by rows, which FSDP then divides."""
        others = [axis for axis in self.axes if not axis.is_tensor and axis != self.fsdp]
        assert len(others) < 2 and all(axis.dim == 0 for axis in others), "experts are rows"
        return others[0] if others else None

    @property
    def tensor(self) -> ShardAxis | None:
        """Tensor parallelism's, of every matrix that the tensor stacks, by rows or columns."""
        return next((axis for axis in self.axes if axis.is_tensor), None)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes that have a part of the tensor, in place."""
        for axis in (self.fsdp, self.experts, self.tensor):
            if axis is not None:
                with span("messages"):
                    dist.all_reduce(value, group=axis.group)
        return value


@dataclass(frozen=True)
class LocalBlock:
    """A block of a tensor that this process has.

    Attributes:
        local: its place in what this process has, from and to in each dimension.
        full: its place in the full tensor.
    """

    local: tuple[Range, ...]
    full: tuple[Range, ...]


def local_blocks(tensor: Tensor, stacked: Sequence[int] = ()) -> list[LocalBlock]:
    """The blocks of a tensor that this process has; none where its shard is empty."""
    each = []
    for dim in range(tensor.ndim):
        found, begin = [], 0
        for full in local_ranges(tensor, dim, stacked):
            length = full[1] - full[0]
            found.append(((begin, begin + length), full))
            begin += length
        each.append(found)
    return [
        LocalBlock(tuple(local for local, _ in block), tuple(full for _, full in block))
        for block in itertools.product(*each)
    ]


def local_ranges(
    tensor: Tensor,
    dim: int,
    stacked: Sequence[int] = (),
    coordinate: Sequence[int] | None = None,
) -> list[Range]:
    """The ranges of dimension `dim` that one process has, in its own order.

    Args:
        tensor: full, or a DTensor.
        dim: of the tensor.
        stacked: heights of what dimension 0 stacks, each divided by itself over tensor ranks.
        coordinate: of the process in the tensor's mesh; None: this one.
    """
    ranges = [(0, tensor.shape[dim])]
    for axis in ShardLayout.of(tensor).axes:
        if axis.dim != dim:
            continue
        parts = [ranges]
        if stacked and dim == 0 and axis.is_tensor:
            ends = list(itertools.accumulate(stacked, initial=0))
            assert ranges == [(0, ends[-1])], "tensor parallelism divides first"
            parts = [[full] for full in itertools.pairwise(ends)]
        rank = axis.rank if coordinate is None else coordinate[axis.number]
        ranges = [each for part in parts for each in _part_of(part, axis, rank)]
    return ranges


def _part_of(ranges: list[Range], axis: ShardAxis, rank: int) -> list[Range]:
    """Part `rank` of some ranges."""
    low, high = axis.bounds(sum(end - begin for begin, end in ranges), rank)
    found, passed = [], 0
    for begin, end in ranges:
        first, last = max(low - passed, 0), min(high - passed, end - begin)
        if first < last:
            found.append((begin + first, begin + last))
        passed += end - begin
    return found


def block_view(tensor: Tensor, block: Sequence[Range]) -> Tensor:
    """A block of a tensor, as a view."""
    return tensor[tuple(slice(*each) for each in block)]


def local_shard(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that may be sharded, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded; every process that has a part calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor, stacked: Sequence[int] = ()) -> None:
    """Write a full value, which every process has, into a parameter that may be sharded."""
    assert parameter.shape == full.shape, (parameter.shape, full.shape)
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    local = parameter.to_local()
    for block in local_blocks(parameter, stacked):
        block_view(local, block.local).copy_(block_view(full, block.full))


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all tensors together, in fp32, in a message for each layout: ()."""
    norms = []
    for layout, places in _by_layout(tensors).items():
        norm = torch.linalg.vector_norm(torch.stack(_local_norms([tensors[i] for i in places])))
        norms.append(layout.sum(norm.square()).sqrt() if layout.axes else norm)
    return torch.linalg.vector_norm(torch.stack(norms))


def l2_norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, in fp32, as `total_norm`: (len(tensors),)."""
    found: list[Tensor] = [torch.empty(())] * len(tensors)
    for layout, places in _by_layout(tensors).items():
        norms = torch.stack(_local_norms([tensors[i] for i in places]))
        norms = layout.sum(norms.square()).sqrt() if layout.axes else norms
        for place, norm in zip(places, norms.unbind(), strict=True):
            found[place] = norm
    return torch.stack(found)


def _by_layout(tensors: list[Tensor]) -> dict[ShardLayout, list[int]]:
    """Places of the tensors of each layout."""
    found: dict[ShardLayout, list[int]] = {}
    for place, tensor in enumerate(tensors):
        found.setdefault(ShardLayout.of(tensor), []).append(place)
    return found


def _local_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each local shard, in fp32 also where it is narrower."""
    split = [_chunks(local_shard(tensor)) for tensor in tensors]
    chunks = [chunk for tensor in split for chunk in tensor]
    found = iter(torch._foreach_norm(chunks, 2.0, torch.float32))
    each = ([next(found) for _ in tensor] for tensor in split)
    return [n[0] if len(n) == 1 else torch.linalg.vector_norm(torch.stack(n)) for n in each]


# Whose squares a CPU sums at once. It adds one by one, in fp32: the norm of 50M values at once
# would be 0.4 % wrong, that of a shard less; in parts of this size either is right to 3e-6.
_NORM_VALUES = 1 << 16


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """A CPU's tensor in parts, for exact sums; of bfloat16 PyTorch writes out fp32 copies, too."""
    if tensor.device.type != "cpu":
        return (tensor,)
    return tensor.reshape(-1).split(_NORM_VALUES)
