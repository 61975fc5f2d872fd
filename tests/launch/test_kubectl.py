"""What kubectl is asked, and what its answers mean, by a program in its place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.launch import kubernetes, slurm
from llmfoundry.launch.client import SILENCE, in_order
from llmfoundry.launch.record import ENDED, RUNNING, UNKNOWN, WAITING, LaunchRecord
from tests.launch.test_render import URL, job_of

WORDS = ("launch=kubernetes", "launch.image=i", URL, "launch.context=c", "launch.namespace=n")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    stand_in = Path(__file__).with_name("fake_kubectl.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("KUBE_FOLDER", str(tmp_path))
    return tmp_path


def asked(cluster: Path) -> list[list[str]]:
    return [json.loads(line) for line in (cluster / "asked").read_text().splitlines()]


def says(cluster: Path, name: str, **status: Any) -> None:
    (cluster / f"{name}.status").write_text(json.dumps(status))


def is_true(kind: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": "True", **more}


def test_it_is_applied_seen_logged_and_deleted(cluster: Path) -> None:
    record = kubernetes.submit(job_of(*WORDS, "nodes=2"))
    assert record.job == "jobset/a"
    assert (record.where["context"], record.where["namespace"]) == ("c", "n")
    assert all(words[:2] == ["--context=c", "--namespace=n"] for words in asked(cluster))
    assert {path.name for path in cluster.glob("*_*")} == {"jobset_a", "configmap_a-recipe"}
    assert kubernetes.state(record) == (kubernetes.TargetState(WAITING, "it has no pods yet"))
    found = list(kubernetes.logs(record, follow=True))
    assert found == [("1", "hello"), ("0", "world")] and "--follow" in asked(cluster)[-1]
    found = list(in_order(kubernetes.logs(record, follow=False)))
    assert found == [("0", "world"), ("1", "hello")] and "--timestamps" in asked(cluster)[-1]
    assert kubernetes.stop(record, now=False) == "deleted; its pods save and end"
    assert kubernetes.state(record) == kubernetes.TargetState(ENDED, "was deleted")
    assert kubernetes.stop(record, now=False) == "had ended"


def test_silence_is_told_from_lines_by_which_who_follows_sees_the_end(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = kubernetes.submit(job_of(*WORDS))
    monkeypatch.setenv("KUBE_SLEEP", "2.5")
    assert SILENCE in list(kubernetes.logs(record, follow=True))
    log = cluster / "slurm-1.log"
    log.write_text("first\n[rank 1] second\n")
    lines = slurm.logs(LaunchRecord("a", "slurm", "1", {"log": str(log)}), follow=True)
    assert [next(lines) for _ in range(3)] == [("0", "first"), ("1", "[rank 1] second"), SILENCE]


def test_an_ended_one_gives_way_and_a_running_one_does_not(cluster: Path) -> None:
    job = job_of(*WORDS, "nodes=2")
    kubernetes.submit(job)
    says(cluster, "jobset_a", replicatedJobsStatus=[{"name": "node", "ready": 1}])
    with pytest.raises(UserError, match=r"run_name: jobset/a is there already, jobset/a; write"):
        kubernetes.submit(job)
    says(cluster, "jobset_a", conditions=[is_true("Completed")])
    kubernetes.submit(job)
    assert "delete" in asked(cluster)[-2] and "apply" in asked(cluster)[-1]
    other = json.loads((cluster / "jobset_a").read_text())
    other["metadata"]["labels"] = {}
    (cluster / "jobset_a").write_text(json.dumps(other))
    with pytest.raises(UserError, match="is there already, and is not of this run"):
        kubernetes.submit(job)


PULL = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "i"'}}


@pytest.mark.parametrize(
    ("status", "pods", "state", "reason"),
    [
        ({"conditions": [is_true("Complete")]}, [], ENDED, "exit status 0 (Complete)"),
        (
            {"conditions": [is_true("Failed", reason="PodFailurePolicy", message="exit code 93")]},
            [],
            ENDED,
            "failed: PodFailurePolicy: exit code 93",
        ),
        (
            {"conditions": [is_true("Suspended", message="Job suspended")]},
            [],
            WAITING,
            "suspended: Job suspended",
        ),
        ({"active": 1, "ready": 1}, [], RUNNING, "job/a"),
        ({"active": 1, "ready": 0}, [{"status": {}}], WAITING, "its pods are not ready"),
        (
            {"active": 1},
            [{"status": {"containerStatuses": [{"state": PULL}]}}],
            WAITING,
            'ImagePullBackOff: Back-off pulling image "i"',
        ),
        (
            {"active": 1},
            [
                {
                    "status": {
                        "conditions": [
                            {
                                "type": "PodScheduled",
                                "status": "False",
                                "reason": "Unschedulable",
                                "message": "0/3 nodes are available",
                            }
                        ]
                    }
                }
            ],
            WAITING,
            "Unschedulable: 0/3 nodes are available",
        ),
    ],
)
def test_what_the_cluster_says(
    cluster: Path, status: dict[str, Any], pods: list[Any], state: str, reason: str
) -> None:
    record = kubernetes.submit(job_of(*WORDS))
    says(cluster, "job_a", **status)
    (cluster / "pods").write_text(json.dumps({"items": pods}))
    found = kubernetes.state(record)
    assert (found.state, found.reason) == (state, reason)
    exits = {"Complete": 0, "Failed": 1}
    kinds = [condition["type"] for condition in status.get("conditions", [])]
    assert found.exit_status == next((exits[kind] for kind in kinds if kind in exits), None)


def test_without_kubectl_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^kubectl: is not installed here; "):
        kubernetes.submit(job_of(*WORDS))
    record = LaunchRecord("a", "kubernetes", "job/a")
    assert kubernetes.state(record).state == UNKNOWN
    verbs: list[Callable[[], object]] = [
        lambda: kubernetes.stop(record, now=False),
        lambda: list(kubernetes.logs(record, follow=False)),
    ]
    for verb in verbs:
        with pytest.raises(UserError, match=r"^kubectl: is not installed here; "):
            verb()
