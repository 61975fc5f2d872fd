"""Distribution of a model over ranks: all transformations of the model, in order.

Entry point: `parallelize`, which `builders/trainer.py` calls on the meta device. Each form of
parallelism has its own file. All of them use the device mesh of `mesh.py`.
"""

from __future__ import annotations

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.distributed.context import apply_context_parallel
from llmfoundry.distributed.experts import (
    apply_expert_parallel,
    cast_experts_once,
    share_router_statistics,
)
from llmfoundry.distributed.fsdp import materialize
from llmfoundry.distributed.mesh import Meshes
from llmfoundry.distributed.process_group import World
from llmfoundry.distributed.tensor import apply_tensor_parallel
from llmfoundry.models.decoder import Root
from llmfoundry.recipe.parallel import ResolvedParallelConfig


def parallelize(
    root: Root,
    world: World,
    meshes: Meshes | None,
    config: ResolvedParallelConfig,
    *,
    precision: str,
    compile_mode: str | None = None,
) -> None:
    """Shard a model built on the meta device, and allocate this rank's shards.

    The weights are not initialized: every rank calls `init_weights` or loads a checkpoint next.

    Args:
        root: the model, with its adapters and with frozen parameters.
        world: this process.
        meshes: device meshes of the run; None: a single process.
        config: resolved, activation checkpointing included.
        precision: the recipe's precision.
        compile_mode: mode of torch.compile; None: not compiled.
    """
    # 1. Tensor parallelism: shard the matrices of dense layers, and the tokens between them.
    apply_tensor_parallel(root, meshes)
    # 2. Expert parallelism: each rank holds some experts, and tokens are dispatched to them.
    apply_expert_parallel(root, meshes, config)
    # 3. Context parallelism: attention exchanges data with the ranks that share its sequences.
    # Router losses then count the tokens of full sequences.
    apply_context_parallel(root, meshes, config)
    share_router_statistics(root, world, meshes)
    # 4. Replace each block's forward pass: activation checkpointing, and compilation inside of it.
    memory = config.activation_memory(len(root.model.blocks))
    cast_experts_once(root, meshes, memory, precision=precision)
    wrap_blocks(root, memory, compile_mode=compile_mode)
    # 5. FSDP is outermost, because its hooks communicate: they must be outside of compiled and
    # recomputed code. Then allocate this rank's shards.
    materialize(root, world, meshes, config, precision=precision)
