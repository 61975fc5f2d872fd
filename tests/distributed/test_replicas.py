"""Replicas add their gradients up in the first step of a process as in all later ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from llmfoundry.distributed import fsdp
from llmfoundry.distributed.fsdp import apply_ddp, materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.parallel import ParallelConfig
from tests.models.test_decoder import make_config
from tests.warm_scripts import on_ranks

RANKS = 4  # a sum of two is the same in either order
WIDE = {"d_model": 256, "n_heads": 4, "tie_word_embeddings": False}  # 8 MB: DDP's first bucket is 1


def test_gradients_of_a_processs_first_step_are_those_of_its_second_bit_for_bit(
    tmp_path: Path,
) -> None:
    """Or a resumed run's first step would differ from that of one that went on."""
    on_ranks(passes, (tmp_path,), RANKS)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"] and found["near"]
    assert found["buckets"][0] == found["buckets"][1] and len(found["buckets"][0]) > 1
    assert "model.lm_head.weight" in found["buckets"][0][0]  # sent while others are computed
    assert "model.wte.weight" in found["buckets"][0][-1]


def passes(rank: int, folder: Path) -> None:
    """Two forward and backward passes over the same rows."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    config = ParallelConfig(data_parallel_replicate_degree=RANKS)
    config.fill()
    world = World(rank, RANKS, rank, torch.device("cpu"))
    meshes = build_mesh(config, world)
    with torch.device("meta"):
        root = Root(Decoder(make_config(n_layers=2, **WIDE)))
    materialize(root, world, meshes, config, precision="fp32")
    root.model.init_weights(1)
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(rank))

    def gradients(module: torch.nn.Module) -> list[torch.Tensor]:
        module.zero_grad(set_to_none=True)
        module(tokens, None, lambda model, hidden: model.loss(hidden, tokens)).backward()
        return [p.grad.clone() for p in root.parameters() if p.grad is not None]

    mine = gradients(root)
    for grad in mine:
        dist.all_reduce(grad)
    module = apply_ddp(root, meshes)
    assert isinstance(module, DistributedDataParallel)
    names = {id(p): name for name, p in root.named_parameters()}
    sent: list[list[list[str]]] = []

    def note(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent[-1].append([names[id(p)] for p in bucket.parameters()])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0])

    module.register_comm_hook(None, lambda state, bucket: note(bucket))
    found = []
    for _ in range(2):
        sent.append([])
        found.append(gradients(module))
    if rank == 0:
        near = all(map(partial(torch.allclose, atol=1e-5), found[0], mine))
        facts = {"equal": all(map(torch.equal, *found)), "near": near, "buckets": sent}
        (folder / "found.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def test_bfloat16_gradients_have_the_same_mean_where_futures_ignore_streams(
    tmp_path: Path,
) -> None:
    on_ranks(means, (tmp_path,), 2)
    ways = json.loads((tmp_path / "means.json").read_text())
    assert ways[0] == ways[1] and len({*ways[0]}) > 1


def means(rank: int, folder: Path) -> None:
    """Gradients of bfloat16 replicas: as on a CPU, and as under gloo on a GPU."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    config, ways = ParallelConfig(data_parallel_replicate_degree=2), list[list[float]]()
    world = World(rank, 2, rank, torch.device("cpu"))
    meshes, tokens = build_mesh(config, world), torch.arange(8)[None] + 9 * rank
    for ignores in (False, True):
        with torch.device("meta"):
            root = Root(Decoder(make_config())).bfloat16()
        materialize(root, world, meshes, config, precision="bf16")
        root.model.init_weights(1)
        with mock.patch.object(fsdp, "_future_ignores_streams", lambda *_, on=ignores: on):
            module = apply_ddp(root, meshes)
            module(tokens, None, lambda model, hidden: model.loss(hidden, tokens)).backward()
        ways.append([p.grad.float().norm().item() for p in root.parameters() if p.grad is not None])
    if rank == 0:
        (folder / "means.json").write_text(json.dumps(ways))
    dist.destroy_process_group()
