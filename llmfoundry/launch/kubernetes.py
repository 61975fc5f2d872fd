"""Kubernetes target: a Job, JobSet or TrainJob, its state, stop and logs through kubectl.

Listed in `targets.py`. The first process of each pod is a supervisor, which starts the processes of
its machine and restarts them if that is useful. With several pods, the rendezvous is on the first
pod, whose name is resolved by JobSet's headless service. The supervisor's exit statuses 2 and 93
fail the object. After other failures, or an eviction, Kubernetes restarts the pods and the run
resumes. The recipe is mounted from a ConfigMap.
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
_CONTAINER = "node"  # name of the container and replicated job in Kubeflow's runtime
_FOLDER = "/etc/llmfoundry"  # mount of the recipe in a pod
_GROUP = 1000  # group of the Dockerfile's user, for write access to volumes
_LONGEST = 40  # characters; JobSet appends to it, and a pod's name has at most 63


def render(job: Job) -> str:
    """Return the objects as YAML for kubectl apply."""
    makers = {kind.lower(): make for kind, make in _MAKERS.items()}
    make = makers[str(job.config.object)]
    recipe = _object("ConfigMap", job, suffix="-recipe", data={RECIPE: job.text})
    objects = [*_cordoning(job), recipe, make(job)]
    return f"# {job.note}\n" + dump_all(*objects)


def object_name(name: str) -> str:
    """Return a valid object name for a run: lower-case letters, digits and `-`.

    A changed name gets a checksum, so that different runs have different names.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain == name and len(plain) <= _LONGEST and not plain[0].isdecimal():
        return plain
    return f"run-{plain[: _LONGEST - 13]}".rstrip("-") + f"-{zlib.crc32(name.encode()):08x}"


def _object(kind: str, job: Job, *, suffix: str = "", **more: Any) -> Object:
    """Return an object with the run's name, labels and annotations, and the fields `more`."""
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
    """Return a Job for one machine, which every cluster supports without extensions."""
    return _object("Job", job, spec=_job_spec(job, backoffLimit=job.config.restarts))


def _job_spec(job: Job, **more: Any) -> Object:
    limit = {"activeDeadlineSeconds": job.config.seconds} if job.config.seconds else {}
    return {**more, "podFailurePolicy": _failures(), **limit, "template": _pod(job)}


def _jobset(job: Job) -> Object:
    """Return a JobSet for several machines; all pods of its one Job restart together."""
    inner = _job_spec(
        job,
        completionMode="Indexed",
        completions=job.nodes,
        parallelism=job.nodes,
        backoffLimit=0,  # JobSet counts the restarts
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
    """Return a TrainJob of Kubeflow Trainer 2.

    Its runtime torch-distributed creates the JobSet and counts restarts.
    """
    # split the pod: the container goes to `trainer`, the rest patches the runtime's pod
    pod = _pod(job)
    (container,) = pod["spec"].pop("containers")
    mounts = {"name": container["name"], "volumeMounts": container["volumeMounts"]}
    runtime_keys = ("restartPolicy", "priorityClassName")  # set by the runtime
    pod["spec"] = {key: value for key, value in pod["spec"].items() if key not in runtime_keys}
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
"""Functions by object kind; launch.object is the kind in lower case."""
_RBAC = "rbac.authorization.k8s.io"
_VERSIONS = {
    "ConfigMap": "v1",
    "ServiceAccount": "v1",
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}


def _failures() -> Object:
    """Return the pod failure policy. Other exit statuses count as restarts."""
    ends = {"containerName": _CONTAINER, "operator": "In", "values": [MISTAKE, GIVE_UP]}
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": ends},
            {"action": "Ignore", "onPodConditions": evicted},  # evicted or preempted: not counted
        ]
    }


def _pod(job: Job) -> Object:
    """Return the pod template of a machine."""
    # volumes and their mounts
    config = job.config
    volumes: list[Object] = [
        {"name": "recipe", "configMap": {"name": f"{object_name(job.name)}-recipe"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for NCCL and data loader workers
    ]
    mounts: list[Object] = [
        {"name": "recipe", "mountPath": _FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for number, mount in enumerate(config.mounts):
        source, _, path = mount.rpartition(":")
        volume: Object = {"name": f"mount-{number}"}
        if source.startswith("/"):
            volume["hostPath"] = {"path": source}
        else:
            volume["persistentVolumeClaim"] = {"claimName": source}
        volumes.append(volume)
        mounts.append({"name": f"mount-{number}", "mountPath": path})

    # the container and its resources
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

    # the pod
    account = config.service_account or (object_name(job.name) if job.acts else None)
    spec: Object = {"serviceAccountName": account} if account else {}
    if config.priority is not None and config.queue is None:
        spec["priorityClassName"] = config.priority
    spec |= {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": config.signal_seconds,  # time to save a checkpoint
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
    # the health check reports the node by the cluster's name for it
    node = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    plain = [{"name": name, "value": value} for name, value in config.env.items()]
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": config.secret, "key": name}}}
        for name in config.secrets
    ]
    return [node, *plain, *secret]


def _cordoning(job: Job) -> list[Object]:
    """Return, for supervise.act, an account with permission to cordon bad nodes."""
    if not job.acts or job.config.service_account is not None:
        return []
    account, space = object_name(job.name), job.config.namespace or "default"
    role, version = {"name": f"{ROLE}-{account}"}, f"{_RBAC}/v1"
    # patch sets spec.unschedulable and an annotation with the reason
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
    """Apply the objects. An ended object of the same run is deleted first.

    Raises:
        UserError: an object of that name has not ended or belongs to something else, or kubectl
            fails.
    """
    config = job.config
    where = {"namespace": config.namespace or "", "context": config.context or ""}
    where |= job.record.where
    job_id = f"{config.object}/{object_name(job.name)}"
    record = dataclasses.replace(job.record, job=job_id, where=where, submitted_at=time.time())

    # delete an ended object of the same run
    existing = _get(record)
    if existing is not None:
        state = _state_of(record, existing)
        label = existing.get("metadata", {}).get("labels", {}).get(RUN_LABEL)
        is_same_run = label == object_name(job.name)
        if state.state != ENDED or not is_same_run:
            why = state.reason if is_same_run else "and is not of this run"
            raise UserError(f"run_name: {job_id} is there already, {why}; write another run_name")
        ask([*_kubectl(record), "delete", job_id, "--wait=true"], seconds=180)
    ask([*_kubectl(record), "apply", "-f", "-"], text=render(job))
    return record


def _kubectl(record: LaunchRecord) -> list[str]:
    names = ("context", "namespace")
    return ["kubectl", *(f"--{n}={record.where[n]}" for n in names if record.where.get(n))]


def _get(record: LaunchRecord) -> Object | None:
    """Return the object; None: it does not exist."""
    try:
        text = ask([*_kubectl(record), "get", record.job, "--output=json"])
        answer = json.loads(text)
    except UserError as error:
        if "not found" in str(error).lower():
            return None
        raise
    except ValueError as error:
        raise UserError("kubectl: its answer cannot be read; try again") from error
    if not isinstance(answer, dict):
        raise UserError("kubectl: its answer is no object of Kubernetes; try again")
    return answer


def state(record: LaunchRecord) -> TargetState:
    """Return the state of the object in the cluster."""
    if not record.job:
        return TargetState(UNKNOWN, "was not submitted")
    try:
        existing = _get(record)
        if existing is None:
            return TargetState(ENDED, "was deleted")
        return _state_of(record, existing)
    except UserError as error:
        return TargetState(UNKNOWN, str(error))
    except (AttributeError, KeyError, TypeError):
        return TargetState(UNKNOWN, "kubectl: its answer is no object of Kubernetes")


def _state_of(record: LaunchRecord, existing: Object) -> TargetState:
    """Return the state from an object's status, and from its pods if they are not ready."""
    # conditions of Job (Complete, Failed), JobSet (Completed) and TrainJob
    status = existing.get("status") or {}
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

    # no condition: running if a pod is ready
    parts = [*status.get("replicatedJobsStatus", []), *status.get("jobsStatus", []), status]
    restarts = status.get("restarts", 0)
    restart_note = f", started again {restarts} times" if restarts else ""
    if any(part.get("ready") for part in parts):
        return TargetState(RUNNING, f"{record.job}{restart_note}")
    return TargetState(WAITING, f"{_why_pods_wait(record)}{restart_note}")


def _why_pods_wait(record: LaunchRecord) -> str:
    """Return why pods are not ready (Unschedulable, ImagePullBackOff, …), as Kubernetes reports."""
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
    """Delete the object and return what was done.

    The supervisors get SIGTERM and have signal_seconds to save and end; with `now` pods are killed.
    """
    if not record.job or state(record).state == ENDED:
        return "had ended"
    ask([*_kubectl(record), "delete", record.job, "--wait=false"])
    if not now:
        return "deleted; its pods save and end"
    pods = [*_kubectl(record), "delete", "pods", f"-l={_selector(record)}"]
    ask([*pods, "--grace-period=0", "--force", "--wait=false"])
    return "deleted, with its pods"


def logs(record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
    """Yield (number of the machine, line) of the output of all existing pods."""
    words = [*_kubectl(record), "logs", f"-l={_selector(record)}", f"--container={_CONTAINER}"]
    words += ["--prefix", "--tail=-1", f"--max-log-requests={max(5, record.nodes)}"]
    words += ["--follow"] if follow else ["--timestamps"] * (record.nodes > 1)
    for source, line in merged_lines({"": words}):
        if (source, line) == SILENCE:
            yield SILENCE
            continue
        prefix = re.match(r"\[pod/(\S+)/\S+\] ?", line)
        index = re.search(r"-0-(\d+)-\w+$", prefix[1]) if prefix else None
        yield index[1] if index else "0", line[prefix.end() :] if prefix else line
