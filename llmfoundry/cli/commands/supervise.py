"""`scripts/supervise.py`, and `supervise.enabled` of a training run: the process around it.

It imports no PyTorch: it waits for days next to processes that need the memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError
from llmfoundry.processes import end_with_starters
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.paths import ROOT
from llmfoundry.recipe.resilience import NODES
from llmfoundry.recipe.train import ResolvedTrainRecipe
from llmfoundry.redaction import public
from llmfoundry.resilience.supervise import slurm_nodes
from llmfoundry.resilience.supervise.attempt import SUPERVISED
from llmfoundry.resilience.supervise.checkpoints import list_in_folder, list_in_store
from llmfoundry.resilience.supervise.exporter import export_to
from llmfoundry.resilience.supervise.notify import send_to_mlflow, send_to_store
from llmfoundry.resilience.supervise.supervisor import Supervisor, earlier_attempts
from llmfoundry.terminal import outlast_full_disks


def supervise(recipe: ResolvedTrainRecipe) -> None:
    """Train until the run is complete, or another attempt is of no use.

    Raises:
        SystemExit: with a status of `exit_status`.
        UserError: the recipe would start over at each restart, or refuse to resume.
    """
    if {SUPERVISED, "RANK"} & os.environ.keys():
        raise UserError(
            "scripts/supervise.py: is itself started by torchrun or another supervisor; start it"
            " alone: it starts the processes of each machine, or supervise.launch"
        )
    if recipe.save_overwrite:
        raise UserError(
            "save_overwrite: true, but every restart would delete what the run has saved; delete"
            f" {recipe.save_folder} once, and write false"
        )
    if not recipe.autoresume:
        raise UserError("autoresume: false, but a supervised run resumes by itself; write true")
    if not slurm_nodes.in_job() and any(NODES in word for word in recipe.supervise.launch):
        raise UserError(
            f"supervise.launch: {NODES} is the number of a Slurm job's machines, and this is none;"
            " write the number, or start it with sbatch"
        )
    end_with_starters()
    outlast_full_disks()
    name = "finetune" if isinstance(recipe, FinetuneRecipe) else "train"
    folder = _folder(recipe)
    final_events: list[Callable[[str], str]] = [partial(send_to_mlflow, recipe.logger, folder)]
    options, url = FetchOptions.from_config(recipe.data), recipe.save_folder
    is_remote = "://" in url
    if is_remote:
        final_events.append(lambda status: send_to_store(url, options, folder))
    supervisor = Supervisor(
        recipe.supervise,
        folder,
        script=[str(ROOT / "scripts" / f"{name}.py"), *sys.argv[1:]],
        check=[str(ROOT / "scripts" / "check.py"), *sys.argv[1:]],
        list_checkpoints=(
            partial(list_in_store, url, options) if is_remote else partial(list_in_folder, folder)
        ),
        url=public(url) if is_remote else "",
        kernel_log=recipe.health_check.kernel_log,
        export=export_to(recipe.supervise, recipe.logger),
        final_events=final_events,
        attempts=earlier_attempts(folder),
    )
    sys.exit(supervisor.run())


def is_supervised(recipe: ResolvedTrainRecipe) -> bool:
    """Whether this process is to become a supervisor: none is around it, and no launcher."""
    is_launched = "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    return recipe.supervise.enabled and SUPERVISED not in os.environ and not is_launched


def _folder(recipe: ResolvedTrainRecipe) -> Path:
    """Where the run works on this machine."""
    if "://" not in recipe.save_folder:
        return Path(recipe.save_folder)
    from llmfoundry.checkpoint.open_run import run_storage  # imports PyTorch

    return run_storage(recipe).folder
