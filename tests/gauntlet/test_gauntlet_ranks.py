"""Scores on real processes: FSDP and DDP over gloo give the single process's."""

from __future__ import annotations

import dataclasses
import json
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from llmfoundry.gauntlet.models.own_decoder import score_requests
from llmfoundry.gauntlet.questions import ScoreRequest
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.recipe.model import ModelConfig
from tests.warm_scripts import on_ranks


def requests() -> list[ScoreRequest]:
    """70 questions of three choices after a shared beginning, 2,000 tokens and more."""
    rng = random.Random(0)
    found = []
    for _ in range(70):
        question = (0, 1, 2, 3, *(rng.randrange(257) for _ in range(rng.randint(5, 30))))
        for _ in range(3):
            answer = tuple(rng.randrange(257) for _ in range(rng.randint(1, 6)))
            found.append(ScoreRequest((*question, *answer[:-1]), answer, ""))
    return found


def score(root: nn.Module, rank: int = 0, world_size: int = 1) -> list[dict[str, Any]]:
    scores = score_requests(
        root,
        requests(),
        seq_len=64,
        eos_id=0,
        device=torch.device("cpu"),
        batch_tokens=512,
        autocast=nullcontext,
        data_rank=rank,
        data_size=world_size,
    )
    return [dataclasses.asdict(each) for each in scores]


def tiny_root() -> Root:
    config = ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=257, max_seq_len=64)
    config = config.resolve(max_seq_len=64)
    model = Decoder(config)
    model.init_weights(seed=1)
    return Root(model)


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    found = {"DDP": score(nn.parallel.DistributedDataParallel(tiny_root()), rank, 2)}
    root = tiny_root()
    for block in root.model.blocks:
        fully_shard(block)
    found["FSDP"] = score(fully_shard(root), rank, 2)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_processes_give_the_scores_of_one(tmp_path: Path) -> None:
    expected = score(tiny_root())
    on_ranks(work, (tmp_path,), 2)
    answers = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert answers[0] == answers[1]
    for found in answers[0].values():
        for a, b in zip(found, expected, strict=True):
            assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-4)
            assert a["best_logprob"] == pytest.approx(b["best_logprob"], abs=1e-4)
            assert (a["greedy"], a["tied"]) == (b["greedy"], b["tied"])
