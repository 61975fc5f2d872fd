"""This process's part of parameters that FSDP may have cut into rows.

Optimizers and clipping work on these parts: what is done to each element or row needs no DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmfoundry.ops import torch_private

_NORM_VALUES = 1 << 20  # whose squares are summed at once on a CPU: 4 MiB in fp32


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds; they share its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Shards:
    """How a parameter's rows lie on processes; whole parameters have one shard.

    Attributes:
        n: how many shards there are.
        rank: the shard that this process holds.
        group: the processes that hold them; None where there is one shard.
    """

    n: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(parameter: Tensor) -> Shards:
        """The shards of a parameter that is whole, or cut along dimension 0."""
        if not isinstance(parameter, DTensor):
            return Shards()
        mesh = parameter.device_mesh
        axes = [axis for axis, place in enumerate(parameter.placements) if not place.is_replicate()]
        if not axes:
            return Shards()
        (axis,) = axes
        assert parameter.placements[axis].is_shard(0), "only rows are sharded"
        return Shards(mesh.size(axis), mesh.get_local_rank(axis), mesh.get_group(axis))

    def bounds(self, height: int, rank: int) -> tuple[int, int]:
        """First row of a shard and the row after its last, of a parameter of so many rows."""
        step = -(-height // self.n)  # as torch.chunk cuts: the last shards may be short or empty
        return min(rank * step, height), min((rank + 1) * step, height)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over shards, in place."""
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value


def norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor, in fp32 also where it is narrower; of DTensors as they reduce."""
    split = [_parts(tensor) for tensor in tensors]
    parts = [part for tensor in split for part in tensor]
    found = iter(torch_private.norms(parts))
    each = ([next(found) for _ in tensor] for tensor in split)
    return [n[0] if len(n) == 1 else torch.linalg.vector_norm(torch.stack(n)) for n in each]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """A CPU's bfloat16 in parts, since PyTorch writes a tensor out in fp32 before it sums it."""
    is_cast = tensor.device.type == "cpu" and tensor.dtype.itemsize < 4
    if not is_cast or isinstance(tensor, DTensor):
        return (tensor,)
    return tensor.reshape(-1).split(_NORM_VALUES)


def l2_norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, whole or cut alike, in one message: (len(tensors),)."""
    held = norms([local(tensor) for tensor in tensors])
    return Shards.of(tensors[0]).sum(torch.stack(held).square()).sqrt()
