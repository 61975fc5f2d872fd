"""The loop: a step's draws are its own, and nothing piles up from step to step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.train.trainer import Trainer
from tests.tiny import losses, write_recipe
from tests.train.here import train_here

DROPOUT = ("model.resid_pdrop=0.2", "model.attn_config.attn_pdrop=0.1", "max_duration=8ba")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml and a run with dropout, saved after 4 and 8 batches."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trainer")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("whole", *DROPOUT, "eval=off")
        yield folder


def test_dropout_is_repeated_after_a_resume(place: Path) -> None:
    shutil.copytree("runs/whole", "runs/resumed")
    shutil.rmtree("runs/resumed/checkpoints/ba0000008")
    train_here("resumed", *DROPOUT, "eval=off")
    assert losses(Path("runs/resumed")) == losses(Path("runs/whole"))


def test_neither_checkpointing_nor_evaluation_nor_samples_change_a_draw(place: Path) -> None:
    others = (
        "parallel.activation_checkpointing=true",
        "eval_interval=3ba",
        "callbacks.generate.prompts=[line]",
        "callbacks.generate.interval=2ba",
        "callbacks.generate.max_new_tokens=2",
    )
    train_here("watched", *DROPOUT, *others)
    assert losses(Path("runs/watched")) == losses(Path("runs/whole"))


def test_samples_of_a_prompt_differ_at_each_place_and_time_and_not_by_a_resume(place: Path) -> None:
    """An untrained model's draws are its noise: of one seed they would all be one text."""
    samples = (
        "callbacks.generate.prompts=[line,line]",
        "callbacks.generate.interval=2ba",
        "callbacks.generate.max_new_tokens=16",
        "max_duration=8ba",
        "optimizer.lr=1e-9",
        "eval=off",
    )
    train_here("drawn", *samples)
    record = Path("runs/drawn/samples.jsonl")
    before = record.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in before]
    assert len(texts) == 8 and len(set(texts)) == 8
    shutil.rmtree("runs/drawn/checkpoints/ba0000008")
    train_here("drawn", *samples)
    assert record.read_text().splitlines() == before


def test_dropout_differs_from_step_to_step_and_from_none(place: Path) -> None:
    train_here("none", "max_duration=8ba", "eval=off")
    plain, dropped = losses(Path("runs/none")), losses(Path("runs/whole"))
    assert all(plain[batch] != dropped[batch] for batch in plain)
    train_here("seeded", *DROPOUT, "eval=off", "seed=18")
    assert losses(Path("runs/seeded")) != dropped


def test_dropout_falls_elsewhere_on_other_tokens_and_alike_beside_them() -> None:
    """Processes with the same tokens, those of a tensor group, must drop the same elements."""
    cpu = torch.device("cpu")

    def draws(world: World, batch: int = 3) -> list[float]:
        with torch.random.fork_rng():
            shared = world.in_evaluation().data_rank
            run: Any = SimpleNamespace(
                recipe=TrainRecipe(), batch=batch, world=world, _seed_rank=shared
            )
            Trainer._seed(run)
            return torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()

    ranks = [draws(World(rank, 4, rank, cpu)) for rank in range(4)]
    assert all(a != b for a, b in combinations(ranks, 2))
    assert ranks[0] == draws(World(0, 4, 0, cpu)) != draws(World(0, 4, 0, cpu), batch=4)
    for rank in range(4):
        mesh: Any = SimpleNamespace(get_local_rank=lambda rank=rank: rank // 2)
        beside = World(rank, 4, rank, cpu, data_mesh=mesh, token_mesh=mesh)
        assert draws(beside) == ranks[rank // 2]
        sharing_rows = World(rank, 4, rank, cpu, data_mesh=mesh)  # as context_parallel_degree: 2
        assert draws(sharing_rows) == ranks[rank]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its queue is empty once CUDA is up")
def test_seeding_leaves_nothing_behind_for_a_gpu_that_never_comes(place: Path) -> None:
    before = len(torch.cuda._queued_calls)
    train_here("queue", "max_duration=5ba", "eval=off")
    assert len(torch.cuda._queued_calls) == before


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (
            "llmfoundry.train.trainer.train_step",
            r"^device_train_microbatch_size: step 1 ran out of memory at 1; write a smaller model,"
            r" or parallel.activation_checkpointing=true \(tried to allocate \d+ bytes\)$",
        ),
        (
            "llmfoundry.builders.evaluation.validate",
            r"^device_eval_batch_size: the evaluation ran out of memory at 4; write 2 \(tried",
        ),
        (
            "llmfoundry.builders.trainer.parallelize",
            r"^model: its weights ran out of memory; .* \(",
        ),
    ],
)
def test_out_of_memory_names_the_key_and_its_value(
    place: Path, monkeypatch: pytest.MonkeyPatch, where: str, line: str
) -> None:
    """With the error that PyTorch raises of an allocation that no machine can make."""
    monkeypatch.setattr(where, lambda *_, **__: torch.empty(2**45))
    with pytest.raises(UserError, match=line):
        train_here(where, "device_train_microbatch_size=4", "eval_first=true", "max_duration=2ba")
