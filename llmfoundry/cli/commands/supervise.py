"""Command of `scripts/supervise.py`, and of a training run with `supervise.enabled`.

Entry point: `supervise`, which starts training processes and restarts them after failures. It does
not import PyTorch, to save memory: it runs for days next to the training processes.
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
    """Train until the run is complete or a restart cannot help.

    Raises:
        SystemExit: always, with a status of `exit_status`.
        UserError: the recipe would start from the beginning at each restart, or not resume.
    """
    # checks
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

    # supervise
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
    """Return whether this process must supervise: no supervisor or launcher has started it."""
    is_launched = "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
    return recipe.supervise.enabled and SUPERVISED not in os.environ and not is_launched


def _folder(recipe: ResolvedTrainRecipe) -> Path:
    """Return the local folder of the run."""
    if "://" not in recipe.save_folder:
        return Path(recipe.save_folder)
    from llmfoundry.checkpoint.open_run import run_storage  # imports PyTorch

    return run_storage(recipe).folder
