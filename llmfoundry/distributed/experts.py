"""Expert parallelism: each rank holds some experts of a layer, and tokens are sent to them.

Entry point: `apply_expert_parallel`, which `apply.py` calls on the meta device, before FSDP. The
stacked weights become DTensors sharded by expert along the mesh's expert dimension. `fsdp.py` then
shards each rank's experts again, over the ranks that hold the same experts. `ops/moe/dispatch.py`
documents the communication, and `models/moe.py` is the layer that calls it.

Gradients: an expert receives the tokens of all ranks of its expert group, so its local gradient is
already their sum. FSDP sums over the remaining ranks. Weights that all experts share (a shared
pair of an adapter) are replicated, and each rank has a part of their gradient. DTensor sums these
parts after every microbatch.
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
from llmfoundry.recipe.parallel import ActivationMemory, ResolvedParallelConfig


def apply_expert_parallel(
    root: Root, meshes: Meshes | None, config: ResolvedParallelConfig
) -> None:
    """Shard the experts of all layers if the mesh has an expert dimension."""
    if meshes is None or meshes.expert is None:
        return
    for layer in mixtures(root):
        layer.group, layer.capacity = meshes.expert.get_group(), config.expert_capacity
        layer.n_parts = 2 if config.expert_halves else 1
        _shard(layer.experts, meshes)


def cast_experts_once(
    root: Root, meshes: Meshes | None, memory: ActivationMemory, *, precision: str
) -> None:
    """Let all microbatches of a step use one bf16 copy of the experts.

    This applies where FSDP does not cast them, and where blocks keep the copy until their backward
    pass in any case: it then takes no more memory at the peak of a step.
    """
    is_whole = meshes is None or meshes.degrees.is_replicas
    if is_whole and precision == "amp_bf16" and memory.checkpointing == "none":
        for layer in mixtures(root):
            layer.experts.is_cast_once = True


def share_router_statistics(root: Root, world: World, meshes: Meshes | None) -> None:
    """Set the process groups over which the router losses are computed.

    Context- and tensor-parallel ranks hold other tokens of the same sequences, and always share
    statistics. With `moe_lbl_scope: global`, all ranks do.
    """
    if meshes is None:
        return
    tensor = None if meshes.tensor is None else meshes.tensor.get_group()
    context = None if meshes.context is None else meshes.context.get_group()
    assert dist.group.WORLD is not None
    all_ranks = world.token_group or dist.group.WORLD
    for layer in mixtures(root):
        is_global = layer.config.moe_lbl_scope == "global"
        layer.statistics_groups = StatisticsGroups(tensor, all_ranks if is_global else context)


def mixtures(root: Root) -> Iterator[MoE]:
    """Yield the layers with experts."""
    return (module for module in root.modules() if isinstance(module, MoE))


def _shard(experts: ExpertWeights, meshes: Meshes) -> None:
    """Replace each parameter by a DTensor with this rank's shard."""
    mesh = meshes.expert
    assert mesh is not None
    shared_loras = [name for name, lora in experts.lora.items() if lora.shared]
    replicated = {f"{name}_{side}" for name in shared_loras for side in ("lora_A", "lora_B")}
    for name, parameter in list(experts.named_parameters(recurse=False)):
        placement: Placement = Replicate() if name in replicated else Shard(0)
        local: Tensor = parameter.detach()
        if name not in replicated:
            assert experts.n % mesh.size() == 0, "checked before"
            local = local.chunk(mesh.size())[mesh.get_local_rank()]
        shape, stride = parameter.shape, parameter.stride()
        sharded = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=shape, stride=stride
        )
        setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
