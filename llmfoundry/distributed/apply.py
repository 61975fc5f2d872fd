"""How a model is spread over processes: everything that is done to it, in order.

`builders/trainer.py` calls `parallelize` on the meta device. Each part is a file of its own; what
they share is the mesh (`mesh.py`).
"""

from __future__ import annotations

from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.distributed.context import apply_context_parallel
from llmfoundry.distributed.experts import apply_expert_parallel, share_router_statistics
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
    """Spread a model built on the meta device, and give this process's part of it memory.

    Its weights are not filled: that is `init_weights` or a checkpoint, on every process.

    Args:
        root: the model, its adapters added and its frozen weights frozen.
        world: this process.
        meshes: None: it is alone.
        config: filled; activation checkpointing is decided.
        precision: the recipe's.
        compile_mode: torch.compile's; None: not compiled.
    """
    # 1. Tensor: dense layers' matrices are sharded, and each process has its own tokens between.
    apply_tensor_parallel(root, meshes)
    # 2. Experts: each process has some of them, and tokens are sent to them.
    apply_expert_parallel(root, meshes)
    # 3. Context: attention receives from the processes that share this one's rows what it needs.
    # What routers' losses count are the tokens of all that share a row.
    apply_context_parallel(root, meshes, config)
    share_router_statistics(root, world, meshes)
    # 4. Activation memory, and compilation inside of it: each block's forward pass is replaced.
    memory = config.activation_memory(len(root.model.blocks))
    wrap_blocks(root, memory, compile_mode=compile_mode)
    # 5. FSDP around that: its hooks wait for other processes, and stay out of what is compiled or
    # recomputed. Then memory for this process's shards.
    materialize(root, world, meshes, config, precision=precision)
