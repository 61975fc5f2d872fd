"""The `launch` section: where `scripts/launch.py` starts a run, and on what.

Training does not read it, so that a recipe trains in the same way with and without it. One section
serves all targets; an `Only` rule of a key names the targets that have it. A key that the target
lacks is an error, because it would have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.recipe.checks import set_defaults
from llmfoundry.recipe.schema import Only, Range, check_fields, choice
from llmfoundry.redaction import names_a_secret, public

TARGETS = ("local", "ssh", "slurm", "kubernetes", "skypilot")
OBJECTS = ("job", "jobset", "trainjob")
_NODES = Range(1, 100_000)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d):(\d\d)")
_HOST = re.compile(r"[A-Za-z0-9_][\w.@:%\[\]-]*")
_KUBERNETES_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.:@/_-]*[A-Za-z0-9])?")
_SSH_FLAGS = re.compile(r"-[pilJ]|-p[0-9]+|-[46Cqv]+")
_SSH_OPTIONS = re.compile(
    r"(BatchMode|Compression|ConnectTimeout|ConnectionAttempts|IdentitiesOnly|IdentityFile|LogLevel"
    r"|Port|ServerAlive\w+|StrictHostKeyChecking|User|UserKnownHostsFile)=[^\s].*"
)
_SBATCH = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")
_OF_LAUNCH = {"--array": "--ar", "--output": "--ou", "--wrap": "--wr", "--nodes": "--nodes"}
"""Options of sbatch that launch decides, each with the shortest form that sbatch takes for it."""
_REFUSED_OPTION = (
    "{} is decided by launch, which starts one run in one folder; remove it (nodes=2 for machines,"
    " a sweep for several runs)"
)


@dataclass
class LaunchConfig:
    """Where scripts/launch.py starts the run, under a supervisor; it does not affect training."""

    target: Annotated[str, choice(TARGETS)] = "local"
    """local: this machine, in the background. ssh: machines that your ssh reaches. slurm: a job of
    sbatch. kubernetes: a Job, JobSet or TrainJob, by kubectl. skypilot: the task is only printed,
    for sky."""
    nodes: Annotated[int | None, _NODES] = None
    """Number of machines; unset: 1, or all hosts. Several machines need a save_folder that all of
    them reach: a shared file system, or a URL."""
    gpus_per_node: Annotated[int | None, Range(0, 1024)] = None
    """GPUs, and therefore processes, of each machine; 0: one process on CPUs. Unset: 8 on slurm,
    kubernetes and skypilot; elsewhere all GPUs of the machine."""
    spare_nodes: Annotated[int | None, _NODES, Only("target", "slurm")] = None
    """Machines in addition to `nodes`, which replace failed ones. Unset: none, and a job that loses
    a machine continues with fewer."""
    hosts: Annotated[list[str], Only("target", "ssh")] = field(default_factory=list)
    """Machines by the names that ssh takes (user@host). All processes connect to the first one."""
    port: Annotated[
        int | None, Range(1, 65_535), Only("target", ("ssh", "kubernetes", "skypilot"))
    ] = None
    """Port of the first machine to which the processes of the other machines connect; unset:
    29400."""
    workdir: str | None = None
    """The folder on the machine in which the run starts, created if it is missing. Relative paths,
    save_folder included, refer to it. Unset: the current folder (on ssh the same path there); on
    kubernetes and skypilot the image's."""
    environment: Annotated[str | None, Only("target", ("local", "ssh", "slurm", "skypilot"))] = None
    """A folder on the machine with bin/python, such as a venv; unset: this Python's on local and
    slurm, else the python of the PATH."""
    image: Annotated[str | None, Only("target", ("slurm", "kubernetes", "skypilot"))] = None
    """A container image with llmfoundry (the repository's Dockerfile builds one). kubernetes
    requires it; slurm starts processes in it by pyxis; skypilot takes it as docker:IMAGE."""
    setup: list[str] = field(default_factory=list)
    """Lines of bash that run first on each machine (on slurm only on the first): module load
    cuda."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, {NCCL_DEBUG: WARN}. They are written into files, so they must not be
    secrets."""
    secrets: list[str] = field(default_factory=list)
    """Names of environment variables with secrets, [HF_TOKEN], never their values. local, slurm:
    inherited from this shell. ssh: sent through ssh's standard input. kubernetes: keys of the
    Secret `secret`. skypilot: sky's secrets, from its shell."""
    secret: Annotated[str | None, Only("target", "kubernetes")] = None
    """The Kubernetes Secret that has `secrets`; unset: llmfoundry, as `kubectl create secret
    generic llmfoundry --from-env-file=FILE` creates it."""
    mounts: Annotated[list[str], Only("target", ("slurm", "kubernetes", "skypilot"))] = field(
        default_factory=list
    )
    """Volumes of the container, SOURCE:/path. kubernetes: SOURCE is the name of a
    PersistentVolumeClaim, or a path of the node; slurm: a path, with `image`; skypilot: the URL of
    a bucket, or a path on this machine."""
    resources: Annotated[dict[str, Any], Only("target", ("kubernetes", "skypilot"))] = field(
        default_factory=dict
    )
    """kubernetes: additional limits of a pod, {memory: 1Ti, cpu: 96, rdma/ib: 8}; skypilot:
    additional keys of its resources, {accelerators: "A100:8", use_spot: true}."""
    queue: Annotated[str | None, Only("target", ("slurm", "kubernetes"))] = None
    """slurm: the partition; kubernetes: Kueue's LocalQueue (a label)."""
    account: Annotated[str | None, Only("target", "slurm")] = None
    """The account that the job is charged to."""
    priority: Annotated[str | None, Only("target", ("slurm", "kubernetes"))] = None
    """slurm: a quality of service (--qos); kubernetes: a PriorityClass, with `queue` Kueue's."""
    time: Annotated[str | None, Only("target", ("slurm", "kubernetes"))] = None
    """Time limit of the job, [DAYS-]HOURS:MM:SS; unset: the target's."""
    restarts: Annotated[
        int | None, Range(0, 10_000), Only("target", ("slurm", "kubernetes", "skypilot"))
    ] = None
    """How often the target may restart the job (preempted, a machine lost), in addition to restarts
    by the supervisor within the job; unset: 20."""
    signal_seconds: Annotated[
        int | None, Range(1, 86_400), Only("target", ("slurm", "kubernetes"))
    ] = None
    """Seconds before the end of the job at which the run is notified, so that it can save; unset:
    300."""
    namespace: Annotated[str | None, Only("target", "kubernetes")] = None
    """Kubernetes namespace; unset: the context's."""
    context: Annotated[str | None, Only("target", "kubernetes")] = None
    """Context of kubectl's configuration; unset: the current one."""
    object: Annotated[str | None, choice(OBJECTS), Only("target", "kubernetes")] = None
    """job (one machine), jobset, or trainjob (Kubeflow Trainer 2); unset: job for one machine,
    jobset for several."""
    service_account: Annotated[str | None, Only("target", "kubernetes")] = None
    """Service account of the pods; unset: the default, or with supervise.act a new one that may
    cordon nodes."""
    options: Annotated[list[str], Only("target", ("ssh", "slurm"))] = field(default_factory=list)
    """ssh: options of the ssh command, ["-p", "2222"] (-i -l -J, and -o with an allowed few; write
    all others into ~/.ssh/config). slurm: #SBATCH lines, ["--constraint=h100"]."""

    def check(self, key: str = "launch.") -> Iterator[str]:
        """Yield an error line for each invalid value, and for each key that the target lacks."""
        if (yield from check_fields(key, self)):
            return
        yield from self._check_variables(key)
        yield from self._check_texts(key)
        if self.time is not None and not _TIME.fullmatch(self.time):
            yield f"{key}time: {self.time!r} is no time; write [DAYS-]HOURS:MM:SS, as 24:00:00"
        if not (self.workdir or "/").startswith("/"):
            yield f"{key}workdir: {self.workdir!r} is relative; write all of the path"
        for number, host in enumerate(self.hosts):
            if not _HOST.fullmatch(host):
                yield f"{key}hosts[{number}]: {host!r} is no host; write host, or user@host"
        for name, value in self.resources.items():
            if not isinstance(value, str | int | float):
                yield f"{key}resources.{name}: {value!r} is no amount; write a number or a text"
        for number, mount in enumerate(self.mounts):
            if not re.fullmatch(r".+:/[^:]*", mount):
                yield f"{key}mounts[{number}]: {mount!r} is no mount; write SOURCE:/path"
        if self.target == "slurm" and self.mounts and self.image is None:
            yield f"{key}mounts: has no effect without {key}image; remove it"
        if self.target == "ssh":
            yield from ssh_problems(f"{key}options", self.options)
        if self.target == "slurm":
            for number, word in enumerate(self.options):
                name = word.partition("=")[0]
                if not _SBATCH.fullmatch(word):
                    yield f"{key}options[{number}]: {word!r} is none; write --name=value"
                elif any(o.startswith(name) and name.startswith(s) for o, s in _OF_LAUNCH.items()):
                    yield f"{key}options[{number}]: {_REFUSED_OPTION.format(name)}"

    def check_launch(self, key: str = "launch.") -> Iterator[str]:
        """Yield an error line for each missing setting; only scripts/launch.py requires them."""
        several = (self.nodes or 1) > 1
        if self.target == "local" and several:
            yield f"{key}nodes: {self.nodes}, and local is one machine; write launch=ssh, or 1"
        if self.target == "ssh" and not self.hosts:
            yield f"{key}hosts: is required with target: ssh; write {key}hosts=[HOST]"
        elif self.target == "ssh" and self.nodes not in (None, len(self.hosts)):
            yield f"{key}nodes: {self.nodes}, but there are {len(self.hosts)} hosts; remove it"
        if self.target == "kubernetes" and self.image is None:
            yield f"{key}image: is required with target: kubernetes; write {key}image=IMAGE"
        if self.object == "job" and several:
            yield f"{key}object: job is for one machine, and nodes: {self.nodes}; write jobset"

        if self.object == "trainjob" and self.priority is not None and self.queue is None:
            yield f"{key}priority: a TrainJob takes one with {key}queue alone; remove it"
        needs_gpus = self.target == "skypilot" and self.gpus_per_node != 0
        if needs_gpus and "accelerators" not in self.resources:
            yield f"{key}resources: names no GPU; write {key}resources.accelerators=H100"

    def in_containers(self, folder: str) -> bool:
        """Return whether a folder is inside a container or rented machine, and lost with it."""
        if self.target not in ("kubernetes", "skypilot") or "://" in folder:
            return False
        paths = [mount.rpartition(":")[2].rstrip("/") for mount in self.mounts]
        return not any(folder.startswith(f"{path}/") for path in paths)

    def _check_variables(self, key: str) -> Iterator[str]:
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name):
                yield f"{key}env: {name!r} is no variable; write letters, digits and _"
            elif names_a_secret(name) or public(value) != value:
                yield (
                    f"{key}env.{name}: may be a secret, and env is written into files; remove it,"
                    f" and write {key}secrets: [{name}], its name alone"
                )
        for name in self.secrets:
            if not _VARIABLE.fullmatch(name):
                yield f"{key}secrets: holds what is no variable's name; write names alone"
            elif name in self.env:
                yield f"{key}secrets: {name} is in {key}env too; remove it there"

    def _check_texts(self, key: str) -> Iterator[str]:
        """Check that no text can start a new line of a script, or be taken for an option."""
        for name, text in self._values():
            if not isinstance(text, str):
                continue
            if not (name + text).isprintable():
                yield f"{key}{name}: has characters that no line can hold; write others"
            elif name in _NAMES and not _KUBERNETES_NAME.fullmatch(text):
                yield f"{key}{name}: {text!r} is no name; write letters, digits, - and ."
            elif text == "" and not name.startswith("env."):
                yield f"{key}{name}: is empty; remove it"

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the value of every setting, with each item of lists and mappings."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                yield from ((f"{name}[{number}]", each) for number, each in enumerate(value))
            elif isinstance(value, dict):
                yield from ((f"{name}.{part}", each) for part, each in value.items())
            else:
                yield name, value

    def fill(self) -> None:
        """Resolve defaults in place."""
        is_cluster = self.target in ("slurm", "kubernetes", "skypilot")
        set_defaults(self, nodes=max(1, len(self.hosts)))
        if is_cluster:
            set_defaults(self, gpus_per_node=8, restarts=20)
        if self.target in ("slurm", "kubernetes"):
            set_defaults(self, signal_seconds=300)
        if self.target in ("ssh", "kubernetes", "skypilot"):
            set_defaults(self, port=29_400)
        if self.target == "kubernetes":
            set_defaults(self, secret="llmfoundry", object="job" if self.nodes == 1 else "jobset")

    @property
    def seconds(self) -> int | None:
        """`time` in seconds."""
        match = _TIME.fullmatch(self.time or "")
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def ssh_problems(key: str, options: list[str]) -> Iterator[str]:
    """Yield an error line for options of ssh that could start programs, and for invalid ones.

    A run's folder records these options, and folders are copied from other people. With
    ProxyCommand or -F in a folder, listing runs would start a program.
    """
    words = iter(options)
    for word in words:
        if word == "-o":
            word = f"-o{next(words, '')}"
        if word.startswith("-o") and _SSH_OPTIONS.fullmatch(word[2:]):
            continue
        if not _SSH_FLAGS.fullmatch(word):
            yield f"{key}: {word!r} is not passed on; write it into ~/.ssh/config"
        elif word in ("-p", "-i", "-l", "-J") and next(words, "-").startswith("-"):
            yield f"{key}: {word} has no value; write one behind it"


_NAMES = {"secret", "namespace", "service_account"}
