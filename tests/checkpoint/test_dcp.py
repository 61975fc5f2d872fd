"""The plan of a save is made once, and again when the state has another form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from llmfoundry.checkpoint.dcp import TensorFiles
from llmfoundry.checkpoint.save import Checkpointer, Contents, Reports, SavePolicy
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.distributed.process_group import World
from tests.warm_scripts import on_ranks

RANKS = 2
PLANS = {"_list": TensorFiles, "create_global_plan": DefaultSavePlanner}
"""Of a process's part, and of all: what makes them."""


@contextmanager
def counted() -> Iterator[list[str]]:
    """The plans that are made on this process meanwhile, by the names of their methods."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, maker in PLANS.items():
            real = getattr(maker, name)

            def count(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
                made.append(name)
                return real(self, *args)

            patch.setattr(maker, name, count)
        yield made


class Run:
    """A model that trains, and the writer of its checkpoints."""

    def __init__(self, folder: Path, world: World, *, wide: bool = False) -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
        if world.size > 1:
            fully_shard(self.model)
        if wide:
            self.model.double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.folder, self.world, self.batch = folder, world, 0
        self.saver = self.new_saver(folder)

    def new_saver(self, folder: Path, *, background: bool = True) -> Checkpointer:
        return Checkpointer(
            Storage(folder),
            self.world,
            Contents({"recipe.yaml": ""}, {}),
            SavePolicy(keep=-1, background=background, max_failures=9),
            Reports(lambda line: None),
        )

    def step(self) -> None:
        dtype = next(self.model.parameters()).dtype
        self.model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.batch += 1

    def save(self) -> list[str]:
        """Step and save; the plans that this process made, which must write what a new one does."""
        self.step()
        with counted() as made:
            folder = self.saver.save(self.batch, self.model, self.optimizer, {})
            self.saver.wait()
        anew = self.new_saver(self.folder / "anew", background=False)
        other = anew.save(self.batch, self.model, self.optimizer, {})
        self.saver.check()
        if self.world.is_main:
            assert contents(folder) == contents(other)
        return made


def contents(folder: Path) -> dict[str, Any]:
    """Every file, byte by byte; the order of entries in COMMIT does not matter."""
    found: dict[str, Any] = {f.name: f.read_bytes() for f in folder.iterdir()}
    return found | {"COMMIT": json.loads(found["COMMIT"])}


def saves(folder: Path, world: World) -> dict[str, list[str]]:
    """The plans that this process made for saves of a state that changes in each way."""
    run = Run(folder / "run", world)
    made = {"first": run.save(), "second": run.save()}
    run.optimizer.param_groups[0]["lr"] = 0.01  # as a schedule does
    made["another rate"] = run.save()
    run.optimizer.param_groups[0]["added"] = 1
    made["a key more"] = run.save()
    made["the same keys"] = run.save()
    run.optimizer.param_groups[0]["added"] = "x" * 500
    run.step()
    with counted() as found:
        longer = run.saver.save(run.batch, run.model, run.optimizer, {})
        run.saver.wait()
    made["a longer value"] = found
    if world.is_main:
        places = FileSystemReader(str(longer)).read_metadata().storage_data
        sizes = {f.name: f.stat().st_size for f in longer.iterdir()}
        for name in {place.relative_path for place in places.values()}:
            ends = [p.offset + p.length for p in places.values() if p.relative_path == name]
            assert max(ends) == sizes[name]
    made["the same again"] = run.save()
    wide = Run(folder / "wide", world, wide=True)
    wide.saver, run.saver = run.saver, wide.saver
    wide.batch = run.batch
    made["another dtype"] = wide.save()
    made["that dtype again"] = wide.save()
    return made


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    world = World(rank, RANKS, rank, torch.device("cpu"), timedelta(seconds=60))
    reported: dict[str, Any] = {"made": saves(folder / "forms", world)}
    run = Run(folder / "failing", world)
    real = TensorFiles._list
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def full(self: Any, planner: Any) -> Any:
                raise MemoryError("no room for the copies")

            patch.setattr(TensorFiles, "_list", full)
        run.step()
        run.saver.save(run.batch, run.model, run.optimizer, {})
        run.saver.wait()
        patch.setattr(TensorFiles, "_list", real)
        reported["after a failure"] = run.save()
    table = run.folder / f"checkpoints/ba{run.batch:07d}"
    reported["tensors"] = len(FileSystemReader(str(table)).read_metadata().storage_data)
    parameter = next(run.model.parameters())
    assert isinstance(parameter, DTensor)
    (folder / f"rank{rank}").write_text(json.dumps(reported))
    dist.barrier()
    dist.destroy_process_group()


PLANNED = {"first", "a key more", "another dtype"}


def check(made: dict[str, list[str]], plans: list[str]) -> None:
    assert {how for how, found in made.items() if found} == PLANNED
    for how in PLANNED:
        assert made[how] == plans, how


def test_one_process_plans_again_only_for_another_form(tmp_path: Path) -> None:
    check(saves(tmp_path, World(0, 1, 0, torch.device("cpu"))), list(PLANS))


def test_shards_are_planned_once_and_a_plan_that_failed_is_not_kept(tmp_path: Path) -> None:
    """In PyTorch's own cache, of 2.11, what follows a failure has no tensors in its table."""
    on_ranks(work, (tmp_path,), RANKS)
    reported = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(RANKS)]
    check(reported[0]["made"], list(PLANS))
    check(reported[1]["made"], list(PLANS)[:1])
    assert [one["after a failure"] for one in reported] == [list(PLANS)[1:], list(PLANS)[:1]]
    moments = 3 * 4 * RANKS + 4  # three tensors each of four parameters' shards, and their steps
    assert reported[0]["tensors"] == reported[1]["tensors"] > moments
