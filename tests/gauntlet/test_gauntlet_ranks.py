"""The gauntlet on real processes: DDP over gloo gives the single process's result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gauntlet_stand_ins import ByteTokenizer, write_gauntlet
from torch import nn

from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.model import ModelConfig


def evaluate(path: Path, root: nn.Module, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    gauntlet = Gauntlet(path, ByteTokenizer(), seq_len=64, validation_texts=list)
    device = torch.device("cpu")
    result = gauntlet.run(root, device=device, batch_rows=2, rank=rank, world_size=world_size)
    return json.loads(json.dumps(result.to_json()))


def tiny_root() -> Root:
    config = ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=257, max_seq_len=64)
    config.fill(max_seq_len=64)
    model = Decoder(config)
    model.init_weights(seed=1)
    return Root(model)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    root = nn.parallel.DistributedDataParallel(tiny_root())
    result = evaluate(folder / "gauntlet.yaml", root, rank, 2)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    words = ["one", "two", "three", "four", "fourteen"]
    rows = [
        {"query": f"{i} is", "choices": [words[(i + j) % 5] for j in range(3)], "gold": i % 3}
        for i in range(23)
    ]
    path = write_gauntlet(
        tmp_path,
        {"words": rows},
        categories=[{"name": "one", "benchmarks": [{"name": "words", "num_fewshot": 0}]}],
    )
    expected = evaluate(path, tiny_root())
    assert expected["tasks"][0]["accuracy"] is not None
    mp.spawn(work, args=(tmp_path,), nprocs=2)
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == expected
