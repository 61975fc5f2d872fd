"""One device mesh (data_parallel_replicate, data_parallel_shard), and the model wrapped on it.

These two are its data axes: processes at different places on them read different rows.
Replicas alone are DDP, shards alone FSDP2, both HSDP. Whatever the layout, gradients are summed,
not averaged: the loss is divided by the global count of labelled tokens before the backward pass,
so the sum is the exact gradient of the global mean.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.parallel.launch import World, bound_waiting
from llmfoundry.recipe.parallel import ParallelConfig

REPLICATE, SHARD = "data_parallel_replicate", "data_parallel_shard"


def degrees(config: ParallelConfig, world_size: int) -> tuple[int, int]:
    """The mesh's two degrees with -1 worked out; raises UserError where they do not fit."""
    replicate, shard = config.data_parallel_replicate_degree, config.data_parallel_shard_degree
    if replicate == -1:
        replicate = world_size // shard
    elif shard == -1:
        shard = world_size // replicate
    if replicate * shard != world_size:
        raise UserError(
            f"parallel.data_parallel_shard_degree: {shard}, times"
            f" data_parallel_replicate_degree ({replicate}), is not the number of processes"
            f" ({world_size}); write -1 for one of them"
        )
    return replicate, shard


def build_mesh(config: ParallelConfig, world: World) -> DeviceMesh | None:
    """The mesh of all processes; None where there is one."""
    shape = degrees(config, world.size)
    if world.size == 1:
        return None
    # HSDP's groups, which are smaller than all, would be of NCCL and gloo, as the default group is
    device_alone = "nccl" in dist.get_backend_config() and 1 not in shape
    mesh = init_device_mesh(
        world.device.type,
        shape,
        mesh_dim_names=(REPLICATE, SHARD),
        backend_override={REPLICATE: "nccl", SHARD: "nccl"} if device_alone else None,
    )
    _bound_waiting(mesh, world)
    return mesh


def _bound_waiting(mesh: DeviceMesh, world: World) -> None:
    """Each group would wait for PyTorch's own time otherwise."""
    for group in mesh.get_all_groups():
        bound_waiting(group, world)


def on_mesh(world: World, mesh: DeviceMesh | None) -> World:
    """The world as a mesh cuts it: processes that differ on its data axes alone read other rows."""
    if mesh is None or mesh.ndim == 2:
        return world
    assert mesh.mesh_dim_names is not None
    axes = [mesh.mesh_dim_names.index(axis) for axis in (REPLICATE, SHARD)]
    ranks = mesh.mesh.movedim(axes, (0, 1)).flatten(0, 1).flatten(1)
    rows = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("data", "others"))
    _bound_waiting(rows, world)
    return replace(world, data_mesh=rows["data"])


def materialize(
    root: Root, world: World, mesh: DeviceMesh | None, config: ParallelConfig, *, precision: str
) -> None:
    """Cut a model built on the meta device into shards, where asked, and give it memory.

    Its weights are not filled: that is `init_weights` or a checkpoint, on every process.
    """
    if mesh is not None and mesh[SHARD].size() > 1:
        _fully_shard(root, mesh, config, precision)
    root.to_empty(device=world.device)


def _fully_shard(root: Root, mesh: DeviceMesh, config: ParallelConfig, precision: str) -> None:
    """Each block its own unit; embeddings, final norm and head stay with the root.

    Frozen parameters may be of any dtype beside those that train, which have one: FSDP gathers
    bytes of 4-bit weights as they are, and reduces gradients only where there are some.
    """
    policy = MixedPrecisionPolicy(
        # under bf16 the shards are bfloat16 already, and gradients come back as such
        param_dtype=torch.bfloat16 if precision == "amp_bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # amp's residual stream and rotary tables stay fp32
    )
    # One replica is a replica too under bf16: what waits for the last microbatch's all-reduce is
    # added up in reduce_dtype, what does not in the weights' own.
    keeps_fp32 = precision == "bf16" and config.reduce_scatter_each_microbatch
    replicated = mesh[REPLICATE].size() > 1 or keeps_fp32
    used = mesh[REPLICATE, SHARD] if replicated else mesh[SHARD]
    reshard = config.reshard_after_forward
    assert reshard is not None, "the recipe was not filled"
    for block in root.model.blocks:
        fully_shard(block, mesh=used, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(root, mesh=used, mp_policy=policy, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
            module.set_gradient_divide_factor(1.0)


# torch 2.13 renamed it, and warns of the old name
_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


def replicate(root: Root, mesh: DeviceMesh | None) -> nn.Module:
    """Around filled weights: DDP where the mesh has replicas only; `root` itself elsewhere."""
    if mesh is None or mesh[SHARD].size() > 1:
        return root
    group = mesh.get_group(REPLICATE)
    module = DistributedDataParallel(
        root,
        process_group=group,
        gradient_as_bucket_view=True,
        **_OWN_BUFFERS,  # routers' biases move alike on every process
        init_sync=False,  # weights are a function of (seed, name), or read by every rank
    )
    if any(p.dtype == torch.bfloat16 and p.requires_grad for p in root.parameters()):
        # DDP reads annotations, and cannot read those that are strings: hence the lambda
        module.register_comm_hook(group, lambda group, bucket: _mean_in_fp32(group, bucket))
    return module


def _mean_in_fp32(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """DDP's mean of bfloat16 gradients over processes, added up in fp32 as FSDP does."""
    wide = bucket.buffer().float().div_(group.size())
    work = dist.all_reduce(wide, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def sum_factor(module: nn.Module) -> int:
    """What a loss is multiplied by so that reduced gradients are sums: DDP's are means."""
    if isinstance(module, DistributedDataParallel):
        return torch.distributed.get_world_size(module.process_group)
    return 1


@contextmanager
def gradient_sync(module: nn.Module, *, last: bool, each: bool = True) -> Iterator[None]:
    """Around a microbatch: add its gradients up over processes, now or in the step's last one.

    Replicas always wait for the last one. Shards that waited too would each hold the gradients of
    the whole model until then.

    Args:
        module: as FSDP or DDP wrapped it, or neither.
        last: whether this microbatch is the step's last.
        each: cut gradients into shards after every microbatch.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last or each)
        module.set_requires_all_reduce(last)
    yield


def whole(tensor: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_deterministic() -> None:
    """Allow deterministic kernels only; PyTorch raises where an operation has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
