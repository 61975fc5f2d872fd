"""The `parallel` section: how one model and one batch are spread over processes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from llmfoundry.errors import UserError
from llmfoundry.recipe.activation_memory import (
    BUDGET,
    COMPRESSIONS,
    LEAST_BUDGET,
    ActivationMemory,
    read_targets,
)
from llmfoundry.recipe.values.bounds import PROCESSES, Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import divisors, inert

LEVELS = ("none", "selective", "whole")
"""What is computed again in the backward pass, the least first."""
RECOMPUTATION = choice((*LEVELS, "auto"), "true or false")


def recomputation(value: bool | str) -> str:
    """One of LEVELS, or auto, as `parallel.activation_checkpointing` says it: true is whole."""
    return {True: "whole", False: "none"}[value] if isinstance(value, bool) else value


AXES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)
"""The mesh's dimensions, the outermost first: adjacent ranks work most closely together."""
EXPERT = "expert_parallel_degree"
METHODS = ("ulysses", "all_gather")
NCCL, GLOO = "nccl", "gloo"
NODE = 8
"""Processes of a node where no launcher says how many: GPUs of most."""


def node_size() -> int:
    """Processes of this node: LOCAL_WORLD_SIZE from torchrun or `distributed.launch`, or NODE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or NODE


@dataclass(frozen=True)
class Degrees:
    """Processes along each dimension of the mesh, none of them -1.

    Attributes:
        replicate: copies of the model (DDP; with the others HSDP).
        shard: processes over which weights are cut (FSDP2); each reads rows of its own.
        context: processes that share each row's tokens; weights are cut over them too.
        tensor: processes that share each matrix of the dense layers.
        expert: processes that share the experts; they are borrowed from shard, context and tensor.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Shares of a batch's rows."""
        return self.replicate * self.shard

    @property
    def weights(self) -> int:
        """Over how many processes FSDP cuts what is not an expert's."""
        return self.shard * self.context

    @property
    def copy_size(self) -> int:
        """Processes of one copy of the model, over which the experts are laid out anew."""
        return self.shard * self.context * self.tensor

    @property
    def expert_shard(self) -> int:
        """Over how many processes FSDP cuts the experts of one expert-parallel process."""
        return self.copy_size // self.expert

    @property
    def is_replicas(self) -> bool:
        """Whether every process holds the whole model: DDP, or one process."""
        return self.copy_size == 1


@dataclass
class ParallelConfig:
    """Degrees of the device mesh: the product of all but the experts' is the number of processes.

    Replicas alone are DDP, shards alone FSDP2, both HSDP. Experts borrow their processes from
    shard, context and tensor: expert_parallel_degree divides the product of these three.
    """

    nproc_per_node: Annotated[int | None, Range(1, 1024, PROCESSES)] = None
    """Processes that `python scripts/train.py` starts; unset: one per local GPU, one on a CPU.
    Under torchrun or Slurm, these decide."""
    data_parallel_replicate_degree: Annotated[int, Range(-1, 2**20)] = -1
    """Copies of the model; -1, of one degree: all processes that the others leave."""
    data_parallel_shard_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes over which one copy is cut (FSDP2), each with rows of its own."""
    context_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes that share the tokens of each row, for rows that one has no memory for; weights are
    cut over them as over the shard degree's."""
    context_parallel_method: Annotated[str | None, choice(METHODS)] = None
    """Only with context_parallel_degree: how attention sees the whole row. ulysses (Jacobs et al.,
    2023): each process attends with a part of the heads; all_gather: with its part of the queries
    over gathered keys and values, two parts from both ends of the row, so that all have as much
    work. Unset: ulysses where the degree divides the heads, else all_gather."""
    tensor_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes that share each matrix of attention, dense feed-forward layers, embedding and head
    (Shoeybi et al., 2019), and between these the row's tokens (Korthikanti et al., 2022)."""
    expert_parallel_degree: Annotated[int, Range(-1, 2**20)] = 1
    """Processes that share the experts of a layer: tokens travel to them and back. -1: as many as
    divide both a node and one copy of the model, so that tokens stay inside a node; a larger degree
    is reported with its cost."""
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
    from their inputs: a third more work, a fraction of the memory; auto: of these, with as many
    rows as fit, what makes the shortest step by the plan; where the GPU's speed is not known, the
    least that fits."""
    activation_checkpointing_target: str | list[str] | dict[str, Any] | None = None
    """Only with activation_checkpointing: whole, which parts are computed again, each from its
    inputs, and in which blocks: a name, a list of names, or {name: range}. Names: block (the
    default), attention, feed_forward, norm, experts, and LLM Foundry's. Ranges: n (the first n),
    first-n, middle-n, last-n, range-i-j (j not included), numbers in a list, and these together:
    {attention: "first-2, last-2", feed_forward: [3]}."""
    activation_compression: Annotated[str, choice(COMPRESSIONS)] = "none"
    """In what form activations wait for the backward pass. none: as they are; int8: 8-bit integers,
    128 values sharing a scale; fp8: 8-bit floating point (e4m3), on GPUs of compute capability 8.9
    and above. Gradients change by about one per cent; what weighs and normalizes stays exact. auto:
    none or int8, whichever makes the shorter step by the plan, together with what
    activation_checkpointing: auto stands for."""
    activation_memory_budget: Annotated[float | None, BUDGET] = None
    """Only with compile: share of what torch.compile would keep of a block's activations that it
    keeps; it computes the rest again, the cheapest first. 1: all; at least 0.15."""
    dist_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Seconds that a collective may wait for other processes."""
    rendezvous_timeout: Annotated[int, Range(1, 31_536_000, "a year")] = 600
    """Seconds within which all processes must have met at MASTER_ADDR, as they start."""

    dist_backend: Annotated[str | None, choice((NCCL, GLOO))] = None
    """What carries collectives between GPUs. Unset: nccl, one process a GPU. gloo copies each
    message through the host's memory: many times slower, but several processes may share a GPU, to
    try a layout on fewer GPUs than it has processes. On CPUs it is gloo in any case."""

    def check(self, key: str = "parallel.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        values = {name: getattr(self, name) for name in (*AXES, EXPERT)}
        for name, value in values.items():
            if value == 0:
                yield f"{key}{name}: {value}; write -1 or a number of processes"
        free = [name for name in AXES if values[name] == -1]
        if len(free) > 1:
            first, *others = free
            yield f"{key}{first}: and {', '.join(others)} cannot both be -1; give all but one"
        if self.keeps_whole:
            why = "with data_parallel_shard_degree: 1"
            shards_only = ["reshard_after_forward", "reduce_scatter_each_microbatch"]
            yield from inert(key, self, shards_only, why)
        if self.context_parallel_degree == 1:
            why = "with context_parallel_degree: 1"
            yield from inert(key, self, ["context_parallel_method"], why)
        yield from self._check_activations(key)

    def _check_activations(self, key: str) -> Iterator[str]:
        level, budget = recomputation(self.activation_checkpointing), self.activation_memory_budget
        target = f"{key}activation_checkpointing_target"
        if self.activation_checkpointing_target is not None and level != "whole":
            yield (
                f"{target}: has no effect with activation_checkpointing: {level}; remove it, or"
                " write activation_checkpointing: whole"
            )
        if budget is not None and budget < LEAST_BUDGET:
            yield (
                f"{key}activation_memory_budget: {budget}; below {LEAST_BUDGET} a smaller budget"
                " takes more memory, not less (pytorch issue 197838); write"
                f" {LEAST_BUDGET} or more, or activation_checkpointing: whole in its place"
            )
        if budget is not None and level != "none":
            yield (
                f"{key}activation_memory_budget: with activation_checkpointing: {level} two would"
                " decide what is computed again; remove one of them"
            )

    def activation_memory(self, n_layers: int) -> ActivationMemory:
        """How the activations of `n_layers` blocks are kept; nothing in it is auto any more."""
        level = recomputation(self.activation_checkpointing)
        assert level in LEVELS and self.activation_compression != "auto", "auto was not decided"
        targets: tuple[frozenset[str], ...] = (frozenset(),) * n_layers
        if level == "whole":
            key = "parallel.activation_checkpointing_target"
            targets = read_targets(self.activation_checkpointing_target, n_layers, key)
        budget = self.activation_memory_budget
        return ActivationMemory(level, targets, self.activation_compression, budget)

    @property
    def keeps_whole(self) -> bool:
        """Whether every process holds the whole model, however many there are."""
        return all(getattr(self, name) == 1 for name in (*AXES[1:], EXPERT))

    @property
    def written_degrees(self) -> Degrees:
        """The degrees as they are written; 1 in place of -1, which waits for the processes."""
        return Degrees(*(max(1, getattr(self, name)) for name in (*AXES, EXPERT)))

    def fill(self) -> None:
        """Write derived values in place."""
        self.activation_checkpointing = recomputation(self.activation_checkpointing)
        if self.keeps_whole:
            return
        if self.reshard_after_forward is None:
            self.reshard_after_forward = True
        if self.reduce_scatter_each_microbatch is None:
            self.reduce_scatter_each_microbatch = True

    def degrees(self, world_size: int) -> Degrees:
        """The degrees of so many processes, -1 worked out.

        Raises:
            UserError: they do not fit; names the nearest that do.
        """
        values = [getattr(self, name) for name in AXES]
        rest = math.prod(value for value in values if value != -1)
        filled = [world_size // rest if value == -1 else value for value in values]
        if math.prod(filled) != world_size or 0 in filled:
            raise UserError(self._does_not_fit(world_size))
        copy_size = math.prod(filled[1:])
        expert = self.expert_parallel_degree
        if expert == -1:
            expert = math.gcd(copy_size, node_size())
        if copy_size % expert:
            close = _nearest(expert, divisors(copy_size))
            raise UserError(
                f"parallel.{EXPERT}: {expert} does not divide the processes of one copy of the"
                f" model ({copy_size}, the product of data_parallel_shard_degree,"
                f" context_parallel_degree and tensor_parallel_degree); write {close}, or a"
                f" data_parallel_shard_degree that makes it a multiple of {expert}"
            )
        replicate, shard, context, tensor = filled
        return Degrees(replicate, shard, context, tensor, expert)

    def _does_not_fit(self, world_size: int) -> str:
        """Blames the last degree that was written, and names what fits in its place."""
        written = {name: getattr(self, name) for name in AXES}
        blamed = next((name for name in (*AXES[:0:-1], AXES[0]) if written[name] > 1), AXES[0])
        others = math.prod(v for name, v in written.items() if name != blamed and v != -1)
        beside = ", ".join(f"{n}: {v}" for n, v in written.items() if n != blamed and v > 1)
        beside = f" beside {beside}" if beside else ""
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        why = f"{written[blamed]}{beside} does not fit {processes}"
        if world_size % others:
            return f"parallel.{blamed}: {why}; start a multiple of {others}, or write -1 for one"
        room = world_size // others
        free = -1 in [v for name, v in written.items() if name != blamed]
        close = _nearest(written[blamed], divisors(room)) if free else str(room)
        return f"parallel.{blamed}: {why}; write {close}, or -1 for one of them"


def _nearest(value: int, options: list[int]) -> str:
    """The options next below and next above, or the one that there is."""
    below, above = [n for n in options if n < value], [n for n in options if n > value]
    return " or ".join(str(n) for n in (below[-1:] + above[:1]))
