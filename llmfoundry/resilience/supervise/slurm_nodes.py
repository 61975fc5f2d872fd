"""Slurm commands of the supervisor: state of a job's machines, drain, requeue, signals.

Used by `nodes.py` and `supervisor.py` inside a job. Slurm's behavior was observed with version
22.05 (`tests/resilience/slurm`): with `--no-kill`, a dead machine is removed from the job but stays
in its environment variables, and steps on it do not end by themselves.

With `--no-kill` a job also continues without its first machine. The batch script and the supervisor
have then died, and the other machines are idle. `start_standby` therefore runs this file as a step
on another machine. The standby requeues the job once Slurm has removed the supervisor's machine.

    python -m llmfoundry.resilience.supervise.slurm_nodes NODE
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable

from llmfoundry.processes import start_module

_COMMAND_SECONDS = 60.0
_EXCLUDE_SECONDS = 20.0  # of the 30 s (KillWait) from a requeue until Slurm kills
_STANDBY_SECONDS = 20.0  # between two polls of the standby
_LOST = ("down", "fail", "error", "powered_down", "powering_down")
_DRAINED = ("drain", "drng")


def in_job() -> bool:
    """Return whether this process runs in a Slurm job with Slurm's commands installed."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("scontrol") is not None


def step_environment() -> dict[str, str]:
    """Return the environment, adjusted for an srun on fewer machines than the job has.

    With `--ntasks-per-node`, sbatch also sets the total number of tasks (SLURM_NTASKS). srun would
    start this number on fewer machines and fail ("More processors requested than permitted"). A
    step with a dead machine occupies its other machines until Slurm marks the machine down, so new
    steps must share them (`--overlap`).
    """
    if not in_job():
        return dict(os.environ)
    env = {"SLURM_OVERLAP": "1", **os.environ}
    tasks, per_node = env.get("SLURM_NTASKS", ""), env.get("SLURM_NTASKS_PER_NODE", "")
    nodes = env.get("SLURM_NNODES", "")
    numbers = [int(n) for n in (tasks, per_node, nodes) if n.isdecimal()]
    if len(numbers) == 3 and numbers[0] == numbers[1] * numbers[2]:
        for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
            env.pop(name, None)
    return env


def job_nodes() -> list[str]:
    """Return the current machines of this job, without lost machines; empty: no answer."""
    names, _ = _run("squeue", "--noheader", f"--jobs={_job()}", "--format=%N")
    return _run("scontrol", "show", "hostnames", names)[0].split() if names else []


def lost_nodes() -> dict[str, str]:
    """Return the initial machines of this job that Slurm has lost, with a description."""
    return {node: what for node, state, what in _states() if _is_lost(state)}


def drained_nodes() -> dict[str, str]:
    """Return the machines of this job that are drained or draining, with a description."""
    return {node: what for node, state, what in _states() if state.startswith(_DRAINED)}


def _is_lost(state: str) -> bool:
    is_silent = state.endswith("*")  # Slurm's mark for a machine that does not respond
    return state.startswith(_LOST) or (state.startswith(_DRAINED) and is_silent)


def _states() -> list[tuple[str, str, str]]:
    """Return (name, state, description) of the machines with which this job began."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
    if not nodelist:
        return []
    lines, _ = _run("sinfo", "--noheader", "--Node", f"--nodes={nodelist}", "--format=%N|%T|%E")
    states = dict[str, tuple[str, str, str]]()  # sinfo prints a line for each partition
    for line in lines.splitlines():
        node, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        reason = "" if reason.strip() in ("", "none", "(null)") else f" ({reason.strip()})"
        states[node] = (node, state.strip().lower(), f"Slurm reports {node} as {state}{reason}")
    return list(states.values())


def step_problem(node: str) -> str:
    """Return why no step can be started on a machine; empty: a step can be started."""
    words = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "true"]
    try:
        done = subprocess.run(
            words, env=step_environment(), capture_output=True, text=True, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no step has started there within {_COMMAND_SECONDS:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    return (errors or ["srun failed"])[0].removeprefix("srun: error: ")


def set_state(nodes: Iterable[str], why: str, *, state: str) -> str:
    """Drain machines or set them to down; return an error message, empty on success.

    Args:
        nodes: names of the machines.
        why: reason for administrators.
        state: drain, or down for machines that do not respond. Otherwise the job would wait until
            Slurm marks them down (SlurmdTimeout).
    """
    names, reason = f"nodename={','.join(nodes)}", f"reason=llmfoundry: {why[:120]}"
    return _run("scontrol", "update", names, f"state={state}", reason)[1]


def requeue(without: Iterable[str]) -> str:
    """Requeue this job, and exclude machines from it; return a description of the result.

    Slurm then sends SIGTERM to this job, and SIGKILL 30 s (KillWait) later. Machines are excluded
    by the job's ExcNodeList, which needs no operator rights and can be set once the job is pending.
    For a job that has lost a machine this works only with accounting (slurmdbd). Without accounting
    it always fails with "the DB index is being set".
    """
    # requeued by Slurm, or cancelled?
    job, _ = _run("scontrol", "--oneliner", "show", "job", _job())
    state = _field(job, "JobState")
    restarts, begun = _field(job, "Restarts"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if restarts.isdecimal() and begun.isdecimal() and int(restarts) > int(begun):
        return "requeued by Slurm itself"  # preempted, or by a person; its state is COMPLETING
    if state != "RUNNING":  # cancelled
        return f"not requeued: Slurm reports the job as {state or 'not there'}"

    problem = _run("scontrol", "requeue", _job())[1]
    if problem:
        return f"not requeued: {problem}"

    # exclude machines; Slurm rejects this ("try again in a bit") until the job is pending
    before = _field(job, "ExcNodeList").replace("(null)", "")
    names = ",".join(filter(None, [before, *sorted(without)]))
    if names == before:
        return "requeued"
    problem, deadline = "not tried", time.monotonic() + _EXCLUDE_SECONDS
    while problem and time.monotonic() < deadline:
        problem = _run("scontrol", "update", f"jobid={_job()}", f"excnodelist={names}")[1]
        time.sleep(0.5 if problem else 0.0)
    return (
        f"requeued, but not without {names}: {problem}" if problem else f"requeued without {names}"
    )


def signal_steps(name: str) -> None:
    """Send a signal to all steps of this job on all machines, but not to the batch script.

    The steps are signaled one by one, because KILL for a job cancels the job.
    """
    listing, _ = _run("squeue", "--steps", "--noheader", f"--jobs={_job()}", "--format=%i")
    steps = [step for step in listing.split() if step.rpartition(".")[2].isdecimal()]
    if steps:
        _run("scancel", f"--signal={name}", *steps)


def _job() -> str:
    return os.environ["SLURM_JOB_ID"]


def _field(line: str, name: str) -> str:
    """Return the value of a field in a line of scontrol; empty: it is missing."""
    match = re.search(rf"\b{name}=(\S+)", line)
    return match[1] if match else ""


def _run(*words: str) -> tuple[str, str]:
    """Return the output of a command (empty if it failed), and an error message (else empty)."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode:
        return "", done.stderr.strip() or f"status {done.returncode}"
    return done.stdout.strip(), ""


def start_standby(own: str, without: Iterable[str]) -> subprocess.Popen[bytes] | None:
    """Start the standby on another machine than `own`; None: the job has no other machine."""
    others = [node for node in job_nodes() if node not in {own, *without}]
    if not others:
        return None
    tasks = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={others[-1]}"]
    return start_module(
        __name__,
        own,
        before=["srun", *tasks],
        env=step_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    """Requeue the job once the machine named by the first argument is no longer in the job."""
    while True:
        time.sleep(_STANDBY_SECONDS)
        nodes = job_nodes()  # empty: Slurm's controller does not answer
        if nodes and sys.argv[1] not in nodes and requeue(()) == "requeued":
            return


if __name__ == "__main__":
    main()
