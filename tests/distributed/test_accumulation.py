"""Gradients of several microbatches: what a process holds of them, and that they are all there.

Of eight processes on a fake group, whose collectives do nothing: bytes are real, values are not.
Values, of a mixture of experts with every kind of clipping, are on gloo processes, and slow; those
of smaller models are in `test_matrix.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmfoundry.builders.model import weight_dtype
from llmfoundry.distributed.activation_checkpoint import wrap_blocks
from llmfoundry.distributed.fsdp import materialize
from llmfoundry.distributed.mesh import build_mesh, with_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.plan.memory import MemoryEstimate, estimate
from llmfoundry.plan.meter import LiveBytes
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.optimizer import GradientClippingConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import Guard, StepSettings, train_step
from tests.distributed.matrix import MICROBATCH, global_batch, share
from tests.distributed.matrix import ROWS as ALL_ROWS
from tests.models.test_decoder import make_config
from tests.tiny import activations
from tests.warm_scripts import on_ranks

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
    recipe = recipe.resolve()
    return recipe


def take_step(recipe: TrainRecipe, world: World) -> tuple[list[int], int]:
    """Bytes that a step of one row at a time has made and keeps between two, and the most ever."""
    mesh = build_mesh(recipe.parallel, world)
    world = with_mesh(world, mesh)
    with torch.device("meta"):
        root = Root(Decoder(recipe.model)).to(weight_dtype(recipe.precision))
    wrap_blocks(root, activations(root, True), compile_mode=None)
    materialize(root, world, mesh, recipe.parallel, precision=recipe.precision)
    root.model.init_weights(5)
    live, held = LiveBytes(), list[int]()
    root.register_forward_pre_hook(lambda *_: held.append(live.settled()), prepend=True)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    with live:
        train_step(
            root,
            build_optimizer(root.model, recipe.optimizer),
            Batch(tokens, tokens, None),
            StepSettings(
                microbatch=1,
                autocast=nullcontext,
                clipping=GradientClippingConfig("norm", 1.0),
                data_group=world.data_group,
                reduce_scatter_each=bool(recipe.parallel.reduce_scatter_each_microbatch),
            ),
            number=0,
            guard=Guard(CPU),
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


CLIPPINGS = {"norm": 0.5, "value": 1e-3, "adaptive": 0.01}
LAYOUTS = {"one": (1, 1), "fsdp-2": (1, 2), "fsdp-4": (1, 4), "hsdp-2x2": (2, 2)}


def dbrx_steps(layout: str, clipping: str, world: World) -> dict[str, Any]:
    """Losses and norms of four steps of DBRX's shape, and bytes kept between two microbatches."""
    replicate, shard = LAYOUTS[layout]
    recipe = checked(TrainRecipe, None, ["model=dbrx-tiny", "model.vocab_size=64"])
    # With less, AdamW makes a whole step of what rounding leaves of a gradient of 0: routers that
    # begin with nearly equal weights then choose others.
    recipe.max_seq_len, recipe.optimizer.lr, recipe.optimizer.eps = 16, 3e-3, 1e-4
    recipe.parallel.data_parallel_replicate_degree = replicate
    recipe.parallel.data_parallel_shard_degree = shard
    recipe = recipe.resolve()
    mesh = build_mesh(recipe.parallel, world)
    world = with_mesh(world, mesh)
    with torch.device("meta"):
        root = Root(Decoder(recipe.model))
    materialize(root, world, mesh, recipe.parallel, precision="fp32")
    root.model.init_weights(5)
    optimizer, guard = build_optimizer(root.model, recipe.optimizer), Guard(CPU)
    held, live = list[int](), LiveBytes()
    root.register_forward_pre_hook(lambda *_: held.append(live.settled()), prepend=True)
    losses, norms = [], []
    for step in range(4):
        with live if step == 3 else nullcontext():
            result = train_step(
                root,
                optimizer,
                share(global_batch(step), world),
                StepSettings(
                    microbatch=ALL_ROWS if world.size == 1 else MICROBATCH[world.size],
                    autocast=nullcontext,
                    clipping=GradientClippingConfig(clipping, CLIPPINGS[clipping]),
                    data_group=world.data_group,
                ),
                number=step,
                guard=guard,
            )
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    values = sum(p.numel() for p in root.parameters())
    return {"loss": losses, "norm": norms, "held": held[-1] - held[-2], "values": values}


def gloo_work(rank: int, size: int, folder: Path) -> None:
    """All layouts of so many processes, with each kind of clipping."""
    meeting = f"file://{folder}/meeting{size}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    found = {
        f"{layout} {clipping}": dbrx_steps(layout, clipping, World(rank, size, rank, CPU))
        for layout, (replicate, shard) in LAYOUTS.items()
        for clipping in CLIPPINGS
        if replicate * shard == size
    }
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_mixture_accumulates_in_shards_as_on_one_process(tmp_path: Path) -> None:
    """Two microbatches a step, the second smaller, of rows with 0 to 16 labels each."""
    on_ranks(gloo_work, (2, tmp_path), 2)
    on_ranks(gloo_work, (4, tmp_path), 4)
    for size in (2, 4):
        for name, found in json.loads((tmp_path / f"{size}.json").read_text()).items():
            layout, clipping = name.split()
            one = dbrx_steps("one", clipping, World(0, 1, 0, CPU))
            assert found["loss"] == pytest.approx(one["loss"], rel=1e-6), name
            assert found["norm"] == pytest.approx(one["norm"], rel=1e-6), name
            shard = LAYOUTS[layout][1]
            assert found["held"] == pytest.approx(4 * found["values"] / shard, rel=0.02), name
