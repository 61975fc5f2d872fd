"""This process's part of parameters that FSDP may have cut into rows.

Optimizers and clipping work on these parts: what is done to each element or row needs no DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmfoundry.models.shard_layout import TENSOR
from llmfoundry.ops import torch_private

# Whose squares a CPU sums at once. It adds one by one, in fp32: the norm of 50M values at once
# would be 0.4 % wrong, that of a shard less; in parts of this size either is right to 3e-6.
_NORM_VALUES = 1 << 16


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds; they share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Across:
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
class Shards:
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
    across: Across | None = None

    @staticmethod
    def of(parameter: Tensor) -> Shards:
        """The shards of a parameter that is whole, or cut by rows, or by columns and rows."""
        if not isinstance(parameter, DTensor):
            return Shards()
        mesh, places = parameter.device_mesh, parameter.placements
        axes = [axis for axis, place in enumerate(places) if not place.is_replicate()]
        if not axes:
            return Shards()
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
            rest = Across(*here, dims[tensor] or 0)
        return Shards(*shards, parts, part, groups, rest)

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


def _kinds(tensors: list[Tensor]) -> dict[Shards, list[int]]:
    """Places of the tensors that are cut alike."""
    kinds: dict[Shards, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault(Shards.of(tensor), []).append(place)
    return kinds


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of what this process holds of each tensor, in fp32 also where it is narrower."""
    split = [_parts(local(tensor)) for tensor in tensors]
    parts = [part for tensor in split for part in tensor]
    found = iter(torch_private.norms(parts))
    each = ([next(found) for _ in tensor] for tensor in split)
    return [n[0] if len(n) == 1 else torch.linalg.vector_norm(torch.stack(n)) for n in each]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A CPU's tensor in parts, for exact sums; of bfloat16 PyTorch writes out fp32 copies, too."""
    if tensor.device.type != "cpu":
        return (tensor,)
    return tensor.reshape(-1).split(_NORM_VALUES)
