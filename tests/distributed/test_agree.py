"""Processes whose machines differ decide alike, or all refuse; on three gloo processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry.builders import trainer
from llmfoundry.builders.job import served_precision
from llmfoundry.builders.resume import check_same_recipe
from llmfoundry.builders.trainer import _memory_fit
from llmfoundry.distributed.collectives import check_alike, together
from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.ops import cpu_features
from llmfoundry.plan.memory import estimate
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.scripts.train import TrainRecipe
from tests.warm_scripts import on_ranks

CPU = torch.device("cpu")
SIZE = 3
MEMORY = (5, 2, 4)  # rows that fit on each rank


def make_recipe() -> TrainRecipe:
    """Rows of 64 tokens, of which a CPU would take all twelve of a process at once."""
    recipe = TrainRecipe(
        model=ModelConfig(d_model=64, n_heads=4, n_layers=4, vocab_size=64),
        max_seq_len=64,
        global_train_batch_size=12 * SIZE,
    )
    recipe.parallel.data_parallel_shard_degree = SIZE
    recipe.fill()
    return recipe


def refusal(action: Callable[[], Any]) -> list[str]:
    """What it says to the user; empty: it did not refuse."""
    try:
        action()
    except UserError as error:
        return list(error.problems)
    return []


def refuse(*lines: str) -> None:
    if lines:
        raise UserError(*lines)


def work(rank: int, folder: Path) -> None:
    """Each rank with a machine of its own."""
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SIZE)
    world, recipe = World(rank, SIZE, rank, CPU), make_recipe()
    free = int(estimate(recipe, SIZE).total(MEMORY[rank]) / 0.9) + 8
    trainer.available_memory = lambda device: SIZE * free  # type: ignore[assignment]
    cpu_features.HAS_BF16 = rank != 2
    other = make_recipe()
    other.save_folder = f"/machine{rank}/runs"
    other.data.cache_folder, other.data.paths = f"cache{rank}", [f"/machine{rank}/text"]
    same = refusal(lambda: check_same_recipe(other, world))
    if rank:
        other.optimizer.lr = 1.0
    if rank == 2:
        other.eval_interval = "7ba"
    found = {
        "microbatch": _memory_fit(recipe, world, None)(recipe, None).microbatch,
        "precision": served_precision("amp_bf16", world, lambda line: None),
        "made": together(world, lambda: rank),
        "refused": refusal(lambda: together(world, lambda: refuse(*["x: no"] * (rank > 0)))),
        "two reasons": refusal(lambda: together(world, lambda: refuse(f"x: {rank}"))),
        "same recipe": same,
        "other recipe": refusal(lambda: check_same_recipe(other, world)),
        "alike": refusal(lambda: check_alike(world, {"data": "a"}, advice="")),
        "more": refusal(lambda: check_alike(world, {"b": ""} if rank == 1 else {}, advice="so")),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found out."""
    folder = tmp_path_factory.mktemp("agree")
    on_ranks(work, (folder,), SIZE)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def test_all_take_the_microbatch_of_the_least_memory(found: list[dict[str, Any]]) -> None:
    assert [one["microbatch"] for one in found] == [min(MEMORY)] * SIZE


def test_all_compute_in_what_every_processor_can(found: list[dict[str, Any]]) -> None:
    assert {one["precision"] for one in found} == {"fp32"}


def test_what_one_machine_refuses_all_refuse_and_who_it_was_is_said(
    found: list[dict[str, Any]],
) -> None:
    assert [one["made"] for one in found] == [0, 1, 2]
    assert found[0]["refused"] == ["x: no (on ranks 1, 2)"]
    assert found[1]["refused"] == found[2]["refused"] == ["x: no"]
    assert [one["two reasons"] for one in found] == [["x: 0"], ["x: 1"], ["x: 2"]]


def test_recipes_that_differ_are_refused_by_their_keys_but_for_paths(
    found: list[dict[str, Any]],
) -> None:
    advice = "start every process with the same recipe and overrides"
    for one in found:
        assert one["same recipe"] == one["alike"] == []
        assert one["other recipe"] == [
            f"eval_interval: rank 2 found another value than rank 0; {advice}",
            f"optimizer.lr: ranks 1, 2 found another value than rank 0; {advice}",
        ]
        assert one["more"] == ["b: rank 1 found another value than rank 0; so"]
