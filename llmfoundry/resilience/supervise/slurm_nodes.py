"""What Slurm knows of a job's machines, and the commands by which the supervisor changes them.

`nodes.py` and `supervisor.py` call it, inside of a job. Nothing is decided here. Slurm's behaviour
was seen with 22.05 (`tests/resilience/slurm`): a machine that dies stays in a job's environment,
but not in the job (`--no-kill`); steps on it never end by themselves.

With `--no-kill` a job continues without any machine that dies, even without the first: the batch
script and the supervisor are gone then, and the job holds the others idle. So `start_standby` runs
this file as a step on another machine; it ends with the job, or requeues it once Slurm has taken
the supervisor's machine out.

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
_STANDBY_SECONDS = 20.0  # between two looks
_LOST = ("down", "fail", "error", "powered_down", "powering_down")
_DRAINED = ("drain", "drng")


def in_job() -> bool:
    """Whether this process belongs to a job, and Slurm's commands are there."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("scontrol") is not None


def step_environment() -> dict[str, str]:
    """This environment, in a job for an srun on fewer machines than the job has.

    From `--ntasks-per-node` sbatch also makes the number of all tasks of the job (SLURM_NTASKS),
    and srun would start as many on fewer machines ("More processors requested than permitted"). A
    step on a dead machine holds its other machines until Slurm marks it down: a new step must not
    wait for them (`--overlap`).
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
    """The machines that this job has now, without lost ones; empty: no answer."""
    names, _ = _run("squeue", "--noheader", f"--jobs={_job()}", "--format=%N")
    return _run("scontrol", "show", "hostnames", names)[0].split() if names else []


def lost_nodes() -> dict[str, str]:
    """Machines of this job, as it began, that Slurm has lost, and what it reports of them."""
    return {node: what for node, state, what in _states() if _is_lost(state)}


def drained_nodes() -> dict[str, str]:
    """Machines of this job that are to take no other one, and the reason that was given."""
    return {node: what for node, state, what in _states() if state.startswith(_DRAINED)}


def _is_lost(state: str) -> bool:
    gone = state.startswith(_DRAINED) and state.endswith("*")  # and does not respond
    return gone or state.startswith(_LOST)


def _states() -> list[tuple[str, str, str]]:
    """Name, state and both in words, of the machines with which this job began."""
    began = os.environ.get("SLURM_JOB_NODELIST", "")
    if not began:
        return []
    lines, _ = _run("sinfo", "--noheader", "--Node", f"--nodes={began}", "--format=%N|%T|%E")
    found = dict[str, tuple[str, str, str]]()  # a machine has a line for each partition
    for line in lines.splitlines():
        node, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        reason = "" if reason.strip() in ("", "none", "(null)") else f" ({reason.strip()})"
        found[node] = (node, state.strip().lower(), f"Slurm reports {node} as {state}{reason}")
    return list(found.values())


def step_problem(node: str) -> str:
    """Why no step can be started on a machine; empty: one can."""
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
    """Let no job use machines any more; empty, or why that was not done.

    `state`: drain, or down for those that do not answer: a job that leaves one, or ends, would wait
    until Slurm itself marks it down (SlurmdTimeout).
    """
    names, reason = f"nodename={','.join(nodes)}", f"reason=llmfoundry: {why[:120]}"
    return _run("scontrol", "update", names, f"state={state}", reason)[1]


def requeue(without: Iterable[str]) -> str:
    """Put this job back into the queue, not `without` again; what came of it, in words.

    Slurm then ends this job with SIGTERM, and 30 s (KillWait) later with SIGKILL. Machines to leave
    out are added to the job's own list, which needs no operator's rights. It can be written once
    the job is pending again; of a job that has lost a machine only where Slurm keeps accounts
    (slurmdbd): elsewhere it fails forever with "the DB index is being set".
    """
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
    before = _field(job, "ExcNodeList").replace("(null)", "")
    names = ",".join(filter(None, [before, *sorted(without)]))
    if names == before:
        return "requeued"
    problem, deadline = "not tried", time.monotonic() + _EXCLUDE_SECONDS
    while problem and time.monotonic() < deadline:  # "try again in a bit", for a moment
        problem = _run("scontrol", "update", f"jobid={_job()}", f"excnodelist={names}")[1]
        time.sleep(0.5 if problem else 0.0)
    return (
        f"requeued, but not without {names}: {problem}" if problem else f"requeued without {names}"
    )


def signal_steps(name: str) -> None:
    """Send a signal to all steps of this job, on all machines; not to the batch script.

    Step by step: to send KILL to a job is to cancel it.
    """
    found, _ = _run("squeue", "--steps", "--noheader", f"--jobs={_job()}", "--format=%i")
    steps = [step for step in found.split() if step.rpartition(".")[2].isdecimal()]
    if steps:
        _run("scancel", f"--signal={name}", *steps)


def _job() -> str:
    return os.environ["SLURM_JOB_ID"]


def _field(line: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", line)
    return found[1] if found else ""


def _run(*words: str) -> tuple[str, str]:
    """The output of a command, and why it failed; either is empty: the controller may be away."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode:
        return "", done.stderr.strip() or f"status {done.returncode}"
    return done.stdout.strip(), ""


def start_standby(own: str, without: Iterable[str]) -> subprocess.Popen[bytes] | None:
    """Start this file on another machine than the supervisor's `own`; None: there is no other."""
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
    """Requeue the job once the machine that the first argument names is no longer its own."""
    while True:
        time.sleep(_STANDBY_SECONDS)
        nodes = job_nodes()  # empty: Slurm's controller is away
        if nodes and sys.argv[1] not in nodes and requeue(()) == "requeued":
            return


if __name__ == "__main__":
    main()
