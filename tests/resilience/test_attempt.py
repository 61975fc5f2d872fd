"""A launcher that does not end, and what Slurm's srun is given; more in `slurm/test_jobs.py`."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from llmfoundry.cli.commands.supervise import is_supervised, supervise
from llmfoundry.errors import UserError
from llmfoundry.exit_status import STOP_FILE, ResumeLimits, read_ranks, record_ranks
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.resilience.supervise import attempt, slurm_nodes
from llmfoundry.resilience.supervise.attempt import RunningAttempt
from llmfoundry.telemetry import beat_path


@pytest.mark.parametrize(("status", "ends"), [(1, True), (75, False), (0, False)])
def test_a_launcher_that_waits_for_a_dead_machine_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, ends: bool
) -> None:
    monkeypatch.setattr(attempt, "_ENDS_SECONDS", 0.0)
    monkeypatch.setattr(attempt, "_REMOTE_LAUNCHER_SECONDS", 0.0)
    folders = {"heartbeats": tmp_path / "beats", "ends": tmp_path / "ends"}
    running = RunningAttempt(["sleep", "1000"], is_local=False, limits=ResumeLimits(), **folders)
    said = {"rank": 0, "status": status, "kind": "lost", "time": 0.0, "node": "n1", "lines": []}
    (tmp_path / "ends/rank-0.json").write_text(json.dumps(said))
    looks = [running.poll() for _ in range(4)]
    assert looks[-1] is not ends
    running.kill()
    assert running.end() == -signal.SIGKILL


def test_a_stop_reaches_the_processes_that_torchrun_has_restarted(tmp_path: Path) -> None:
    """Only those: torchrun itself would give them 30 s, in which a save may not end."""
    folders = {"heartbeats": tmp_path / "beats", "ends": tmp_path / "ends"}
    running = RunningAttempt(["sleep", "1000"], is_local=False, limits=ResumeLimits(), **folders)
    rank_folder = tmp_path / "beats/run"
    rank_folder.mkdir()
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    beat = {"rank": 0, "step": 5, "phase": "step", "since": 1.0, "longest": {}, "saved": -1}
    for process in processes:  # the second replaces the first
        beat_path(rank_folder, 0).write_text(json.dumps({**beat, "pid": process.pid}))
        assert running.poll()
        if process is processes[0]:
            process.kill()
            process.wait()
    running.request_stop(signal.SIGINT)
    assert processes[1].wait(10) == -signal.SIGTERM
    assert running.poll() and (tmp_path / "beats" / STOP_FILE).exists()
    running.kill()
    assert running.end() == -signal.SIGKILL


def test_srun_counts_tasks_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with Slurm 22.05: more tasks than fit on the machines that are left are refused."""
    monkeypatch.setattr(slurm_nodes, "in_job", lambda: True)
    job = {"NTASKS": "16", "NPROCS": "16", "NNODES": "2", "NTASKS_PER_NODE": "8"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    env = slurm_nodes.step_environment()
    assert "SLURM_NTASKS" not in env and "SLURM_NPROCS" not in env
    assert env["SLURM_OVERLAP"] == "1" and env["SLURM_NTASKS_PER_NODE"] == "8"
    monkeypatch.setenv("SLURM_NTASKS", "10")  # asked for by itself
    assert slurm_nodes.step_environment()["SLURM_NTASKS"] == "10"


def test_who_is_on_which_machine_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first, node in ((0, "n1"), (2, "n2")):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        record_ranks(tmp_path, [first, first + 1])
    assert read_ranks(tmp_path) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}


def test_the_number_of_machines_is_known_in_a_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    recipe = TrainRecipe(supervise=SuperviseConfig(launch=["srun", "--nodes={nodes}"]))
    with pytest.raises(UserError, match=r"^supervise.launch: \{nodes\} is the number of"):
        supervise(recipe.resolve())


def test_a_process_that_srun_has_started_is_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_STEP_NUM_TASKS", attempt.SUPERVISED):
        monkeypatch.delenv(name, raising=False)
    recipe = TrainRecipe(supervise=SuperviseConfig(enabled=True))
    assert is_supervised(recipe.resolve())
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    assert not is_supervised(recipe.resolve())
