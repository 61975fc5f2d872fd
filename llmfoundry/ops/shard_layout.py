"""Description of a sharded tensor: the part of this rank, and the ranks that have the other parts.

Entry points: `local_blocks` and `ShardLayout`. Initialization and streamed loading fill the blocks
of `local_blocks`; checkpoints save and load the same blocks; gradient norms and Muon reduce and
gather over the groups of `ShardLayout`. The idea: mesh axes shard a tensor one after the other,
each like torch.chunk: expert parallelism by rows, tensor parallelism by rows or columns, and FSDP
the remaining rows. In each dimension a rank then has a few ranges, mostly one. A fused Wqkv under
tensor parallelism has three: the queries, keys and values of the rank's heads, adjacent in memory
so that one matmul computes all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmfoundry.telemetry import span

TENSOR = "tensor_parallel"  # name of the mesh axis
Range = tuple[int, int]  # first, and one past the last
Stacked = Mapping[str, Sequence[int]]
"""Heights of the matrices that a parameter stacks in dimension 0, by name; each is sharded."""


@dataclass(frozen=True)
class ShardAxis:
    """A mesh axis that shards a tensor like torch.chunk: the last parts may be shorter.

    Attributes:
        dim: dimension of the tensor.
        n: number of parts.
        rank: part of this rank.
        group: ranks that have these parts.
        is_tensor: whether it is the axis of tensor parallelism.
        number: index of the axis in the tensor's mesh.
    """

    dim: int
    n: int
    rank: int
    group: dist.ProcessGroup
    is_tensor: bool
    number: int = field(compare=False)

    def bounds(self, length: int, rank: int) -> Range:
        """Return begin and end of part `rank` of `length` rows or columns."""
        size = math.ceil(length / self.n)
        return min(rank * size, length), min((rank + 1) * size, length)


@dataclass(frozen=True)
class ShardLayout:
    """All mesh axes that shard a tensor, in order; empty: every rank has the full tensor."""

    axes: tuple[ShardAxis, ...] = ()

    @staticmethod
    def of(tensor: Tensor) -> ShardLayout:
        """Return the layout of a tensor: full, or a DTensor sharded along any dimensions."""
        if not isinstance(tensor, DTensor):
            return ShardLayout()
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        axes, last_axes = list[ShardAxis](), list[ShardAxis]()
        for number, placement in enumerate(tensor.placements):
            dim = getattr(placement, "dim", None)  # Shard and _StridedShard have it
            if dim is None:
                continue
            axis = ShardAxis(
                dim=dim,
                n=mesh.size(number),
                rank=mesh.get_local_rank(number),
                group=mesh.get_group(number),
                is_tensor=names[number] == TENSOR,
                number=number,
            )
            # FSDP shards after the other axes; its placement is then strided
            is_last = hasattr(placement, "split_factor")
            (last_axes if is_last else axes).append(axis)
        return ShardLayout((*axes, *last_axes))

    @property
    def fsdp(self) -> ShardAxis | None:
        """Return the axis of FSDP, by rows; None: FSDP does not shard the tensor."""
        others = [axis for axis in self.axes if not axis.is_tensor]
        last = others[-1] if others else None
        assert last is None or last.dim == 0, "FSDP shards rows"
        return last

    @property
    def experts(self) -> ShardAxis | None:
        """Return the axis of expert parallelism: equal parts by rows, which FSDP shards further."""
        others = [axis for axis in self.axes if not axis.is_tensor and axis != self.fsdp]
        assert len(others) < 2 and all(axis.dim == 0 for axis in others), "experts are rows"
        return others[0] if others else None

    @property
    def tensor(self) -> ShardAxis | None:
        """Return the axis of tensor parallelism, by rows or columns of every stacked matrix."""
        return next((axis for axis in self.axes if axis.is_tensor), None)

    def sum(self, value: Tensor) -> Tensor:
        """Sum a value over all ranks that have a part of the tensor, in place."""
        for axis in (self.fsdp, self.experts, self.tensor):
            if axis is not None:
                with span("messages"):
                    dist.all_reduce(value, group=axis.group)
        return value


@dataclass(frozen=True)
class LocalBlock:
    """A block of a tensor that this rank has.

    Attributes:
        local: ranges of the block in the local shard, one per dimension.
        full: ranges of the block in the full tensor.
    """

    local: tuple[Range, ...]
    full: tuple[Range, ...]


def local_blocks(tensor: Tensor, stacked: Sequence[int] = ()) -> list[LocalBlock]:
    """Return the blocks of a tensor that this rank has; none if its shard is empty."""
    # for each dimension, pairs of a range in the local shard and its range in the full tensor
    pairs_by_dim: list[list[tuple[Range, Range]]] = []
    for dim in range(tensor.ndim):
        pairs, local_begin = [], 0
        for begin, end in local_ranges(tensor, dim, stacked):
            local_end = local_begin + end - begin
            pairs.append(((local_begin, local_end), (begin, end)))
            local_begin = local_end
        pairs_by_dim.append(pairs)

    # a block for each combination of ranges
    blocks = []
    for block_pairs in itertools.product(*pairs_by_dim):
        local = tuple(local_range for local_range, _ in block_pairs)
        full = tuple(full_range for _, full_range in block_pairs)
        blocks.append(LocalBlock(local, full))
    return blocks


def local_ranges(
    tensor: Tensor,
    dim: int,
    stacked: Sequence[int] = (),
    coordinate: Sequence[int] | None = None,
) -> list[Range]:
    """Return the ranges of dimension `dim` that one rank has, in the order of its memory.

    Args:
        tensor: full tensor or DTensor.
        dim: dimension of the tensor.
        stacked: heights of the matrices stacked in dimension 0, each sharded over tensor ranks.
        coordinate: coordinate of the rank in the tensor's mesh; None: this rank.
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
        ranges = [local_range for part in parts for local_range in _part_of(part, axis, rank)]
    return ranges


def _part_of(ranges: list[Range], axis: ShardAxis, rank: int) -> list[Range]:
    """Return the part of a rank, if `axis` shards the concatenation of some ranges."""
    low, high = axis.bounds(sum(end - begin for begin, end in ranges), rank)
    part, passed = [], 0
    for begin, end in ranges:
        first, last = max(low - passed, 0), min(high - passed, end - begin)
        if first < last:
            part.append((begin + first, begin + last))
        passed += end - begin
    return part


def block_view(tensor: Tensor, block: Sequence[Range]) -> Tensor:
    """Return a block of a tensor as a view."""
    return tensor[tuple(slice(begin, end) for begin, end in block)]


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, in the same memory; a full tensor is its own shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor, stacked: Sequence[int] = ()) -> Tensor:
    """Return the full value of a tensor that may be sharded. A collective call.

    Args:
        tensor: full, or a DTensor.
        stacked: row counts of the matrices that it stacks, each sharded over tensor ranks. Their
            shards are put in order; DTensor only concatenates the rows of the ranks.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    full, axis = tensor.full_tensor(), ShardLayout.of(tensor).tensor
    if not stacked or axis is None or axis.dim != 0:
        return full
    local_heights = [height // axis.n for height in stacked]
    # each rank has a shard of every stacked matrix: collect the shards matrix by matrix
    by_rank = [rows.split(local_heights) for rows in full.chunk(axis.n)]
    by_matrix = zip(*by_rank, strict=True)
    return torch.cat([shard for matrix_shards in by_matrix for shard in matrix_shards])


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor, stacked: Sequence[int] = ()) -> None:
    """Write a full value, which every rank has, into a parameter that may be sharded."""
    assert parameter.shape == full.shape, (parameter.shape, full.shape)
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    local = parameter.to_local()
    for block in local_blocks(parameter, stacked):
        block_view(local, block.local).copy_(block_view(full, block.full))


@torch.no_grad()
def full_rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor that may be sharded, on its device. A collective call."""
    index = torch.tensor(rows, dtype=torch.int64, device=tensor.device)
    if not isinstance(tensor, DTensor):
        return tensor.detach()[index]
    local = tensor.to_local().detach()
    result = torch.zeros(len(rows), *tensor.shape[1:], dtype=local.dtype, device=local.device)
    for block in local_blocks(tensor):
        full_index, local_index = _rows_in(block, index)
        result[full_index] = local[local_index]
    return ShardLayout.of(tensor).sum(result)


@torch.no_grad()
def assign_rows(parameter: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Write `values` (len(rows), ...), which every rank has, into rows of a tensor."""
    index = torch.tensor(rows, dtype=torch.int64, device=parameter.device)
    values = values.to(parameter)
    if not isinstance(parameter, DTensor):
        parameter[index] = values
        return
    local = parameter.to_local()
    for block in local_blocks(parameter):
        full_index, local_index = _rows_in(block, index)
        local[local_index] = values[full_index]


_Index = tuple[Tensor | slice, ...]


def _rows_in(block: LocalBlock, index: Tensor) -> tuple[_Index, _Index]:
    """Return the positions within `index` of the rows that a block has, and its local rows.

    Both are followed by the ranges of the block in the other dimensions.
    """
    begin, end = block.full[0]
    first, _ = block.local[0]
    here = ((index >= begin) & (index < end)).nonzero().flatten()
    columns = [slice(*bounds) for bounds in block.full[1:]]
    local_columns = [slice(*bounds) for bounds in block.local[1:]]
    return (here, *columns), (index[here] - begin + first, *local_columns)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together, (), fp32, with one collective per layout."""
    norms = []
    for layout, indices in _by_layout(tensors).items():
        norm = torch.linalg.vector_norm(torch.stack(_local_norms([tensors[i] for i in indices])))
        norms.append(layout.sum(norm.square()).sqrt() if layout.axes else norm)
    return torch.linalg.vector_norm(torch.stack(norms))


def l2_norms(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, (len(tensors),), fp32."""
    result: list[Tensor] = [torch.empty(())] * len(tensors)
    for layout, indices in _by_layout(tensors).items():
        norms = torch.stack(_local_norms([tensors[i] for i in indices]))
        norms = layout.sum(norms.square()).sqrt() if layout.axes else norms
        for i, norm in zip(indices, norms.unbind(), strict=True):
            result[i] = norm
    return torch.stack(result)


def _by_layout(tensors: list[Tensor]) -> dict[ShardLayout, list[int]]:
    """Return the indices of the tensors of each layout."""
    indices: dict[ShardLayout, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(ShardLayout.of(tensor), []).append(i)
    return indices


def _local_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each local shard, in fp32 even if the shard is narrower."""
    # the norms of all chunks of all tensors in one kernel launch
    chunks_by_tensor = [_chunks(local_shard(tensor)) for tensor in tensors]
    all_chunks = [chunk for chunks in chunks_by_tensor for chunk in chunks]
    chunk_norms = iter(torch._foreach_norm(all_chunks, 2.0, torch.float32))

    # combine the chunks of each tensor
    norms = []
    for chunks in chunks_by_tensor:
        own_norms = [next(chunk_norms) for _ in chunks]
        if len(own_norms) == 1:
            norms.append(own_norms[0])
        else:
            norms.append(torch.linalg.vector_norm(torch.stack(own_norms)))
    return norms


# Values whose squares a CPU sums at once. It adds sequentially in fp32: the norm of 50M values at
# once would be 0.4 % wrong, that of a smaller shard less. In parts of this size the error is 3e-6.
_NORM_VALUES = 1 << 16


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a CPU tensor in parts, for exact sums and because bf16 parts are copied to fp32."""
    if tensor.device.type != "cpu":
        return (tensor,)
    return tensor.reshape(-1).split(_NORM_VALUES)
