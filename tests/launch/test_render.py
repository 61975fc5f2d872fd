"""What launch prints for each target: structure that its scheduler, or bash, reads.

Whole objects against their own schemas are in test_schemas.py.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmfoundry.errors import UserError
from llmfoundry.launch import hosts, kubernetes, skypilot, slurm
from llmfoundry.launch.job import Job, make_job
from llmfoundry.recipe.before_training import LaunchFinetuneRecipe, LaunchRecipe
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_dict

RENDER: dict[str, Callable[[Job], str]] = {
    "local": hosts.render,
    "ssh": hosts.render,
    "slurm": slurm.render,
    "kubernetes": kubernetes.render,
    "skypilot": skypilot.render,
}
URL = "save_folder=s3://bucket/runs/a"


def job_of(*words: str, recipe: str = "mpt-7b.yaml") -> Job:
    kind = LaunchFinetuneRecipe if recipe.startswith("finetune/") else LaunchRecipe
    made = checked(kind, YAMLS / recipe, words)
    return make_job(made, given=recipe, overrides=words)


def render(*words: str, recipe: str = "mpt-7b.yaml") -> str:
    job = job_of(*words, recipe=recipe)
    return RENDER[job.config.target](job)


def objects(*words: str) -> dict[str, Any]:
    text = render("launch=kubernetes", "launch.image=me/foundry", URL, *words)
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    if found["kind"] == "JobSet":
        found = found["spec"]["replicatedJobs"][0]["template"]
    return found["spec"]["template"]["spec"]


def test_slurms_script_is_the_supervisor_with_an_srun_for_each_attempt() -> None:
    text = render("launch=slurm", "nodes=8", "launch.spare_nodes=1", "launch.time=2-00:00:00")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert {
        "--nodes=9",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--no-kill",
        "--requeue",
        "--signal=B:TERM@300",
        "--time=2-00:00:00",
    } <= {*options}
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    words = shlex.split(text[text.index("\nexec ") :].replace("\\\n", ""))
    assert words[2] == "-c"  # holds signals back for the supervisor, and becomes it
    assert words[5:8] == ["-m", "llmfoundry", "supervise"]
    config = checked(TrainRecipe, YAMLS / "mpt-7b.yaml", words[9:-1]).supervise
    assert config.act and config.launch[:4] == ["srun", "-K", "--nodes=8", "--exclude={exclude}"]
    without = render("launch=slurm", "nodes=8")
    assert '"--nodes={nodes}"' in without and "#SBATCH --nodes=8" in without


def test_slurm_has_only_what_was_asked_for() -> None:
    text = render("launch=slurm", "nodes=1", "gpus_per_node=0", "launch.restarts=0")
    assert "--gpus-per-node" not in text and "--ntasks-per-node=1\n" in text
    assert "--no-requeue" in text and "-lt 0 ]" in text
    text = render("launch=slurm", "launch.image=me/f", "launch.mounts=[/data:/data]")
    assert '"--container-image=me/f","--container-mounts=/data:/data","python"]' in text
    text = render("launch=slurm", "supervise.launch=[mpirun]", "launch.options=['--comment=a b']")
    assert "srun" not in text and '#SBATCH --comment="a b"' in text
    text = render("launch=slurm", "supervise.act=false")
    assert text.index("supervise.act=true") < text.index("supervise.act=false")


@pytest.mark.parametrize("target", ["ssh", "kubernetes", "skypilot"])
def test_processes_of_several_machines_meet_at_the_first(target: str) -> None:
    words = {
        "ssh": ["launch.hosts=[me@n1,n2]", "gpus_per_node=4"],
        "kubernetes": ["launch.image=i", URL, "nodes=2", "gpus_per_node=4"],
        "skypilot": ["launch.resources.accelerators=A100", URL, "nodes=2", "gpus_per_node=4"],
    }[target]
    extra = ["dry_run=true"] if target == "skypilot" else []
    text = render(f"launch={target}", *words, *extra)
    first = {"ssh": "n1", "kubernetes": "mpt-7b-node-0-0.mpt-7b", "skypilot": "'\"$head\"'"}
    name = "a" if target != "ssh" else "mpt-7b"
    first["kubernetes"] = first["kubernetes"].replace("mpt-7b", name)
    assert f'"--rdzv-endpoint={first[target]}:29400"' in text.replace("''", "'")
    assert '"--nnodes=2","--nproc-per-node=4"' in text
    if target == "ssh":
        assert (
            text.count("--rdzv-endpoint") == 2
            and subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        )


def test_a_jobset_ends_with_a_verdict_and_starts_again_as_a_gang() -> None:
    found = objects("nodes=4", "launch.queue=team", "launch.priority=high", "launch.restarts=7")
    jobset = found["JobSet"]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["completions"] == inner["parallelism"] == 4 and inner["backoffLimit"] == 0
    first, second = inner["podFailurePolicy"]["rules"]
    assert first["onExitCodes"]["values"] == [2, 93] and second["action"] == "Ignore"
    assert "ServiceAccount" not in found and "priorityClassName" not in pod_of(jobset)


def test_a_pod_has_its_gpus_memory_recipe_and_the_names_of_secrets() -> None:
    words = ("launch.secrets=[HF_TOKEN]", "launch.mounts=[data:/data,/scratch:/tmp/scratch]")
    found = objects(*words, "launch.resources={cpu: 96, rdma/ib: 8}", "launch.time=10:00:00")
    pod, job = pod_of(found["Job"]), found["Job"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "96", "rdma/ib": "8"}
    assert job["activeDeadlineSeconds"] == 36_000 and job["backoffLimit"] == 20
    assert pod["terminationGracePeriodSeconds"] == 300 and pod["restartPolicy"] == "Never"
    kinds = {next(key for key in volume if key != "name"): volume for volume in pod["volumes"]}
    assert kinds["emptyDir"]["emptyDir"] == {"medium": "Memory"}
    assert kinds["persistentVolumeClaim"]["persistentVolumeClaim"]["claimName"] == "data"
    assert kinds["hostPath"]["hostPath"] == {"path": "/scratch"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    secret = {"secretKeyRef": {"name": "llmfoundry", "key": "HF_TOKEN"}}
    assert {"name": "HF_TOKEN", "valueFrom": secret} in container["env"]
    assert container["env"][0]["valueFrom"]["fieldRef"] == {"fieldPath": "spec.nodeName"}


def test_who_may_cordon_is_asked_for_with_act_alone() -> None:
    found = objects("supervise.act=true", "launch.namespace=training")
    rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]
    assert found["ClusterRole"]["rules"] == rules
    (subject,) = found["ClusterRoleBinding"]["subjects"]
    assert (subject["name"], subject["namespace"]) == ("a", "training")
    assert pod_of(found["Job"])["serviceAccountName"] == "a"
    found = objects("supervise.act=true", "launch.service_account=trainer")
    assert pod_of(found["Job"])["serviceAccountName"] == "trainer"
    assert "ClusterRole" not in found
    with pytest.raises(UserError, match=r"launch\.namespace: is required with supervise\.act"):
        objects("supervise.act=true")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mpt-7b", "mpt-7b"),
        ("MPT_7b", "run-mpt-7b-"),
        ("7b", "run-7b-"),
        ("x" * 90, "run-xxx"),
        ("lr=1e-3,seed=1", "run-lr-1e-3-seed-1-"),
        ("…", "run-"),
    ],
)
def test_any_runs_name_becomes_one_of_kubernetes(name: str, expected: str) -> None:
    found = kubernetes.object_name(name)
    assert found.startswith(expected) and len(found) <= 40
    assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") and found[-1] != "-"
    assert found == name or found != kubernetes.object_name(name + "y")


@pytest.mark.parametrize("recipe", ["mpt-7b.yaml", "finetune/llama-8b-lora.yaml"])
def test_the_recipe_that_travels_is_the_recipe(recipe: str, tmp_path: Path) -> None:
    words = ("launch=slurm", "nodes=2", "seed=3")
    job = job_of(*words, recipe=recipe)
    path = tmp_path / "launch.yaml"
    path.write_text(job.text)
    kind = FinetuneRecipe if recipe.startswith("finetune/") else TrainRecipe
    ours, theirs = to_dict(checked(kind, path)), to_dict(checked(kind, YAMLS / recipe, ["seed=3"]))
    assert ours.pop("launch")["nodes"] == 2 and theirs.pop("launch")["nodes"] is None
    assert ours == theirs


def test_secrets_are_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "kanarie-kanarie")
    monkeypatch.setenv("S3_KEY", "kanarie-key")
    words = ["launch.secrets=[HF_TOKEN,S3_KEY]", "data.storage_options={key: '${oc.env:S3_KEY}'}"]
    for target, more in {
        "local": [],
        "ssh": ["launch.hosts=[n1]"],
        "slurm": [],
        "kubernetes": ["launch.image=i", URL],
        "skypilot": ["launch.resources.accelerators=A100", URL, "dry_run=true"],
    }.items():
        text = render(f"launch={target}", *words, *more)
        assert "kanarie" not in text and "HF_TOKEN" in text
    with pytest.raises(UserError, match=r"launch\.secrets: the recipe reads \$\{oc\.env:S3_KEY\}"):
        render("launch=ssh", "launch.hosts=[n1]", words[1])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nodes=2"], "launch.nodes: 2, and local is one machine; write launch=ssh, or 1"),
        (["launch.queue=long"], "launch.queue: has no effect with launch.target: local"),
        (["launch.env={HF_TOKEN: hf_x}"], "launch.env.HF_TOKEN: may be a secret"),
        (["launch.env={U: 'https://a:b@c'}"], "launch.env.U: may be a secret"),
        (["launch.target=slrum"], "launch.target: 'slrum' is not a choice; did you mean 'slurm'?"),
        (["launch.hostz=[a]"], "unknown key 'launch.hostz'; did you mean 'hosts'?"),
        (
            ["data.storage_options={key: abcdefghijk}"],
            "data.storage_options.key: has a secret, and the recipe is written into files",
        ),
        (["launch=ssh"], "launch.hosts: is required"),
        (
            ["launch=ssh", "launch.hosts=['-oProxyCommand=x']"],
            "launch.hosts[0]: '-oProxyCommand=x'",
        ),
        (["launch=ssh", "launch.hosts=[a]", "launch.options=[-F,x]"], "launch.options: '-F'"),
        (["launch=ssh", "launch.hosts=[a,b]", "nodes=3"], "launch.nodes: 3, but there are 2"),
        (["launch=ssh", "launch.hosts=[a]", "launch.workdir=x"], "launch.workdir: 'x' is relative"),
        (["launch=slurm", "launch.time=4h"], "launch.time: '4h' is no time"),
        (["launch=slurm", "launch.options=[x]"], "launch.options[0]: 'x' is none"),
        (["launch=slurm", "launch.mounts=[/a:/b]"], "launch.mounts: has no effect without"),
        (["launch=slurm", "launch.account=a\nb"], "launch.account: has characters"),
        (["launch=kubernetes", URL], "launch.image: is required"),
        (["launch=kubernetes", "launch.image=i"], "save_folder: runs/mpt-7b goes with"),
        (["launch=kubernetes", "launch.image=i", URL, "launch.namespace=-x"], "launch.namespace: "),
        (
            ["launch=kubernetes", "launch.image=i", URL, "launch.object=job", "nodes=2"],
            "launch.object: job is for one machine",
        ),
        (["launch=skypilot", URL, "dry_run=true"], "launch.resources: names no GPU"),
        (["launch=skypilot", URL, "launch.resources.accelerators=A100"], "launch.target: skypilot"),
        (["save_overwrite=true"], "save_overwrite: true, but every restart"),
    ],
)
def test_what_a_target_does_not_take_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(UserError) as refused:
        render(*words)
    assert any(line in found for found in refused.value.problems), refused.value
    assert "abcdefghijk" not in str(refused.value) and "hf_x" not in str(refused.value)


@pytest.mark.parametrize("option", ["--array=0-1", "--arr=0-1", "--output=x", "--nodes=3"])
def test_options_that_launch_decides_are_refused(option: str) -> None:
    """Two elements of an array would train in one folder."""
    with pytest.raises(UserError, match=r"launch.options\[0\]: --\w+ is decided by launch"):
        job_of("launch=slurm", f"launch.options=['{option}']")
    job_of("launch=slurm", "launch.options=['--nodelist=n[1-2]','--account=a']")


def test_training_itself_takes_any_launch_section() -> None:
    for name in ("local", "ssh", "slurm", "kubernetes", "skypilot"):
        checked(TrainRecipe, YAMLS / "quickstart.yaml", [f"launch={name}"])
