"""Estimate of the communication of one rank in a step, by a formula for each parallelism.

Entry point: `communication`, for `--dry-run`, `seconds.py` and `benchmarks/layouts.py`.
`tests/test_communication.py` compares it with counted bytes (`benchmarks/memory.py`). Small
collectives, such as counts and gradient norms, are left out.

Symbols: p is the number of ranks of a group, W the number of values that they share
(`parameter_shards.py`), low the bytes of a value in matmuls (2 under bfloat16). A rank sends as
much as it receives: (p - 1) / p of what is all-gathered, reduce-scattered or exchanged all-to-all,
as in a ring, and twice that for an all-reduce (Patarasuk & Yuan, 2009).

Bytes that leave a node are also estimated, as the mean over ranks. Nodes hold adjacent ranks. For
an all-to-all it is the fraction of the other p - 1 ranks that are on other nodes. A ring enters and
leaves each node once, so one rank of the group per node sends to another node. Each rank has a
network card, and NCCL builds rings so that all cards are used.
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
"""Fractions of the data sheets' bandwidth that NCCL's rings reach with large buffers: 361 to 367 of
450 GB/s for all-gather, reduce-scatter and all-reduce on 8 H200; 365 of 400 GB/s on 32 H200 with
400 Gb/s network cards (S. Bekman, Machine Learning Engineering, network)."""
BASE, HOP, NETWORK_HOP = 14e-6, 1.9e-6, 4e-6
"""Seconds of latency of a collective: constant, per step of the ring inside a node, and per step
between nodes (NCCL's tuning.cc, LL128)."""
FEW = 4  # GPUs of a node that NVLink connects without switches (NVIDIA HGX, 4-GPU boards)
BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces in one call
WAITED_FOR = ("tokens", "activations", "heads", "keys and values")
"""Communication whose result the next matmul needs. It is exposed, except that a shared expert
hides part of that of tokens. Communication of weights and gradients overlaps with compute of other
blocks."""


class CollectiveTraffic(NamedTuple):
    """Communication of a rank in a step by one kind of collective.

    Attributes:
        what: what is communicated, in a word.
        kind: name of the collective in torch.distributed.
        processes: number of ranks in the group.
        apart: stride between the ranks of the group.
        sent: bytes that the rank sends; it receives as many.
        between: bytes of these that leave the node, as the mean over ranks.
        calls: number of collectives in a step.
    """

    what: str
    kind: str
    processes: int
    apart: int
    sent: int
    between: int = 0
    calls: int = 0

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds without overlap; traffic inside and between nodes is concurrent."""
        inside = (self.sent - self.between) / (LINK_REACHED * self._link_gb_s(gpu) * 1e9)
        network = NETWORK_REACHED * gpu.network_gb_s * 1e9
        between = self.between / network if self.between else 0.0
        return self.calls * self.latency(gpu.node) + max(inside, between)

    def _link_gb_s(self, gpu: Gpu) -> float:
        """Return the bandwidth to the ranks of the group inside the node.

        Boards of up to FEW GPUs have no NVLink switches: each pair of GPUs is connected by an equal
        part of the links, so that two ranks of four reach a third.
        """
        ranks = min(self.processes, max(1, gpu.node // self.apart))
        if not gpu.switched or gpu.node > FEW or ranks == 1:
            return gpu.link_gb_s
        return gpu.link_gb_s * (ranks - 1) / (gpu.node - 1)

    def latency(self, node: int) -> float:
        """Return the latency of one collective, with `node` ranks per node."""
        nodes = -(-self.processes * self.apart // node) if self.between else 1
        if self.kind == "all_to_all":  # all sends are concurrent
            return BASE + NETWORK_HOP * (nodes > 1)
        ring = (self.processes - nodes) * HOP + (nodes - 1) * NETWORK_HOP
        if self.kind == "all_reduce":  # NCCL can use a tree between nodes
            ring = 2 * min(ring, node * HOP + math.log2(max(nodes, 1)) * NETWORK_HOP)
        return BASE + ring


def communication(
    recipe: ResolvedTrainRecipe, world_size: int, microbatch: int, node: int = NODE
) -> list[CollectiveTraffic]:
    """Return the communication of a rank in a step.

    Args:
        recipe: resolved recipe; activation checkpointing is decided.
        world_size: number of ranks.
        microbatch: sequences per microbatch and rank.
        node: ranks per node.
    """
    degrees = recipe.parallel.degrees(world_size)
    rows = recipe.global_train_batch_size // degrees.data
    microbatches = -(-rows // microbatch)
    parameters = shares(recipe.model, degrees)
    if degrees.is_replicas:
        traffic = [*data_parallel(parameters, degrees)]
    else:
        traffic = [*fully_sharded(recipe, parameters, degrees, microbatches)]
        traffic += tensor_parallel(recipe, degrees, rows, microbatches)
        traffic += context_parallel(recipe, degrees, rows, microbatches)
        traffic += expert_parallel(recipe, degrees, rows, microbatches)

    # the bytes of each that leave the node
    result = []
    for transfer in traffic:
        if transfer.sent:
            fraction = between_nodes(transfer, world_size, node)
            result.append(transfer._replace(between=round(transfer.sent * fraction)))
    return result


def between_nodes(traffic: CollectiveTraffic, world_size: int, node: int) -> float:
    """Return the fraction of the bytes that leaves a node of `node` adjacent ranks.

    The ranks of a group have the stride `traffic.apart`. The groups partition all ranks of the run.
    """
    at_once = traffic.kind == "all_to_all"
    return _leaving(traffic.processes, traffic.apart, at_once, world_size, node)


@cache
def _leaving(p: int, apart: int, at_once: bool, world_size: int, node: int) -> float:
    """Return the fraction for groups of p ranks with a stride; all-to-all if `at_once`."""
    crossing = 0.0
    for first in range(0, world_size, p * apart):
        for offset in range(apart):
            ranks = range(first + offset, first + offset + p * apart, apart)
            ranks_by_node = Counter(rank // node for rank in ranks)
            if at_once:  # a rank sends to all ranks of other nodes
                crossing += p - sum(n * (n - 1) for n in ranks_by_node.values()) / (p - 1)
            elif len(ranks_by_node) > 1:  # a ring: one rank per node sends to the next node
                crossing += len(ranks_by_node)
    return crossing / world_size


def waited_for(traffic: Iterable[CollectiveTraffic], gpu: Gpu) -> float:
    """Return the seconds of exposed communication in a step."""
    return sum(each.seconds(gpu) for each in traffic if each.what in WAITED_FOR)


def spanning(
    recipe: ResolvedTrainRecipe, world_size: int, microbatch: int, node: int, gpu: Gpu | None = None
) -> Iterator[str]:
    """Yield a line for each parallelism with exposed communication between nodes, with its cost.

    Args:
        recipe: resolved recipe; activation checkpointing is decided.
        world_size: number of ranks.
        microbatch: sequences per microbatch and rank.
        node: ranks per node.
        gpu: data sheet of the GPU; None: unknown, an H100 is assumed.
    """
    gpu = gpu or GPUS["H100"]
    degrees = recipe.parallel.degrees(world_size)
    if all(getattr(degrees, name) == 1 for name in _SPANNING):
        return
    traffic = communication(recipe, world_size, microbatch, node)
    for name, what in _SPANNING.items():
        across = [each for each in traffic if each.what in what and each.between]
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


def data_parallel(parameters: ParameterShards, degrees: Degrees) -> Iterator[CollectiveTraffic]:
    """Yield the communication of DDP: one all-reduce of gradients per step, 2 (p - 1) / p * 4 W."""
    p = degrees.replicate
    sent = 2 * (p - 1) * REDUCED * parameters.all.shard // p
    yield CollectiveTraffic("gradients", "all_reduce", p, 1, sent, calls=-(-sent // BUCKET))


def fully_sharded(
    recipe: ResolvedTrainRecipe, parameters: ParameterShards, degrees: Degrees, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """Yield the communication of FSDP2 and HSDP.

    All-gather of weights per microbatch: (p - 1) / p * low * 2 W for the blocks, in the forward and
    again in the backward pass (reshard_after_forward), and low * W for the ends. Reduce-scatter of
    gradients: (p - 1) / p * 4 W per microbatch, or per step (reduce_scatter_each_microbatch). A
    head that is not tied to the embedding is a unit of its own.
    All-reduce of gradients between r replicas: 2 (r - 1) / r * 4 W / p per step. Each FSDP unit has
    its own p. Routers are gathered once, in fp32 under autocast: as many bytes as two gathers in
    bfloat16.
    """
    passes = 2 if recipe.parallel.reshard_after_forward else 1
    scattered = microbatches if recipe.parallel.reduce_scatter_each_microbatch else 1
    r = degrees.replicate
    n = recipe.model.n_layers
    parts = [(unit.processes, unit.apart, unit.all.shard, passes, n) for unit in parameters.units]
    n_ends = 1 if recipe.model.tie_word_embeddings else 2
    ends = (degrees.weights, degrees.tensor, parameters.ends.shard, 1, n_ends)
    for p, apart, shard, gathers, units in [ends, *parts]:
        gathers *= microbatches
        sent, reduced = (p - 1) * gathers * _low(recipe) * shard, REDUCED * shard
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
    """Yield the communication of tensor parallelism with sharded norms (Korthikanti et al., 2022).

    Each all-gather or reduce-scatter of activations sends (p - 1) / p * d values per token. A dense
    block has 2 all-gathers and 2 reduce-scatters in the forward pass and as many in the backward
    pass; a block with experts has half of them. Latent attention gathers its latent vectors, and
    the residual stream only if queries have none. Full activation checkpointing repeats two
    all-gathers and one reduce-scatter, selective checkpointing the all-gathers. Embedding and head
    add one of each. The dtype is that of matmuls: norms compute in fp32, but round what is
    gathered. In each microbatch the gradients of norms and positions are all-reduced, and the loss
    all-gathers 2 fp32 values per labeled token.
    """
    p, model = degrees.tensor, recipe.model
    again = recomputation(recipe.parallel.activation_checkpointing)
    is_whole, repeats = again == "whole", again != "none"
    low, d, n = _low(recipe), model.d_model, model.n_layers
    n_dense = n - model.moe_layers  # blocks whose feed-forward layer is sharded
    # widths of what is gathered before attention: one, or queries and keys by themselves
    entering, attn = [d], model.attn_config
    if attn.is_latent:
        entering = [attn.q_lora_rank or d, attn.kv_lora_rank + attn.qk_rope_head_dim]
    enter, sends = sum(entering), len(entering)
    # values per token, and collectives: of attention, of dense layers, of embedding and head
    gathered = n * (enter * (1 + repeats) + d) + n_dense * (2 + repeats) * d + 2 * d
    gathers = n * (sends * (1 + repeats) + 1) + n_dense * (2 + repeats) + 2
    scattered = n * (enter + (1 + is_whole) * d) + n_dense * 2 * d + 2 * d
    scatters = n * (sends + 1 + is_whole) + n_dense * 2 + 2
    tokens = low * (p - 1) * rows * _rounded(tokens_of_row(recipe, degrees), p) // p
    for kind, values, calls in (
        ("all_gather", gathered, gathers),
        ("reduce_scatter", scattered, scatters),
    ):
        yield CollectiveTraffic(
            "activations", kind, p, 1, tokens * values, calls=microbatches * calls
        )
    of_tokens = microbatches * low * seen_by_tokens(model)
    yield CollectiveTraffic("gradients", "all_reduce", p, 1, 2 * (p - 1) * of_tokens // p)
    of_losses = 2 * 4 * rows * tokens_of_row(recipe, degrees)
    yield CollectiveTraffic("losses", "all_gather", p, 1, (p - 1) * of_losses)


def context_parallel(
    recipe: ResolvedTrainRecipe, degrees: Degrees, rows: int, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """Yield the communication of context parallelism by either method.

    A rank has h heads and k key-value heads; w is the width of a key and a value together. Ulysses
    (Jacobs et al., 2023) sends (p - 1) / p * (h + l) w values per token of the rank all-to-all, in
    the forward and in the backward pass; l is the least common multiple of k and p. The other
    method all-gathers keys and values, (p - 1) * k w values per token, and reduce-scatters their
    gradients. Full activation checkpointing repeats the forward pass, selective checkpointing the
    all-gather.
    """
    p, model = degrees.context, recipe.model
    again = recomputation(recipe.parallel.activation_checkpointing)
    kv_heads, width = model.attn_config.kv_n_heads, model.head_dim + model.value_dim
    heads, kv = model.n_heads // degrees.tensor, kv_heads // degrees.tensor
    # layers that compute keys and values; others reuse those of an earlier layer
    kv_layers = sum(layer.kv_from == i for i, layer in enumerate(model.layers()))
    tokens = rows * tokens_of_row(recipe, degrees)
    if context_method(model, recipe.parallel, degrees) == "ulysses":
        exchanged_heads = heads * model.n_layers + math.lcm(kv, p) * kv_layers
        values = (p - 1) * tokens * exchanged_heads * width // p
        passes = 3 if again == "whole" else 2
        sent, calls = passes * _low(recipe) * values, 4 * passes * microbatches * model.n_layers
        yield CollectiveTraffic("heads", "all_to_all", p, degrees.tensor, sent, calls=calls)
    else:
        values = (p - 1) * tokens * kv * width * kv_layers
        passes = 1 if again == "none" else 2
        values *= _low(recipe)
        what, calls = "keys and values", 2 * microbatches * kv_layers
        sent = passes * values
        yield CollectiveTraffic(what, "all_gather", p, degrees.tensor, sent, calls=passes * calls)
        yield CollectiveTraffic(what, "reduce_scatter", p, degrees.tensor, values, calls=calls)


def expert_parallel(
    recipe: ResolvedTrainRecipe, degrees: Degrees, rows: int, microbatches: int
) -> Iterator[CollectiveTraffic]:
    """Yield the all-to-all of tokens to the experts and back, 4 (p - 1) / p * top_k * d per token.

    This counts both passes and assumes balanced expert load. A rank whose experts have a times the
    mean load receives a times as much and returns as much. With parallel.expert_capacity the amount
    is that many times the even one, whatever the load. Full activation checkpointing repeats
    the forward pass. Under tensor parallelism each rank dispatches its own tokens.
    """
    p, model = degrees.expert, recipe.model
    if p == 1:
        return
    top_k = model.ffn_config.moe_top_k
    tokens = rows * -(-tokens_of_row(recipe, degrees) // degrees.tensor)
    rows_sent, capacity = (p - 1) * tokens * top_k // p, recipe.parallel.expert_capacity
    if capacity is not None:
        rows_sent = (p - 1) * math.ceil(min(capacity, p) * (tokens * top_k / p))
    is_full = recomputation(recipe.parallel.activation_checkpointing) == "whole"
    passes = (3 if is_full else 2) * model.moe_layers
    # a pass sends rows there and back, and weight and expert of each row, or its gradient, in fp32
    sent = passes * rows_sent * (2 * _low(recipe) * model.d_model + 2 * 4)
    # a forward pass also sends the numbers of rows, without a capacity
    counts = 0 if capacity is not None else passes - model.moe_layers
    parts = 2 if recipe.parallel.expert_halves else 1
    calls = (3 * passes + counts) * microbatches * parts
    yield CollectiveTraffic("tokens", "all_to_all", p, 1, sent, calls=calls)


def _low(recipe: ResolvedTrainRecipe) -> int:
    """Return the bytes of a value in matmuls."""
    return 4 if recipe.precision == "fp32" else 2


def _rounded(tokens: int, processes: int) -> int:
    """Return the number of tokens, rounded up to a multiple of the ranks."""
    return -(-tokens // processes) * processes
