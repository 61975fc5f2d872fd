"""Machines of a supervised run: check suspected machines, exclude bad ones, drain or cordon them.

Entry point: `Nodes`, used by `supervisor.py`. `slurm_nodes.py` and `kubernetes_nodes.py` contain
the schedulers' commands. The cause of a failure names the suspected machines (`causes.py`). A
machine is bad if Slurm has lost it, if no step starts on it, or if scripts/check.py finds it bad.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmfoundry.events import names_in
from llmfoundry.exit_status import BAD_MACHINE, own_node
from llmfoundry.files import read_json
from llmfoundry.recipe.resilience import EXCLUDE, NODES, SuperviseConfig
from llmfoundry.resilience.check import kernel_log
from llmfoundry.resilience.supervise import kubernetes_nodes, slurm_nodes
from llmfoundry.resilience.supervise.notify import print_stderr

_CHECK_SECONDS = 1800.0


class Nodes:
    """Machines on which a supervisor starts its run."""

    def __init__(self, config: SuperviseConfig) -> None:
        """Begin without bad machines."""
        self._config, self._this_node = config, own_node()
        self._is_slurm = bool(config.launch) and slurm_nodes.in_job()
        self._excluded = set[str]()  # machines that the next attempts do not use
        self._silent = set[str]()  # bad machines that do not respond
        self._schedulable = set[str]()  # bad machines that could not be drained
        self._standby: subprocess.Popen[bytes] | None = None

    def launcher(self, *, is_first: bool) -> tuple[list[str], set[str]]:
        """Return the launch command before the script, and the machines that it excludes."""
        excluded, machines = set(self._excluded), 0
        if not self._config.launch:
            return [sys.executable], excluded
        if self._is_slurm:
            # also exclude machines that an administrator has drained, unless none would be left
            if self._config.act and not is_first:
                excluded |= slurm_nodes.drained_nodes().keys()
            job_nodes = set(slurm_nodes.job_nodes())  # empty: Slurm's controller does not answer
            if not job_nodes - excluded:
                excluded = set(self._excluded)
            # the number of machines for the attempt
            initial = int(os.environ.get("SLURM_NNODES", 1))
            machines = len(job_nodes - excluded) if job_nodes else initial - len(excluded)
            self.end_standby()
            if self._config.requeue:
                self._standby = slurm_nodes.start_standby(self._this_node, excluded)
        return launch_words(self._config.launch, excluded, machines), excluded

    def end_standby(self) -> None:
        """End the process on another machine that waits for the loss of this machine."""
        if self._standby is not None:
            self._standby.terminate()

    def lost(self) -> dict[str, str]:
        """Return the machines that the scheduler has lost, with its description."""
        return slurm_nodes.lost_nodes() if self._is_slurm else {}

    def can_exclude(self, bad: tuple[str, ...]) -> bool:
        """Return whether the launcher can exclude machines, and any other machine is left."""
        if not any(EXCLUDE in word for word in self._config.launch):
            return False
        return not self._is_slurm or bool(set(slurm_nodes.job_nodes()) - self._excluded - set(bad))

    def find_bad(
        self, suspected: tuple[str, ...], check: Sequence[str], output: Path
    ) -> tuple[tuple[str, ...], str, str]:
        """Check suspected machines.

        Args:
            suspected: names of the machines.
            check: command of scripts/check.py.
            output: folder for its report.

        Returns:
            The names of the bad machines, and a line and an action for the run's events. The line
            is empty if nothing was checked.
        """
        level, names = self._config.confirm, ", ".join(suspected)
        if not suspected or (level == "off" and not self._is_slurm):
            return (), "", ""
        words = [*check, f"level={level}", f"output={output}"]
        if self._is_slurm:
            bad, verdict = self._find_in_job(suspected, words if level != "off" else [], output)
        elif set(suspected) <= {self._this_node}:
            bad, verdict = run_check_script([sys.executable, *words], output)
        else:
            return (), f"{names} cannot be checked from here", "none"
        bad = tuple(node for node in bad if node in suspected)
        return bad, f"{names} suspected; {verdict}", "check"

    def _find_in_job(
        self, suspected: Iterable[str], command: Sequence[str], output: Path
    ) -> tuple[tuple[str, ...], str]:
        """Check suspected machines of a Slurm job.

        Args:
            suspected: names of the machines.
            command: command of the check; empty: only ask Slurm.
            output: folder for the check's report.

        Returns:
            The bad machines, and the reasons.
        """
        # machines that Slurm has lost, and machines on which no step starts
        lost = slurm_nodes.lost_nodes()
        silent = {node: lost[node] for node in suspected if node in lost}
        reasons = list(silent.values())
        rest = [node for node in suspected if node not in silent] if command else []
        for node in rest:
            problem = slurm_nodes.step_problem(node)
            if problem:
                silent[node] = problem
                reasons.append(f"{node}: {problem}")

        # run the check on the other machines
        rest = [node for node in rest if node not in silent]
        checked_bad: tuple[str, ...] = ()
        if rest:
            tasks = [f"--ntasks={len(rest)}", f"--nodes={len(rest)}", "--ntasks-per-node=1"]
            srun = ["srun", *tasks, f"--nodelist={','.join(rest)}", sys.executable]
            checked_bad, verdict = run_check_script([*srun, *command], output)
            reasons.append(verdict)
        self._silent = {*silent}
        return (*silent, *checked_bad), "; ".join(reasons) or "not checked"

    def take_out(self, bad: Iterable[str], why: str) -> str:
        """Exclude machines and drain or cordon them; return a description of the result."""
        names, results = {*bad}, list[str]()
        self._excluded |= names
        if "SLURM_JOB_ID" not in os.environ and kubernetes_nodes.in_pod():
            return kubernetes_nodes.cordon(names, why)
        if not slurm_nodes.in_job():
            return ""
        # Slurm would wait for machines that do not respond, so these are set to down
        for state, nodes in (("down", names & self._silent), ("drain", names - self._silent)):
            if nodes:
                problem = slurm_nodes.set_state(sorted(nodes), why, state=state)
                results.append(f"not set to {state}: {problem}" if problem else f"set to {state}")
                self._schedulable |= nodes if problem else set()
        return ", ".join(results)

    def requeue(self) -> str:
        """Requeue this job without bad machines; return a description of the result."""
        return f"job {os.environ['SLURM_JOB_ID']}: {slurm_nodes.requeue(self._schedulable)}"


def launch_words(launch: Sequence[str], excluded: Iterable[str], nodes: int = 0) -> list[str]:
    """Return `supervise.launch` with its placeholders for excluded machines and their number."""
    names = ",".join(sorted(excluded))
    words = [word for word in launch if names or EXCLUDE not in word]
    return [word.replace(EXCLUDE, names).replace(NODES, str(nodes)) for word in words]


def run_check_script(command: Sequence[str], output: Path) -> tuple[tuple[str, ...], str]:
    """Run scripts/check.py; return the bad machines and a description of the result.

    Args:
        command: command of the check, which writes check.json to `output`.
        output: folder of the report.
    """
    try:
        done = subprocess.run(
            list(command),
            timeout=_CHECK_SECONDS,
            stdout=subprocess.PIPE,  # a log that cannot be written must not end the check
            env=slurm_nodes.step_environment(),
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"the check itself failed: {error}"
    print_stderr(done.stdout.rstrip())
    if done.returncode == 0:
        return (), "nothing is bad"
    if done.returncode != BAD_MACHINE:
        return (), f"the check itself ended with status {done.returncode}"
    try:
        bad = names_in(read_json(output / "check.json"), "bad_nodes")
    except (OSError, ValueError, AttributeError) as error:
        return (), f"the check's report cannot be read: {error}"
    return bad, f"bad: {', '.join(bad) or 'no machine alone is to blame'}"


def kernel_events(
    path: str | None, node: str, *, seconds: float, start: int
) -> list[tuple[str, str, bool]]:
    """Return (machine, reason, whether the machine is bad) of recent errors in the kernel log.

    Args:
        path: file of the log (health_check.kernel_log); None: the system's log.
        node: name of this machine.
        seconds: age limit for the system's log.
        start: first byte to read of the file.
    """
    lines, _ = kernel_log.read_log(path, hours=max(1.0, seconds) / 3600, start=start)
    return [(node, f"{e.code} {e.why}".strip(), e.is_bad) for e in kernel_log.log_events(lines)]
