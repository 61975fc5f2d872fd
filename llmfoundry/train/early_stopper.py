"""Ends a run whose metric has stopped improving; a callback.

The idea: process 0's measurement counts for all, so that they stop at the same batch, and what it
has seen so far is in the checkpoint, so that a resumed run stops where the uninterrupted one would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry.distributed.launch import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.logger import EarlyStopperConfig
from llmfoundry.recipe.values.checks import nearest
from llmfoundry.train.trainer import Callback, Trainer


class EarlyStopper(Callback):
    """Looks at every logged step and evaluation; comes last among callbacks, to see all metrics."""

    def __init__(self, config: EarlyStopperConfig) -> None:
        """`config` is filled and names a metric."""
        assert config.metric is not None and config.patience is not None, "fill the recipe"
        self._config, self._metric, self._patience = config, config.metric, config.patience
        self._best: float | None = None
        self._since = 0  # measurements since the best
        self._names: set[str] = set()  # of all metrics seen by this process
        self._logged = self._evaluated = False
        # what evaluations measure: no logged step ends the run
        self.may_lag = self._metric.startswith("metrics/") and "/train/" not in self._metric

    def on_start(self, trainer: Trainer) -> None:
        """End at once a run that had ended so already."""
        self._end_if_exhausted(trainer)

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look at a logged step."""
        self._logged = True
        self._look(trainer, metrics, evaluated=False)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Look at an evaluation."""
        self._evaluated = True
        self._look(trainer, metrics, evaluated=True)

    def state(self) -> dict[str, Any]:
        """The best value so far, of which metric, and how long ago it was."""
        best = {"metric": self._metric, "mode": self._config.mode, "best": self._best}
        return {"early_stopper": {**best, "since": self._since}}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume; with another metric or mode the count starts over."""
        seen = state.get("early_stopper", {})
        if (seen.get("metric"), seen.get("mode")) == (self._metric, self._config.mode):
            self._best, self._since = seen["best"], seen["since"]

    def _look(self, trainer: Trainer, metrics: dict[str, float], *, evaluated: bool) -> None:
        self._names |= metrics.keys()
        value = metrics.get(self._metric)
        if evaluated or value is not None or not self.may_lag:  # else nobody has one
            value = _of_process_0(value, trainer.world)
        if value is None:
            was_measured = self._best is not None or self._since > 0
            if self._logged and self._evaluated and not was_measured:
                self._refuse(trainer)
        elif self._is_better(value):
            self._best, self._since = value, 0
        else:
            self._since += 1
            self._end_if_exhausted(trainer)

    def _is_better(self, value: float) -> bool:
        if self._best is None or math.isnan(value):
            return not math.isnan(value)
        gain = self._best - value if self._config.mode == "min" else value - self._best
        assert self._config.min_delta is not None
        return gain > self._config.min_delta

    def _end_if_exhausted(self, trainer: Trainer) -> None:
        if self._since >= self._patience:
            best = "a number" if self._best is None else f"{self._best:.6g}"
            trainer.end(
                f"stopped early after batch {trainer.batch:,}: {self._metric} has not improved on"
                f" {best} in {self._since} measurements"
            )

    def _refuse(self, trainer: Trainer) -> None:
        """A metric that never comes would stop nothing, in silence."""
        problem = (
            f"callbacks.early_stopper.metric: {self._metric} is not among what the run has logged"
            f" and evaluated{nearest(self._metric, sorted(self._names))}"
        )
        if trainer.done:
            trainer.tracker.note(f"{problem}; nothing could end the run early")
            return
        trainer.save(last=True)
        raise UserError(
            f"{problem}; write a name of metrics.jsonl, and run the same command: batch"
            f" {trainer.batch:,} is saved"
        )


def _of_process_0(value: float | None, world: World) -> float | None:
    """Process 0's value: throughput, for one, is another on every process."""
    if world.size == 1:
        return value
    shared = torch.tensor([value is not None, value or 0.0], dtype=torch.float64)
    dist.broadcast(shared, src=0)  # on the host, where the value is
    return shared[1].item() if shared[0] else None
