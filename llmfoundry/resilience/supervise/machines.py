"""Machines that are suspected: check them, take them out, start without them.

Slurm, or Kubernetes, is asked where it is there. Nothing is decided here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from llmfoundry.events import names_in
from llmfoundry.exit_status import BAD_MACHINE
from llmfoundry.files import read_json
from llmfoundry.recipe.resilience.supervise import EXCLUDE, NODES
from llmfoundry.resilience.check import kernel_log
from llmfoundry.resilience.check.kernel_log import log_events
from llmfoundry.resilience.supervise import kubernetes, slurm
from llmfoundry.resilience.supervise.record import say

_PATIENCE = 1800.0  # seconds, of a check


def kernel_events(
    path: str | None, node: str, *, seconds: float, start: int
) -> list[tuple[str, str, bool]]:
    """Machine, why, and whether it takes the machine out, of the kernel's latest lines.

    Args:
        path: health_check.kernel_log.
        node: this machine.
        seconds: how far back; counted, not the difference of two times of a clock that is set.
        start: bytes of the file of that path to pass over.
    """
    lines, _ = kernel_log.read_log(path, hours=max(1.0, seconds) / 3600, start=start)
    return [(node, f"{e.code} {e.why}".strip(), e.is_bad) for e in log_events(lines)]


def check(command: Sequence[str], output: Path) -> tuple[tuple[str, ...], str]:
    """Run scripts/check.py; the machines that it finds bad, and its verdict in words.

    Args:
        command: its words, which write to `output`.
        output: where check.json lands.
    """
    try:
        done = subprocess.run(
            list(command),
            timeout=_PATIENCE,
            stdout=subprocess.PIPE,  # a log that cannot be written must not end the check
            env=slurm.step_environment(),
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"the check itself failed: {error}"
    say(done.stdout.rstrip())
    if done.returncode == 0:
        return (), "nothing is bad"
    if done.returncode != BAD_MACHINE:
        return (), f"the check itself ended with status {done.returncode}"
    try:
        found = names_in(read_json(output / "check.json"), "bad_nodes")
    except (OSError, ValueError, AttributeError) as error:
        return (), f"the check's report cannot be read: {error}"
    return found, f"bad: {', '.join(found) or 'no machine alone is to blame'}"


def take_out(nodes: Iterable[str], why: str, *, silent: Collection[str]) -> tuple[str, set[str]]:
    """Tell the scheduler to start nothing on machines any more.

    Args:
        nodes: their names.
        why: for who looks after them.
        silent: those that do not answer.

    Returns:
        What came of it, in words, and which of them Slurm may still use.
    """
    if "SLURM_JOB_ID" not in os.environ and kubernetes.is_here():
        return kubernetes.cordon(nodes, why), set()
    if not slurm.in_job():
        return "", set()
    found, names, kept = [], set(nodes), set[str]()
    for state, some in (("down", names & {*silent}), ("drain", names - {*silent})):
        if some:
            problem = slurm.take_out(sorted(some), why, state=state)
            found.append(f"not set to {state}: {problem}" if problem else f"set to {state}")
            kept |= some if problem else set()
    return ", ".join(found), kept


def find_bad(
    suspected: Iterable[str], command: Sequence[str], output: Path
) -> tuple[tuple[str, ...], set[str], str]:
    """Machines of a Slurm job that are bad, those of them that do not answer, and why.

    Args:
        suspected: their names.
        command: the words of scripts/check.py; empty: nothing is started, Slurm alone is asked.
        output: where check.json lands.
    """
    lost = slurm.lost_nodes()
    bad = {node: lost[node] for node in suspected if node in lost}
    rest = [node for node in suspected if node not in bad]
    told = list(bad.values())
    if not command or not rest:
        return tuple(bad), set(bad), "; ".join(told) or "not checked"
    silent = {node: why for node in rest if (why := slurm.answers(node))}
    told += [f"{node}: {why}" for node, why in silent.items()]
    rest = [node for node in rest if node not in silent]
    if rest:
        tasks = [f"--ntasks={len(rest)}", f"--nodes={len(rest)}", "--ntasks-per-node=1"]
        prefix = ["srun", *tasks, f"--nodelist={','.join(rest)}", sys.executable]
        found, verdict = check([*prefix, *command], output)
        told.append(verdict)
    else:
        found = ()
    return (*bad, *silent, *found), {*bad, *silent}, "; ".join(told)


def launch_words(launch: Sequence[str], excluded: Iterable[str], nodes: int = 0) -> list[str]:
    """The words of `supervise.launch`, without machines that are to be left out.

    Args:
        launch: as it is written.
        excluded: their names.
        nodes: how many machines there are without them.
    """
    names = ",".join(sorted(excluded))
    words = [word for word in launch if names or EXCLUDE not in word]
    return [word.replace(EXCLUDE, names).replace(NODES, str(nodes)) for word in words]
