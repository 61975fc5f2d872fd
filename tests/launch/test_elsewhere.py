"""Runs that lie elsewhere than the record of their launch: seen, or unknown, never failed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from llmfoundry.cli.commands.runs import runs as command
from llmfoundry.errors import UserError
from llmfoundry.launch import hosts, kubernetes, runs, slurm
from llmfoundry.launch import record as records
from llmfoundry.launch.record import ENDED, RUNNING, UNKNOWN, WAITING, LaunchRecord, TargetState
from llmfoundry.launch.states import UNDER_WAY
from llmfoundry.launch.stop import stop
from llmfoundry.launch.targets import TARGETS
from tests.launch.test_hosts import launch, place, recorded, wait  # noqa: F401
from tests.launch.test_render import job_of
from tests.launch.test_runs import recipe, write_run
from tests.tiny import losses

JOBS = {"ssh": "me@n1:12@1700000000", "slurm": "7", "kubernetes": "job/a", "local": "5@1"}
PODS = ["launch=kubernetes", "launch.image=i"]
SINCE = 1_800_000_000.0


def answer(monkeypatch: pytest.MonkeyPatch, state: TargetState) -> None:
    """All targets say this."""
    for name, target in [*TARGETS.items()]:
        monkeypatch.setitem(TARGETS, name, dataclasses.replace(target, state=lambda record: state))


def launched(folder: Path, target: str, run: Path | str) -> Path:
    where = {records.RUN: str(run)}
    records.write(
        folder, LaunchRecord(folder.name, target, JOBS[target], where, submitted_at=SINCE)
    )
    return folder


@pytest.mark.parametrize(
    ("target", "state"),
    [
        (TargetState(WAITING, "PENDING (Resources)"), "waiting"),
        (TargetState(RUNNING, "process 12 of n1"), "running"),
        (TargetState(UNKNOWN, "ssh: no answer"), "unknown"),
        (TargetState(ENDED, "exit status 0", 0), "finished"),
        (TargetState(ENDED, "exit status 75", 75), "stopped"),
        (TargetState(ENDED, "exit status 93", 93), "given up"),
        (TargetState(ENDED, "exit status 130", 130), "stopped"),
        (TargetState(ENDED, "it was killed, or its machine has restarted"), "unknown"),
        (TargetState(ENDED, "Slurm no longer knows the job"), "unknown"),
        (TargetState(ENDED, "was deleted"), "unknown"),
    ],
)
@pytest.mark.parametrize("where", ["/nowhere/run", "s3://my/run"])
def test_what_cannot_be_seen_is_told_by_the_target_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: TargetState,
    state: str,
    where: str,
) -> None:
    answer(monkeypatch, target)
    folder = launched(tmp_path / "runs/a", "kubernetes", where)
    write_run(folder, status="failed")  # an earlier run of this machine
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))
    found = runs.state_of(folder)
    assert (found.state, found.is_seen, found.run_folder) == (state, False, where)
    assert target.reason in found.why and f"{where} is unknown here" in found.why
    assert found.loss is None and runs.describe("a", tmp_path / "runs").checkpoints == []
    command(recipe("list", f"folder={tmp_path}/runs"))
    assert "unknown here" in capsys.readouterr().out


@pytest.mark.parametrize("target", [*JOBS])
def test_a_run_elsewhere_is_read_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    answer(monkeypatch, TargetState(ENDED, "exit status 0", 0))
    folder = launched(tmp_path / "runs/a", target, tmp_path / "work/runs/a")
    there = write_run(tmp_path / "work/runs/a")
    for path in there.iterdir():
        os.utime(path, (SINCE + 60, SINCE + 60))
    (there / "checkpoints/ba0000003").mkdir(parents=True)
    found = runs.state_of(folder)
    assert (found.state, found.step, found.is_seen) == ("finished", 3, True)
    assert runs.describe("a", tmp_path / "runs").checkpoints == ["ba0000003"]


def test_an_unreachable_run_is_not_said_to_have_nothing_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, TargetState(UNKNOWN, "n1: ssh: no route to host"))
    launched(tmp_path / "a", "ssh", "/nowhere/run")
    with pytest.raises(UserError, match=r"a: whether it runs is unknown here: n1: ssh: no route"):
        stop("a", tmp_path)


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (["launch=local", "launch.workdir=/w"], "/w/runs/a"),
        (["launch=slurm", "launch.workdir=/w"], "/w/runs/a"),
        (["launch=ssh", "launch.hosts=[n1,n2]", "launch.workdir=/w"], "/w/runs/a"),
        (["launch=ssh", "launch.hosts=[n1]", "save_folder=/data/a"], "/data/a"),
        (["launch=local", "save_folder=s3://my/a"], "s3://my/a"),
        (
            [*PODS, "launch.mounts=[claim:/runs]", "save_folder=/runs/a"],
            "/runs/a",
        ),
        (
            [*PODS, "launch.mounts=[/nfs/r:/runs]", "save_folder=/runs/a"],
            "/nfs/r/a",
        ),
    ],
)
def test_the_record_names_the_runs_folder(words: list[str], run: str) -> None:
    assert job_of(*words, "run_name=a").record.where == {records.RUN: run}
    assert records.RUN not in job_of("launch=local", "run_name=a").record.where


def test_a_local_run_with_a_workdir_that_is_made_is_finished(place: Path) -> None:  # noqa: F811
    there = place / "new/work"
    words = ["max_duration=2ba", f"launch.workdir={there}"]
    assert launch(place, *words).returncode == 0
    folder = place / "runs/tiny"
    wait(lambda: runs.state_of(folder).state not in UNDER_WAY, "its end")
    found = runs.state_of(folder)
    assert (found.state, found.step) == ("finished", 2), found
    assert sorted(losses(there / "runs/tiny")) == [1, 2]
    assert recorded(place).where[records.RUN] == str(there / "runs/tiny")
    (by_hand,) = runs.list_runs(there / "runs")
    assert (by_hand.state, by_hand.step) == ("finished", 2)


def test_exit_statuses_are_the_supervisors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {hosts._ended("0\n").exit_status, hosts._ended(" 75").exit_status} == {0, 75}
    complete = {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    record = LaunchRecord("a", "kubernetes", "job/a")
    assert kubernetes._state_of(record, complete).exit_status == 0
    states = {
        "JobState=COMPLETED Requeue=1 ExitCode=0:0": 0,
        "JobState=FAILED Requeue=1 ExitCode=93:0": 93,
        "JobState=CANCELLED Requeue=1 ExitCode=0:0": 130,  # by a person, before it began
        "JobState=TIMEOUT Requeue=1 ExitCode=0:0": None,
        "JobState=FAILED Requeue=1 ExitCode=0:9": None,
    }
    for said, status in states.items():
        monkeypatch.setattr(slurm, "ask", lambda words, said=said: said)
        assert slurm._of_the_past(LaunchRecord("a", "slurm", "7")).exit_status == status
