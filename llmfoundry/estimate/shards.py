"""How many values of a model one process holds, of every degree of parallelism.

`memory.py` and `communication.py` ask it. Tensor parallelism divides the matrices of the dense
layers, expert parallelism the experts; what these leave is cut by FSDP into even parts along the
first dimension, those of the experts over other processes than those of all else
(`parallel/mesh.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from llmfoundry.models.counts import EXPERTS, parts
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.parallel import Degrees

_BY_OUTPUTS = re.compile(
    r"(^|\.)(wte|lm_head)\.weight$|attn\.W\w+\.(weight|bias)$|(up|gate)_proj\.(weight|bias)$"
)
"""What tensor parallelism divides along the first dimension."""
_BY_INPUTS = re.compile(r"(attn\.out_proj|ffn\.down_proj)\.weight$")
"""The same along the second."""


REDUCED = 4  # bytes of a gradient on its way to its shard: added up in fp32


class Values(NamedTuple):
    """Values of some parameters, or bytes, as one process has them.

    Attributes:
        shard: what the process keeps; of several the one with most.
        gathered: what there is of them while they are at work.
    """

    shard: int = 0
    gathered: int = 0

    def __add__(self, other: object) -> Values:
        """Those of both."""
        assert isinstance(other, Values)
        return Values(self.shard + other.shard, self.gathered + other.gathered)

    def __mul__(self, count: object) -> Values:
        """Those of so many alike."""
        assert isinstance(count, int)
        return Values(self.shard * count, self.gathered * count)


class Shares(NamedTuple):
    """What one process has of a model.

    Attributes:
        ends: embeddings, final norm and head.
        head: the output head, which may be the embedding.
        dense: all blocks without what routers choose from.
        experts: what routers choose from, of all blocks.
        block: of the largest block what is gathered beside its experts.
        block_experts: the experts of that block.
    """

    ends: Values
    head: Values
    dense: Values
    experts: Values
    block: Values
    block_experts: Values

    @property
    def all(self) -> Values:
        """Of the whole model."""
        return self.ends + self.dense + self.experts


def shares(model: ModelConfig, degrees: Degrees) -> Shares:
    """What a process has of a filled model."""
    (bare, _), *blocks = parts(model)
    each = [(*_block_values(block, degrees), count) for block, count in blocks]
    dense = total(values * count for values, _, count in each)
    experts = total(values * count for _, values, count in each)
    block, of_block, _ = max(each, key=lambda one: one[0].gathered + one[1].gathered)
    head = bare.head_weight
    assert isinstance(head, Tensor)
    return Shares(
        ends=total(values_of(name, p.shape, degrees) for name, p in bare.named_parameters()),
        head=values_of("lm_head.weight", head.shape, degrees),
        dense=dense,
        experts=experts,
        block=block,
        block_experts=of_block,
    )


def _block_values(block: nn.Module, degrees: Degrees) -> tuple[Values, Values]:
    """Of a block: what is no expert's, and the experts."""
    named = [(name, values_of(name, p.shape, degrees)) for name, p in block.named_parameters()]
    return (
        total(values for name, values in named if EXPERTS not in name),
        total(values for name, values in named if EXPERTS in name),
    )


def total(values: Iterable[Values]) -> Values:
    """Of several."""
    return sum(values, Values())


def values_of(name: str, shape: Sequence[int], degrees: Degrees) -> Values:
    """What a process has of a parameter of that name and shape."""
    rows, *rest = shape or [1]
    row = 1
    for width in rest:
        row *= width
    shards = degrees.weights
    if EXPERTS in name:
        if degrees.expert > 1:
            rows, shards = rows // degrees.expert, degrees.expert_shard
    elif _BY_OUTPUTS.search(name):
        rows = -(-rows // degrees.tensor)
    elif _BY_INPUTS.search(name):
        row = -(-row // degrees.tensor)
    return Values(-(-rows // shards) * row, rows * row)
