"""Every layout of processes takes the steps of one process: losses, norms, weights.

Each number of processes is started once and runs all its layouts. Rows have very different numbers
of labels, one process has none at all, and no microbatch divides its rows; what they are compared
with is a plain loop over whole batches that shares nothing with `train_step`.
"""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from llmfoundry.assemble.job import weight_dtype
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.ops.layout import Layout
from llmfoundry.parallel.blocks import wrap_blocks
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import build_mesh, materialize, replicate
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.train.optimizer_monitor import OptimizerMonitor
from llmfoundry.train.optimizers.optim import build_optimizer
from llmfoundry.train.step import Guard, train_step
from tests.models.test_decoder import make_config

CPU = torch.device("cpu")
STEPS, ROWS, LENGTH, CLIP = 4, 12, 16, 0.5
MICROBATCH = {1: 5, 2: 4, 4: 2}  # of 12, 6 and 3 rows a process
LABELS = (16, 1, 9, 2, 16, 3, 0, 0, 0, 16, 5, 1)  # of each row; on 4 processes the third has none


@dataclass(frozen=True)
class Entry:
    """A layout of processes, and how its blocks are run."""

    processes: int
    replicate: int = 1
    shard: int = 1
    checkpointing: bool = False
    compiled: bool = False
    precision: str = "fp32"


ENTRIES = {
    "one": Entry(1),
    "one-checkpointing": Entry(1, checkpointing=True),
    "ddp-2": Entry(2, replicate=2),
    "fsdp-2": Entry(2, shard=2),
    "fsdp-2-checkpointing": Entry(2, shard=2, checkpointing=True),
    "ddp-2-compiled": Entry(2, replicate=2, compiled=True),
    "fsdp-2-compiled-checkpointing": Entry(2, shard=2, checkpointing=True, compiled=True),
    "ddp-4": Entry(4, replicate=4),
    "fsdp-4": Entry(4, shard=4),
    "hsdp-2x2": Entry(4, replicate=2, shard=2),
    "hsdp-2x2-checkpointing": Entry(4, replicate=2, shard=2, checkpointing=True),
}
LOW = {
    "one-bf16": Entry(1, precision="bf16"),
    "ddp-2-bf16": Entry(2, replicate=2, precision="bf16"),
    "fsdp-2-bf16": Entry(2, shard=2, precision="bf16"),
    "hsdp-2x2-bf16": Entry(4, replicate=2, shard=2, precision="bf16"),
}


def global_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (ROWS, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    for row, kept in enumerate(LABELS):
        labels[row, kept:] = IGNORE
    return Batch(
        tokens, labels, Layout.from_lengths([[1 + row, LENGTH - 1 - row] for row in range(ROWS)])
    )


def share(batch: Batch, world: World) -> Batch:
    """This process's rows."""
    return list(batch.split(ROWS // world.size))[world.rank]


def make_optimizer_config() -> OptimizerConfig:
    config = OptimizerConfig(name="adamw", lr=0.01, weight_decay=0.1)
    config.fill()
    return config


def take_steps(entry: Entry, world: World) -> dict[str, Any]:
    """Losses and gradient norms of each step, and all norms after the last."""
    config = ParallelConfig(
        data_parallel_replicate_degree=entry.replicate, data_parallel_shard_degree=entry.shard
    )
    config.fill()
    mesh = build_mesh(config, world)
    with torch.device("meta"):
        root = Root(Decoder(make_config(n_layers=2))).to(weight_dtype(entry.precision))
    mode = "default" if entry.compiled else None
    wrap_blocks(root, checkpointing=entry.checkpointing, compile_mode=mode)
    materialize(root, world, mesh, config, precision=entry.precision)
    root.model.init_weights(5)
    module = replicate(root, mesh)
    optimizer = build_optimizer(root.model, make_optimizer_config())
    monitor, trainer = OptimizerMonitor(), SimpleNamespace(root=root, optimizer=optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        result = train_step(
            module,
            optimizer,
            share(global_batch(step), world),
            number=step,
            microbatch=MICROBATCH[world.size],
            autocast=nullcontext,
            clipping=GradientClippingConfig("norm", CLIP),
            guard=Guard(CPU),
            on_gradients=partial(monitor.on_gradients, trainer),  # type: ignore[arg-type]
        )
        assert result.count == sum(LABELS)
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    metrics: dict[str, float] = {}
    monitor.on_log(trainer, metrics)  # type: ignore[arg-type]
    return {"loss": losses, "norm": norms, "metrics": metrics}


def work(rank: int, size: int, folder: Path) -> None:
    """All entries of so many processes."""
    torch.set_num_threads(1)
    if size > 1:
        meeting = f"file://{folder}/meeting{size}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    compile = torch.compile  # inductor would take a minute
    torch.compile = lambda f, *, mode: compile(f, backend="aot_eager")  # type: ignore[assignment]
    try:
        found = {
            name: take_steps(entry, World(rank, size, rank, CPU))
            for name, entry in (ENTRIES | LOW).items()
            if entry.processes == size
        }
    finally:
        torch.compile = compile
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every entry gave."""
    folder, results = tmp_path_factory.mktemp("matrix"), {}
    for size in (1, 2, 4):
        if size == 1:
            work(0, 1, folder)
        else:
            mp.spawn(work, args=(size, folder), nprocs=size)
        results |= json.loads((folder / f"{size}.json").read_text())
    return results


@cache
def plain() -> tuple[list[float], list[float], dict[str, float]]:
    """Losses, gradient norms, and the last weights' norms, of a loop as one would write it."""
    model = Decoder(make_config(n_layers=2))
    model.init_weights(5)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), foreach=False
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step)
        logits = model.head(model(batch.tokens, batch.layout))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return (
        losses,
        norms,
        {n: float(p.detach().double().norm()) for n, p in model.named_parameters()},
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_losses_norms_and_weights_are_those_of_a_plain_loop(
    found: dict[str, Any], name: str
) -> None:
    losses, norms, weights = plain()
    assert min(norms) > CLIP, "the bound must bind"
    assert found[name]["loss"] == pytest.approx(losses, rel=0, abs=1e-6)
    assert found[name]["norm"] == pytest.approx(norms, rel=1e-5)
    metrics = found[name]["metrics"]
    for parameter, norm in weights.items():
        assert metrics[f"l2_norm/param/{parameter}"] == pytest.approx(norm, rel=2e-3)
    gradients = [value for key, value in metrics.items() if key.startswith("l2_norm/grad/")]
    assert math.hypot(*gradients) == pytest.approx(norms[-1], rel=1e-5)
    one = found["one"]["metrics"]
    assert metrics == pytest.approx(one, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("name", LOW)
def test_bfloat16_weights_stay_near_fp32_on_every_layout(found: dict[str, Any], name: str) -> None:
    assert found[name]["loss"] == pytest.approx(plain()[0], abs=0.03)
    assert found[name]["loss"] != pytest.approx(plain()[0], abs=1e-5)
