"""What a process of eight holds between microbatches and at most, on a fake process group.

Its collectives do nothing, so bytes are real and values are not. That values are right is in
`test_matrix.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmfoundry.assemble.job import weight_dtype
from llmfoundry.estimate.memory import MemoryEstimate, estimate
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.batch import Batch
from llmfoundry.parallel.blocks import wrap_blocks
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import build_mesh, materialize, on_mesh
from llmfoundry.recipe.optimizer import GradientClippingConfig
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.train.optimizers.optim import build_optimizer
from llmfoundry.train.step import Guard, train_step
from tests.live_bytes import LiveBytes
from tests.models.test_decoder import make_config

CPU = torch.device("cpu")
LAYERS, ROWS, LENGTH = 6, 3, 8


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield World(0, 8, 0, CPU)
    dist.destroy_process_group()


def make_recipe(shard: int, precision: str, each: bool | None) -> TrainRecipe:
    recipe = TrainRecipe(
        model=make_config(n_layers=LAYERS, d_model=64),
        max_seq_len=LENGTH,
        precision=precision,
        global_train_batch_size=8 * ROWS,
    )
    recipe.parallel.data_parallel_shard_degree = shard
    recipe.parallel.reduce_scatter_each_microbatch = each
    recipe.parallel.activation_checkpointing = True
    recipe.fill()
    return recipe


def take_step(recipe: TrainRecipe, world: World) -> tuple[list[int], int]:
    """Bytes that a step of one row at a time has made and keeps between two, and the most ever."""
    mesh = build_mesh(recipe.parallel, world)
    world = on_mesh(world, mesh)
    with torch.device("meta"):
        root = Root(Decoder(recipe.model)).to(weight_dtype(recipe.precision))
    wrap_blocks(root, checkpointing=True, compile_mode=None)
    materialize(root, world, mesh, recipe.parallel, precision=recipe.precision)
    root.model.init_weights(5)
    live, held = LiveBytes(), list[int]()
    root.register_forward_pre_hook(lambda *_: held.append(live.now()), prepend=True)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    with live:
        train_step(
            root,
            build_optimizer(root.model, recipe.optimizer),
            Batch(tokens, tokens, None),
            number=0,
            microbatch=1,
            autocast=nullcontext,
            clipping=GradientClippingConfig("norm", 1.0),
            guard=Guard(CPU),
            data_group=world.data_group,
            reduce_scatter_each=bool(recipe.parallel.reduce_scatter_each_microbatch),
        )
    return [after - held[0] for after in held[1:]], live.most


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shard", [8, 4], ids=["fsdp", "hsdp"])
def test_gradients_between_microbatches_are_those_of_the_estimate(
    world: World, shard: int, precision: str
) -> None:
    """A shard's in fp32 unless the recipe says otherwise; then the whole model's."""
    width = 2 if precision == "bf16" else 4  # of the shard's gradients that `weights` counts
    for each, divisor in ((None, shard), (False, 1)):
        recipe = make_recipe(shard, precision, each)
        need = estimate(recipe, 8)
        held, _ = take_step(recipe, world)
        assert held == [pytest.approx(4 * need.parameters / divisor, rel=1e-3)] * (ROWS - 1)
        counted = need.accumulated + width * need.parameters // shard
        assert counted == pytest.approx(held[0], rel=1e-3)


def test_the_most_that_a_step_holds_grows_by_what_the_estimate_says(world: World) -> None:
    found = dict[bool, tuple[int, MemoryEstimate]]()
    for each in (True, False):
        recipe = make_recipe(8, "fp32", each)
        found[each] = take_step(recipe, world)[1], estimate(recipe, 8)
    (few, safe), (most, waiting) = found[True], found[False]
    said = waiting.total(1) - safe.total(1)
    assert said == pytest.approx(3.5 * safe.parameters, rel=1e-3)
    block = 4 * safe.parameters / LAYERS  # or two, whose gradients are on their way
    assert said - 2 * block < most - few < said
    assert waiting.total(ROWS) == safe.total(ROWS), "one microbatch a step accumulates nothing"
