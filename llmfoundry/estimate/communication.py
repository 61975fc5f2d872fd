"""What a process sends to others in one step, by a formula for each kind of parallelism.

`--dry-run` and `benchmarks/memory` show it; `tests/test_communication.py` compares it with what is
counted (`benchmarks/memory/sent_bytes.py`). Left out are counts, losses, norms: hundreds of bytes.

Written below: p processes take part, W are the values that they share (`shards.py`), low bytes is a
value in matrix products (2 under bfloat16), M microbatches are in a step. A process sends what it
receives: (p - 1) / p of what is gathered or reduce-scattered, as in a ring, twice that of what is
all-reduced (Patarasuk & Yuan, 2009), (p - 1) / p of what is exchanged all to all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from llmfoundry.estimate.shards import REDUCED, Shares, Values, shares
from llmfoundry.recipe.parallel import Degrees
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
    held, microbatches = shares(recipe.model, degrees), -(-rows // microbatch)
    if degrees.is_replicas:
        found = [*data_parallel(held, degrees)]
    else:
        found = [*fully_sharded(recipe, held, degrees, microbatches)]
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
    gradients, once a step. Experts that expert parallelism shares are cut over other p.
    """
    low = 4 if recipe.precision == "fp32" else 2
    passes = 2 if recipe.parallel.reshard_after_forward else 1
    scattered = microbatches if recipe.parallel.reduce_scatter_each_microbatch else 1
    r, lent = degrees.replicate, degrees.expert > 1
    dense = held.dense if lent else held.dense + held.experts
    for p, blocks, ends in (
        (degrees.weights, dense, held.ends),
        (degrees.expert_shard, held.experts if lent else Values(), Values()),
    ):
        each, own = microbatches * low, blocks.shard + ends.shard
        gathered = (p - 1) * each * (passes * blocks.shard + ends.shard)
        yield Messages("weights", "all_gather", p, gathered)
        yield Messages("gradients", "reduce_scatter", p, (p - 1) * scattered * REDUCED * own)
        yield Messages("gradients", "all_reduce", r, 2 * (r - 1) * REDUCED * own // r)
