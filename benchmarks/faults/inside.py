"""A plugin for the runs that faults are injected into: a steady pace, and what is done, noted.

`runs.Place` names it in every run's recipe. Rank 0 adds a line a step to steps.txt in the run's
folder: the process, the step, the time. A step that is there twice was lost, and a new process is a
return: nothing of what watches the run is asked.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from llmfoundry.assemble.job import Job
from llmfoundry.recipe.logger import CALLBACKS, CallbackType
from llmfoundry.train.stores.run_place import run_folder
from llmfoundry.train.trainer import Callback, Trainer

STEPS = "steps.txt"


class Pace(Callback):
    """Makes steps long enough to be struck in, and notes each of them."""

    def __init__(self, job: Job, *, seconds: float) -> None:
        self._seconds, self._notes = seconds, job.world.is_main
        self._path: Path = run_folder(job.recipe) / STEPS

    def on_step(self, trainer: Trainer) -> None:
        """Wait, and note the step."""
        time.sleep(self._seconds)
        if self._notes:
            with self._path.open("a") as file:
                file.write(f"{os.getpid()} {trainer.batch} {time.time():.3f}\n")


CALLBACKS["pace"] = CallbackType(Pace, keys={"seconds": 0.1})
