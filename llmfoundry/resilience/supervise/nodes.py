"""`Nodes`: the machines of a run, and which of them are bad, left out, or taken out of service.

`supervisor.py` calls it; `slurm_nodes.py` and `kubernetes_nodes.py` have the schedulers' commands.
Which machines are suspected is the cause's (`causes.py`); one is bad if Slurm has lost it, no step
starts on it, or scripts/check.py finds it so.
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
    """The machines that a supervisor starts its run on."""

    def __init__(self, config: SuperviseConfig) -> None:
        """All of them are sound yet."""
        self._config, self._own = config, own_node()
        self._is_slurm = bool(config.launch) and slurm_nodes.in_job()
        self._excluded = set[str]()  # from the next start on
        self._silent = set[str]()  # of the bad ones, those that do not answer
        self._kept = set[str]()  # of the bad ones, those that Slurm may still use
        self._standby: subprocess.Popen[bytes] | None = None

    def launcher(self, *, is_first: bool) -> tuple[list[str], set[str]]:
        """The words before the script, and the machines that the attempt does not use."""
        excluded, left = set(self._excluded), 0
        if not self._config.launch:
            return [sys.executable], excluded
        if self._is_slurm:
            if self._config.act and not is_first:
                excluded |= slurm_nodes.drained_nodes().keys()  # an administrator wants them free
            there = set(slurm_nodes.job_nodes())  # empty: Slurm's controller is away
            if not there - excluded:
                excluded = set(self._excluded)
            first = int(os.environ.get("SLURM_NNODES", 1))
            left = len(there - excluded) if there else first - len(excluded)
            self.end_standby()
            if self._config.requeue:
                self._standby = slurm_nodes.start_standby(self._own, excluded)
        return launch_words(self._config.launch, excluded, left), excluded

    def end_standby(self) -> None:
        """End the process that waits for the loss of this machine."""
        if self._standby is not None:  # its machine may be the one that is lost
            self._standby.terminate()

    def lost(self) -> dict[str, str]:
        """Machines that the scheduler has lost, and what it reports of them."""
        return slurm_nodes.lost_nodes() if self._is_slurm else {}

    def can_exclude(self, bad: tuple[str, ...]) -> bool:
        """Whether the launcher can leave machines out, and any other is left."""
        if not any(EXCLUDE in word for word in self._config.launch):
            return False
        return not self._is_slurm or bool(set(slurm_nodes.job_nodes()) - self._excluded - set(bad))

    def find_bad(
        self, suspected: tuple[str, ...], check: Sequence[str], output: Path
    ) -> tuple[tuple[str, ...], str, str]:
        """Which of the suspected machines are bad.

        Args:
            suspected: their names.
            check: the words of scripts/check.py.
            output: a folder for its report.

        Returns:
            The names of the bad ones, and a line and the action for the run's events; an empty
            line: nothing was done.
        """
        level, names = self._config.confirm, ", ".join(suspected)
        if not suspected or (level == "off" and not self._is_slurm):
            return (), "", ""
        words = [*check, f"level={level}", f"output={output}"]
        if self._is_slurm:
            bad, verdict = self._find_in_job(suspected, words if level != "off" else [], output)
        elif set(suspected) <= {self._own}:
            bad, verdict = run_check_script([sys.executable, *words], output)
        else:
            return (), f"{names} cannot be checked from here", "none"
        bad = tuple(node for node in bad if node in suspected)
        return bad, f"{names} suspected; {verdict}", "check"

    def _find_in_job(
        self, suspected: Iterable[str], command: Sequence[str], output: Path
    ) -> tuple[tuple[str, ...], str]:
        """Machines of a Slurm job that are bad, and why; without a command by Slurm alone."""
        lost = slurm_nodes.lost_nodes()
        silent = {node: lost[node] for node in suspected if node in lost}
        reasons = list(silent.values())
        rest = [node for node in suspected if node not in silent] if command else []
        for node in rest:
            if problem := slurm_nodes.step_problem(node):
                silent[node] = problem
                reasons.append(f"{node}: {problem}")
        rest = [node for node in rest if node not in silent]
        found: tuple[str, ...] = ()
        if rest:
            tasks = [f"--ntasks={len(rest)}", f"--nodes={len(rest)}", "--ntasks-per-node=1"]
            srun = ["srun", *tasks, f"--nodelist={','.join(rest)}", sys.executable]
            found, verdict = run_check_script([*srun, *command], output)
            reasons.append(verdict)
        self._silent = {*silent}
        return (*silent, *found), "; ".join(reasons) or "not checked"

    def take_out(self, bad: Iterable[str], why: str) -> str:
        """Leave machines out, and have the scheduler start nothing there; what came of it."""
        names, found = {*bad}, list[str]()
        self._excluded |= names
        if "SLURM_JOB_ID" not in os.environ and kubernetes_nodes.in_pod():
            return kubernetes_nodes.cordon(names, why)
        if not slurm_nodes.in_job():
            return ""
        for state, some in (("down", names & self._silent), ("drain", names - self._silent)):
            if some:
                problem = slurm_nodes.set_state(sorted(some), why, state=state)
                found.append(f"not set to {state}: {problem}" if problem else f"set to {state}")
                self._kept |= some if problem else set()
        return ", ".join(found)

    def requeue(self) -> str:
        """Requeue this job without bad machines; what came of it, in a line."""
        return f"job {os.environ['SLURM_JOB_ID']}: {slurm_nodes.requeue(self._kept)}"


def launch_words(launch: Sequence[str], excluded: Iterable[str], nodes: int = 0) -> list[str]:
    """The words of `supervise.launch` for a start without the excluded machines, on `nodes`."""
    names = ",".join(sorted(excluded))
    words = [word for word in launch if names or EXCLUDE not in word]
    return [word.replace(EXCLUDE, names).replace(NODES, str(nodes)) for word in words]


def run_check_script(command: Sequence[str], output: Path) -> tuple[tuple[str, ...], str]:
    """Run scripts/check.py; the machines that it finds bad, and its verdict in words.

    `output`: where the words of its command have it write check.json.
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
        found = names_in(read_json(output / "check.json"), "bad_nodes")
    except (OSError, ValueError, AttributeError) as error:
        return (), f"the check's report cannot be read: {error}"
    return found, f"bad: {', '.join(found) or 'no machine alone is to blame'}"


def kernel_events(
    path: str | None, node: str, *, seconds: float, start: int
) -> list[tuple[str, str, bool]]:
    """Machine, why, and whether it takes the machine out, of the kernel's latest lines.

    Those of the last `seconds`, or of the file at `path` (health_check.kernel_log) from byte
    `start`.
    """
    lines, _ = kernel_log.read_log(path, hours=max(1.0, seconds) / 3600, start=start)
    return [(node, f"{e.code} {e.why}".strip(), e.is_bad) for e in kernel_log.log_events(lines)]
