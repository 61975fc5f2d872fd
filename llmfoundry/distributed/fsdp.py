"""A model's weights sharded by FSDP2 or replicated under DDP, and its gradients added up.

Whatever the layout, gradients are summed, not averaged: the loss is divided by the global count of
labeled tokens before the backward pass, so the sum is the exact gradient of the global mean.
"""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.distributed.launch import World
from llmfoundry.distributed.mesh import REPLICATE, Meshes
from llmfoundry.errors import UserError
from llmfoundry.models.decoder import Root
from llmfoundry.models.moe import ExpertWeights, MoE
from llmfoundry.ops.torch_private import Replicas
from llmfoundry.recipe.parallel import GLOO, ParallelConfig


def materialize(
    root: Root, world: World, meshes: Meshes | None, config: ParallelConfig, *, precision: str
) -> None:
    """Shard a model built on the meta device, where the recipe does, and allocate its memory.

    Its weights are not filled: that is `init_weights` or a checkpoint, on every process.
    """
    if meshes is not None and not meshes.degrees.is_replicas:
        _fully_shard(root, meshes, config, precision)
    root.to_empty(device=world.device)


OLD = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


def _fully_shard(root: Root, meshes: Meshes, config: ParallelConfig, precision: str) -> None:
    """Each block its own unit; embeddings, final norm and head stay with the root.

    Experts that other processes share are a unit of their own within a block, sharded over the
    processes that have the same ones. Under tensor parallelism so is a layer with experts:
    its router and a shared expert meet other tokens on each process. Frozen parameters may be of
    any dtype beside those that train, which have one: FSDP gathers bytes of 4-bit weights as they
    are, and reduces gradients only where there are some.
    """
    if OLD and any(not p.dtype.is_floating_point for p in root.parameters()):
        raise UserError(
            "model.quantize: FSDP takes no 4-bit weights before PyTorch 2.13, and this is"
            f" {torch.__version__}; write parallel=ddp, or install 2.13"
        )
    policy = MixedPrecisionPolicy(
        # under bf16 the shards are bfloat16 already, and gradients come back as such
        param_dtype=torch.bfloat16 if precision == "amp_bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # amp's residual stream and rotary tables stay fp32
    )
    # One replica is a replica too under bf16: what waits for the last microbatch's all-reduce is
    # added up in reduce_dtype, what does not in the weights' own.
    keeps_fp32 = precision == "bf16" and bool(config.reduce_scatter_each_microbatch)
    replicated = meshes.degrees.replicate > 1 or keeps_fp32
    reshard = config.reshard_after_forward
    assert reshard is not None, "the recipe was not filled"

    def used(mesh: DeviceMesh) -> DeviceMesh:
        assert mesh.mesh_dim_names is not None
        return mesh if replicated else mesh[mesh.mesh_dim_names[-1]]

    for block in root.model.blocks:
        if meshes.expert_weights is not None:
            for experts in (m for m in block.modules() if isinstance(m, ExpertWeights)):
                mesh = used(meshes.expert_weights)
                fully_shard(experts, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if meshes.mixture_weights is not None:
            # a block adds what a layer gives to its stream, out of place
            warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPMoE\) returned")
            for layer in (m for m in block.modules() if isinstance(m, MoE)):
                mesh = used(meshes.mixture_weights)
                fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        inner = [m for m in block.modules() if isinstance(m, FSDPModule)]
        mesh = used(meshes.weights)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if inner:  # gathered while attention computes, not once the host has waited for counts
            block.set_modules_to_forward_prefetch(inner)  # type: ignore[operator]
    fully_shard(root, mesh=used(meshes.weights), mp_policy=policy, reshard_after_forward=False)
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
