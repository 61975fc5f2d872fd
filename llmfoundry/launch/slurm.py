"""Jobs of Slurm: the script for sbatch, and what squeue, scontrol, scancel and the job's log say.

`targets.py` lists it. The batch script is the supervisor, on the first machine; it starts every
attempt by srun on those that the job still has (`resilience/supervise/slurm_nodes.py`), so that a
bad machine costs an attempt and not the job. Slurm counts no requeues: the script does.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import time
from collections.abc import Iterator

from llmfoundry.errors import UserError
from llmfoundry.exit_status import INTERRUPTED, SAVED
from llmfoundry.launch.client import SILENCE, NoAnswerError, ask, merged_lines, secrets_here
from llmfoundry.launch.job import LOGS, RECIPE, Job, list_key
from llmfoundry.launch.record import ENDED, RUNNING, UNKNOWN, WAITING, LaunchRecord, TargetState
from llmfoundry.recipe.resilience import EXCLUDE, NODES

_REQUEUE = 'if $requeue; then scontrol requeue "$SLURM_JOB_ID"; fi'
_HOLD = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK,"
    " [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]); os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Keeps signals for the supervisor until it takes them (`exit_status.on_stops`): it needs seconds
to start, in which one would kill it, and the job would not be requeued."""
# Clusters wrap these commands, and print lines of their own around the answer.
_NUMBER = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;(\S+))?$", re.MULTILINE)
_QUEUED = re.compile(r"^([A-Z_]+)\|(.*)\|([^|\n]*)$", re.MULTILINE)
_FORGOTTEN = "Invalid job id"
_CLUSTER = "cluster"
"""In a record's `where`: the cluster of several that has the job; missing: the default one."""
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING")
_ENDS_ITSELF = ("COMPLETED", "FAILED")  # of others, such as TIMEOUT, the status is Slurm's
_SILENT_SECONDS = 60.0
_silent: dict[str, float] = {}
"""When a cluster's squeue last gave no answer: of hundreds of jobs only a few wait for one."""
_NO_LONGER_KNOWN = TargetState(ENDED, "Slurm no longer knows the job")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")


def render(job: Job) -> str:
    """The script that sbatch takes."""
    config, folder = job.config, job.folder.absolute()
    workdir = config.workdir or os.getcwd()
    lines = ["#!/bin/bash", f"# {job.note}", *_directives(job)]
    lines += [
        "# Slurm starts it again: preempted, at its limit, or when a machine was lost.",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {config.restarts} ]',
        "then requeue=true; else requeue=false; fi",
        f"trap '{_REQUEUE}; exit {SAVED}' TERM USR1  # before the supervisor is there",
        job.enter(workdir),
        *job.environment("from the shell of sbatch"),
        *config.setup,
    ]
    words = [*_supervise(job), "supervise.requeue=$requeue"]
    command = job.command(str(folder / RECIPE), *words)
    quoted = (f'"{word}"' if word.endswith("$requeue") else shlex.quote(word) for word in command)
    held = f"exec {shlex.quote(job.python)} -c {shlex.quote(_HOLD)}"
    return "\n".join([*lines, " \\\n    ".join([held, *quoted]), ""])


def _directives(job: Job) -> Iterator[str]:
    config = job.config
    log = str(job.folder.absolute() / LOGS / "slurm").replace("%", "%%")
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes + (config.spare_nodes or 0)}",
        f"--ntasks-per-node={job.processes}",
        *([f"--gpus-per-node={config.gpus_per_node}"] if config.gpus_per_node else []),
        "--exclusive",
        "--no-kill",  # a machine that dies does not take the job with it
        "--requeue" if config.restarts else "--no-requeue",
        f"--signal=B:TERM@{config.signal_seconds}",  # ahead of the job's limit, to save
        "--open-mode=append",
        f"--output={log}-%j.log",
    ]
    chosen = {"partition": config.queue, "account": config.account, "qos": config.priority}
    chosen["time"] = config.time
    options += [f"--{name}={value}" for name, value in chosen.items() if value is not None]
    for option in [*options, *config.options]:
        name, equals, value = option.partition("=")
        is_plain = re.fullmatch(r"[\w.,:/@%+=\[\]*&|-]*", value)
        text = value if is_plain else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
        yield f"#SBATCH {name}{equals}{text}"


def _supervise(job: Job) -> list[str]:
    """Settings of the supervisor, which is to start an attempt by srun."""
    if job.launches_itself:
        return ["supervise.act=true"]
    config = job.config
    # With spare machines always as many; without, on those that are left.
    machines = str(job.nodes) if config.spare_nodes else NODES
    words = ["srun", "-K", f"--nodes={machines}", f"--exclude={EXCLUDE}"]
    if config.image is not None:
        words.append(f"--container-image={config.image}")
        words += [f"--container-mounts={','.join(config.mounts)}"] if config.mounts else []
    return ["supervise.act=true", list_key("supervise.launch", [*words, _python_of_tasks(job)])]


def _python_of_tasks(job: Job) -> str:
    return "python" if job.config.image is not None else job.python


def submit(job: Job) -> LaunchRecord:
    """Give the script to sbatch, through its standard input."""
    secrets_here(job.config.secrets)
    if "SBATCH_ARRAY_INX" in os.environ:
        raise UserError(
            "SBATCH_ARRAY_INX: is set in this shell, and all elements of an array would train in"
            " one folder; unset it, and write a sweep for several runs"
        )
    try:
        answer = ask(["sbatch", "--parsable"], text=render(job))
    except NoAnswerError as error:
        raise UserError(
            f"sbatch: has not answered, and the job may be in the queue all the same: look for"
            f" {job.name} with squeue --me, and cancel it before you launch it again"
        ) from error
    numbers = _NUMBER.findall(answer)
    if not numbers:
        raise UserError(
            f"sbatch: printed no job number, but {answer.strip()[:200]!r}; look for {job.name} with"
            " squeue --me"
        )
    number, cluster = numbers[-1]
    where = {"log": str(job.folder.absolute() / LOGS / f"slurm-{number}.log"), **job.record.where}
    where |= {_CLUSTER: cluster} if cluster else {}
    return dataclasses.replace(job.record, job=number, where=where, submitted_at=time.time())


def _client(name: str, record: LaunchRecord) -> list[str]:
    """One of Slurm's commands, for the cluster that has the job."""
    cluster = record.where.get(_CLUSTER)
    return [name, f"--clusters={cluster}"] if cluster else [name]


def state(record: LaunchRecord) -> TargetState:
    """What Slurm says of it; of a job that it has forgotten its accounts, if it has any."""
    if not record.job:
        return TargetState(UNKNOWN, "was not submitted")
    cluster = record.where.get(_CLUSTER, "")
    if time.monotonic() - _silent.get(cluster, -math.inf) < _SILENT_SECONDS:
        return TargetState(UNKNOWN, "squeue: gave no answer about another job; try again later")
    words = ["--noheader", f"--jobs={record.job}", "--format=%T|%r|%N"]
    try:
        found = _QUEUED.search(ask([*_client("squeue", record), *words]))
        if found:
            return _in_queue(*found.groups())
    except NoAnswerError as error:
        _silent[cluster] = time.monotonic()
        return TargetState(UNKNOWN, str(error))
    except UserError as error:
        if _FORGOTTEN not in str(error):
            return TargetState(UNKNOWN, str(error))
    return _of_the_past(record)


def _in_queue(word: str, reason: str, nodes: str) -> TargetState:
    said = f"{word} ({reason})" if reason not in ("", "None") else word
    if word in _WAITS:
        return TargetState(WAITING, said)
    if word in _RUNS:
        return TargetState(RUNNING, f"{said} on {nodes}" if nodes else said)
    return TargetState(ENDED, said)


def _of_the_past(record: LaunchRecord) -> TargetState:
    """From the controller, which forgets a job after some minutes (MinJobAge), or from accounts."""
    away = ""
    for name, words, form in (
        (
            "scontrol",
            ["--oneliner", "show", "job", record.job],
            r"JobState=(\S+).* ExitCode=(\d+):(\d+)",
        ),
        (
            "sacct",
            ["-X", "-n", "-P", "-o", "State,ExitCode", "-j", record.job],
            r"(\w+).*\|(\d+):(\d+)",
        ),
    ):
        try:
            found = re.search(form, ask([*_client(name, record), *words]))
        except UserError as error:
            if name == "scontrol" and _FORGOTTEN not in str(error):
                away = str(error)  # many clusters keep no accounts, so sacct may fail
            continue
        if found and found[1] in (*_WAITS, *_RUNS):
            return _in_queue(found[1], "", "")
        if found:
            how = f"signal {found[3]}" if found[3] != "0" else f"exit status {found[2]}"
            status = int(found[2]) if found[1] in _ENDS_ITSELF and found[3] == "0" else None
            status = INTERRUPTED if found[1].startswith("CANCELLED") else status
            return TargetState(ENDED, f"{how} ({found[1]})", status)
    return TargetState(UNKNOWN, away) if away else _NO_LONGER_KNOWN


def stop(record: LaunchRecord, *, now: bool) -> str:
    """Signal the supervisor, which saves, ends, and is not requeued; a waiting job is cancelled."""
    if not record.job:
        return "was not submitted"
    found = state(record)
    if found.state == ENDED:
        return "had ended"
    if found.state == WAITING or now:
        ask([*_client("scancel", record), record.job])
        return "cancelled"
    ask([*_client("scancel", record), "--batch", "--signal=INT", record.job])
    return "asked to save and end"


def logs(record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
    """What the supervisor and all ranks print, of every start of the job, in one log."""
    words = ["tail", "-n", "+1", *(["-F"] if follow else []), "--", record.where.get("log", "")]
    for found in merged_lines({"": words}):
        yield found if found == SILENCE else (_rank(found[1]), found[1])


def _rank(line: str) -> str:
    """The rank that a line names; that of most is the first's, which alone reports."""
    found = re.match(r"\[rank (\d+)\]", line)
    return found[1] if found else "0"
