"""Whole runs on 2 and 4 gloo processes: started, sharded, resumed and restarted as users do it.

The matrix of layouts, step by step, is in test_matrix.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from llmfoundry.distributed.process_group import first_host, slurm_environment
from llmfoundry.errors import UserError
from llmfoundry.plan.fit import with_guessed_vocabulary
from llmfoundry.plan.memory import estimate
from llmfoundry.plan.microbatch_sizes import USABLE
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.parallel import Degrees, ParallelConfig
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import ENV, command, losses, run, write_recipe

REPLICATE, SHARD = "data_parallel_replicate_degree", "data_parallel_shard_degree"
LAYOUTS = {
    "fsdp-2": (2, 1, -1),
    "fsdp-4": (4, 1, -1),
    "hsdp-2x2": (4, 2, 2),
}
EIGHT_STEPS = ("max_duration=8ba", "schedule.t_warmup=1ba", "save_interval=4ba", "eval=off")
EXACT = 1e-6


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its run on one process, 8 steps, saved after 4."""
    folder = tmp_path_factory.mktemp("ranks")
    write_recipe(folder)
    run("train.py", "tiny.yaml", "run_name=alone", *EIGHT_STEPS, cwd=folder)
    return folder


def run_layout(folder: Path, layout: str, name: str, *overrides: str) -> dict[int, float]:
    processes, replicate, shard = LAYOUTS[layout]
    degrees = (f"parallel.{REPLICATE}={replicate}", f"parallel.{SHARD}={shard}")
    arguments = ("tiny.yaml", f"run_name={name}", *EIGHT_STEPS, *degrees, *overrides)
    run("train.py", *arguments, cwd=folder, processes=processes)
    return losses(folder / "runs" / name)


@pytest.mark.slow  # tests/train/spikes/test_runs.py has a run of four shards, the next an HSDP
def test_losses_equal_one_process(alone: Path) -> None:
    expected = losses(alone / "runs" / "alone")
    found = run_layout(alone, "fsdp-4", "sharded")
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=0, abs=EXACT)


@pytest.mark.slow  # the optimizer's own tests have its formula
def test_lion_in_shards_equals_lion_on_one_process(alone: Path) -> None:
    lion = ("optimizer.name=decoupled_lionw", "optimizer.lr=3e-4", "max_duration=4ba")
    run("train.py", "tiny.yaml", "run_name=lion", *EIGHT_STEPS, *lion, cwd=alone)
    found = run_layout(alone, "fsdp-2", "lion-sharded", *lion)
    # the sign of a mean near 0 may differ in a few elements
    assert found == pytest.approx(losses(alone / "runs" / "lion"), rel=0, abs=1e-4)


def grad_norms(run_folder: Path) -> list[float]:
    rows = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [row["l2_norm/grad/global"] for row in rows if "l2_norm/grad/global" in row]


def test_four_processes_continue_as_two_and_then_as_one(alone: Path) -> None:
    """Losses and norms after each change of the number of processes are the whole run's."""
    expected = losses(alone / "runs" / "alone")
    again = ("parallel.activation_checkpointing=true", "schedule.t_max=8ba")
    run_layout(alone, "hsdp-2x2", "shrinking", "max_duration=3ba", *again)
    run_layout(alone, "fsdp-2", "shrinking", "max_duration=6ba", "schedule.t_max=8ba")
    arguments = ("tiny.yaml", "run_name=shrinking", *EIGHT_STEPS)
    run("train.py", *arguments, cwd=alone)
    found = losses(alone / "runs" / "shrinking")
    assert sorted(found) == list(range(1, 9))
    assert found == pytest.approx(expected, rel=0, abs=EXACT)
    norms = [grad_norms(alone / "runs" / name) for name in ("shrinking", "alone")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.slow  # tests/checkpoint/test_kills.py has it, from any moment
def test_a_resume_on_the_same_processes_is_bit_for_bit(alone: Path) -> None:
    whole = run_layout(alone, "fsdp-2", "sharded-whole")
    folder = alone / "runs" / "sharded-resumed"
    shutil.copytree(alone / "runs" / "sharded-whole", folder)
    shutil.rmtree(folder / "checkpoints" / "ba0000008")
    assert run_layout(alone, "fsdp-2", "sharded-resumed") == whole


@pytest.mark.slow
def test_bf16_shards_stay_near_one_process(alone: Path) -> None:
    arguments = ("tiny.yaml", "run_name=bf16", *EIGHT_STEPS, "precision=amp_bf16")
    run("train.py", *arguments, cwd=alone)
    found = run_layout(alone, "fsdp-2", "bf16-sharded", "precision=amp_bf16")
    assert found == pytest.approx(losses(alone / "runs" / "bf16"), abs=0.03)


@pytest.mark.slow
def test_torchrun_restarts_after_a_process_died_and_the_losses_are_the_same(alone: Path) -> None:
    name, folder = "restarted", alone / "runs" / "restarted"
    arguments = ("tiny.yaml", f"run_name={name}", *EIGHT_STEPS, "max_duration=120ba")
    run("train.py", *arguments, "run_name=unharmed", cwd=alone, processes=2)
    start = command("train.py", *arguments, processes=2)
    start.insert(start.index("--standalone"), "--max-restarts=1")
    agent = subprocess.Popen(
        start, cwd=alone, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "ba0000004" / "COMMIT").exists():
        assert agent.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    psutil.Process(agent.pid).children()[1].kill()
    said = agent.communicate(timeout=200)[0]
    assert agent.returncode == 0, said[-3000:]
    assert "resuming from" in said
    assert losses(folder) == losses(alone / "runs" / "unharmed")


@pytest.mark.slow  # tests/test_processes.py kills such a run
def test_the_script_starts_its_own_processes(alone: Path) -> None:
    arguments = ("tiny.yaml", "run_name=own", *EIGHT_STEPS, "parallel.nproc_per_node=2")
    done = run("train.py", *arguments, cwd=alone)
    assert "2 x CPU" in done.stdout
    expected = losses(alone / "runs" / "alone")
    assert losses(alone / "runs" / "own") == pytest.approx(expected, rel=0, abs=EXACT)


@pytest.mark.slow  # tests/distributed/test_collectives.py has the decision
def test_processes_of_different_memory_train_alike(alone: Path) -> None:
    """Rank 0 has room for four rows at a time, rank 1 for one: on their own they would hang."""
    words = ("global_train_batch_size=16", "device_train_microbatch_size=auto", "eval=off")
    shards = (f"parallel.{REPLICATE}=1", f"parallel.{SHARD}=2", "parallel.dist_timeout=30")
    recipe = checked(TrainRecipe, alone / "tiny.yaml", [*words, *shards])
    recipe = recipe.resolve()
    need = estimate(with_guessed_vocabulary(recipe), 2)
    free = [2 * int(need.total(rows) / USABLE) + 2**10 for rows in (4, 1)]
    (alone / "memory.py").write_text(
        "import os\nfrom llmfoundry.plan import microbatch_sizes\n"
        f"microbatch_sizes.available_memory = lambda device: {free}[int(os.environ['RANK'])]\n"
    )
    short = ("tiny.yaml", "max_duration=3ba", "schedule.t_warmup=1ba", *words)
    done = run(
        "train.py",
        *short,
        *shards,
        "run_name=memory",
        "plugins=[./memory.py]",
        cwd=alone,
        processes=2,
    )
    assert "2 x CPU, fp32, microbatch 1" in done.stdout
    run("train.py", *short, "run_name=one-memory", cwd=alone)
    expected = losses(alone / "runs" / "one-memory")
    assert losses(alone / "runs" / "memory") == pytest.approx(expected, rel=0, abs=EXACT)


def test_degrees_that_do_not_fit_name_their_key() -> None:
    with pytest.raises(UserError, match=r"^parallel.data_parallel_shard_degree: 3 .*; write 2 or"):
        ParallelConfig(data_parallel_shard_degree=3).degrees(4)
    assert ParallelConfig(data_parallel_shard_degree=2).degrees(4) == Degrees(2, 2)
    config = ParallelConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=-1)
    assert config.degrees(8) == Degrees(2, 4)


@pytest.mark.parametrize(
    ("node", "world", "replicate", "shard", "expert"),
    [("", 512, 4, -1, 8), ("8", 128, 1, 128, 8), ("4", 128, 1, -1, 4), ("8", 12, 1, -1, 4),
     ("72", 144, 2, 72, 72), ("8", 1, 1, 1, 1)],
)  # fmt: skip
def test_experts_stay_within_a_node_unless_a_degree_is_written(
    monkeypatch: pytest.MonkeyPatch, node: str, world: int, replicate: int, shard: int, expert: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", node or "0")
    config = ParallelConfig(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        expert_parallel_degree=-1,
    )
    assert not [*config.check()]
    assert config.degrees(world).expert == expert
    config.expert_parallel_degree = expert
    assert config.degrees(world).expert == expert


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu[03-05,09]", "gpu03"),
        ("gpu[03-05,9],x", "gpu03"),
        ("a1,a2", "a1"),
        ("n-7", "n-7"),
        ("host", "host"),
        ("x,y[1-2]", "x"),
        ("[1-3]", "1"),
        ("n[001,003-004]", "n001"),
        ("n[099-101]", "n099"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("a[1-2]0[3-4],b", "a103"),
        ("r[1,4]-ib", "r1-ib"),  # a suffix, which scontrol 22.05 refuses to read
        ("a[1-2]b[3,5-6]c,d[7]", "a1b3c"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    """All but the last two are the first lines of `scontrol show hostnames` (Slurm 22.05.8)."""
    assert first_host(nodelist) == host


def test_a_slurm_step_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm_environment() == {}
    facts = {
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[03-04]",
        "SLURM_JOB_ID": "20123",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
        "SLURM_NODEID": "1",
    }
    for key, value in facts.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert slurm_environment() == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "20123",
    }
    monkeypatch.setenv("SLURM_NODEID", "2")
    assert slurm_environment()["LOCAL_WORLD_SIZE"] == "4"
    monkeypatch.delenv("SLURM_STEP_TASKS_PER_NODE")
    assert "LOCAL_WORLD_SIZE" not in slurm_environment()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_first_losses_on_a_gpu_are_those_of_a_cpu(alone: Path) -> None:
    run("train.py", "tiny.yaml", "run_name=gpu", *EIGHT_STEPS, cwd=alone)
    expected = losses(alone / "runs" / "alone")
    assert losses(alone / "runs" / "gpu") == pytest.approx(expected, rel=0, abs=1e-3)
