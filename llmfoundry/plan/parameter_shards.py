"""Number of parameter values on one rank, for any combination of parallel degrees.

Entry points: `shares`, `unit_of` and `values_of`, for `memory.py` and `communication.py`. Tensor
parallelism shards the matrices of dense layers, and expert parallelism the experts. FSDP then
shards the rest evenly along the first dimension, over the ranks that hold the same values
(`distributed/fsdp.py`).
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

REDUCED = 4  # bytes per value of a gradient that is being reduced, in fp32
_OF_TOKENS = re.compile(r"(^|\.)(wpe|norm_\w+|[qk]_ln|(q|kv)_a_ln|W(q|kv)_a)\.(weight|bias)$")
"""Parameters that every tensor-parallel rank holds in full and applies to its tokens."""
_IN_LAYER = re.compile(r"ffn\.(router|shared|experts)\.")
"""Parameters of a layer with experts, which tensor parallelism does not shard."""
BLOCK, OF_LAYER, OF_EXPERTS = "block", "layer with experts", "experts"
"""Units that FSDP gathers: a block; under tensor parallelism a layer with experts is a separate
unit, and under expert parallelism the experts of a layer are."""


class Values(NamedTuple):
    """Number of values (or bytes) of some parameters on one rank.

    Attributes:
        shard: values that the rank keeps (the maximum over ranks).
        gathered: values while they are gathered for compute.
    """

    shard: int = 0
    gathered: int = 0

    def plus(self, other: Values) -> Values:
        """Return the sum."""
        return Values(self.shard + other.shard, self.gathered + other.gathered)

    def times(self, count: int) -> Values:
        """Return the values of `count` equal sets of parameters."""
        return Values(self.shard * count, self.gathered * count)


def total(values: Iterable[Values]) -> Values:
    """Return the sum of several values."""
    result = Values()
    for one in values:
        result = result.plus(one)
    return result


class Unit(NamedTuple):
    """FSDP unit of each block.

    Attributes:
        processes: number of ranks that share it.
        apart: stride between these ranks.
        all: values in all blocks.
        block: values in the largest block.
    """

    processes: int
    apart: int
    all: Values
    block: Values


class ParameterShards(NamedTuple):
    """Values of a model on one rank.

    Attributes:
        ends: embeddings, final norm and head.
        head: output head, which may be the embedding.
        units: FSDP units of the blocks; the first one is the block itself.
    """

    ends: Values
    head: Values
    units: tuple[Unit, ...]

    @property
    def blocks(self) -> Values:
        """Values of all blocks."""
        return total(unit.all for unit in self.units)

    @property
    def all(self) -> Values:
        """Values of the model."""
        return self.ends.plus(self.blocks)


def shares(model: ResolvedModelConfig, degrees: Degrees) -> ParameterShards:
    """Return the values of a model on one rank, from a cache: a plan requests them often."""
    key = repr((model, degrees))
    if key not in _SHARES:
        if len(_SHARES) >= MOST_SHARES:
            _SHARES.clear()
        _SHARES[key] = _shares(model, degrees)
    return _SHARES[key]


_SHARES: dict[str, ParameterShards] = {}
MOST_SHARES = 1000  # models and degrees in the cache


def _shares(model: ResolvedModelConfig, degrees: Degrees) -> ParameterShards:
    (bare, _), *blocks = parts(model)
    each = [(by_unit(block.named_parameters(), degrees), count) for block, count in blocks]
    # by size: the first blocks of a mixture may have no experts, and then fewer units
    each.sort(key=lambda one: total(one[0].values()).gathered, reverse=True)
    largest = {unit: values for by_unit_of_block, _ in reversed(each)
               for unit, values in by_unit_of_block.items()}  # fmt: skip
    units = tuple(
        Unit(
            cut_over(unit, degrees),
            apart(unit, degrees),
            total(by_unit_of_block.get(unit, Values()).times(n) for by_unit_of_block, n in each),
            largest[unit],
        )
        for unit in (BLOCK, OF_LAYER, OF_EXPERTS)
        if unit in largest
    )
    head = bare.head_weight
    assert isinstance(head, Tensor)
    return ParameterShards(
        ends=total(values_of(name, p.shape, degrees) for name, p in bare.named_parameters()),
        head=values_of("lm_head.weight", head.shape, degrees),
        units=units,
    )


def by_unit(named: Iterable[tuple[str, Tensor]], degrees: Degrees) -> dict[str, Values]:
    """Return the values of a block's parameters on one rank, by FSDP unit."""
    units = {BLOCK: Values()}
    for name, parameter in named:
        unit, values = unit_of(name, degrees), values_of(name, parameter.shape, degrees)
        units[unit] = units.get(unit, Values()).plus(values)
    return units


def unit_of(name: str, degrees: Degrees) -> str:
    """Return the FSDP unit that a parameter of a block belongs to."""
    if EXPERTS in name and degrees.expert > 1:
        return OF_EXPERTS
    return OF_LAYER if degrees.tensor > 1 and _IN_LAYER.search(name) else BLOCK


def cut_over(unit: str, degrees: Degrees) -> int:
    """Return the number of ranks that FSDP shards a unit over."""
    return {
        BLOCK: degrees.weights,
        OF_LAYER: degrees.copy_size,
        OF_EXPERTS: degrees.expert_shard,
    }[unit]


def apart(unit: str, degrees: Degrees) -> int:
    """Return the stride between these ranks in the mesh (`distributed/mesh.py`)."""
    return {BLOCK: degrees.tensor, OF_LAYER: 1, OF_EXPERTS: degrees.expert}[unit]


def tokens_of_row(recipe: ResolvedTrainRecipe, degrees: Degrees) -> int:
    """Return the tokens of a sequence on one rank, padded for context parallelism."""
    if degrees.context == 1:
        return recipe.max_seq_len
    gathered = context_method(recipe.model, recipe.parallel, degrees) == "all_gather"
    pieces = 2 if gathered else 1  # from both ends of the row
    return -(-recipe.max_seq_len // (pieces * degrees.context)) * pieces


def seen_by_tokens(model: ResolvedModelConfig) -> int:
    """Return the number of values that tensor-parallel ranks hold in full, for their own tokens.

    These are norms, positions and projections to latent vectors. Biases of row-parallel matrices
    are not included: they are added to the output of all tokens. Layers with experts are not
    included either: FSDP shards them over the tensor-parallel ranks too.
    """
    return sum(
        count * parameter.numel()
        for module, count in parts(model)
        for name, parameter in module.named_parameters()
        if is_of_tokens(name)
    )


def is_of_tokens(name: str) -> bool:
    """Return whether tensor-parallel ranks apply a parameter to their own tokens only."""
    return _OF_TOKENS.search(name) is not None


def values_of(name: str, shape: Sequence[int], degrees: Degrees) -> Values:
    """Return the values of a parameter on one rank."""
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    unit = unit_of(name, degrees)
    if unit == OF_EXPERTS:
        rows //= degrees.expert
    elif unit == BLOCK and tensor_parallel_dim(name) == 0:
        rows = -(-rows // degrees.tensor)
    elif unit == BLOCK and tensor_parallel_dim(name) == 1:
        row = -(-row // degrees.tensor)
    return Values(-(-rows // cut_over(unit, degrees)) * row, rows * row)
