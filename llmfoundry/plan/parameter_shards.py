"""How many values of a model one process holds, of every degree of parallelism.

`memory.py` and `communication.py` ask it. Tensor parallelism divides the matrices of the dense
layers, expert parallelism the experts; what these leave is cut by FSDP into even parts along the
first dimension, over the processes that have the same (`distributed/fsdp.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from llmfoundry.models.counts import EXPERTS, parts
from llmfoundry.models.tensor_parallel import tensor_parallel_dim
from llmfoundry.recipe.model import ResolvedModelConfig
from llmfoundry.recipe.parallel import Degrees, context_method
from llmfoundry.recipe.train import ResolvedTrainRecipe

REDUCED = 4  # bytes of a gradient on its way to its shard: added up in fp32
_OF_TOKENS = re.compile(r"(^|\.)(wpe|norm_\w+|[qk]_ln)\.(weight|bias)$")
"""What each process has whole and applies to its own tokens."""
_IN_LAYER = re.compile(r"ffn\.(router|shared|experts)\.")
"""A layer with experts, which tensor parallelism does not divide."""
BLOCK, OF_LAYER, OF_EXPERTS = "block", "layer with experts", "experts"
"""What FSDP gathers at once: a block; of it apart, under tensor parallelism, a layer with experts,
and under expert parallelism the experts of one."""


class Values(NamedTuple):
    """Values of some parameters, or bytes, as one process has them.

    Attributes:
        shard: what the process keeps; of several processes the one with most.
        gathered: what there is of them while they are at work.
    """

    shard: int = 0
    gathered: int = 0

    def plus(self, other: Values) -> Values:
        """Those of both."""
        return Values(self.shard + other.shard, self.gathered + other.gathered)

    def times(self, count: int) -> Values:
        """Those of so many alike."""
        return Values(self.shard * count, self.gathered * count)


def total(values: Iterable[Values]) -> Values:
    """Of several."""
    found = Values()
    for one in values:
        found = found.plus(one)
    return found


class Unit(NamedTuple):
    """What FSDP gathers of each block at once.

    Attributes:
        processes: over which it is cut.
        apart: ranks from one of these to the next.
        all: of all blocks.
        block: of the largest block.
    """

    processes: int
    apart: int
    all: Values
    block: Values


class ParameterShards(NamedTuple):
    """What one process has of a model.

    Attributes:
        ends: embeddings, final norm and head.
        head: the output head, which may be the embedding.
        units: of the blocks; the first is what is gathered with the block itself.
    """

    ends: Values
    head: Values
    units: tuple[Unit, ...]

    @property
    def blocks(self) -> Values:
        """Of all blocks."""
        return total(unit.all for unit in self.units)

    @property
    def all(self) -> Values:
        """Of the whole model."""
        return self.ends.plus(self.blocks)


def shares(model: ResolvedModelConfig, degrees: Degrees) -> ParameterShards:
    """What a process has of a filled model."""
    (bare, _), *blocks = parts(model)
    each = [(by_unit(block.named_parameters(), degrees), count) for block, count in blocks]
    largest, _ = max(each, key=lambda one: total(one[0].values()).gathered)
    units = tuple(
        Unit(
            cut_over(unit, degrees),
            apart(unit, degrees),
            total(found[unit].times(n) for found, n in each),
            of_block,
        )
        for unit, of_block in largest.items()
    )
    head = bare.head_weight
    assert isinstance(head, Tensor)
    return ParameterShards(
        ends=total(values_of(name, p.shape, degrees) for name, p in bare.named_parameters()),
        head=values_of("lm_head.weight", head.shape, degrees),
        units=units,
    )


def by_unit(named: Iterable[tuple[str, Tensor]], degrees: Degrees) -> dict[str, Values]:
    """What a process has of a block's parameters, by the unit that they are gathered with."""
    found = {BLOCK: Values()}
    for name, parameter in named:
        unit, values = unit_of(name, degrees), values_of(name, parameter.shape, degrees)
        found[unit] = found.get(unit, Values()).plus(values)
    return found


def unit_of(name: str, degrees: Degrees) -> str:
    """With what FSDP gathers a parameter of a block."""
    if EXPERTS in name and degrees.expert > 1:
        return OF_EXPERTS
    return OF_LAYER if degrees.tensor > 1 and _IN_LAYER.search(name) else BLOCK


def cut_over(unit: str, degrees: Degrees) -> int:
    """Over how many processes FSDP cuts a unit."""
    return {
        BLOCK: degrees.weights,
        OF_LAYER: degrees.copy_size,
        OF_EXPERTS: degrees.expert_shard,
    }[unit]


def apart(unit: str, degrees: Degrees) -> int:
    """Ranks from one of these processes to the next, as `distributed/mesh.py` lays them out."""
    return {BLOCK: degrees.tensor, OF_LAYER: 1, OF_EXPERTS: degrees.expert}[unit]


def tokens_of_row(recipe: ResolvedTrainRecipe, degrees: Degrees) -> int:
    """A process's tokens of a row that context parallelism divides; padded where it does not."""
    if degrees.context == 1:
        return recipe.max_seq_len
    gathered = context_method(recipe.model, recipe.parallel, degrees) == "all_gather"
    pieces = 2 if gathered else 1  # from both ends of the row
    return -(-recipe.max_seq_len // (pieces * degrees.context)) * pieces


def seen_by_tokens(model: ResolvedModelConfig) -> int:
    """Values of what tensor parallelism gives each process whole, for its own tokens.

    Norms and positions. Biases of the second matrices are added to what all tokens gave, and layers
    with experts are cut by FSDP over these processes too.
    """
    return sum(
        count * parameter.numel()
        for module, count in parts(model)
        for name, parameter in module.named_parameters()
        if _OF_TOKENS.search(name)
    )


def values_of(name: str, shape: Sequence[int], degrees: Degrees) -> Values:
    """What a process has of a parameter of that name and shape."""
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    unit = unit_of(name, degrees)
    if unit == OF_EXPERTS:
        rows //= degrees.expert
    elif unit == BLOCK and tensor_parallel_dim(name) == 0:
        rows = -(-rows // degrees.tensor)
    elif unit == BLOCK and tensor_parallel_dim(name) == 1:
        row = -(-row // degrees.tensor)
    return Values(-(-rows // cut_over(unit, degrees)) * row, rows * row)
