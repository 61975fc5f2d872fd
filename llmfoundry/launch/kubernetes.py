"""Objects of Kubernetes: a Job, a JobSet or a TrainJob, and what kubectl says of them.

`targets.py` lists it. In every pod a supervisor is the first process: it starts its machine's
processes, again where that is of use, and those of several pods meet at the first one's name, which
JobSet's headless service gives it. Its exit statuses 2 and 93 end the whole object; after another,
or an eviction, Kubernetes starts pods anew, which resume. The recipe comes along as a ConfigMap.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import time
import zlib
from collections.abc import Iterator
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.exit_status import DONE, FAILED, GIVE_UP, MISTAKE
from llmfoundry.launch.client import SILENCE, ask, merged_lines
from llmfoundry.launch.job import RECIPE, Job, dump_all
from llmfoundry.launch.record import ENDED, RUNNING, UNKNOWN, WAITING, LaunchRecord, TargetState

Object = dict[str, Any]
RUN_LABEL = "llmfoundry/run"
ROLE = "llmfoundry-cordon"
_CONTAINER = "node"  # so Kubeflow's runtime calls it, and the replicated job around it
_FOLDER = "/etc/llmfoundry"  # of the recipe, in a pod
_GROUP = 1000  # of the Dockerfile's user, so that it may write to a volume
_LONGEST = 40  # with what JobSet adds a pod's name has 63 at most


def render(job: Job) -> str:
    """The objects as YAML, for kubectl apply."""
    make = next(make for kind, make in _MAKERS.items() if kind.lower() == job.config.object)
    recipe = _object("ConfigMap", job, suffix="-recipe", data={RECIPE: job.text})
    objects = [*_cordoning(job), recipe, make(job)]
    return f"# {job.note}\n" + dump_all(*objects)


def object_name(name: str) -> str:
    """A run's name as Kubernetes takes one: lower case, digits and `-`; one of its own if cut."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain == name and len(plain) <= _LONGEST and not plain[0].isdecimal():
        return plain
    return f"run-{plain[: _LONGEST - 13]}".rstrip("-") + f"-{zlib.crc32(name.encode()):08x}"


def _object(kind: str, job: Job, *, suffix: str = "", **more: Any) -> Object:
    """An object of this run, with `more` beside its metadata."""
    name, git = object_name(job.name), job.record.git
    notes = {"llmfoundry/recipe": job.record.recipe}
    if git:
        notes["llmfoundry/commit"] = f"{git['commit']}{' and changes' * bool(git['dirty'])}"
    labels = {"app.kubernetes.io/managed-by": "llmfoundry", RUN_LABEL: name}
    if kind in _MAKERS and job.config.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = job.config.queue
        if job.config.priority is not None:
            labels["kueue.x-k8s.io/priority-class"] = job.config.priority
    metadata: Object = {"name": name + suffix}
    metadata |= {"namespace": job.config.namespace} if job.config.namespace else {}
    metadata |= {"labels": labels, "annotations": notes}
    return {"apiVersion": _VERSIONS[kind], "kind": kind, "metadata": metadata, **more}


def _job(job: Job) -> Object:
    """One machine: a Job, which needs nothing that a cluster does not have."""
    return _object("Job", job, spec=_job_spec(job, backoffLimit=job.config.restarts))


def _job_spec(job: Job, **more: Any) -> Object:
    limit = {"activeDeadlineSeconds": job.config.seconds} if job.config.seconds else {}
    return {**more, "podFailurePolicy": _failures(), **limit, "template": _pod(job)}


def _jobset(job: Job) -> Object:
    """Several machines: all pods of the one Job start again together, as a gang."""
    inner = _job_spec(
        job,
        completionMode="Indexed",
        completions=job.nodes,
        parallelism=job.nodes,
        backoffLimit=0,  # JobSet counts
    )
    given_up = {"name": "givenUp", "action": "FailJobSet"}
    rules = [{**given_up, "onJobFailureReasons": ["PodFailurePolicy"]}]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.config.restarts, "rules": rules},
        "replicatedJobs": [{"name": _CONTAINER, "replicas": 1, "template": {"spec": inner}}],
    }
    return _object("JobSet", job, spec=spec)


def _trainjob(job: Job) -> Object:
    """Kubeflow Trainer 2: its runtime torch-distributed makes the JobSet, and counts restarts."""
    pod = _pod(job)
    (container,) = pod["spec"].pop("containers")
    mounts = {"name": container["name"], "volumeMounts": container["volumeMounts"]}
    own = ("restartPolicy", "priorityClassName")  # the runtime's
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key not in own}
    pod["spec"]["containers"] = [mounts]
    patch = {"name": _CONTAINER, "template": {"spec": {"template": pod}}}
    runtime = {"template": {"spec": {"replicatedJobs": [patch]}}}
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        "resourcesPerNode": container["resources"],
        "env": container["env"],
    }
    spec: Object = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "llmfoundry/launch", "trainingRuntimeSpec": runtime}],
    }
    spec |= {"activeDeadlineSeconds": job.config.seconds} if job.config.seconds else {}
    return _object("TrainJob", job, spec=spec)


_MAKERS = {"Job": _job, "JobSet": _jobset, "TrainJob": _trainjob}
"""By kind: in lower case launch.object's."""
_RBAC = "rbac.authorization.k8s.io"
_VERSIONS = {
    "ConfigMap": "v1",
    "ServiceAccount": "v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}


def _failures() -> Object:
    """What a pod's end means; a supervisor's other statuses are failures that count."""
    ends = {"containerName": _CONTAINER, "operator": "In", "values": [MISTAKE, GIVE_UP]}
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": ends},
            {"action": "Ignore", "onPodConditions": evicted},  # or preempted: not counted
        ]
    }


def _pod(job: Job) -> Object:
    """The pod of a machine."""
    config = job.config
    volumes: list[Object] = [
        {"name": "recipe", "configMap": {"name": f"{object_name(job.name)}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # NCCL's and the loaders'
    ]
    mounts: list[Object] = [
        {"name": "recipe", "mountPath": _FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, mount in enumerate(config.mounts):
        source, _, path = mount.rpartition(":")
        is_path = source.startswith("/")
        of_node = {"hostPath": {"path": source}}
        claimed = {"persistentVolumeClaim": {"claimName": source}}
        volumes.append({"name": f"mount-{number}", **(of_node if is_path else claimed)})
        mounts.append({"name": f"mount-{number}", "mountPath": path})
    limits = {"nvidia.com/gpu": str(config.gpus_per_node)} if config.gpus_per_node else {}
    more = {name: str(amount) for name, amount in config.resources.items()}
    container = {
        "name": _CONTAINER,
        "image": config.image,
        "command": _command(job),
        **({"workingDir": config.workdir} if config.workdir else {}),
        "env": _variables(job),
        "resources": {"limits": limits | more},
        "volumeMounts": mounts,
    }
    account = config.service_account or (object_name(job.name) if job.acts else None)
    spec: Object = {"serviceAccountName": account} if account else {}
    if config.priority is not None and config.queue is None:
        spec["priorityClassName"] = config.priority
    spec |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.signal_seconds,  # in which it saves
        "securityContext": {"fsGroup": _GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": {RUN_LABEL: object_name(job.name)}}, "spec": spec}


def _command(job: Job) -> list[str]:
    name = object_name(job.name)
    words = [*job.torchrun(f"{name}-{_CONTAINER}-0-0.{name}"), *job.own_processes()]
    command = job.command(f"{_FOLDER}/{RECIPE}", *words)
    if not job.config.setup:
        return command
    lines = ["set -e", *job.config.setup, f"exec {shlex.join(command)}"]
    return ["bash", "-c", "\n".join(lines)]


def _variables(job: Job) -> list[Object]:
    config = job.config
    # The check's word for this machine is then the cluster's.
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    plain = [{"name": name, "value": value} for name, value in config.env.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": config.secret, "key": name}}}
        for name in config.secrets
    ]
    return [node, *plain, *secret]


def _cordoning(job: Job) -> list[Object]:
    """With supervise.act: an account that may cordon a node which the check finds bad."""
    if not job.acts or job.config.service_account is not None:
        return []
    account, space = object_name(job.name), job.config.namespace or "default"
    role, version = {"name": f"{ROLE}-{account}"}, f"{_RBAC}/v1"
    # spec.unschedulable, and an annotation that says why
    rules = [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]
    subject = {"kind": "ServiceAccount", "name": account, "namespace": space}
    named = {"apiGroup": _RBAC, "kind": "ClusterRole", **role}
    binding = {"metadata": role, "roleRef": named, "subjects": [subject]}
    return [
        _object("ServiceAccount", job),
        {"apiVersion": version, "kind": "ClusterRole", "metadata": role, "rules": rules},
        {"apiVersion": version, "kind": "ClusterRoleBinding", **binding},
    ]


def submit(job: Job) -> LaunchRecord:
    """Apply the objects; an ended one of the same run is deleted first.

    Raises:
        UserError: it is there and has not ended, or is another's; or kubectl refuses.
    """
    config = job.config
    where = {"namespace": config.namespace or "", "context": config.context or ""}
    where |= job.record.where
    named = f"{config.object}/{object_name(job.name)}"
    record = dataclasses.replace(job.record, job=named, where=where, submitted_at=time.time())
    there = _get(record)
    if there is not None:
        found = _state_of(record, there)
        owned = there.get("metadata", {}).get("labels", {}).get(RUN_LABEL) == object_name(job.name)
        if found.state != ENDED or not owned:
            why = found.reason if owned else "and is not of this run"
            raise UserError(f"run_name: {named} is there already, {why}; write another run_name")
        ask([*_kubectl(record), "delete", named, "--wait=true"], seconds=180)
    ask([*_kubectl(record), "apply", "-f", "-"], text=render(job))
    return record


def _kubectl(record: LaunchRecord) -> list[str]:
    names = ("context", "namespace")
    return ["kubectl", *(f"--{n}={record.where[n]}" for n in names if record.where.get(n))]


def _get(record: LaunchRecord) -> Object | None:
    """The object; None: it is not there."""
    try:
        text = ask([*_kubectl(record), "get", record.job, "--output=json"])
        found = json.loads(text)
    except UserError as error:
        if "not found" in str(error).lower():
            return None
        raise
    except ValueError as error:
        raise UserError("kubectl: its answer cannot be read; try again") from error
    if not isinstance(found, dict):
        raise UserError("kubectl: its answer is no object of Kubernetes; try again")
    return found


def state(record: LaunchRecord) -> TargetState:
    """What the cluster says of its object."""
    if not record.job:
        return TargetState(UNKNOWN, "was not submitted")
    try:
        found = _get(record)
        return TargetState(ENDED, "was deleted") if found is None else _state_of(record, found)
    except UserError as error:
        return TargetState(UNKNOWN, str(error))
    except (AttributeError, KeyError, TypeError):
        return TargetState(UNKNOWN, "kubectl: its answer is no object of Kubernetes")


def _state_of(record: LaunchRecord, found: Object) -> TargetState:
    status = found.get("status") or {}
    conditions = {c.get("type"): c for c in status.get("conditions", []) if c["status"] == "True"}
    for name in ("Complete", "Completed"):
        if name in conditions:
            return TargetState(ENDED, f"exit status 0 ({name})", DONE)
    if "Failed" in conditions:
        why = [conditions["Failed"].get(key) for key in ("reason", "message")]
        return TargetState(ENDED, f"failed: {': '.join(filter(None, why))}", FAILED)
    if "Suspended" in conditions:
        whose = conditions["Suspended"].get("message") or "by Kueue or a person"
        return TargetState(WAITING, f"suspended: {whose}")
    parts = [*status.get("replicatedJobsStatus", []), *status.get("jobsStatus", []), status]
    restarts = status.get("restarts", 0)
    again = f", started again {restarts} times" if restarts else ""
    if any(part.get("ready") for part in parts):
        return TargetState(RUNNING, f"{record.job}{again}")
    return TargetState(WAITING, f"{_why_pods_wait(record)}{again}")


def _why_pods_wait(record: LaunchRecord) -> str:
    """Of its pods: Unschedulable, ImagePullBackOff and their like, with Kubernetes' own words."""
    try:
        text = ask([*_kubectl(record), "get", "pods", f"-l={_selector(record)}", "--output=json"])
        pods = json.loads(text)["items"]
    except (UserError, ValueError, KeyError, TypeError):
        return "its pods are not ready"
    for pod in pods:
        status = pod.get("status", {})
        for container in status.get("containerStatuses", []):
            waits = container.get("state", {}).get("waiting")
            if waits:
                return ": ".join(filter(None, [waits.get("reason"), waits.get("message")]))
        for condition in status.get("conditions", []):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                return ": ".join(filter(None, map(condition.get, ("reason", "message"))))
    return "its pods are not ready" if pods else "it has no pods yet"


def _selector(record: LaunchRecord) -> str:
    return f"{RUN_LABEL}={record.job.rpartition('/')[2]}"


def stop(record: LaunchRecord, *, now: bool) -> str:
    """Delete it: its supervisors get SIGTERM, save, and end within signal_seconds."""
    if not record.job or state(record).state == ENDED:
        return "had ended"
    ask([*_kubectl(record), "delete", record.job, "--wait=false"])
    if not now:
        return "deleted; its pods save and end"
    pods = [*_kubectl(record), "delete", "pods", f"-l={_selector(record)}"]
    ask([*pods, "--grace-period=0", "--force", "--wait=false"])
    return "deleted, with its pods"


def logs(record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
    """What all pods print that there are now, with the number of the machine."""
    words = [*_kubectl(record), "logs", f"-l={_selector(record)}", f"--container={_CONTAINER}"]
    words += ["--prefix", "--tail=-1", f"--max-log-requests={max(5, record.nodes)}"]
    words += ["--follow"] if follow else ["--timestamps"] * (record.nodes > 1)
    for source, line in merged_lines({"": words}):
        if (source, line) == SILENCE:
            yield SILENCE
            continue
        found = re.match(r"\[pod/(\S+)/\S+\] ?", line)
        index = re.search(r"-0-(\d+)-\w+$", found[1]) if found else None
        yield index[1] if index else "0", line[found.end() :] if found else line
