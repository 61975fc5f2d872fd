"""Muon and adaptive clipping on shards: whole rows and matrices, wherever they lie."""

from __future__ import annotations

import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, distribute_tensor

from llmfoundry.distributed.fsdp import apply_ddp, materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import Batch, PackedLayout
from llmfoundry.ops.shard_layout import full_tensor
from llmfoundry.recipe.optimizer import GradientClippingConfig, OptimizerConfig, ParamGroupConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.train.optim.optimizers import build_optimizer, freeze
from llmfoundry.train.step import Guard, StepSettings, clip_adaptive, train_step
from tests.models.test_decoder import make_config
from tests.selection import slow_but
from tests.tiny import losses, run, write_recipe
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
GQA = {"attn_type": "grouped_query_attention", "kv_n_heads": 1, "rope": True}
LAYOUTS = {"fsdp-2": (1, 2), "hsdp-2x2": (2, 2)}  # degrees of replicas and of shards


def whole_weights(root: Root) -> dict[str, Tensor]:
    return {name: full_tensor(p.detach()).clone() for name, p in root.model.named_parameters()}


def follow(root: Root, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights after three steps with given gradients, and a fourth that is not to be taken."""
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for parameter in root.model.parameters():
            grad = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                where = (parameter.device_mesh, parameter.placements)
                grad = distribute_tensor(grad, *where, src_data_rank=None)
            parameter.grad = grad if parameter.requires_grad else None
        clip_adaptive([p for p in root.model.parameters() if p.requires_grad], 0.1, torch.ones(()))
        optimizer.found_inf = torch.tensor(float(number == 3))
        optimizer.step()
    optimizer.zero_grad()
    return whole_weights(root)


def train(rank: int, size: int, degrees: tuple[int, int], folder: str) -> None:
    """What `follow` gives, and then the losses of three real steps, into a file.

    Queries, keys and values have 18, 6 and 6 rows of 30: two shards of 15 rows cut across them.
    """
    world = World(rank, size, rank, CPU)
    layout = ParallelConfig(
        data_parallel_replicate_degree=degrees[0], data_parallel_shard_degree=degrees[1]
    )
    layout.fill()
    group = ParamGroupConfig(r"^blocks\.0\.", lr=2e-3)
    frozen = ["norm_1", "blocks.1.ffn.up_proj"]
    config = OptimizerConfig(
        "muon", lr=1e-3, weight_decay=0.1, param_groups=[group], disable_grad=frozen
    )
    config.fill()
    with torch.device("meta"):
        root = Root(Decoder(make_config(d_model=18, n_heads=3, attn_config=GQA)))
    freeze(root.model, config)
    mesh = build_mesh(layout, world)
    materialize(root, world, mesh, layout, precision="fp32")
    root.model.init_weights(3)
    module, optimizer = apply_ddp(root, mesh), build_optimizer(root.model, config)
    weights = follow(root, optimizer)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    mine = slice(rank * 4 // size, (rank + 1) * 4 // size)
    documents = PackedLayout.from_lengths([[16], [5, 11], [16], [8, 8]][mine])
    batch, guard, found = Batch(tokens[mine], tokens.roll(-1, 1)[mine], documents), Guard(CPU), []
    for number in range(3):
        result = train_step(
            module,
            optimizer,
            batch,
            StepSettings(
                microbatch=2, autocast=nullcontext, clipping=GradientClippingConfig("adaptive", 0.1)
            ),
            number=number,
            guard=guard,
        )
        found.append(result.loss.item())
    torch.save({"weights": weights, "losses": found}, Path(folder) / f"{rank}.pt")


def _join(rank: int, size: int, degrees: tuple[int, int], folder: str, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    train(rank, size, degrees, folder)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    train(0, 1, (1, 1), str(folder))
    return torch.load(folder / "0.pt")


@pytest.mark.parametrize("layout", slow_but(["fsdp-2"], LAYOUTS))
def test_steps_on_shards_are_those_of_one_process(
    layout: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    degrees = LAYOUTS[layout]
    size = degrees[0] * degrees[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_ranks(_join, (size, degrees, str(tmp_path), port), size)
    for rank in range(size):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, weight in alone["weights"].items():
            ours = found["weights"][name]
            if weight.ndim > 1:  # from the same gradients bit for bit
                assert torch.equal(ours, weight), name
            torch.testing.assert_close(ours, weight, rtol=1e-6, atol=1e-7, msg=name)
        assert found["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-6)


@pytest.mark.slow
def test_a_resumed_run_in_shards_is_the_whole_one_bit_for_bit(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    settings = ("optimizer=muon", "optimizer.lr=1e-3", "max_duration=4ba", "save_interval=2ba")
    shards = ("parallel.data_parallel_replicate_degree=1", "parallel.data_parallel_shard_degree=-1")
    common = ("tiny.yaml", "schedule.t_warmup=1ba", "eval=off", *settings, *shards)
    run("train.py", *common, "run_name=whole", cwd=tmp_path, processes=2)
    runs = tmp_path / "runs"
    saved = FileSystemReader(runs / "whole/checkpoints/ba0000002").read_metadata()
    assert "optimizer.state.blocks.0.attn.Wqkv.weight.momentum_buffer" in saved.state_dict_metadata
    assert "optimizer.state.wte.weight.exp_avg" in saved.state_dict_metadata
    shutil.copytree(runs / "whole", runs / "resumed")
    shutil.rmtree(runs / "resumed/checkpoints/ba0000004")
    run("train.py", *common, "run_name=resumed", cwd=tmp_path, processes=2)
    assert losses(runs / "resumed") == losses(runs / "whole")
