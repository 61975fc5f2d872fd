"""What a process sends to others in one step, by a formula for each kind of parallelism.

`--dry-run` and `benchmarks/layouts.py` show it; `tests/test_communication.py` compares it with what
is counted (`benchmarks/memory.py`). Counts and norms are left out.

Symbols: p is the number of processes, W the number of values they share (`parameter_shards.py`),
low the bytes of a value in matrix multiplications (2 under bfloat16), M the microbatches of a step.
A process sends what it receives: (p - 1) / p of what is gathered or reduce-scattered, as in a ring,
twice that of what is all-reduced (Patarasuk & Yuan, 2009), (p - 1) / p of what is exchanged all to
all.

What leaves a node is counted beside it. Nodes hold adjacent ranks. All to all, the other nodes'
share of the p - 1 others; around a ring, which enters and leaves each node once, one message in as
many as the node has processes of the group: the mean of its processes, each of which has a network
card (NCCL turns its rings so that all do).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from llmfoundry.plan.memory import GIB
from llmfoundry.plan.parameter_shards import (
    REDUCED,
    ParameterShards,
    seen_by_tokens,
    shares,
    tokens_of_row,
)
from llmfoundry.recipe.hardware import GPUS, Gpu
from llmfoundry.recipe.parallel import NODE, Degrees, context_method, recomputation
from llmfoundry.recipe.train import ResolvedTrainRecipe

LINK_REACHED, NETWORK_REACHED = 0.8, 0.9
"""Shares of the data sheets' bytes/s that NCCL's rings reach with large messages: 361 to 367 of 450
GB/s of all-gathers, reduce-scatters and all-reduces among 8 H200, 365 of 400 among 32 of them over
cards of 400 Gb/s (S. Bekman, Machine Learning Engineering, network)."""
BASE, HOP, NETWORK_HOP = 14e-6, 1.9e-6, 4e-6
"""Seconds that a collective takes whatever its size: to begin, for each step of the ring inside a
node, and for each between nodes (NCCL's tuning.cc, LL128)."""
BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces at once
WAITED_FOR = ("tokens", "activations", "heads", "keys and values")
"""What the next products need: nothing is computed beside it, but a shared expert, which hides part
of the tokens. Weights and gradients travel beside other blocks' products."""


class CollectiveTraffic(NamedTuple):
    """What a process sends in a step by one kind of collective.

    Attributes:
        what: is sent, in a word.
        kind: of the collective, as torch.distributed calls it.
        processes: that take part.
        apart: ranks from one of them to the next.
        sent: bytes; it receives as many.
        between: those of them that go to another node; the mean of all processes.
        calls: collectives in a step.
    """

    what: str
    kind: str
    processes: int
    apart: int
    sent: int
    between: int = 0
    calls: int = 0

    def seconds(self, gpu: Gpu) -> float:
        """That it takes by itself: bytes inside and between nodes move at once."""
        inside = (self.sent - self.between) / (LINK_REACHED * gpu.link_gb_s * 1e9)
        network = NETWORK_REACHED * gpu.network_gb_s * 1e9
        between = self.between / network if self.between else 0.0
        return self.calls * self.latency(gpu.node) + max(inside, between)

    def latency(self, node: int) -> float:
        """Seconds of one collective of no bytes, in nodes of so many processes."""
        nodes = -(-self.processes * self.apart // node) if self.between else 1
        if self.kind == "all_to_all":  # all at once
            return BASE + NETWORK_HOP * (nodes > 1)
        ring = (self.processes - nodes) * HOP + (nodes - 1) * NETWORK_HOP
        if self.kind == "all_reduce":  # a tree between nodes
            ring = 2 * min(ring, node * HOP + math.log2(max(nodes, 1)) * NETWORK_HOP)
        return BASE + ring


def communication(
    recipe: ResolvedTrainRecipe, world_size: int, microbatch: int, node: int = NODE
) -> list[CollectiveTraffic]:
    """All that a process sends in a step of a filled recipe.

    Args:
        recipe: filled; activation checkpointing decided.
        world_size: processes of the run.
        microbatch: rows at a time.
        node: processes of a node.
    """
    degrees = recipe.parallel.degrees(world_size)
    rows = recipe.global_train_batch_size // degrees.data
    held = shares(recipe.model, degrees)
    if degrees.is_replicas:
        found = [*data_parallel(held, degrees)]
    else:
        found = [*fully_sharded(recipe, held, degrees, -(-rows // microbatch))]
        found += tensor_parallel(recipe, degrees, rows, -(-rows // microbatch))
        found += context_parallel(recipe, degrees, rows, -(-rows // microbatch))
        found += expert_parallel(recipe, degrees, rows, -(-rows // microbatch))
    return [
        each._replace(between=round(each.sent * between_nodes(each, world_size, node)))
        for each in found
        if each.sent
    ]


def between_nodes(messages: CollectiveTraffic, world_size: int, node: int) -> float:
    """The share of messages that leaves a node of so many adjacent ranks.

    Groups are ranks `apart` from each other, and all of a run's groups together are its processes.
    """
    at_once = messages.kind == "all_to_all"
    return _leaving(messages.processes, messages.apart, at_once, world_size, node)


@cache
def _leaving(p: int, apart: int, at_once: bool, world_size: int, node: int) -> float:
    """Of groups of p ranks `apart`, which send around a ring or to all `at_once`."""
    crossing = 0.0
    for first in range(0, world_size, p * apart):
        for offset in range(apart):
            ranks = range(first + offset, first + offset + p * apart, apart)
            here = Counter(rank // node for rank in ranks)
            if at_once:
                crossing += p - sum(n * (n - 1) for n in here.values()) / (p - 1)
            elif len(here) > 1:
                crossing += len(here)
    return crossing / world_size


def waited_for(found: Iterable[CollectiveTraffic], gpu: Gpu) -> float:
    """Seconds of a step in which nothing is computed: of what the next products need."""
    return sum(each.seconds(gpu) for each in found if each.what in WAITED_FOR)


def spanning(
    recipe: ResolvedTrainRecipe, world_size: int, microbatch: int, node: int, gpu: Gpu | None = None
) -> Iterator[str]:
    """A line for each degree whose processes wait for each other across nodes, with its cost.

    Args:
        recipe: filled; activation checkpointing decided.
        world_size: processes of the run.
        microbatch: rows at a time.
        node: processes of a node.
        gpu: what they are, and how fast their links; None: not known, H100 are taken.
    """
    gpu = gpu or GPUS["H100"]
    degrees = recipe.parallel.degrees(world_size)
    if all(getattr(degrees, name) == 1 for name in _SPANNING):
        return
    found = communication(recipe, world_size, microbatch, node)
    for name, what in _SPANNING.items():
        across = [each for each in found if each.what in what and each.between]
        if not across:
            continue
        degree, apart = getattr(degrees, name), across[0].apart
        cost, out = sum(each.seconds(gpu) for each in across), sum(each.between for each in across)
        inside = math.gcd(degree, node // apart) if node % apart == 0 else 1
        yield (
            f"parallel.{name}_parallel_degree: {degree} spans nodes of {node} processes:"
            f" {out / GIB:.3g} of {sum(each.sent for each in across) / GIB:.3g} GiB of a process's"
            f" {across[0].what} leave its node in a step, about {cost:.2g} s that nothing hides (at"
            f" {gpu.link_gb_s:g} GB/s inside, {gpu.network_gb_s:g} GB/s between); at most {inside}"
            " stays inside"
        )


_SPANNING = {
    "expert": ("tokens",),
    "tensor": ("activations",),
    "context": ("heads", "keys and values"),
}


def data_parallel(held: ParameterShards, degrees: Degrees) -> Iterator[CollectiveTraffic]:
    """DDP: gradients, all-reduced once a step: 2 (p - 1) / p * 4 W."""
    p = degrees.replicate
    sent = 2 * (p - 1) * REDUCED * held.all.shard // p
    yield CollectiveTraffic("gradients", "all_reduce", p, 1, sent, calls=-(-sent // BUCKET))


def fully_sharded(
    recipe: ResolvedTrainRecipe, held: ParameterShards, degrees: Degrees, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """FSDP2 and HSDP: weights gathered, gradients reduce-scattered, those of shards all-reduced.

    Of each microbatch (p - 1) / p * low * 2 W of the blocks, once for the forward and once for the
    backward pass (reshard_after_forward), and low * W of the ends; (p - 1) / p * 4 W of gradients,
    or once a step (reduce_scatter_each_microbatch). Between r replicas 2 (r - 1) / r * 4 W / p of
    gradients, once a step. Of what is cut over other processes than the block, each by its own p.
    Routers are gathered once, in fp32 under autocast: as many bytes as twice in bfloat16.
    """
    passes = 2 if recipe.parallel.reshard_after_forward else 1
    scattered = microbatches if recipe.parallel.reduce_scatter_each_microbatch else 1
    r = degrees.replicate
    n = recipe.model.n_layers
    parts = [(unit.processes, unit.apart, unit.all.shard, passes, n) for unit in held.units]
    ends = (degrees.weights, degrees.tensor, held.ends.shard, 1, 1)
    for p, apart, own, gathers, units in [ends, *parts]:
        gathers *= microbatches
        sent, reduced = (p - 1) * gathers * _low(recipe) * own, REDUCED * own
        yield CollectiveTraffic("weights", "all_gather", p, apart, sent, calls=gathers * units)
        sent = (p - 1) * scattered * reduced
        yield CollectiveTraffic(
            "gradients", "reduce_scatter", p, apart, sent, calls=scattered * units
        )
        sent = 2 * (r - 1) * reduced // r
        yield CollectiveTraffic("gradients", "all_reduce", r, degrees.copy_size, sent, calls=units)


def tensor_parallel(
    recipe: ResolvedTrainRecipe, degrees: Degrees, rows: int, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """Tensor parallelism with sequence-sharded norms (Korthikanti et al., 2022).

    Each passage between a process's tokens and all tokens sends g = (p - 1) / p * d values of each
    token. A dense block: 2 all-gathers and 2 reduce-scatters forward, as many backward; of a layer
    with experts half. Whole-block checkpointing gathers twice again and scatters once, selective
    gathers alone. Embedding and head: one of each. All in the dtype of matrix products: norms
    compute in fp32, and round what is gathered. Gradients of norms and positions are all-reduced in
    each microbatch; for the loss 2 fp32 values of each labelled token are gathered.
    """
    p, model = degrees.tensor, recipe.model
    again = recomputation(recipe.parallel.activation_checkpointing)
    dense = model.ffn_config.ffn_type != "dmoe"
    low, gathers = _low(recipe), 2 if dense else 1
    scatters = (1 if dense else gathers) if again == "whole" else 0
    repeated = gathers if again != "none" else 0
    n, tokens = model.n_layers, rows * _rounded(tokens_of_row(recipe, degrees), p)
    values = low * (p - 1) * tokens * model.d_model // p
    gathered, scattered = n * (2 * gathers + repeated) + 2, n * (2 * gathers + scatters) + 2
    calls = microbatches * gathered, microbatches * scattered
    yield CollectiveTraffic("activations", "all_gather", p, 1, gathered * values, calls=calls[0])
    yield CollectiveTraffic(
        "activations", "reduce_scatter", p, 1, scattered * values, calls=calls[1]
    )
    of_tokens = microbatches * low * seen_by_tokens(model)
    yield CollectiveTraffic("gradients", "all_reduce", p, 1, 2 * (p - 1) * of_tokens // p)
    of_losses = 2 * 4 * rows * tokens_of_row(recipe, degrees)
    yield CollectiveTraffic("losses", "all_gather", p, 1, (p - 1) * of_losses)


def context_parallel(
    recipe: ResolvedTrainRecipe, degrees: Degrees, rows: int, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """Either method, of h heads and k heads of keys and values of width w on a process.

    Ulysses (Jacobs et al., 2023): (p - 1) / p * (2 h + 2 l) w values of each of the process's
    tokens, forward and backward, all to all; l is the least common multiple of k and p. Gathered
    keys and values: (p - 1) * 2 k w of each, gathered forward, reduce-scattered backward.
    Whole-block checkpointing repeats the forward pass, selective what is gathered.
    """
    p, model = degrees.context, recipe.model
    again = recomputation(recipe.parallel.activation_checkpointing)
    kv_heads, width = model.attn_config.kv_n_heads, model.head_dim
    heads, kv = model.n_heads // degrees.tensor, kv_heads // degrees.tensor
    makers = sum(layer.kv_from == i for i, layer in enumerate(model.layers()))
    tokens = rows * tokens_of_row(recipe, degrees)
    if context_method(model, recipe.parallel, degrees) == "ulysses":
        each = 2 * heads * model.n_layers + 2 * math.lcm(kv, p) * makers
        values = (p - 1) * tokens * each * width // p
        passes = 3 if again == "whole" else 2
        sent, calls = passes * _low(recipe) * values, 4 * passes * microbatches * model.n_layers
        yield CollectiveTraffic("heads", "all_to_all", p, degrees.tensor, sent, calls=calls)
    else:
        values = (p - 1) * tokens * 2 * kv * width * makers
        passes = 1 if again == "none" else 2
        values *= _low(recipe)
        what, calls = "keys and values", 2 * microbatches * makers
        sent = passes * values
        yield CollectiveTraffic(what, "all_gather", p, degrees.tensor, sent, calls=passes * calls)
        yield CollectiveTraffic(what, "reduce_scatter", p, degrees.tensor, values, calls=calls)


def expert_parallel(
    recipe: ResolvedTrainRecipe, degrees: Degrees, rows: int, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """Rows to the experts and back, forward and backward: 4 (p - 1) / p * top_k * d of each token.

    Of evenly loaded experts; a process whose experts have a times the mean load receives a times
    as much on the way to them and sends as much back. Whole-block checkpointing sends the forward
    pass's again. Under tensor parallelism each process has its own tokens.
    """
    p, model = degrees.expert, recipe.model
    if p == 1:
        return
    top_k = model.ffn_config.moe_top_k
    tokens = rows * -(-tokens_of_row(recipe, degrees) // degrees.tensor)
    values = (p - 1) * tokens * top_k * model.d_model // p
    whole = recomputation(recipe.parallel.activation_checkpointing) == "whole"
    times = (6 if whole else 4) * model.n_layers
    sent, calls = times * _low(recipe) * values, 2 * times * microbatches  # their numbers go first
    yield CollectiveTraffic("tokens", "all_to_all", p, 1, sent, calls=calls)


def _low(recipe: ResolvedTrainRecipe) -> int:
    """Bytes of a value in matrix products."""
    return 4 if recipe.precision == "fp32" else 2


def _rounded(tokens: int, processes: int) -> int:
    """So many that the processes divide them."""
    return -(-tokens // processes) * processes
