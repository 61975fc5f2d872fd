"""Candidates for the microbatch size of a rank, and the memory available for them.

`search.py` and `builders/microbatch.py` choose a candidate for training by the cost of a step, and
`builders/evaluation.py` for an evaluation by the cost of a forward pass. A run and a plan use the
same margin (`rooms`).
"""

from __future__ import annotations

import torch

from llmfoundry.distributed.collectives import all_reduce_min
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.ops.devices import available_host_memory
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.hardware import Hardware
from llmfoundry.recipe.train import ResolvedTrainRecipe

USABLE = 0.95
"""Fraction of the memory that an estimate or a measured peak may fill when a run or a plan chooses;
the rest is for fragmentation and the buffers of NCCL."""
FRAMEWORK = 2**29
"""Bytes of PyTorch and its imports before a model is built; on a GPU those of the CUDA context."""
CPU_TOKENS = 1024
"""Maximum tokens per matmul of a microbatch on a CPU. More tokens are not faster and take more
memory. With experts a microbatch has more tokens, because each expert processes only a part."""


def microbatches(recipe: ResolvedTrainRecipe, rows: int, device: torch.device) -> list[int]:
    """Return the candidates, the largest first, or the size that the recipe sets."""
    configured = recipe.device_train_microbatch_size
    if isinstance(configured, int):
        return [min(configured, rows)]
    most = rows
    if device.type == "cpu":
        tokens = CPU_TOKENS / recipe.model.ffn_config.active_share
        most = max(1, int(tokens) // recipe.max_seq_len)
    return [n for n in reversed(divisors(rows)) if n <= most]


def rows_per_process(recipe: ResolvedTrainRecipe, data_size: int) -> int:
    """Return the sequences of a global batch per rank; raise a UserError if they do not divide."""
    rows, rest = divmod(recipe.global_train_batch_size, data_size)
    if rest or rows == 0:
        below = max(1, rows) * data_size
        raise UserError(
            f"global_train_batch_size: {recipe.global_train_batch_size} rows cannot be shared"
            f" evenly by {data_size} processes; write a multiple, such as {below}"
        )
    return rows


def available_memory(device: torch.device) -> int:
    """Return the free bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory()


def memory_of_gpu(hardware: Hardware) -> int:
    """Return the bytes that `available_memory` would report on a GPU that is not here."""
    return max(0, hardware.memory - FRAMEWORK)


def rooms(available: int, device: torch.device) -> tuple[int, ...]:
    """Return the bytes that an estimate may take, FRAMEWORK included, the preferred ones first.

    Of the free memory of a GPU, the CUDA context is already taken. A configuration that only fits
    without the margin is used if there is no other: a GPU then refuses an allocation, and the run
    continues with half the microbatch. On a CPU, the process would be killed.
    """
    if device.type == "cpu":
        return (int(USABLE * available),)
    whole = available + FRAMEWORK
    return int(USABLE * whole), whole


def memory_of_process(world: World) -> int:
    """Return the bytes that every rank may use: the minimum over ranks. Must run on all ranks.

    Ranks on a CPU share the host's memory. Ranks on the same GPU share its memory.
    """
    free, sharing = available_memory(world.device), world.size
    if world.device.type == "cuda":
        sharing = 1 if world.machine is None else world.machine.sharing
    return all_reduce_min(world, free // sharing)
