"""Two processes of which one hangs, fails or is refused: the other ends too, and says why."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry.checkpoint.run_lock import LOCK
from llmfoundry.distributed.process_group import World
from llmfoundry.files import try_lock
from llmfoundry.train.signals import StopSignal
from llmfoundry.train.trainer import Trainer
from tests.tiny import ENV, ROOT, write_recipe

Hung = tuple[list[int | None], list[str], list[str], dict[str, Any]]
TARGETS = """
import time
from pathlib import Path
import torch, torch.distributed as dist
from llmfoundry.checkpoint import run_lock
from llmfoundry.errors import UserError, enough_memory
from llmfoundry.distributed import failures
from llmfoundry.distributed.process_group import join
from llmfoundry.distributed.mesh import build_mesh

def hang(recipe):
    run_lock._PATIENCE, failures._AFTER_TIMEOUT = 0.2, 3
    failures.keep_messages_in(Path(recipe.save_folder) / "hangs" / "messages")
    with join(recipe.parallel) as world:
        try:
            with run_lock.only_run(Path(recipe.save_folder), world, note=print):
                print("has it")
        except UserError as error:
            print(error, flush=True)
        group = build_mesh(recipe.parallel, world).root.get_group(0)
        if world.rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1), async_op=True)
        dist.all_reduce(torch.ones(1), group=group)

def run_out_of_memory(recipe):
    with join(recipe.parallel) as world:
        dist.all_reduce(torch.ones(1), async_op=True)
        if world.rank == 1:
            with enough_memory("device_train_microbatch_size: ran out of memory at 8; write 4"):
                torch.empty(2**45)
        dist.all_reduce(torch.ones(1))
"""
SCRIPT = """
import sys
from llmfoundry.cli.script import run
from llmfoundry.recipe.train import TrainRecipe
run(TrainRecipe, "targets:" + sys.argv[1], sys.argv[2:])
"""


def start(folder: Path, target: str, timeout: int) -> list[subprocess.Popen[str]]:
    """A function of TARGETS on two processes that have no launcher."""
    (folder / "targets.py").write_text(TARGETS)
    (folder / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(ROOT), str(folder)])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "PYTHONPATH": path}
    arguments = ["tiny.yaml", f"parallel.dist_timeout={timeout}"]
    return [
        subprocess.Popen(
            [sys.executable, "script.py", target, *arguments],
            cwd=folder,
            env=ENV | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Hung:
    """Of each rank: status, stdout, stderr, where the run's folder is locked and rank 1 hangs.

    And what rank 0's flight recorder had.
    """
    folder = tmp_path_factory.mktemp("hung")
    write_recipe(folder)
    (folder / "runs/tiny").mkdir(parents=True)
    with try_lock(folder / "runs/tiny" / LOCK, mode=0o644) or pytest.fail():
        ranks = start(folder, "hang", timeout=4)
        began = time.monotonic()
        out, err = ranks[0].communicate(timeout=200)
        assert time.monotonic() - began < 200  # PyTorch's own timeout is half an hour
    statuses = [ranks[0].returncode, ranks[1].poll()]
    ranks[1].kill()
    messages = pickle.loads((folder / "runs/tiny/hangs/messages/flight-0").read_bytes())
    said = ranks[1].communicate()
    return statuses, [out, said[0]], [err, said[1]], messages


def test_who_waits_for_a_hung_rank_names_it_and_the_key(
    hung: Hung,
) -> None:
    statuses, _, stderr, _ = hung
    assert statuses == [1, None]
    (line,) = (line for line in stderr[0].splitlines() if "dist_timeout" in line)
    assert line.startswith("parallel.dist_timeout: rank 1 did not come within 4 s")
    assert "Traceback" not in stderr[0]
    assert line.endswith("torchfrtrace --prefix flight- runs/tiny/hangs/messages")


def test_its_last_messages_are_there_for_pytorch_s_program(
    hung: Hung,
) -> None:
    messages = hung[3]
    assert messages["version"] and messages["pg_config"]
    newest = messages["entries"][-1]
    assert newest["profiling_name"] == "gloo:all_reduce" and newest["timeout_ms"] == 4000
    assert any("targets.py" in frame["filename"] for frame in newest["frames"])


def test_every_rank_learns_that_the_folder_is_in_use(
    hung: Hung,
) -> None:
    for said in hung[1]:
        assert "save_folder: runs/tiny is in use by" in said and "has it" not in said


@pytest.mark.slow
def test_one_rank_out_of_memory_ends_all_at_once(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    began = time.monotonic()
    ranks = start(tmp_path, "run_out_of_memory", timeout=600)
    said = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert time.monotonic() - began < 200
    assert [rank.returncode for rank in ranks] == [1, 2]
    key = "[rank 1] device_train_microbatch_size: ran out of memory at 8; write 4 (tried to"
    assert key in said[1]
    assert "rank 1 ended before the others" in said[0]


@pytest.mark.parametrize("error", [dist.DistBackendError("closed by peer"), RuntimeError("CUDA")])
def test_who_has_lost_another_does_not_wait_for_a_save_that_needs_it(error: Exception) -> None:
    """Of an error of its own it does: the others' saves wait for this one's part."""
    waited: list[str] = []

    def fail(interrupt_again: object) -> None:
        try:
            raise error
        except Exception as first:
            raise ValueError("in the step") from first

    parts = SimpleNamespace(
        checkpointer=SimpleNamespace(tidy=list, wait=lambda: waited.append("save"), saved=None),
        recipe=SimpleNamespace(eval_first=False),
        callbacks=[],
        _calling=lambda hook: (),
        batch=3,
        _fit=fail,
    )
    with pytest.raises(ValueError, match="in the step"):
        Trainer.fit(parts)  # type: ignore[arg-type]
    assert bool(waited) == (type(error) is RuntimeError)


def test_who_has_lost_another_says_so_before_its_launcher_ends_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        world = World(0, 2, 0, torch.device("cpu"))
        with pytest.raises(dist.DistBackendError), StopSignal(world):
            raise dist.DistBackendError("closed by peer")
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
