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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llmfoundry.recipe.architecture.model import ModelConfig

TENSOR = "tensor_parallel"  # the mesh's dimension
Run = tuple[int, int]  # from and to
STACKED = ("attn.Wqkv.weight", "attn.Wqkv.bias")


@dataclass(frozen=True)
class HeldBlock:
    """A block of a parameter.

    Attributes:
        local: its place in what this process holds, from and to in each dimension.
        whole: its place in the whole parameter.
    """

    local: tuple[Run, ...]
    whole: tuple[Run, ...]


def stacked_rows(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Heights of the matrices that a parameter stacks, of which each tensor rank has its part.

    Empty: tensor parallelism cuts it as one.
    """
    if not name.endswith(STACKED) or config.head_dim is None:
        return ()
    kv_heads = config.attn_config.kv_n_heads
    assert kv_heads is not None, "the recipe was not filled"
    kv_width = kv_heads * config.head_dim
    return (config.n_heads * config.head_dim, kv_width, kv_width)


def all_stacked_rows(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """`stacked_rows` of those parameters that stack some, by name; of our decoder alone."""
    config = getattr(model, "config", None)
    if not isinstance(config, ModelConfig):
        return {}
    found = {name: stacked_rows(name, config) for name, _ in model.named_parameters()}
    return {name: rows for name, rows in found.items() if rows}


def runs(
    tensor: Tensor,
    dim: int,
    stacked: Sequence[int] = (),
    coordinate: Sequence[int] | None = None,
) -> list[Run]:
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
    for axis in cutting_axes(tensor, dim):
        parts = [held]
        if stacked and dim == 0 and _name(mesh, axis) == TENSOR:
            ends = list(itertools.accumulate(stacked, initial=0))
            assert held == [(0, ends[-1])], "tensor parallelism cuts first"
            parts = [[run] for run in itertools.pairwise(ends)]
        held = [run for part in parts for run in _cut(part, mesh.size(axis), place[axis])]
    return held


def held_blocks(tensor: Tensor, stacked: Sequence[int] = ()) -> list[HeldBlock]:
    """The blocks of a tensor that this process holds; none where its shard is empty."""
    each = []
    for dim in range(tensor.ndim):
        found, begin = [], 0
        for run in runs(tensor, dim, stacked):
            length = run[1] - run[0]
            found.append(((begin, begin + length), run))
            begin += length
        each.append(found)
    return [
        HeldBlock(tuple(local for local, _ in block), tuple(whole for _, whole in block))
        for block in itertools.product(*each)
    ]


def at(tensor: Tensor, place: Sequence[Run]) -> Tensor:
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
    for block in held_blocks(parameter, stacked):
        at(local, block.local).copy_(at(whole, block.whole))


def cutting_axes(tensor: DTensor, dim: int) -> list[int]:
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


def _cut(held: list[Run], n: int, rank: int) -> list[Run]:
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
