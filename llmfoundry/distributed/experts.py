"""Expert parallelism: each process has some of a layer's experts, and tokens are sent to them.

`apply.py` calls `apply_expert_parallel` on the meta device, before FSDP. The stacked weights become
DTensors sharded along the mesh's expert axis, expert after expert; `fsdp.py` then shards each
process's experts once more, over the processes that have the same ones. What is sent, how much, and
when it is waited for is in `ops/moe/dispatch.py`; the layer that calls it is `models/moe.py`.

Gradients: an expert meets the tokens of all processes that share the experts with its own, so that
its gradient is their sum already; FSDP adds up over the others. What experts have in common (a
shared pair of an adapter) is on every process, with a part of the gradient each: DTensor adds those
up after every microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from llmfoundry.distributed.mesh import Meshes
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Root
from llmfoundry.models.moe import ExpertWeights, MoE
from llmfoundry.models.router import StatisticsGroups


def apply_expert_parallel(root: Root, meshes: Meshes | None) -> None:
    """Give each process its experts, where the mesh shares them; on the meta device."""
    if meshes is None or meshes.expert is None:
        return
    for layer in mixtures(root):
        layer.group = meshes.expert.get_group()
        _shard(layer.experts, meshes)


def share_router_statistics(root: Root, world: World, meshes: Meshes | None) -> None:
    """Let routers' losses count the tokens of other processes, where rows or the recipe ask for it.

    Processes of the context and tensor dimensions have other tokens of the same rows; with
    `moe_lbl_scope: global` those of all rows count.
    """
    if meshes is None:
        return
    tensor = None if meshes.tensor is None else meshes.tensor.get_group()
    context = None if meshes.context is None else meshes.context.get_group()
    assert dist.group.WORLD is not None
    every = world.token_group or dist.group.WORLD
    for layer in mixtures(root):
        is_global = layer.config.moe_lbl_scope == "global"
        layer.statistics_groups = StatisticsGroups(tensor, every if is_global else context)


def mixtures(root: Root) -> Iterator[MoE]:
    """The layers with experts."""
    return (module for module in root.modules() if isinstance(module, MoE))


def _shard(experts: ExpertWeights, meshes: Meshes) -> None:
    """Replace each parameter by this process's part of it."""
    mesh = meshes.expert
    assert mesh is not None
    shared = {
        f"{name}_{side}"
        for name, lora in experts.lora.items()
        if lora.shared
        for side in ("lora_A", "lora_B")
    }
    for name, parameter in list(experts.named_parameters(recurse=False)):
        place: Placement = Replicate() if name in shared else Shard(0)
        own: Tensor = parameter.detach()
        if name not in shared:
            assert experts.n % mesh.size() == 0, "checked before"
            own = own.chunk(mesh.size())[mesh.get_local_rank()]
        sharded = DTensor.from_local(
            own, mesh, [place], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
