"""The device mesh of all ranks, and the views of it that each form of parallelism uses.

Entry point: `build_mesh`. The dimensions are data_parallel_replicate x data_parallel_shard x
context_parallel x tensor_parallel, with adjacent ranks along the last. Expert parallelism reshapes
the last three dimensions. Its own dimension is the innermost, because tokens cross it twice per
layer.
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
    """Views of one device mesh.

    Attributes:
        degrees: sizes of the dimensions.
        root: (replicate, shard), then context and tensor if their sizes are above 1.
        weights: (replicate, shard x context), over which FSDP shards all non-expert weights.
        data: ranks that read different sequences; None: all ranks.
        tokens: ranks that hold different tokens, data x context; None: all ranks.
        context: ranks that share sequences (context parallelism); None: no context parallelism.
        tensor: ranks that share matrices (tensor parallelism); None: no tensor parallelism.
        expert: ranks that share the experts of a layer; None: no expert parallelism.
        expert_weights: (replicate, shard), over which FSDP shards the experts of each expert rank;
            None without expert parallelism.
        mixture_weights: (replicate, shard x context x tensor), over which FSDP shards the other
            weights of a layer with experts under tensor parallelism; None: `weights` is used.
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
        """Yield every process group of all views."""
        views: list[DeviceMesh | None] = [self.root, self.weights, self.data, self.tokens]
        views += [self.expert, self.expert_weights, self.mixture_weights]
        for view in views:
            if view is not None:
                yield from view.get_all_groups()


def build_mesh(config: ParallelConfig, world: World) -> Meshes | None:
    """Build the mesh of all ranks; None for a single process."""
    degrees = config.degrees(world.size)
    if world.size == 1:
        return None

    # the mesh itself
    sizes = {REPLICATE: degrees.replicate, SHARD: degrees.shard}
    more = {CONTEXT: degrees.context, TENSOR: degrees.tensor}
    sizes |= {name: size for name, size in more.items() if size > 1}
    # else smaller groups would get both NCCL and gloo, as the default group does
    backend = NCCL if NCCL in dist.get_backend_config() else None
    small = [name for name, size in sizes.items() if 1 < size < world.size]
    root = init_device_mesh(
        world.device.type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override={name: backend for name in small} if backend and small else None,
    )

    def over(*names: str) -> DeviceMesh | None:
        """Flatten some dimensions into one; None if the result has all ranks."""
        present = [name for name in names if sizes.get(name, 1) > 1] or [names[0]]
        if math.prod(sizes[name] for name in present) == world.size:
            return None
        if len(present) == 1:
            return root[present[0]]
        return flattened(root, present, backend)

    # views for data, context and tensor parallelism
    has_context = degrees.context > 1
    if has_context:
        weights = concatenated(root[REPLICATE], flattened(root, [SHARD, CONTEXT], backend))
    else:
        weights = root[REPLICATE, SHARD]
    meshes = Meshes(
        degrees,
        root,
        weights=weights,
        data=over(REPLICATE, SHARD),
        tokens=over(REPLICATE, SHARD, CONTEXT),
        context=root[CONTEXT] if has_context else None,
        tensor=root[TENSOR] if degrees.tensor > 1 else None,
    )

    # views for layers with experts, over the ranks of one replica
    if degrees.tensor > 1 or degrees.expert > 1:
        replica = flattened(root, [name for name in sizes if name != REPLICATE], backend)
    if degrees.tensor > 1:
        meshes = replace(meshes, mixture_weights=concatenated(root[REPLICATE], replica))
    if degrees.expert > 1:
        shape = {f"{EXPERT}_shard": degrees.expert_shard, EXPERT: degrees.expert}
        expert_view = unflattened(replica, shape, backend)
        shards = concatenated(root[REPLICATE], expert_view[f"{EXPERT}_shard"])
        meshes = replace(meshes, expert=expert_view[EXPERT], expert_weights=shards)

    for group in meshes.groups():  # else each group keeps PyTorch's default timeout
        set_group_timeouts(group, world)
    return meshes


def with_mesh(world: World, meshes: Meshes | None) -> World:
    """Return the world with the data and token groups of a mesh."""
    if meshes is None:
        return world
    return replace(world, data_mesh=meshes.data, token_mesh=meshes.tokens)


@contextmanager
def imagined(degrees: Degrees) -> Iterator[Meshes | None]:
    """Yield the tensor, context and expert views of a mesh without processes, for fake tensors.

    This process has rank 0, and there is no communication. Yield None if no degree is above 1.
    """
    sizes = {"context": degrees.context, "tensor": degrees.tensor, "expert": degrees.expert}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    if not sizes:
        yield None
        return
    with imagined_meshes(sizes) as views:
        first = next(iter(views.values()))
        yield Meshes(degrees, root=first, weights=first, **views)
