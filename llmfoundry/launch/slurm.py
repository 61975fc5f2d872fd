"""Slurm target: the batch script, submission, job state, stop and logs.

Listed in `targets.py`. The batch script runs the supervisor on the job's first machine. The
supervisor starts each attempt with srun on the machines that the job still has
(`resilience/supervise/slurm_nodes.py`), so a bad machine costs one attempt and not the job. The
script limits the number of requeues, because Slurm does not.
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
"""Python program that blocks signals until the supervisor handles them (`exit_status.on_stops`).
While the supervisor starts, which takes seconds, a signal would kill it and prevent the requeue."""
# Some clusters wrap these commands and print additional lines.
_NUMBER = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;(\S+))?$", re.MULTILINE)
_QUEUED = re.compile(r"^([A-Z_]+)\|(.*)\|([^|\n]*)$", re.MULTILINE)
_FORGOTTEN = "Invalid job id"
_CLUSTER = "cluster"
"""Key of a record's `where`: the job's cluster in a multi-cluster setup; missing: the default."""
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING")
_ENDS_ITSELF = ("COMPLETED", "FAILED")  # in other states (TIMEOUT) the exit code is Slurm's
_SILENT_SECONDS = 60.0
_silent: dict[str, float] = {}
"""Time of the last squeue timeout by cluster: of hundreds of jobs, few wait for a timeout."""
_NO_LONGER_KNOWN = TargetState(ENDED, "Slurm no longer knows the job")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")


def render(job: Job) -> str:
    """Return the batch script for sbatch."""
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
    recipe = str(folder / RECIPE)
    if not job.is_supervised:
        command = job.command(recipe, *job.own_processes())
        return "\n".join([*lines, f"exec {shlex.join(command)}", ""])
    words = [*_supervise(job), "supervise.requeue=$requeue"]
    command = job.command(recipe, *words)
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
    """Return the overrides with which the supervisor starts attempts by srun."""
    if job.launches_itself:
        return ["supervise.act=true"]
    config = job.config
    # with spare machines the number is fixed; without, the run uses the machines that are left
    machines = str(job.nodes) if config.spare_nodes else NODES
    words = ["srun", "-K", f"--nodes={machines}", f"--exclude={EXCLUDE}"]
    if config.image is not None:
        words.append(f"--container-image={config.image}")
        words += [f"--container-mounts={','.join(config.mounts)}"] if config.mounts else []
    return ["supervise.act=true", list_key("supervise.launch", [*words, _python_of_tasks(job)])]


def _python_of_tasks(job: Job) -> str:
    return "python" if job.config.image is not None else job.python


def submit(job: Job) -> LaunchRecord:
    """Submit the script to sbatch on standard input.

    Raises:
        UserError: a secret is not set, or sbatch fails or does not answer.
    """
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
    """Return a Slurm command for the cluster of the job."""
    cluster = record.where.get(_CLUSTER)
    return [name, f"--clusters={cluster}"] if cluster else [name]


def state(record: LaunchRecord) -> TargetState:
    """Return the state of a job from squeue, or from the controller and accounting if it ended."""
    if not record.job:
        return TargetState(UNKNOWN, "was not submitted")
    cluster = record.where.get(_CLUSTER, "")
    if time.monotonic() - _silent.get(cluster, -math.inf) < _SILENT_SECONDS:
        return TargetState(UNKNOWN, "squeue: gave no answer about another job; try again later")
    words = ["--noheader", f"--jobs={record.job}", "--format=%T|%r|%N"]
    try:
        match = _QUEUED.search(ask([*_client("squeue", record), *words]))
        if match:
            return _in_queue(*match.groups())
    except NoAnswerError as error:
        _silent[cluster] = time.monotonic()
        return TargetState(UNKNOWN, str(error))
    except UserError as error:
        if _FORGOTTEN not in str(error):
            return TargetState(UNKNOWN, str(error))
    return _of_the_past(record)


def _in_queue(word: str, reason: str, nodes: str) -> TargetState:
    """Return the state for a line of squeue: the job's state, its reason and its machines."""
    text = f"{word} ({reason})" if reason not in ("", "None") else word
    if word in _WAITS:
        return TargetState(WAITING, text)
    if word in _RUNS:
        return TargetState(RUNNING, f"{text} on {nodes}" if nodes else text)
    return TargetState(ENDED, text)


def _of_the_past(record: LaunchRecord) -> TargetState:
    """Return the state of a job that has left the queue.

    The controller (scontrol) forgets a job after some minutes (MinJobAge). Accounting (sacct) knows
    older jobs, but many clusters do not have it.
    """
    controller_error = ""
    job_words = ["--oneliner", "show", "job", record.job]
    account_words = ["-X", "-n", "-P", "-o", "State,ExitCode", "-j", record.job]
    for name, words, pattern in (
        ("scontrol", job_words, r"JobState=(\S+).* ExitCode=(\d+):(\d+)"),
        ("sacct", account_words, r"(\w+).*\|(\d+):(\d+)"),
    ):
        try:
            match = re.search(pattern, ask([*_client(name, record), *words]))
        except UserError as error:
            if name == "scontrol" and _FORGOTTEN not in str(error):
                controller_error = str(error)  # not sacct's: accounting may not be configured
            continue
        if match is None:
            continue
        state, code, number = match.groups()
        if state in (*_WAITS, *_RUNS):
            return _in_queue(state, "", "")
        how = f"signal {number}" if number != "0" else f"exit status {code}"
        status = int(code) if state in _ENDS_ITSELF and number == "0" else None
        status = INTERRUPTED if state.startswith("CANCELLED") else status
        return TargetState(ENDED, f"{how} ({state})", status)
    return TargetState(UNKNOWN, controller_error) if controller_error else _NO_LONGER_KNOWN


def stop(record: LaunchRecord, *, now: bool) -> str:
    """Stop a job and return what was done.

    The supervisor of a running job is signaled: it saves, ends, and is not requeued. A waiting job
    is cancelled.
    """
    if not record.job:
        return "was not submitted"
    current = state(record)
    if current.state == ENDED:
        return "had ended"
    if current.state == WAITING or now:
        ask([*_client("scancel", record), record.job])
        return "cancelled"
    ask([*_client("scancel", record), "--batch", "--signal=INT", record.job])
    return "asked to save and end"


def logs(record: LaunchRecord, *, follow: bool) -> Iterator[tuple[str, str]]:
    """Yield (rank, line) of the job's log, which has the output of all its starts."""
    words = ["tail", "-n", "+1", *(["-F"] if follow else []), "--", record.where.get("log", "")]
    for source, line in merged_lines({"": words}):
        yield SILENCE if (source, line) == SILENCE else (_rank(line), line)


def _rank(line: str) -> str:
    """Return the rank that a line names; "0" if it names none, because rank 0 logs most lines."""
    match = re.match(r"\[rank (\d+)\]", line)
    return match[1] if match else "0"
