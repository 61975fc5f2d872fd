"""Generation on two processes that hold half of each weight, or a copy."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry.distributed.fsdp import apply_ddp, materialize
from llmfoundry.distributed.mesh import build_mesh
from llmfoundry.distributed.process_group import World
from llmfoundry.inference.decoder_slots import DecoderSlots, first_process, stream_tokens
from llmfoundry.inference.engine import SlotEngine, draw_all
from llmfoundry.inference.requests import Sampling, SequenceRequest
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.parallel import ParallelConfig
from tests.hf.random_models import EOS, ROPE, settings
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
REQUESTS = [
    SequenceRequest((EOS, 3, 4), 12, Sampling(temperature=1.0, seed=4)),
    SequenceRequest((EOS, 5, 6, 7, 8), 9),
    SequenceRequest((EOS,), 5, Sampling(temperature=1.0, seed=5)),
]


def continued(module: torch.nn.Module, *, kv_cache: bool) -> list[list[int]]:
    given: dict[str, Any] = {"device": CPU, "autocast": nullcontext, "n_tokens": None}
    if not kv_cache:
        return [list(stream_tokens(module, request, **given)) for request in REQUESTS]
    rows = DecoderSlots(module, slots=2, length=20, **given)
    return draw_all(SlotEngine(rows, agree=first_process(CPU)), REQUESTS)


def _continue_on(rank: int, shard: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    config = ParallelConfig(data_parallel_shard_degree=shard)
    config.fill()
    world = World(rank, 2, rank, CPU)
    mesh = build_mesh(config, world)
    with torch.device("meta"):
        root = Root(Decoder(settings(attn=ROPE)))
    materialize(root, world, mesh, config, precision="fp32")
    root.model.init_weights(2)
    module = apply_ddp(root, mesh)
    found = [continued(module, kv_cache=kv_cache) for kv_cache in (True, False)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.parametrize("shard", [1, 2], ids=["ddp", "fsdp"])
def test_every_process_draws_what_one_alone_would(shard: int, tmp_path: Path) -> None:
    model = Decoder(settings(attn=ROPE))
    model.init_weights(2)
    expected = continued(Root(model), kv_cache=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_ranks(_continue_on, (shard, port, str(tmp_path)), 2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [expected, expected]
