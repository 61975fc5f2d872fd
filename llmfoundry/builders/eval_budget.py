"""How many rows of the gauntlet a training run can afford: `eval.icl_max_fraction`.

`build_evaluate` asks it at every evaluation. The idea: scores of a run are comparable only if the
same rows are asked each time, so the share of the rows is decided once, at the first evaluation,
and kept in the run's folder for those after a resume.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from llmfoundry.distributed.launch import World
from llmfoundry.files import write_json
from llmfoundry.gauntlet.gauntlet import Gauntlet
from llmfoundry.gauntlet.questions import EvaluatedModel
from llmfoundry.loggers.pages.report import read_json

PROBE = 0.02  # of the rows; twice, for the first time has much that comes only once
CAUTION = 0.8  # of what the probe allows: it is short
FILE = "icl_share.json"


class EvalBudget:
    """Decides the share, once."""

    def __init__(
        self,
        max_fraction: float,
        run_folder: Path,
        world: World,
        note: Callable[[str], None],
        *,
        resumed: bool,
    ) -> None:
        """Start the clock of the training before the first evaluation.

        Args:
            max_fraction: of the wall time, for the gauntlet.
            run_folder: where the share is kept.
            world: this process.
            note: reports what was decided.
            resumed: what the run decided before holds.
        """
        self._max_fraction, self._file, self._world = max_fraction, run_folder / FILE, world
        self._note, self._share = note, self._agreed(self._kept() if resumed else None)
        self.restart()

    def restart(self) -> None:
        """Training goes on now."""
        self._since = time.perf_counter()

    def share(self, gauntlet: Gauntlet, model: EvaluatedModel) -> float:
        """Share of each task's questions; every process calls it, and gets the same."""
        if self._share is None:
            trained = time.perf_counter() - self._since
            allowed = CAUTION * trained * self._max_fraction / (1 - self._max_fraction)
            whole = _seconds_of_all(gauntlet, model)
            self._share = self._agreed(ladder(allowed / whole))
            assert self._share is not None
            self._tell(self._share, trained, whole)
        return self._share

    def _tell(self, share: float, trained: float, whole: float) -> None:
        took = f"all rows would take about {whole:.1f} s after {trained:.1f} s of training"
        self._note(
            f"eval.icl_max_fraction: {self._max_fraction:g}: each evaluation asks"
            f" {100 * share:.2g} % of each task's rows; {took}"
        )
        if self._world.is_main:
            write_json(self._file, {"share": share, "max_fraction": self._max_fraction})

    def _kept(self) -> float | None:
        """What this run decided before, for the same fraction."""
        if not self._file.is_file():
            return None
        kept = read_json(self._file)
        return float(kept["share"]) if kept["max_fraction"] == self._max_fraction else None

    def _agreed(self, share: float | None) -> float | None:
        """Process 0's; a negative number stands for none."""
        if self._world.size == 1:
            return share
        shared = torch.tensor([-1.0 if share is None else share], dtype=torch.float64)
        shared = shared.to(self._world.device)
        dist.broadcast(shared, src=0)
        return None if float(shared) < 0 else float(shared)


def _seconds_of_all(gauntlet: Gauntlet, model: EvaluatedModel) -> float:
    """An estimate, by the tokens of a small part."""
    for _ in range(2):
        cost = gauntlet.run(model, share=PROBE)[0].cost
    assert cost is not None
    return cost.seconds * gauntlet.tokens() / gauntlet.tokens(PROBE)


def ladder(share: float) -> float:
    """The next of 1, 1/2, 1/4, … at or below a share: equal runs should ask equal rows."""
    return 1.0 if share >= 1 else 2.0 ** math.floor(math.log2(max(share, 2**-20)))
