"""Clients of a target that print other lines, refuse, or do not answer: programs of the test."""

from __future__ import annotations

import calendar
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.events import read_events
from llmfoundry.launch import client, hosts, kubernetes, runs, slurm
from llmfoundry.launch.record import ENDED, RUNNING, UNKNOWN, WAITING, LaunchRecord, read, write
from llmfoundry.launch.stop import stop
from tests.launch.test_render import job_of

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
SLURM = LaunchRecord("a", "slurm", "7", {"log": "/nowhere/log"})
BY_HOST = 'case "$*" in *n1*) echo "ssh: connect to host n1: No route to host" >&2; exit 255; esac'
Fake = Callable[[str, str], Path]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Makes a program of bash that is found first; those of Slurm are missing before."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(name: str, script: str) -> Path:
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
        return folder / name

    for name in ("squeue", "scontrol", "sacct"):
        make(name, AWAY)
    return make


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A session that counts the signals of Ctrl-C, as a supervisor gets them."""
    script = f"trap 'echo >> {tmp_path}/signals' INT; touch {tmp_path}/ready; "
    script += f"while :; do sleep 0.1; done; echo $? > {tmp_path}/launch/node-0.exit"
    process = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    (tmp_path / "launch").mkdir()
    until((tmp_path / "ready").exists)
    yield process
    process.kill()
    process.wait()


def until(is_so: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.05)


def signals(tmp_path: Path) -> int:
    path = tmp_path / "signals"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("squeue", "state", "reason"),
    [
        ("echo Welcome; echo 'RUNNING|None|n1'; echo Bye", RUNNING, "RUNNING on n1"),
        ("echo 'CLUSTER: alpha'; echo 'PENDING|Prio|rity|'", WAITING, "PENDING (Prio|rity)"),
        ("echo hello", UNKNOWN, "scontrol: slurm_load_jobs error: Unable to contact"),
        ("", UNKNOWN, "scontrol: slurm_load_jobs error: Unable to contact"),
        (FORGOTTEN, UNKNOWN, "scontrol: slurm_load_jobs error: Unable to contact"),
        (AWAY, UNKNOWN, "squeue: slurm_load_jobs error: Unable to contact"),
    ],
)
def test_what_squeue_prints_around_its_answer_ends_no_listing(
    fake: Fake, squeue: str, state: str, reason: str
) -> None:
    """Nor is a job gone that a controller which is away cannot be asked about."""
    fake("squeue", squeue)
    found = slurm.state(SLURM)
    assert found.state == state and found.reason.startswith(reason), found


def test_hundreds_of_jobs_do_not_each_wait_for_a_scheduler_that_hangs(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake("squeue", "sleep 60")
    monkeypatch.setattr(slurm, "ask", lambda words, **more: client.ask(words, seconds=1.0))
    monkeypatch.setattr(slurm, "_silent", {})
    began = time.monotonic()
    reasons = {slurm.state(SLURM).reason for _ in range(20)}
    assert time.monotonic() - began < 10
    assert reasons == {
        "squeue: no answer within 1 s; try again",
        "squeue: gave no answer about another job; try again later",
    }


def test_a_scheduler_is_not_asked_several_times_a_second(fake: Fake, tmp_path: Path) -> None:
    """By one stop that waits, or one person who follows: clusters limit such questions."""
    fake("squeue", f"echo >> {tmp_path}/asked; echo 'RUNNING|None|n1'")
    fake("scancel", "true")
    write(tmp_path, replace(SLURM, where={"log": f"{tmp_path}/log"}))
    with pytest.raises(UserError, match="is waiting after 3 s"):
        stop(tmp_path.name, tmp_path.parent, timeout=3)
    assert (tmp_path / "asked").read_text().count("\n") <= 6


def test_a_job_that_slurm_and_its_accounts_have_forgotten_has_ended(fake: Fake) -> None:
    fake("squeue", FORGOTTEN)
    fake("scontrol", FORGOTTEN)
    fake("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    found = slurm.state(SLURM)
    assert (found.state, found.reason) == (ENDED, "Slurm no longer knows the job")


@pytest.mark.parametrize(
    ("sbatch", "number", "cluster"),
    [
        ("echo -- Welcome --; echo 7", "7", None),
        ("echo 7; echo -- Have a nice day --", "7", None),
        ("echo 'Submitted batch job 7'", "7", None),
        ("echo '7;alpha'", "7", "alpha"),
    ],
)
def test_the_number_of_a_job_is_found_in_what_sbatch_prints(
    fake: Fake, tmp_path: Path, sbatch: str, number: str, cluster: str | None
) -> None:
    fake("sbatch", sbatch)
    record = slurm.submit(job_of("launch=slurm", f"save_folder={tmp_path / 'a'}"))
    assert (record.job, record.where.get("cluster")) == (number, cluster)
    write(tmp_path / "a", record)
    fake("squeue", 'echo "$*" > $0.said; echo "RUNNING|None|n1"')
    fake("scancel", 'echo "$*" > $0.said')
    found = read(tmp_path / "a")
    assert found is not None and slurm.stop(found, now=True) == "cancelled"
    for name in ("squeue", "scancel"):  # a job of that number on another cluster is not ours
        said = (tmp_path / "bin" / f"{name}.said").read_text()
        assert ("--clusters=alpha" in said) == (cluster is not None)


@pytest.mark.parametrize(
    ("sbatch", "line"),
    [
        ("true", "sbatch: printed no job number, but ''; look for a with squeue --me"),
        ("echo hello", "sbatch: printed no job number, but 'hello'"),
        ("echo 'sbatch: error: Invalid qos' >&2; exit 1", "sbatch: error: Invalid qos"),
        ("sleep 60", "sbatch: has not answered, and the job may be in the queue all the same"),
    ],
)
def test_a_job_that_may_be_queued_is_said_to_be_so(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, sbatch: str, line: str
) -> None:
    fake("sbatch", sbatch)
    ask = client.ask
    monkeypatch.setattr(slurm, "ask", lambda words, **more: ask(words, **more, seconds=1.0))
    with pytest.raises(UserError) as error:
        slurm.submit(job_of("launch=slurm", "run_name=a"))
    assert error.value.problems[0].startswith(line), error.value


@pytest.mark.parametrize(
    "answer", ["[]", "7", '{"status": "x"}', '{"status": {"conditions": [1]}}']
)
def test_an_answer_of_kubectl_that_is_no_object_is_unknown(fake: Fake, answer: str) -> None:
    fake("kubectl", f"echo '{answer}'")
    found = kubernetes.state(LaunchRecord("a", "kubernetes", "job/a"))
    assert found.state == UNKNOWN and "kubectl: its answer is no object" in found.reason


def of_two(tmp_path: Path, pid: int, began: float) -> LaunchRecord:
    where = {"log": f"{tmp_path}/launch/node-*.log"}
    marks = f"n1:{pid}@{began:.0f},n2:{pid}@{began:.0f}"
    return LaunchRecord("a", "ssh", marks, where, nodes=2, submitted_at=1.0)


def test_a_host_that_is_away_keeps_no_other_from_its_stop_and_each_is_asked_once(
    fake: Fake, tmp_path: Path, supervisor: subprocess.Popen[bytes]
) -> None:
    began, reached = time.time(), f"{tmp_path}/reached"
    fake("ssh", f"[ -e {reached} ] || {BY_HOST}\nexec bash -s")
    write(tmp_path, of_two(tmp_path, supervisor.pid, began))
    for _ in range(2):
        with pytest.raises(UserError, match="n1: ssh: connect to host n1: No route to host"):
            stop(tmp_path.name, tmp_path.parent, timeout=1)
        until(lambda: signals(tmp_path) == 1)
    assert not [*read_events(tmp_path)]  # n1 was not asked, so that the next stop is to try again
    Path(reached).touch()
    (tmp_path / "launch/node-1.asked").unlink()  # in this test both are one process
    with pytest.raises(UserError, match=r"was asked to save and end, and is waiting after 1 s"):
        stop(tmp_path.name, tmp_path.parent, timeout=1)
    assert [e["kind"] for e in read_events(tmp_path)] == ["stop"]


@pytest.mark.parametrize("target", ["local", "ssh"])
def test_a_clock_that_was_set_has_ended_no_run(
    fake: Fake, tmp_path: Path, supervisor: subprocess.Popen[bytes], target: str
) -> None:
    """Nor has another time zone; a later process of the same number is not the run's."""
    fake("ssh", "export TZ=Asia/Tokyo; exec bash -s")
    hour_before = f"{supervisor.pid}@{time.time() - 3600:.0f}"
    record = of_two(tmp_path, 1, 1)
    job = hour_before if target == "local" else f"n1:{hour_before}"
    record = replace(record, target=target, job=job, nodes=1)
    assert hosts.state(record).state == RUNNING
    elsewhere = replace(record, where={"log": f"{tmp_path}/other/node-*.log"})
    assert hosts.state(elsewhere).state == ENDED


@pytest.mark.parametrize(
    ("status", "reason"),
    [("75\n", "exit status 75"), (None, "it was killed, or its machine has restarted")],
)
def test_a_supervisor_that_has_ended_on_a_host_has(
    fake: Fake, tmp_path: Path, status: str | None, reason: str
) -> None:
    fake("ssh", "exec bash -s")
    (tmp_path / "launch").mkdir()
    if status is not None:
        (tmp_path / "launch/node-0.exit").write_text(status)
    process = subprocess.Popen(["true"])
    process.wait()
    record = replace(of_two(tmp_path, 1, 1), job=f"n1:{process.pid}@5", nodes=1)
    assert hosts.state(record).reason == reason
    assert hosts.stop(record, now=False) == "had ended on n1"


def test_a_start_is_told_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    began = calendar.timegm((2026, 11, 28, 10, 45, 7, 0, 0, 0))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        answer = "Welcome\nllmfoundry started 12 Sat Nov 28 10:45:07 2026\n"
        assert hosts._started("n1", answer) == f"n1:12@{began}"
        assert hosts._is_same("Ss   Sat Nov 28 10:45:08 2026 bash -c x", "/s", began)
        assert not hosts._is_same("Ss   Sat Nov 28 19:45:08 2026 bash -c x", "/s", began)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert hosts._started("n1", "llmfoundry started 12 \n") == ""


def test_the_second_host_fails_and_the_first_is_ended_whatever_happens(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch=ssh", "launch.hosts=[n2,n1]", "run_name=a", "launch.environment=/"]
    job = job_of(*words)
    job.folder.mkdir(parents=True)
    first = subprocess.Popen(["sleep", "600"], start_new_session=True)
    start = time.strftime("%a %b %d %H:%M:%S %Y", time.gmtime())
    started = f"echo 'llmfoundry started {first.pid} {start}'"
    answers = f'case "$text" in {{*) {started};; *) bash -c "$text"; esac'
    fake("ssh", f"text=$(cat); {BY_HOST}; {answers}")
    with pytest.raises(UserError, match=r"launch\.hosts\[1\]: n1: "):
        hosts.submit(job)
    assert first.wait(30) != 0
    half = read(job.folder)
    assert half is not None and half.job.startswith(f"n2:{first.pid}@")  # had this been killed


def test_a_python_that_cannot_start_it_is_refused_with_its_own_reason(
    fake: Fake, tmp_path: Path
) -> None:
    """And not a run that fails a moment later: Python 3.8, or another environment's."""
    lines = "echo Traceback >&2; echo 'SyntaxError: invalid syntax' >&2; exit 1"
    environment = fake("python", lines).parent.parent
    words = [f"launch.environment={environment}", f"save_folder={tmp_path / 'a'}"]
    with pytest.raises(UserError) as error:
        hosts.submit(job_of("launch=local", *words))
    expected = (
        f"bash: {environment}/bin/python cannot start llmfoundry (SyntaxError: invalid syntax)"
    )
    assert error.value.problems[0].startswith(f"launch: {expected}; write launch.environment=")
    assert not (tmp_path / "a/launch/node-0.log").exists()


def test_a_run_is_launched_where_ps_is_missing(fake: Fake, tmp_path: Path) -> None:
    """As in containers of Debian's slim images."""
    fake("ps", "echo 'ps: command not found' >&2; exit 127")
    job = replace(job_of("launch=local", f"save_folder={tmp_path / 'a'}"), own_words=["nonsense=1"])
    record = hosts.submit(job)
    until(lambda: hosts.state(record).state == ENDED)
    assert hosts.state(record).reason == "exit status 2"


def test_the_log_of_a_folder_that_was_moved_goes_with_it(tmp_path: Path) -> None:
    before, after = tmp_path / "a", tmp_path / "b"
    (before / "launch").mkdir(parents=True)
    (before / "launch/node-0.log").write_text("first\n")
    (before / "launch/node-0.exit").write_text("0\n")
    where = {"log": f"{before}/launch/node-*.log"}
    write(before, LaunchRecord("a", "local", "999999@5", where))
    before.rename(after)
    assert [*runs.logs("b", tmp_path)] == [("0", "first")]
    assert runs.describe("b", tmp_path).run.state == "finished"
