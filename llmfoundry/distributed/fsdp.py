"""A model's weights sharded by FSDP2 or replicated under DDP, and its gradients added up.

Whatever the layout, gradients are summed, not averaged: the loss is divided by the global count of
labeled tokens before the backward pass, so the sum is the exact gradient of the global mean.
"""

from __future__ import annotations

import inspect
import os
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.distributed.mesh import REPLICATE, Meshes
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.models.moe import ExpertWeights, MoE
from llmfoundry.models.router import Router
from llmfoundry.ops.torch_private import Replicas
from llmfoundry.recipe.parallel import GLOO, ResolvedParallelConfig


def materialize(
    root: Root,
    world: World,
    meshes: Meshes | None,
    config: ResolvedParallelConfig,
    *,
    precision: str,
) -> None:
    """Shard a model built on the meta device, where the recipe does, and allocate its memory.

    Its weights are not filled: that is `init_weights` or a checkpoint, on every process.
    """
    if meshes is not None and not meshes.degrees.is_replicas:
        _fully_shard(root, meshes, config, precision)
    root.to_empty(device=world.device)


class Routers(nn.Module):
    """All routers of a model as one FSDP unit, whose weights are gathered in fp32.

    The unit is never called: FSDP's hooks around each router would break the graph of a compiled
    block and run again inside a recomputed one. The weights are gathered before the forward pass,
    and FSDP reduces their gradients at the end of the backward pass.
    """

    def __init__(self, routers: list[Router]) -> None:
        super().__init__()
        self.routers = nn.ModuleList(routers)


OLD = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


def _fully_shard(
    root: Root, meshes: Meshes, config: ResolvedParallelConfig, precision: str
) -> None:
    """Each block its own unit; embeddings, final norm and head stay with the root.

    Experts that other processes share are a unit of their own within a block, sharded over the
    processes that have the same ones. Under tensor parallelism so is a layer with experts: its
    router and a shared expert meet other tokens on each process. Under autocast all routers are one
    unit that is gathered in fp32: with rounded weights some tokens choose other experts. Frozen
    parameters may be of any dtype: FSDP gathers bytes of 4-bit weights as they
    are, and reduces gradients only where there are some.
    """
    if OLD and any(not p.dtype.is_floating_point for p in root.parameters()):
        raise UserError(
            "model.quantize: FSDP takes no 4-bit weights before PyTorch 2.13, and this is"
            f" {torch.__version__}; write parallel=ddp, or install 2.13"
        )
    autocast = precision == "amp_bf16"
    # Under bf16 the shards are bfloat16 already, and so are gradients. Inputs are not cast: amp's
    # residual stream and rotary tables stay fp32.
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = replace(exact, param_dtype=torch.bfloat16) if autocast else exact
    # One replica is a replica too under bf16: what waits for the last microbatch's all-reduce is
    # added up in reduce_dtype, what does not in the weights' own.
    keeps_fp32 = precision == "bf16" and bool(config.reduce_scatter_each_microbatch)
    replicated = meshes.degrees.replicate > 1 or keeps_fp32
    reshard = config.reshard_after_forward

    def used(mesh: DeviceMesh) -> DeviceMesh:
        assert mesh.mesh_dim_names is not None
        return mesh if replicated else mesh[mesh.mesh_dim_names[-1]]

    routers = [m for m in root.modules() if isinstance(m, Router)]
    in_fp32: set[nn.Parameter] = set()
    if autocast and routers:
        root.routers = Routers(routers)
        mesh = used(meshes.mixture_weights or meshes.weights)
        fully_shard(root.routers, mesh=mesh, mp_policy=exact)
        in_fp32 |= {p for router in routers for p in router.parameters()}
    shard = partial(fully_shard, mp_policy=policy, ignored_params=in_fp32)
    for block in root.model.blocks:
        if meshes.expert_weights is not None:
            for experts in (m for m in block.modules() if isinstance(m, ExpertWeights)):
                mesh = used(meshes.expert_weights)
                shard(experts, mesh=mesh, reshard_after_forward=reshard)
        if meshes.mixture_weights is not None:
            # a block adds what a layer gives to its stream, out of place
            warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPMoE\) returned")
            for layer in (m for m in block.modules() if isinstance(m, MoE)):
                mesh = used(meshes.mixture_weights)
                shard(layer, mesh=mesh, reshard_after_forward=reshard)
        inner = [m for m in block.modules() if isinstance(m, FSDPModule)]
        mesh = used(meshes.weights)
        shard(block, mesh=mesh, reshard_after_forward=reshard)
        if inner:  # gathered while attention computes, not once the host has waited for counts
            block.set_modules_to_forward_prefetch(inner)  # type: ignore[operator]
    shard(root, mesh=used(meshes.weights), reshard_after_forward=False)
    if in_fp32:  # behind FSDP's own hook of the root, which prepares its streams
        root.register_forward_pre_hook(lambda root, _: root.routers.unshard())
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
            module.set_gradient_divide_factor(1.0)


# torch 2.13 renamed it, and warns of the old name
_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


def apply_ddp(root: Root, meshes: Meshes | None) -> nn.Module:
    """Around filled weights: DDP where the mesh has replicas only; `root` itself elsewhere."""
    if meshes is None or not meshes.degrees.is_replicas:
        return root
    group = meshes.root.get_group(REPLICATE)
    module = Replicas(
        root,
        process_group=group,
        gradient_as_bucket_view=True,
        **_OWN_BUFFERS,  # routers' biases are the same on every process
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
    if _future_ignores_streams(wide, group):
        dist.all_reduce(wide, group=group)
        done = torch.futures.Future[Tensor]()
        done.set_result(bucket.buffer().copy_(wide))
        return done
    work = dist.all_reduce(wide, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _future_ignores_streams(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Of gloo on a GPU: its copy back may be under way when the future is done; `wait` waits."""
    return tensor.is_cuda and dist.get_backend(group) == GLOO


def set_deterministic() -> None:
    """Allow deterministic kernels only; PyTorch raises where an operation has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
