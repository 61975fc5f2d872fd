"""Data parallelism: weights sharded by FSDP2 or replicated by DDP, and gradient reduction.

Entry points: `materialize` (FSDP) before and `apply_ddp` after the weights are initialized. In all
layouts, gradients are summed, not averaged. The loss is divided by the global count of labeled
tokens before the backward pass, so the sum is the exact gradient of the global mean.
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
from llmfoundry.models.decoder import Decoder, Head, Root
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
    """Shard a model built on the meta device if the recipe uses FSDP, and allocate its memory.

    The weights are not initialized: every rank calls `init_weights` or loads a checkpoint next.
    """
    if meshes is not None and not meshes.degrees.is_replicas:
        _fully_shard(root, meshes, config, precision)
    root.to_empty(device=world.device)


class Routers(nn.Module):
    """All routers of a model as one FSDP unit whose weights are gathered in fp32.

    The unit's forward method is never called. FSDP hooks around each router would break the graph
    of a compiled block, and would run again inside a recomputed block. Instead, the weights are
    gathered before the model's forward pass, and FSDP reduces their gradients at the end of the
    backward pass.
    """

    def __init__(self, routers: list[Router]) -> None:
        super().__init__()
        self.routers = nn.ModuleList(routers)


OLD = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


def _fully_shard(
    root: Root, meshes: Meshes, config: ResolvedParallelConfig, precision: str
) -> None:
    """Apply `fully_shard` to the units of a model.

    - Each block is one unit. Embeddings and final norm belong to the root unit.
    - An untied head is a unit. It is gathered during the last block, and its gradient is reduced
      during the last block's backward pass. In the root unit, a step would wait for both.
    - With expert parallelism, the experts of a layer are a unit inside the block, sharded over the
      ranks that hold the same experts.
    - With tensor parallelism, a layer with experts is a unit inside the block, because its router
      and shared expert receive other tokens on each rank.
    - Under autocast, all routers are one unit that is gathered in fp32: with bfloat16 weights, some
      tokens would choose other experts.

    Frozen parameters may have any dtype. FSDP gathers the bytes of 4-bit weights unchanged, and
    reduces only the gradients that exist.
    """
    if OLD and any(not p.dtype.is_floating_point for p in root.parameters()):
        raise UserError(
            "model.quantize: FSDP takes no 4-bit weights before PyTorch 2.13, and this is"
            f" {torch.__version__}; write parallel=ddp, or install 2.13"
        )
    autocast = precision == "amp_bf16"
    exact, policy = _policies(autocast=autocast)
    # HSDP accumulates gradients over microbatches in reduce_dtype (fp32), plain FSDP in the dtype
    # of the weights. Under bf16, use HSDP even with a single replica.
    keeps_fp32 = precision == "bf16" and bool(config.reduce_scatter_each_microbatch)
    replicated = meshes.degrees.replicate > 1 or keeps_fp32
    reshard = config.reshard_after_forward

    def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
        assert mesh.mesh_dim_names is not None
        return mesh if replicated else mesh[mesh.mesh_dim_names[-1]]

    # the unit of all routers
    in_fp32: set[nn.Parameter] = set()
    if autocast and (routers := [m for m in root.modules() if isinstance(m, Router)]):
        root.routers = Routers(routers)
        mesh = fsdp_mesh(meshes.mixture_weights or meshes.weights)
        fully_shard(root.routers, mesh=mesh, mp_policy=exact)
        in_fp32 |= {p for router in routers for p in router.parameters()}

    # the units of each block and of the head, the root unit, and settings of all units
    shard = partial(fully_shard, mp_policy=policy, ignored_params=in_fp32)
    weights_mesh = fsdp_mesh(meshes.weights)
    if isinstance(root.model, Decoder) and not root.model.config.tie_word_embeddings:
        root.head = Head(root.model.lm_head)
        shard(root.head, mesh=weights_mesh, reshard_after_forward=False)
    for block in root.model.blocks:
        if meshes.expert_weights is not None:
            for experts in (m for m in block.modules() if isinstance(m, ExpertWeights)):
                mesh = fsdp_mesh(meshes.expert_weights)
                shard(experts, mesh=mesh, reshard_after_forward=reshard)
        if meshes.mixture_weights is not None:
            # the warning is about in-place changes; a block adds the layer's output out of place
            warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPMoE\) returned")
            for layer in (m for m in block.modules() if isinstance(m, MoE)):
                mesh = fsdp_mesh(meshes.mixture_weights)
                shard(layer, mesh=mesh, reshard_after_forward=reshard)
        shard(block, mesh=weights_mesh, reshard_after_forward=reshard)
    of_head = set() if root.head is None else {*root.head.parameters()}
    shard(root, mesh=weights_mesh, reshard_after_forward=False, ignored_params=in_fp32 | of_head)
    _prefetch(root)
    if in_fp32:  # runs after FSDP's hook of the root, which creates its streams
        root.register_forward_pre_hook(lambda root, _: root.routers.unshard())
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-scaled sum
            module.set_gradient_divide_factor(1.0)


def _policies(*, autocast: bool) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Return the mixed precision of units that are gathered unchanged, and of other units.

    Under bf16, shards and gradients are bfloat16 already. Inputs are not cast: the residual stream
    and rotary tables stay fp32 under autocast.
    """
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    return exact, replace(exact, param_dtype=torch.bfloat16) if autocast else exact


def _prefetch(root: Root) -> None:
    """Gather inner units when the forward pass of their block begins, and the head with the last.

    The host waits for the dispatch counts within a block, and would start the gathers afterwards.
    """
    for block in root.model.blocks:
        units = [m for m in block.modules() if isinstance(m, FSDPModule) and m is not block]
        if block is root.model.blocks[-1] and root.head is not None:
            units.append(root.head)  # type: ignore[arg-type]
        if units:
            block.set_modules_to_forward_prefetch(units)  # type: ignore[operator]


# torch 2.13 renamed broadcast_buffers, and warns about the old name
_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


def apply_ddp(root: Root, meshes: Meshes | None) -> nn.Module:
    """Wrap a model with initialized weights in DDP if the mesh has replicas only.

    Returns:
        The DDP module, or `root` itself in all other layouts.
    """
    if meshes is None or not meshes.degrees.is_replicas:
        return root
    group = meshes.root.get_group(REPLICATE)
    module = Replicas(
        root,
        process_group=group,
        gradient_as_bucket_view=True,
        **_NO_BUFFER_SYNC,  # the router biases are equal on all ranks
        init_sync=False,  # weights are a function of (seed, name), or loaded by every rank
    )
    if any(p.dtype == torch.bfloat16 and p.requires_grad for p in root.parameters()):
        # DDP inspects the hook's annotations and rejects string annotations: hence the lambda
        module.register_comm_hook(group, lambda group, bucket: _mean_in_fp32(group, bucket))
    return module


def _mean_in_fp32(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average bfloat16 gradients over ranks as DDP does, but sum in fp32 as FSDP does."""
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
    """Return whether the group is gloo on a GPU.

    Its future may complete before the copy back to the GPU. A blocking call waits for the copy.
    """
    return tensor.is_cuda and dist.get_backend(group) == GLOO


def set_deterministic() -> None:
    """Allow deterministic kernels only; PyTorch raises if an operation has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
