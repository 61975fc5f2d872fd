"""Matrix products of a step, and how long a GPU takes for each.

`seconds.py` asks it. The idea: a product is cut into tiles, which the GPU's multiprocessors compute
in waves; a last wave that is not full, and tiles that are smaller so that there are enough of them,
cost what large products do not. No number here is of a measured product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from llmfoundry.models.counts import EXPERTS
from llmfoundry.models.tensor_parallel import tensor_parallel_dim
from llmfoundry.plan.shards import BLOCK, unit_of
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.hardware import Gpu
from llmfoundry.recipe.parallel import Degrees

TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
"""Rows and columns of cuBLAS's tiles, and the share of the largest one's speed that each reaches:
smaller ones read more for each product (NVIDIA, Matrix Multiplication Background)."""


class Product(NamedTuple):
    """(rows, inner) times (inner, columns), so often side by side.

    Attributes:
        rows: of the first matrix: tokens, in the forward pass.
        columns: of the second.
        inner: of both.
        groups: such products in one call: experts.
    """

    rows: float
    columns: float
    inner: float
    groups: int = 1

    @property
    def flops(self) -> float:
        """A multiply-add is two."""
        return 2.0 * self.rows * self.columns * self.inner * self.groups

    def seconds(self, gpu: Gpu, *, flops: float, moved: float) -> float:
        """On a GPU whose fastest product reaches `flops` FLOP/s and that moves `moved` bytes/s."""
        waves = min(self._waves(gpu, *tile) for tile in TILES)
        values = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return max(waves * 2 * self.inner / flops, 2 * values * self.groups / moved)

    def _waves(self, gpu: Gpu, height: int, width: int, share: float) -> float:
        """Multiply-adds of an inner step that as many full waves of tiles would be."""
        tiles = self.groups * math.ceil(self.rows / height) * math.ceil(self.columns / width)
        waves = math.ceil(tiles / gpu.multiprocessors)
        return waves * gpu.multiprocessors * height * width / share

    def backward(self) -> tuple[Product, Product]:
        """What gives the gradients of the first matrix and of the second."""
        rows, columns, inner, groups = self
        return Product(rows, inner, columns, groups), Product(inner, columns, rows, groups)


def products(
    module: nn.Module, model: ModelConfig, degrees: Degrees, tokens: float
) -> Iterator[Product]:
    """Those of a block, or of the head, on one process in a forward pass over so many tokens.

    Args:
        module: on the meta device: one of `counts.parts`.
        model: filled.
        degrees: of the mesh: tensor parallelism divides the matrices, whose products then meet the
            tokens of all its processes; expert parallelism leaves rows evenly loaded as many.
        tokens: of this process, before tensor parallelism divides them.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim != 2 or name in ("wte.weight", "wpe.weight"):
            continue
        outputs, inputs = parameter.shape
        if EXPERTS in name:
            yield _expert(name, outputs, inputs, model, degrees, tokens)
            continue
        if unit_of(name, degrees) != BLOCK:  # beside experts each process has its own tokens
            yield Product(tokens / degrees.tensor, outputs, inputs)
            continue
        if tensor_parallel_dim(name) == 0:
            outputs = -(-outputs // degrees.tensor)
        elif tensor_parallel_dim(name) == 1:
            inputs = -(-inputs // degrees.tensor)
        yield Product(tokens, outputs, inputs)


def _expert(
    name: str, height: int, width: int, model: ModelConfig, degrees: Degrees, tokens: float
) -> Product:
    """Of a stack of experts (experts * hidden, d), each with its share of evenly loaded rows."""
    ffn = model.ffn_config
    assert ffn.moe_num_experts and ffn.moe_top_k, "the recipe was not filled"
    experts = ffn.moe_num_experts // degrees.expert
    rows = tokens / degrees.tensor * ffn.moe_top_k / experts
    hidden = height // ffn.moe_num_experts
    outputs, inputs = (width, hidden) if name.endswith("w2") else (hidden, width)
    return Product(rows, outputs, inputs, experts)


def head(model: ModelConfig, degrees: Degrees, tokens: float) -> Product:
    """The output head's, tied or not."""
    assert model.vocab_size is not None
    return Product(tokens, -(-model.vocab_size // degrees.tensor), model.d_model)
