"""A process on another machine of a Slurm job, should the supervisor's own machine be lost.

With `--no-kill` Slurm lets a job go on without any machine that dies, even without the first: the
batch script and the supervisor are gone then, and the job holds the others and does nothing (seen
with 22.05). The supervisor starts this as a step; it ends with the job, or puts it back into the
queue once Slurm has taken the supervisor's machine out.

    python -m llmfoundry.resilience.supervise.slurm_requeue NODE
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from llmfoundry.resilience.supervise import slurm

_SECONDS = 20.0  # between two looks
_ROOT = Path(__file__).resolve().parents[3]


def start(own: str, without: Iterable[str]) -> subprocess.Popen[bytes] | None:
    """Start it on another machine of this job; None: there is no other.

    Args:
        own: the machine of the supervisor.
        without: others that are no use.
    """
    others = [node for node in slurm.job_nodes() if node not in {own, *without}]
    if not others:
        return None
    env = slurm.step_environment()
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
        nodes = slurm.job_nodes()  # none: Slurm's controller is away
        if nodes and sys.argv[1] not in nodes and slurm.requeue(()) == "requeued":
            return


if __name__ == "__main__":
    main()
