"""What a process sends to others in one step, by a formula for each kind of parallelism.

`--dry-run` and `benchmarks/memory` show it; `tests/test_communication.py` compares it with what is
counted (`benchmarks/memory/sent_bytes.py`). Counts and norms are left out.

Written below: p processes take part, W are the values that they share (`shards.py`), low bytes is a
value in matrix products (2 under bfloat16), M microbatches are in a step. A process sends what it
receives: (p - 1) / p of what is gathered or reduce-scattered, as in a ring, twice that of what is
all-reduced (Patarasuk & Yuan, 2009), (p - 1) / p of what is exchanged all to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from llmfoundry.estimate.activations import tokens_of_row
from llmfoundry.estimate.shards import REDUCED, Shares, seen_by_tokens, shares
from llmfoundry.recipe.parallel import Degrees, recomputation
from llmfoundry.recipe.parallel_limits import context_method
from llmfoundry.recipe.scripts.train import TrainRecipe


class Messages(NamedTuple):
    """What a process sends in a step by one kind of collective.

    Attributes:
        what: is sent, in a word.
        kind: of the collective, as torch.distributed calls it.
        processes: that take part.
        sent: bytes; it receives as many.
    """

    what: str
    kind: str
    processes: int
    sent: int


def communication(recipe: TrainRecipe, world_size: int, microbatch: int) -> list[Messages]:
    """All that a process sends in a step of a filled recipe, `microbatch` rows at a time."""
    degrees = recipe.parallel.degrees(world_size)
    rows = recipe.global_train_batch_size // degrees.data
    held = shares(recipe.model, degrees)
    if degrees.is_replicas:
        found = [*data_parallel(held, degrees)]
    else:
        found = [*fully_sharded(recipe, held, degrees, -(-rows // microbatch))]
        found += tensor_parallel(recipe, degrees, rows, -(-rows // microbatch))
        found += context_parallel(recipe, degrees, rows)
        found += expert_parallel(recipe, degrees, rows)
    return [messages for messages in found if messages.sent]


def data_parallel(held: Shares, degrees: Degrees) -> Iterator[Messages]:
    """DDP: gradients, all-reduced once a step: 2 (p - 1) / p * 4 W."""
    p = degrees.replicate
    yield Messages("gradients", "all_reduce", p, 2 * (p - 1) * REDUCED * held.all.shard // p)


def fully_sharded(
    recipe: TrainRecipe, held: Shares, degrees: Degrees, microbatches: int
) -> Iterator[Messages]:
    """FSDP2 and HSDP: weights gathered, gradients reduce-scattered, those of shards all-reduced.

    Of each microbatch (p - 1) / p * low * 2 W of the blocks, once for the forward and once for the
    backward pass (reshard_after_forward), and low * W of the ends; (p - 1) / p * 4 W of gradients,
    or once a step (reduce_scatter_each_microbatch). Between r replicas 2 (r - 1) / r * 4 W / p of
    gradients, once a step. Of what is cut over other processes than the block, each by its own p.
    """
    passes = 2 if recipe.parallel.reshard_after_forward else 1
    scattered = microbatches if recipe.parallel.reduce_scatter_each_microbatch else 1
    r = degrees.replicate
    parts = [(unit.processes, unit.all.shard, passes) for unit in held.units]
    for p, own, gathers in [(degrees.weights, held.ends.shard, 1), *parts]:
        gathered = microbatches * gathers * _low(recipe) * own
        yield Messages("weights", "all_gather", p, (p - 1) * gathered)
        yield Messages("gradients", "reduce_scatter", p, (p - 1) * scattered * REDUCED * own)
        yield Messages("gradients", "all_reduce", r, 2 * (r - 1) * REDUCED * own // r)


def tensor_parallel(
    recipe: TrainRecipe, degrees: Degrees, rows: int, microbatches: int
) -> Iterator[Messages]:
    """Tensor parallelism with sequence-sharded norms (Korthikanti et al., 2022).

    Each passage between a process's tokens and all tokens sends g = (p - 1) / p * d values of each
    token. A dense block: 2 all-gathers and 2 reduce-scatters forward, as many backward; of a layer
    with experts half. Whole-block checkpointing gathers twice again and scatters once, selective
    gathers alone. Embedding and head: one of each. Norms give fp32 under amp_bf16, products low.
    Gradients of norms and positions are all-reduced in each microbatch; for the loss 2 fp32 values
    of each labelled token are gathered.
    """
    p, model = degrees.tensor, recipe.model
    again = recomputation(recipe.parallel.activation_checkpointing)
    dense = model.ffn_config.ffn_type != "dmoe"
    norm = _low(recipe) if model.norm_type.startswith("low_precision") else _stream(recipe)
    low, gathers = _low(recipe), 2 if dense else 1
    scatters = (1 if dense else gathers) if again == "whole" else 0
    repeated = gathers if again != "none" else 0
    n, tokens = model.n_layers, rows * _rounded(tokens_of_row(recipe, degrees), p)
    gathered = n * (gathers * (norm + low) + repeated * norm) + norm + low
    scattered = n * (gathers * (norm + low) + scatters * low) + norm + low
    values = (p - 1) * tokens * model.d_model // p
    yield Messages("activations", "all_gather", p, gathered * values)
    yield Messages("activations", "reduce_scatter", p, scattered * values)
    of_tokens = microbatches * low * seen_by_tokens(model)
    yield Messages("gradients", "all_reduce", p, 2 * (p - 1) * of_tokens // p)
    yield Messages(
        "losses", "all_gather", p, (p - 1) * 2 * 4 * rows * tokens_of_row(recipe, degrees)
    )


def context_parallel(recipe: TrainRecipe, degrees: Degrees, rows: int) -> Iterator[Messages]:
    """Either method, of h heads and k heads of keys and values of width w on a process.

    Ulysses (Jacobs et al., 2023): (p - 1) / p * (2 h + 2 l) w values of each of the process's
    tokens, forward and backward, all to all; l is the least common multiple of k and p. Gathered
    keys and values: (p - 1) * 2 k w of each, gathered forward, reduce-scattered backward.
    Whole-block checkpointing repeats the forward pass, selective what is gathered.
    """
    p, model = degrees.context, recipe.model
    again = recomputation(recipe.parallel.activation_checkpointing)
    kv_heads, width = model.attn_config.kv_n_heads, model.head_dim
    assert kv_heads and width, "the recipe was not filled"
    heads, kv = model.n_heads // degrees.tensor, kv_heads // degrees.tensor
    makers = sum(layer.kv_from == i for i, layer in enumerate(model.layers()))
    tokens = rows * tokens_of_row(recipe, degrees)
    if context_method(model, recipe.parallel, degrees) == "ulysses":
        each = 2 * heads * model.n_layers + 2 * math.lcm(kv, p) * makers
        values = (p - 1) * tokens * each * width // p
        passes = 3 if again == "whole" else 2
        yield Messages("heads", "all_to_all", p, passes * _low(recipe) * values)
    else:
        values = (p - 1) * tokens * 2 * kv * width * makers
        passes = 1 if again == "none" else 2
        yield Messages("keys and values", "all_gather", p, passes * _low(recipe) * values)
        yield Messages("keys and values", "reduce_scatter", p, _low(recipe) * values)


def expert_parallel(recipe: TrainRecipe, degrees: Degrees, rows: int) -> Iterator[Messages]:
    """Rows to the experts and back, forward and backward: 4 (p - 1) / p * top_k * d of each token.

    Of evenly loaded experts; a process whose experts have a times the mean load receives a times
    as much on the way to them and sends as much back. Whole-block checkpointing sends the forward
    pass's again. Under tensor parallelism each process has its own tokens.
    """
    p, model = degrees.expert, recipe.model
    if p == 1:
        return
    top_k = model.ffn_config.moe_top_k
    assert top_k, "the recipe was not filled"
    tokens = rows * -(-tokens_of_row(recipe, degrees) // degrees.tensor)
    values = (p - 1) * tokens * top_k * model.d_model // p
    whole = recomputation(recipe.parallel.activation_checkpointing) == "whole"
    sent = (6 if whole else 4) * _low(recipe) * values * model.n_layers
    yield Messages("tokens", "all_to_all", p, sent)


def _low(recipe: TrainRecipe) -> int:
    """Bytes of a value in matrix products."""
    return 4 if recipe.precision == "fp32" else 2


def _stream(recipe: TrainRecipe) -> int:
    """The same in the residual stream."""
    return 2 if recipe.precision == "bf16" else 4


def _rounded(tokens: int, processes: int) -> int:
    """So many that the processes divide them."""
    return -(-tokens // processes) * processes
