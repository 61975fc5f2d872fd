"""What Slurm knows of a job's machines, and what it is asked to do with them.

`machines.py` and `supervisor.py` call it, inside of a job. Nothing is decided here. What is said
here of Slurm was seen with 22.05 (`tests/resilience/slurm`): a machine that dies stays in a job's
environment, but not in the job (`--no-kill`); steps on it never end by themselves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PATIENCE = 60.0  # seconds, of a command of Slurm's
_GRACE = 20.0  # of the 30 s (KillWait) from a requeue until Slurm kills
_LOST = ("down", "fail", "error", "powered_down", "powering_down")
_DRAINED = ("drain", "drng")


def in_job() -> bool:
    """Whether this process belongs to a job, and Slurm's commands are there."""
    return "SLURM_JOB_ID" in os.environ and shutil.which("scontrol") is not None


def step_environment() -> dict[str, str]:
    """This environment, in a job for an srun on fewer machines than the job has.

    From `--ntasks-per-node` sbatch also makes the number of all tasks of the job (SLURM_NTASKS),
    and srun would start as many on fewer machines ("More processors requested than permitted"). A
    step on a dead machine holds its other machines until Slurm believes that it is dead: a new
    one is not to wait for them (`--overlap`).
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
    """The machines that this job has now: without those that Slurm has given up."""
    names = _ask("squeue", "--noheader", f"--jobs={_job()}", "--format=%N")
    return _ask("scontrol", "show", "hostnames", names).split() if names else []


def lost_nodes() -> dict[str, str]:
    """Machines of this job, as it began, that Slurm holds for lost, and what it says of them."""
    return {node: what for node, state, what in _states() if _is_lost(state)}


def drained_nodes() -> dict[str, str]:
    """Machines of this job that take no other one any more, and the reason that was given."""
    return {node: what for node, state, what in _states() if state.startswith(_DRAINED)}


def _is_lost(state: str) -> bool:
    gone = state.startswith(_DRAINED) and state.endswith("*")  # and does not respond
    return gone or state.startswith(_LOST)


def _states() -> list[tuple[str, str, str]]:
    """Name, state and both in words, of the machines with which this job began."""
    began = os.environ.get("SLURM_JOB_NODELIST", "")
    if not began:
        return []
    said = _ask("sinfo", "--noheader", "--Node", f"--nodes={began}", "--format=%N|%T|%E")
    found = dict[str, tuple[str, str, str]]()  # a machine has a line for each partition
    for line in said.splitlines():
        node, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        reason = "" if reason.strip() in ("", "none", "(null)") else f" ({reason.strip()})"
        found[node] = (node, state.strip().lower(), f"Slurm holds {node} for {state}{reason}")
    return list(found.values())


def answers(node: str) -> str:
    """Whether a step can be started on a machine; empty, or why not."""
    words = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "true"]
    try:
        done = subprocess.run(
            words, env=step_environment(), capture_output=True, text=True, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        return f"no step has started there within {_PATIENCE:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    return (errors or ["srun failed"])[0].removeprefix("srun: error: ")


def set_state(nodes: Iterable[str], why: str, *, state: str) -> str:
    """Let no job have machines any more; empty, or why that was not done.

    Args:
        nodes: their names.
        why: for who looks after them.
        state: drain, or down of those that do not answer: a job that is to leave one, or to end,
            else waits until Slurm gives it up by itself (SlurmdTimeout).
    """
    names = f"nodename={','.join(nodes)}"
    return _tell("update", names, f"state={state}", f"reason=llmfoundry: {why[:120]}")


def requeue(without: Iterable[str]) -> str:
    """Put this job back into the queue; what came of it, in words.

    Slurm then ends this job with SIGTERM, and 30 s (KillWait) later with SIGKILL. What is to be
    left out is added to the job's own list, for which nobody needs an operator's rights. It can be
    written once the job waits again; of a job that has lost a machine only where Slurm keeps
    accounts (slurmdbd): elsewhere it says forever "the DB index is being set".

    Args:
        without: machines that the job is not to get again, though Slurm may use them.
    """
    job = _ask("scontrol", "--oneliner", "show", "job", _job())
    state = _field(job, "JobState")
    if state != "RUNNING":  # cancelled, or Slurm has requeued it
        return f"not requeued: Slurm says that the job is {state or 'not there'}"
    problem = _tell("requeue", _job())
    if problem:
        return f"not requeued: {problem}"
    before = _field(job, "ExcNodeList").replace("(null)", "")
    names = ",".join(filter(None, [before, *sorted(without)]))
    if names == before:
        return "requeued"
    problem, deadline = "not tried", time.monotonic() + _GRACE
    while problem and time.monotonic() < deadline:  # "try again in a bit", it says for a moment
        problem = _tell("update", f"jobid={_job()}", f"excnodelist={names}")
        time.sleep(0.5 if problem else 0.0)
    return (
        f"requeued, but not without {names}: {problem}" if problem else f"requeued without {names}"
    )


def signal_steps(name: str) -> None:
    """Send a signal to all steps of this job, on all machines; not to the batch script.

    Step by step: to send KILL to a job is to cancel it.
    """
    found = _ask("squeue", "--steps", "--noheader", f"--jobs={_job()}", "--format=%i").split()
    steps = [step for step in found if step.rpartition(".")[2].isdecimal()]
    if steps:
        _ask("scancel", f"--signal={name}", *steps)


def _job() -> str:
    return os.environ["SLURM_JOB_ID"]


def _field(line: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", line)
    return found[1] if found else ""


def _ask(*words: str) -> str:
    """What a command says; empty if it fails: Slurm's controller may be away."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _tell(*words: str) -> str:
    """Run scontrol; empty, or why it failed."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


# --- from llmfoundry.resilience.supervise.slurm_requeue: A process on another machine of a Slurm
# job, should the supervisor's own machine be lost.
#
# With `--no-kill` Slurm lets a job go on without any machine that dies, even without the first: the
# batch script and the supervisor are gone then, and the job holds the others and does nothing (seen
# with 22.05). The supervisor starts this as a step; it ends with the job, or puts it back into the
# queue once Slurm has taken the supervisor's machine out.
#
#     python -m llmfoundry.resilience.supervise.slurm NODE


_SECONDS = 20.0  # between two looks
_ROOT = Path(__file__).resolve().parents[3]


def start_standby(own: str, without: Iterable[str]) -> subprocess.Popen[bytes] | None:
    """Start it on another machine of this job; None: there is no other.

    Args:
        own: the machine of the supervisor.
        without: others that are no use.
    """
    others = [node for node in job_nodes() if node not in {own, *without}]
    if not others:
        return None
    env = step_environment()
    paths = [str(_ROOT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    tasks = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={others[-1]}"]
    return subprocess.Popen(
        ["srun", *tasks, sys.executable, "-m", __name__, own],
        env=env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Look until the machine that the first argument names is no longer the job's."""
    while True:
        time.sleep(_SECONDS)
        nodes = job_nodes()  # none: Slurm's controller is away
        if nodes and sys.argv[1] not in nodes and requeue(()) == "requeued":
            return


if __name__ == "__main__":
    main()
