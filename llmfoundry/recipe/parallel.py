"""The `parallel` section: how one model and one batch are spread over processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import PROCESSES, Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert

LEVELS = ("none", "selective", "whole")
"""What is computed again in the backward pass, the least first."""
RECOMPUTATION = choice((*LEVELS, "auto"), "true or false")


def recomputation(value: bool | str) -> str:
    """One of LEVELS, or auto, as `parallel.activation_checkpointing` says it: true is whole."""
    return {True: "whole", False: "none"}[value] if isinstance(value, bool) else value


@dataclass
class ParallelConfig:
    """Degrees of the device mesh (data_parallel_replicate, data_parallel_shard).

    Their product is the number of processes. Replicas alone are DDP, shards alone FSDP2, both HSDP.
    """

    nproc_per_node: Annotated[int | None, Range(1, 1024, PROCESSES)] = None
    """Processes that `python scripts/train.py` starts; unset: one per local GPU, one on a CPU.
    Under torchrun or Slurm, these decide."""
    data_parallel_replicate_degree: Annotated[int, Range(-1, 2**20)] = -1
    """Copies of the model; -1: all processes that the shard degree leaves."""
    data_parallel_shard_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes over which one copy is cut (FSDP2); -1: all that the replicate degree leaves."""
    reshard_after_forward: bool | None = None
    """Only with shards: free a block's weights after its forward pass and gather them again for
    the backward pass; default true. False keeps them: faster, more memory."""
    reduce_scatter_each_microbatch: bool | None = None
    """Only with shards: cut the gradients into shards after every microbatch of a step, so that a
    process keeps its own shard's alone; default true. False does so once a step, after the last
    microbatch: fewer messages, and until then every process keeps the gradients of the whole model,
    4 bytes a parameter."""
    activation_checkpointing: Annotated[bool | str, RECOMPUTATION] = "none"
    """What the backward pass computes again in place of keeping it. none; selective: all but the
    results of matrix products, attention and experts, at half the memory; whole (or true): blocks,
    from their inputs: a third more work, a fraction of the memory; auto: the least of these that
    the estimate says fits."""
    dist_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Seconds that a collective may wait for other processes."""

    def check(self, key: str = "parallel.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
        values = [getattr(self, name) for name in degrees]
        for name, value in zip(degrees, values, strict=True):
            if value == 0:
                yield f"{key}{name}: {value}; write -1 or a number of processes"
        if values == [-1, -1]:
            yield f"{key}{degrees[0]}: and {degrees[1]} cannot both be -1; give one of them"
        if self.data_parallel_shard_degree == 1:
            why = "with data_parallel_shard_degree: 1"
            shards_only = ["reshard_after_forward", "reduce_scatter_each_microbatch"]
            yield from inert(key, self, shards_only, why)

    def fill(self) -> None:
        """Write derived values in place."""
        self.activation_checkpointing = recomputation(self.activation_checkpointing)
        if self.data_parallel_shard_degree == 1:
            return
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True
        if self.reduce_scatter_each_microbatch is None:
            self.reduce_scatter_each_microbatch = True
