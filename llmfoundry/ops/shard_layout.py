"""Where what a process holds of a parameter lies in the whole one, however it is cut.

Initialisation, weights that stream by, checkpoints and Muon ask it. FSDP cuts rows, tensor
parallelism rows or columns before that, expert parallelism rows. The idea: a process holds, of each
dimension, a few runs of the whole; mostly one, and of a fused Wqkv under tensor parallelism three:
its heads' queries, keys and values, one after the other, so that one product makes all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llmfoundry.ops import torch_private

TENSOR = "tensor_parallel"  # the mesh's dimension
Range = tuple[int, int]  # from and to


@dataclass(frozen=True)
class LocalBlock:
    """A block of a parameter.

    Attributes:
        local: its place in what this process holds, from and to in each dimension.
        whole: its place in the whole parameter.
    """

    local: tuple[Range, ...]
    whole: tuple[Range, ...]


def local_ranges(
    tensor: Tensor,
    dim: int,
    stacked: Sequence[int] = (),
    coordinate: Sequence[int] | None = None,
) -> list[Range]:
    """The runs of dimension `dim` that one process holds, in its own order.

    Args:
        tensor: whole, or a DTensor cut along any dimensions, also unevenly.
        dim: of the tensor.
        stacked: heights of what dimension 0 stacks, cut each by itself over tensor ranks.
        coordinate: of the process in the tensor's mesh; None: this one.
    """
    held = [(0, tensor.shape[dim])]
    if not isinstance(tensor, DTensor):
        return held
    mesh = tensor.device_mesh
    place = mesh.get_coordinate() if coordinate is None else coordinate
    assert place is not None, "this process is not of the mesh"
    for axis in sharding_axes(tensor, dim):
        parts = [held]
        if stacked and dim == 0 and _name(mesh, axis) == TENSOR:
            ends = list(itertools.accumulate(stacked, initial=0))
            assert held == [(0, ends[-1])], "tensor parallelism cuts first"
            parts = [[run] for run in itertools.pairwise(ends)]
        held = [run for part in parts for run in _cut(part, mesh.size(axis), place[axis])]
    return held


def local_blocks(tensor: Tensor, stacked: Sequence[int] = ()) -> list[LocalBlock]:
    """The blocks of a tensor that this process holds; none where its shard is empty."""
    each = []
    for dim in range(tensor.ndim):
        found, begin = [], 0
        for run in local_ranges(tensor, dim, stacked):
            length = run[1] - run[0]
            found.append(((begin, begin + length), run))
            begin += length
        each.append(found)
    return [
        LocalBlock(tuple(local for local, _ in block), tuple(whole for _, whole in block))
        for block in itertools.product(*each)
    ]


def block_view(tensor: Tensor, place: Sequence[Range]) -> Tensor:
    """A block of a tensor, as a view."""
    return tensor[tuple(slice(*run) for run in place)]


@torch.no_grad()
def assign(parameter: Tensor, whole: Tensor, stacked: Sequence[int] = ()) -> None:
    """Write a value that every process has into a parameter, whole or cut."""
    assert parameter.shape == whole.shape, (parameter.shape, whole.shape)
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    local = parameter.to_local()
    for block in local_blocks(parameter, stacked):
        block_view(local, block.local).copy_(block_view(whole, block.whole))


def sharding_axes(tensor: DTensor, dim: int) -> list[int]:
    """The mesh's axes that cut dimension `dim`, in the order in which they do.

    FSDP cuts last what others have cut already; its placement then is a strided one.
    """
    cuts = [
        (hasattr(place, "split_factor"), axis)
        for axis, place in enumerate(tensor.placements)
        if getattr(place, "dim", None) == dim
    ]
    return [axis for _, axis in sorted(cuts)]


def _name(mesh: DeviceMesh, axis: int) -> str | None:
    return mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else None


def _cut(held: list[Range], n: int, rank: int) -> list[Range]:
    """Part `rank` of `n` of some runs, as torch.chunk cuts: the last may be short or empty."""
    total = sum(end - begin for begin, end in held)
    step = -(-total // n)
    low, high = min(rank * step, total), min((rank + 1) * step, total)
    found, passed = [], 0
    for begin, end in held:
        first, last = max(low - passed, 0), min(high - passed, end - begin)
        if first < last:
            found.append((begin + first, begin + last))
        passed += end - begin
    return found


Stacked = Mapping[str, Sequence[int]]


# Whose squares a CPU sums at once. It adds one by one, in fp32: the norm of 50M values at once
# would be 0.4 % wrong, that of a shard less; in parts of this size either is right to 3e-6.
_NORM_VALUES = 1 << 16


def local_shard(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds; they share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class TensorShards:
    """Processes that have as many rows, or columns, of every matrix that a parameter stacks.

    Attributes:
        group: the processes.
        n: how many there are.
        rank: this one's number among them.
        dim: what they cut: 0 rows, 1 columns.
    """

    group: dist.ProcessGroup
    n: int
    rank: int
    dim: int


@dataclass(frozen=True)
class ShardLayout:
    """How a parameter's rows lie on processes; whole parameters have one shard.

    FSDP cuts what a process would hold without it: all rows, or a part of them where a dimension of
    the mesh behind FSDP's has cut them first, as experts are.

    Attributes:
        n: how many shards FSDP makes of a part.
        rank: the shard that this process holds.
        group: the processes that hold them; None where the parameter is whole.
        parts: how many parts there are, of equal height.
        part: the one that this process's shard is of.
        others: of each dimension that makes parts, the processes along it.
        across: the processes that hold the rest of each matrix beside FSDP's shards: tensor ranks;
            None: there are none.
    """

    n: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    parts: int = 1
    part: int = 0
    others: tuple[dist.ProcessGroup, ...] = ()
    across: TensorShards | None = None

    @staticmethod
    def of(parameter: Tensor) -> ShardLayout:
        """The shards of a parameter that is whole, or cut by rows, or by columns and rows."""
        if not isinstance(parameter, DTensor):
            return ShardLayout()
        mesh, places = parameter.device_mesh, parameter.placements
        axes = [axis for axis, place in enumerate(places) if not place.is_replicate()]
        if not axes:
            return ShardLayout()
        dims = {axis: getattr(places[axis], "dim", None) for axis in axes}  # also of _StridedShard
        across = [axis for axis in axes if (mesh.mesh_dim_names or {axis: ""})[axis] == TENSOR]
        axis, *inner = [axis for axis in axes if axis not in across]  # FSDP's are the outermost
        assert all(dims[axis] == 0 for axis in (axis, *inner)), "FSDP cuts rows"
        parts, part = 1, 0
        for other in inner:
            parts, part = parts * mesh.size(other), part * mesh.size(other)
            part += mesh.get_local_rank(other)
        groups = tuple(mesh.get_group(other) for other in inner)
        shards = (mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis))
        rest = None
        for tensor in across:
            here = (mesh.get_group(tensor), mesh.size(tensor), mesh.get_local_rank(tensor))
            rest = TensorShards(*here, dims[tensor] or 0)
        return ShardLayout(*shards, parts, part, groups, rest)

    def bounds(self, height: int, rank: int) -> tuple[int, int]:
        """First row of a shard and the row after its last, of a part of so many rows."""
        step = -(-height // self.n)  # as torch.chunk cuts: the last shards may be short or empty
        return min(rank * step, height), min((rank + 1) * step, height)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all that hold a part of the parameter, in place."""
        across = () if self.across is None else (self.across.group,)
        for group in (self.group, *self.others, *across):
            if group is not None:
                dist.all_reduce(value, group=group)
        return value


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all tensors together, in fp32, in a message for each way they are cut: ()."""
    together = []
    for shards, places in _kinds(tensors).items():
        norm = torch.linalg.vector_norm(torch.stack(_norms([tensors[i] for i in places])))
        together.append(norm if shards.group is None else shards.sum(norm.square()).sqrt())
    return torch.linalg.vector_norm(torch.stack(together))


def l2_norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, in fp32, as `total_norm`: (len(tensors),)."""
    found: list[Tensor] = [torch.empty(())] * len(tensors)
    for shards, places in _kinds(tensors).items():
        norms = torch.stack(_norms([tensors[i] for i in places]))
        whole = norms if shards.group is None else shards.sum(norms.square()).sqrt()
        for place, norm in zip(places, whole.unbind(), strict=True):
            found[place] = norm
    return torch.stack(found)


def _kinds(tensors: list[Tensor]) -> dict[ShardLayout, list[int]]:
    """Places of the tensors that are cut alike."""
    kinds: dict[ShardLayout, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault(ShardLayout.of(tensor), []).append(place)
    return kinds


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of what this process holds of each tensor, in fp32 also where it is narrower."""
    split = [_parts(local_shard(tensor)) for tensor in tensors]
    parts = [part for tensor in split for part in tensor]
    found = iter(torch_private.norms(parts))
    each = ([next(found) for _ in tensor] for tensor in split)
    return [n[0] if len(n) == 1 else torch.linalg.vector_norm(torch.stack(n)) for n in each]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A CPU's tensor in parts, for exact sums; of bfloat16 PyTorch writes out fp32 copies, too."""
    if tensor.device.type != "cpu":
        return (tensor,)
    return tensor.reshape(-1).split(_NORM_VALUES)
