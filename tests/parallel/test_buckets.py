"""Gradients of replicas are added up in one order, in a process's first step as in its later ones.

On four gloo processes: of two numbers the sum does not depend on the order, of four it does.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.parallel.launch import World
from llmfoundry.parallel.mesh import build_mesh
from llmfoundry.parallel.sharding import gradient_sync, replicate
from llmfoundry.recipe.parallel import ParallelConfig
from tests.models.test_decoder import make_config
from tests.parallel.test_matrix import CPU, global_batch
from tests.warm_scripts import on_ranks

SIZE, STEPS = 4, 3


def work(rank: int, folder: Path) -> None:
    """One process's gradients of the same rows, step after step without an update."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SIZE)
    config = ParallelConfig(data_parallel_replicate_degree=SIZE)
    config.fill()
    root = Root(Decoder(make_config(n_layers=2)))
    root.model.init_weights(5)
    module = replicate(root, build_mesh(config, World(rank, SIZE, rank, CPU)))
    assert all(p.grad is None for p in root.parameters())
    rows = global_batch(0).tokens[rank : rank + 1]
    found = list[torch.Tensor]()
    for _ in range(STEPS):
        root.zero_grad()
        with gradient_sync(module, last=True):
            module(rows, None, lambda model, hidden: model.head(hidden).square().mean()).backward()
        found.append(torch.cat([p.grad.flatten() for p in root.parameters() if p.grad is not None]))
    assert all(found[0].equal(other) for other in found[1:])
    alone = Root(Decoder(make_config(n_layers=2)))
    alone.model.init_weights(5)
    for other in range(SIZE):  # each loss is a process's own, of which DDP takes the mean
        rows = global_batch(0).tokens[other : other + 1]
        alone(rows, None, lambda model, hidden: model.head(hidden).square().mean()).backward()
    expected = torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None])
    torch.testing.assert_close(found[0], expected / SIZE)
    dist.destroy_process_group()


def test_the_first_step_of_a_process_is_rounded_like_its_later_ones(tmp_path: Path) -> None:
    on_ranks(work, (tmp_path,), SIZE)
