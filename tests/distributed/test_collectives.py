"""Collectives: ranks whose machines differ decide alike, and all get what one made; gloo ranks."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from llmfoundry.builders.model import served_precision
from llmfoundry.builders.resume import check_same_recipe
from llmfoundry.builders.trainer import _memory_fit
from llmfoundry.distributed import collectives, process_group
from llmfoundry.distributed.collectives import (
    check_same_on_all_ranks,
    on_all_ranks,
    on_each_machine,
    on_rank0,
)
from llmfoundry.distributed.process_group import ALONE, World, join
from llmfoundry.errors import UserError
from llmfoundry.ops import devices
from llmfoundry.plan import microbatch_sizes
from llmfoundry.plan.memory import estimate
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.parallel import ParallelConfig
from llmfoundry.recipe.train import TrainRecipe
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
    recipe = recipe.resolve()
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
    free = int(estimate(recipe, SIZE).total(MEMORY[rank]) / microbatch_sizes.USABLE) + 8
    microbatch_sizes.available_memory = lambda device: SIZE * free  # type: ignore[assignment]
    devices.HAS_BF16 = rank != 2
    other = make_recipe()
    other.save_folder = f"/machine{rank}/runs"
    other.data.cache_folder, other.data.paths = f"cache{rank}", [f"/machine{rank}/text"]
    same = refusal(lambda: check_same_recipe(other, world))
    if rank:
        other.optimizer.lr = 1.0
    if rank == 2:
        other.eval_interval = "7ba"
    found = {
        "microbatch": _memory_fit(recipe, world, None)(recipe).microbatch,
        "precision": served_precision("amp_bf16", world, lambda line: None),
        "made": on_all_ranks(world, lambda: rank),
        "refused": refusal(lambda: on_all_ranks(world, lambda: refuse(*["x: no"] * (rank > 0)))),
        "two reasons": refusal(lambda: on_all_ranks(world, lambda: refuse(f"x: {rank}"))),
        "same recipe": same,
        "other recipe": refusal(lambda: check_same_recipe(other, world)),
        "alike": refusal(lambda: check_same_on_all_ranks(world, {"data": "a"}, advice="")),
        "more": refusal(
            lambda: check_same_on_all_ranks(world, {"b": ""} if rank == 1 else {}, advice="so")
        ),
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


N_RANKS = 4
MACHINES = "abac"  # of each rank


class TwoWordsError(Exception):
    """Cannot be made again from its pickle, as some of other libraries'."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def fails(error: Exception) -> Any:
    raise error


def message_of(action: Callable[[], Any]) -> list[str]:
    """The kind of an error, and its lines."""
    try:
        action()
    except UserError as error:
        return ["UserError", *error.problems]
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def share_work(rank: int, folder: str, port: str) -> None:
    """What each rank got, and how often it made something."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(N_RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    collectives.PIECE = 1000
    process_group._machine_name = lambda: f"node {MACHINES[rank]}"
    made: list[str] = []

    def make(what: str, value: Any) -> Callable[[], Any]:
        def made_here() -> Any:
            made.append(what)
            return value

        return made_here

    with join(ParallelConfig(dist_timeout=3)) as world:
        array = np.arange(1234)
        shared: dict[str, Any] = {
            "in pieces": bool((on_rank0(world, make("array", array)) == np.arange(1234)).all()),
            "nothing": on_rank0(world, make("nothing", None)),
            "machine": on_each_machine(world, make("machine", f"rank {rank}'s")),
            "group": world.machine is not None and world.machine.group is not None,
            "user": message_of(lambda: on_rank0(world, lambda: fails(UserError("x: no", "y: no")))),
            "odd": message_of(
                lambda: on_rank0(world, lambda: fails(TwoWordsError("not", "again")))
            ),
            "result": message_of(lambda: on_rank0(world, lambda: lambda: 0))[:1],
            "late": on_rank0(world, lambda: time.sleep(4) or "late", patient=True),
            "again": on_each_machine(world, make("again", rank), patient=True),
            "last": on_rank0(world, lambda: rank, patient=True),
        }
    (Path(folder) / str(rank)).write_text(json.dumps(shared | {"made": made}))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank shared."""
    folder = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    on_ranks(share_work, (str(folder), port), N_RANKS)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(N_RANKS)]


def test_one_makes_and_all_get(shared: list[dict[str, Any]]) -> None:
    assert all(one["in pieces"] and one["nothing"] is None for one in shared)
    assert [one["machine"] for one in shared] == ["rank 0's", "rank 1's", "rank 0's", "rank 3's"]
    assert [one["again"] for one in shared] == [0, 1, 0, 3]
    assert [one["group"] for one in shared] == [True, False, True, False]
    assert [one["made"] for one in shared] == [
        ["array", "nothing", "machine", "again"],
        ["machine", "again"],
        [],
        ["machine", "again"],
    ]


def test_what_fails_on_one_is_raised_by_all(shared: list[dict[str, Any]]) -> None:
    assert [one["user"] for one in shared] == [["UserError", "x: no", "y: no"]] * N_RANKS
    odd = ["RuntimeError", "TwoWordsError: not again"]
    assert [one["odd"] for one in shared[1:]] == [odd] * (N_RANKS - 1)
    assert shared[0]["odd"] == ["TwoWordsError", "not again"]  # its own, with its traceback
    assert shared[0]["result"] and shared[1]["result"] == shared[2]["result"] == shared[3]["result"]


def test_who_is_patient_waits_longer_than_dist_timeout(shared: list[dict[str, Any]]) -> None:
    assert [one["late"] for one in shared] == ["late"] * N_RANKS
    assert [one["last"] for one in shared] == [0] * N_RANKS


def test_who_is_alone_makes_it_itself() -> None:
    assert on_rank0(ALONE, lambda: 3) == on_each_machine(ALONE, lambda: 3) == 3
