"""Microbatch sizes of a process: the candidates, and the memory that they may use.

`fit.py` and `builders/microbatch.py` choose among them for a training run, by what a step takes;
`builders/evaluation.py` for an evaluation, by what a forward pass does.
"""

from __future__ import annotations

import torch

from llmfoundry.distributed.collectives import all_reduce_min
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.ops.devices import available_host_memory
from llmfoundry.recipe.checks import divisors
from llmfoundry.recipe.train import ResolvedTrainRecipe

CPU_TOKENS = 1024
"""Tokens that a matrix meets in a microbatch on a CPU: more is not faster there, and takes more
memory. A mixture's microbatch holds more, for each expert meets only its share."""


def microbatches(recipe: ResolvedTrainRecipe, rows: int, device: torch.device) -> list[int]:
    """Microbatches of a process's rows, the largest first; the one that the recipe writes."""
    asked = recipe.device_train_microbatch_size
    if isinstance(asked, int):
        return [min(asked, rows)]
    most = rows
    if device.type == "cpu":
        tokens = CPU_TOKENS / recipe.model.ffn_config.active_share
        most = max(1, int(tokens) // recipe.max_seq_len)
    return [n for n in reversed(divisors(rows)) if n <= most]


def rows_per_process(recipe: ResolvedTrainRecipe, data_size: int) -> int:
    """This process's rows of a global batch; raises UserError where they do not divide."""
    rows, rest = divmod(recipe.global_train_batch_size, data_size)
    if rest or rows == 0:
        below = max(1, rows) * data_size
        raise UserError(
            f"global_train_batch_size: {recipe.global_train_batch_size} rows cannot be shared"
            f" evenly by {data_size} processes; write a multiple, such as {below}"
        )
    return rows


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still use on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_host_memory()


def memory_of_process(world: World) -> int:
    """Bytes that every process may use: those of the one that has least; all processes ask.

    On a CPU all share one memory, and so do processes on one GPU.
    """
    free, sharing = available_memory(world.device), world.size
    if world.device.type == "cuda":
        sharing = 1 if world.machine is None else world.machine.sharing
    return all_reduce_min(world, free // sharing)


USABLE = 0.9  # of the free memory; the rest is for the allocator's gaps and the libraries
