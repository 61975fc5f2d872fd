"""Jobs of real Slurm, by scripts/launch.py: struck in every way, to the same losses.

`make test-slurm`; needs slurmctld, slurmd and slurm-client, and no root.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.events import read_events
from llmfoundry.launch.record import ENDED, RUNNING, WAITING, read
from llmfoundry.launch.targets import TARGETS
from tests.resilience.slurm.cluster import INSTALL, PATH, PYTHON, Cluster, free_ports, missing, wait
from tests.tiny import ROOT, losses, run, write_recipe

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"no {missing()}: {INSTALL}"),
]
SLOW = ROOT / "tests/resilience/slow_steps.py"
LENGTH = ("max_duration=40ba", "save_interval=4ba", "parallel=fsdp")
SPARE = 'supervise.launch=[srun,-K,"--nodes=2","--exclude={exclude}",python]'
TORCHRUN = (
    'supervise.launch=[srun,-K,"--nodes={nodes}","--exclude={exclude}",torchrun,'
    '"--nnodes={nodes}","--nproc-per-node=1","--rdzv-backend=c10d",'
    '"--rdzv-endpoint=127.0.0.1:PORT"]'
)
# A machine that dies while others save is missed by their messages' time limit alone.
FAST = ("supervise.wait_seconds=0", "hang.stopped_seconds=10", "parallel.dist_timeout=90")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm")
    write_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[int, float]:
    """The losses of two processes that no scheduler has started, and nothing happens to."""
    run("train.py", "tiny.yaml", *LENGTH, "run_name=whole", cwd=place, processes=2)
    return losses(place / "runs/whole")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.begin()
        yield made
    finally:
        made.stop()


@pytest.fixture
def cluster(machines: Cluster) -> Cluster:
    machines.repair()
    return machines


class Job:
    """A job by scripts/launch.py, of one process on each machine."""

    def __init__(
        self, cluster: Cluster, place: Path, name: str, *overrides: str, path: str = ""
    ) -> None:
        self.cluster, self.folder = cluster, place / "runs" / name
        keys = [f"save_folder={self.folder}", f"plugins=[{SLOW}]", *FAST, *LENGTH]
        keys += ["callbacks.plugins.slow={}", "launch=slurm", "nodes=2", "gpus_per_node=1"]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
        env |= {"PATH": f"{path}:{PYTHON}:{cluster.env['PATH']}", "PYTHONUNBUFFERED": "1"}
        script = [sys.executable, str(ROOT / "scripts/launch.py"), str(place / "tiny.yaml")]
        done = subprocess.run(
            [*script, *keys, *overrides],
            cwd=place,
            env=cluster.env | env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        record = read(self.folder)
        assert record is not None
        self.record, self.number = record, record.job
        self.log = Path(record.where["log"])

    def wait_for(self, batch: int) -> None:
        """Wait until a step is done."""

        def is_done() -> bool:
            assert self.state() in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING"), self.said()
            written = (self.folder / "metrics.jsonl").exists()
            return written and max(losses(self.folder), default=0) >= batch

        wait(is_done, f"step {batch}")

    def state(self) -> str:
        return self.cluster.job(self.number).get("JobState", "")

    def end(self) -> dict[str, str]:
        """Wait for the last end of the job: what Slurm says of it then."""

        def is_over() -> bool:
            if self.state() == "PENDING":  # for two minutes after a requeue; five seconds it needs
                time.sleep(5)
                self.cluster.ask("scontrol", "update", f"jobid={self.number}", "starttime=now")
            return self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

        wait(is_over, "the end of the job", 400)
        return self.cluster.job(self.number)

    def said(self) -> str:
        return self.log.read_text()[-6000:] if self.log.exists() else ""

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.folder) if event["kind"] == kind]

    def decisions(self) -> list[tuple[str, str]]:
        return [(event["cause"], event["action"]) for event in self.events("decision")]


def report(what: str, job: Job, began: float) -> None:
    """For people (pytest -s): seconds from a moment to the job's end, and what was lost."""
    for event in read_events(job.folder):
        if event["kind"] in ("decision", "returned", "requeue", "check"):
            print(f"{what}: {event['time'] - began:.1f} s: {event['what']}; {event['action']}")


def test_two_machines_train_as_two_processes_of_one(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    job = Job(cluster, place, "undisturbed")
    ended = job.end()
    assert ended["ExitCode"] == "0:0", job.said()
    assert ended["NodeList"] == "n[1-2]" and losses(job.folder) == whole
    assert job.decisions() == [("done", "finish")]


def test_it_is_launched_followed_stopped_and_resumed(
    cluster: Cluster, place: Path, whole: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the record says alone."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.env[name])
    monkeypatch.chdir(place)
    slurm = TARGETS["slurm"]
    blocking = cluster.submit("--nodes=3", "--exclusive", "--wrap=sleep 600", cwd=place)
    wait(lambda: cluster.job(blocking)["JobState"] == "RUNNING", "a job in the way")
    job = Job(cluster, place, "followed", "callbacks.plugins.slow.seconds=1")
    found = slurm.state(job.record)
    assert found.state == WAITING and found.reason.startswith("PENDING ("), found
    cluster.ask("scancel", blocking)
    job.wait_for(10)
    found = slurm.state(job.record)
    assert found.state == RUNNING and found.reason == "RUNNING on n[1-2]"
    lines = slurm.logs(job.record, follow=True)
    assert any("40 batches" in line for _, line in lines)
    with pytest.raises(AssertionError, match="followed: is running as slurm"):
        Job(cluster, place, "followed")
    assert slurm.stop(job.record, now=False) == "asked to save and end"
    wait(lambda: slurm.state(job.record).state == ENDED, "its end")
    assert slurm.state(job.record).reason == "exit status 75 (FAILED)"
    assert 10 <= max(losses(job.folder)) < 40
    again = Job(cluster, place, "followed")
    assert again.number != job.number
    again.wait_for(12)
    wait(lambda: slurm.state(again.record).state == ENDED, "the end of the second")
    assert slurm.state(again.record).reason == "exit status 0 (COMPLETED)"
    assert slurm.stop(again.record, now=False) == "had ended"
    assert losses(job.folder) == whole


def test_a_job_leaves_a_drained_machine(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """Slurm lets a job end on a machine that is drained: it goes when it is reported."""
    job = Job(cluster, place, "drained")
    job.wait_for(10)
    began = time.time()
    cluster.ask("scontrol", "update", "nodename=n1", "state=drain", "reason=disk")
    job.wait_for(14)  # continues all the same
    cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    ended = job.end()
    report("drained", job, began)
    assert ended["ExitCode"] == "0:0", job.said()
    assert (ended["NodeList"], ended["Restarts"]) == ("n[2-3]", "1")
    assert job.decisions() == [("preemption", "stop"), ("done", "finish")]
    assert losses(job.folder) == whole


def test_a_spare_machine_takes_the_place_of_one_that_dies(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """Slurm itself believes it five minutes later; nobody waits for that."""
    job = Job(cluster, place, "spare", "launch.spare_nodes=1")
    job.wait_for(10)
    began = time.time()
    cluster.kill("n2")
    ended = job.end()
    report("spare", job, began)
    assert ended["ExitCode"] == "0:0", job.said()
    assert ended["Restarts"] == "0"
    assert job.decisions() == [("machine", "restart_without"), ("done", "finish")]
    first, _ = job.events("decision")
    assert first["bad_nodes"] == ["n2"] and "set to down" in first["done"]
    assert "n2" in cluster.reason("n2") and "down" in cluster.states()["n2"]
    assert losses(job.folder) == whole


def test_a_machine_that_lost_its_processes_and_is_sound_is_kept(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """By scripts/check.py, which srun starts on it."""
    job = Job(cluster, place, "sound")
    job.wait_for(10)
    began = time.time()
    for process in cluster.processes("n2"):
        if any(word.endswith("train.py") for word in process.cmdline()):
            process.kill()
    ended = job.end()
    report("sound", job, began)
    assert (ended["ExitCode"], ended["NodeList"]) == ("0:0", "n[1-2]"), job.said()
    assert job.decisions() == [("machine", "restart"), ("done", "finish")]
    (check,) = job.events("check")
    assert check["what"] == "n2 suspected; nothing is bad"
    assert (job.folder / "supervise/check.json").exists()
    assert losses(job.folder) == whole


def test_without_a_spare_the_run_continues_with_fewer(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    job = Job(cluster, place, "fewer")
    job.wait_for(10)
    began = time.time()
    cluster.kill("n2")
    ended = job.end()
    report("fewer", job, began)
    assert ended["ExitCode"] == "0:0", job.said()
    assert job.decisions() == [("machine", "restart_without"), ("done", "finish")]
    found = losses(job.folder)
    assert found.keys() == whole.keys()
    assert max(abs(found[batch] - whole[batch]) for batch in whole) < 1e-6


def test_a_run_that_needs_two_machines_waits_for_another(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    job = Job(cluster, place, "elsewhere", SPARE)
    job.wait_for(10)
    began = time.time()
    cluster.kill("n2")
    ended = job.end()
    report("elsewhere", job, began)
    assert ended["ExitCode"] == "0:0", job.said()
    assert (ended["NodeList"], ended["Restarts"]) == ("n[1,3]", "1")
    assert [action for _, action in job.decisions()] == ["restart_without", "stop", "finish"]
    assert losses(job.folder) == whole


def test_nobody_needs_the_right_to_drain(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """The job does without the bad machine by its own list."""
    bin_folder = place / "bin"
    bin_folder.mkdir()
    (bin_folder / "scontrol").write_text(f"""#!/bin/sh
case "$*" in *nodename=*) echo 'slurm_update error: Invalid user id' >&2; exit 1;; esac
exec {shutil.which("scontrol", path=PATH)} "$@"
""")
    (bin_folder / "scontrol").chmod(0o755)
    job = Job(cluster, place, "no-rights", SPARE, path=str(bin_folder))
    job.wait_for(10)
    began = time.time()
    cluster.kill("n2")
    wait(lambda: bool(job.events("requeue")), "a requeue")
    # the job waits until Slurm, or an administrator, gives the machine up
    cluster.ask("scontrol", "update", "nodename=n2", "state=down", "reason=dead")
    ended = job.end()
    report("no-rights", job, began)
    assert ended["ExitCode"] == "0:0", job.said()
    assert (ended["NodeList"], ended["ExcNodeList"]) == ("n[1,3]", "n2")
    first = job.events("decision")[0]
    assert "not set to down: slurm_update error: Invalid user id" in first["done"]
    assert losses(job.folder) == whole


def test_the_job_begins_again_where_the_supervisors_machine_dies(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """Slurm itself would let the job hold its other machine until its limit."""
    cluster.give_up_after(20)
    job = Job(cluster, place, "first-machine")
    job.wait_for(10)
    began = time.time()
    cluster.kill("n1")
    ended = job.end()
    report("first-machine", job, began)
    assert ended["ExitCode"] == "0:0", job.said()
    assert (ended["NodeList"], ended["Restarts"]) == ("n[2-3]", "1")
    assert losses(job.folder) == whole


def test_a_job_is_notified_ahead_of_its_limit(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """By --signal of sbatch: saved, status 75, requeued, and counted."""
    limits = ("launch.time=00:04:00", "launch.signal_seconds=75")
    job = Job(cluster, place, "limit", "callbacks.plugins.slow.seconds=5", *limits)
    began = time.time()
    wait(lambda: job.cluster.job(job.number)["Restarts"] == "1", "a requeue")
    report("limit", job, began)
    assert job.decisions() == [("preemption", "stop")]
    (requeue,) = job.events("requeue")
    assert requeue["what"].endswith("requeued")
    done = max(losses(job.folder))
    assert 0 < done < 40
    cluster.ask("scontrol", "update", f"jobid={job.number}", "timelimit=10")
    ended = job.end()
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1"), job.said()
    assert [event["attempt"] for event in job.events("start")] == [1, 2]
    assert losses(job.folder) == whole


def test_torchrun_and_its_processes_get_a_preemption(
    cluster: Cluster, place: Path, whole: dict[int, float]
) -> None:
    """Slurm signals both, and torchrun signals its processes once more."""
    (port,) = free_ports(1)
    job = Job(cluster, place, "torchrun", TORCHRUN.replace("PORT", str(port)))
    job.wait_for(10)
    began = time.time()
    cluster.ask("scancel", "--signal=TERM", job.number)
    ended = job.end()
    report("torchrun", job, began)
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1"), job.said()
    assert job.decisions() == [("preemption", "stop"), ("done", "finish")]
    assert losses(job.folder) == whole


@pytest.mark.parametrize("name", ["cancelled", "stopped"])
def test_who_ends_a_job_does_not_get_it_back(cluster: Cluster, place: Path, name: str) -> None:
    """By scancel, or saved, by the signal of Ctrl-C."""
    job = Job(cluster, place, name)
    job.wait_for(4)
    signals = [] if name == "cancelled" else ["--batch", "--signal=INT"]
    cluster.ask("scancel", *signals, job.number)
    ended = job.end()
    state = "CANCELLED" if name == "cancelled" else "FAILED"
    assert (ended["JobState"], ended["Restarts"]) == (state, "0"), job.said()
    if name == "stopped":
        assert ended["ExitCode"] == "75:0" and "SIGINT, and saved" in job.said()


@pytest.mark.parametrize(
    ("name", "override", "status"),
    [("mistaken", "data.paths=[nowhere]", "2:0"), ("exploded", "optimizer.lr=1e30", "93:0")],
)
def test_what_another_start_does_not_mend_is_not_requeued(
    cluster: Cluster, place: Path, name: str, override: str, status: str
) -> None:
    job = Job(cluster, place, name, override)
    ended = job.end()
    assert (ended["ExitCode"], ended["Restarts"]) == (status, "0"), job.said()
