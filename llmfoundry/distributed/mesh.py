"""One device mesh for all processes, and every view of it that a part of the run needs.

The processes form a block of data_parallel_replicate x data_parallel_shard x context_parallel x
tensor_parallel, adjacent ranks along the last. Experts use those of the last three, in another
shape: their axis is the innermost, since tokens travel along it twice a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmfoundry.distributed.process_group import World, set_group_timeouts
from llmfoundry.ops.shard_layout import TENSOR
from llmfoundry.ops.torch_private import concatenated, flattened, imagined_meshes, unflattened
from llmfoundry.recipe.parallel import NCCL, Degrees, ParallelConfig

REPLICATE, SHARD = "data_parallel_replicate", "data_parallel_shard"
CONTEXT, EXPERT = "context_parallel", "expert_parallel"


@dataclass(frozen=True)
class Meshes:
    """The views of one mesh; those that differ in shape alone share their processes.

    Attributes:
        degrees: of its dimensions.
        root: (replicate, shard), and behind them context and tensor where they are above 1.
        weights: (replicate, shard x context): how FSDP shards what is not an expert's.
        data: the processes that read other rows; None: all.
        tokens: those that hold other tokens, data x context; None: all.
        context: those that share this one's rows; None: it has them alone.
        tensor: those that share this one's matrices; None: it has them alone.
        expert: those that share this one's experts; None: it has them all.
        expert_weights: (replicate, shard): how FSDP shards the experts of one of these; None too.
        mixture_weights: (replicate, shard x context x tensor): how it shards what else is of a
            layer with experts, where tensor ranks have other tokens; None: as other weights.
    """

    degrees: Degrees
    root: DeviceMesh
    weights: DeviceMesh
    data: DeviceMesh | None = None
    tokens: DeviceMesh | None = None
    context: DeviceMesh | None = None
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    expert_weights: DeviceMesh | None = None
    mixture_weights: DeviceMesh | None = None

    def groups(self) -> Iterator[dist.ProcessGroup]:
        """Each group of processes of all views."""
        views: list[DeviceMesh | None] = [self.root, self.weights, self.data, self.tokens]
        views += [self.expert, self.expert_weights, self.mixture_weights]
        for view in views:
            if view is not None:
                yield from view.get_all_groups()


def build_mesh(config: ParallelConfig, world: World) -> Meshes | None:
    """The mesh of all processes; None where there is one."""
    degrees = config.degrees(world.size)
    if world.size == 1:
        return None
    sizes = {REPLICATE: degrees.replicate, SHARD: degrees.shard}
    more = {CONTEXT: degrees.context, TENSOR: degrees.tensor}
    sizes |= {name: size for name, size in more.items() if size > 1}
    # Groups smaller than all would be of NCCL and gloo, as the default group is.
    backend = NCCL if NCCL in dist.get_backend_config() else None
    small = [name for name, size in sizes.items() if 1 < size < world.size]
    root = init_device_mesh(
        world.device.type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override={name: backend for name in small} if backend and small else None,
    )

    def over(*names: str) -> DeviceMesh | None:
        """Some dimensions as one; None: they are all processes."""
        present = [name for name in names if sizes.get(name, 1) > 1] or [names[0]]
        if math.prod(sizes[name] for name in present) == world.size:
            return None
        if len(present) == 1:
            return root[present[0]]
        return flattened(root, present, backend)

    context = degrees.context > 1
    meshes = Meshes(
        degrees,
        root,
        weights=concatenated(root[REPLICATE], flattened(root, [SHARD, CONTEXT], backend))
        if context
        else root[REPLICATE, SHARD],
        data=over(REPLICATE, SHARD),
        tokens=over(REPLICATE, SHARD, CONTEXT),
        context=root[CONTEXT] if context else None,
        tensor=root[TENSOR] if degrees.tensor > 1 else None,
    )
    if degrees.tensor > 1 or degrees.expert > 1:
        copy = flattened(root, [name for name in sizes if name != REPLICATE], backend)
    if degrees.tensor > 1:
        meshes = replace(meshes, mixture_weights=concatenated(root[REPLICATE], copy))
    if degrees.expert > 1:
        shape = {f"{EXPERT}_shard": degrees.expert_shard, EXPERT: degrees.expert}
        copy = unflattened(copy, shape, backend)
        shards = concatenated(root[REPLICATE], copy[f"{EXPERT}_shard"])
        meshes = replace(meshes, expert=copy[EXPERT], expert_weights=shards)
    for group in meshes.groups():  # each would wait for PyTorch's own time otherwise
        set_group_timeouts(group, world)
    return meshes


def with_mesh(world: World, meshes: Meshes | None) -> World:
    """The world with a mesh's groups: which processes have other rows, and which other tokens."""
    if meshes is None:
        return world
    return replace(world, data_mesh=meshes.data, token_mesh=meshes.tokens)


@contextmanager
def imagined(degrees: Degrees) -> Iterator[Meshes | None]:
    """The views that tensor, context and expert parallelism take of a mesh that does not exist.

    For fake tensors: this process is the first, and nothing is sent. None: there are none.
    """
    sizes = {"context": degrees.context, "tensor": degrees.tensor, "expert": degrees.expert}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if not sizes:
        yield None
        return
    with imagined_meshes(sizes) as views:
        first = next(iter(views.values()))
        yield Meshes(degrees, root=first, weights=first, **views)
