"""`StepWatch`: the guard on the device and the decisions on the host, for the trainer.

The trainer gives it what the guard saw, as soon as the host has it: at each step on a CPU, where
there is nothing to wait for, else at each log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from llmfoundry.errors import GivenUp
from llmfoundry.recipe.resilience.watch import WatchConfig
from llmfoundry.train.spikes.decide import SpikeDecision, SpikeRecord, decide
from llmfoundry.train.spikes.guard import Guard, StepVerdict, read_verdicts


class TrainingLog(Protocol):
    """What the loop tells: `loggers.loggers.Tracker`, which this floor may not import."""

    def log(self, batch: int, tokens: int, metrics: dict[str, float]) -> None:
        """Record a logged step."""

    def routing(self, batch: int, tokens: int, load: list[list[int]]) -> None:
        """Record the load of every expert of every layer, at a logged step."""

    def samples(self, batch: int, samples: list[tuple[str, ...]]) -> None:
        """Record generated text."""

    def note(self, text: str) -> None:
        """Tell the user something."""

    def rewind(self, batch: int) -> None:
        """Drop what was recorded of steps after `batch`, which are made anew."""

    def event(
        self, kind: str, seen: str, done: str, *, step: int, action: str, **more: Any
    ) -> None:
        """Tell, and keep, what was seen in a step (from 1), what was done, and further facts."""


class RollBack(Exception):
    """The run is to go back before a step, on every process."""

    def __init__(self, decision: SpikeDecision) -> None:
        super().__init__(decision.seen)
        self.decision = decision


class StepWatch:
    """Looks at every step, and says what is done about it.

    Attributes:
        guard: the device's part, which the step calls.
        config: filled.
        record: how often something was done.
    """

    def __init__(
        self, config: WatchConfig, device: torch.device, log: TrainingLog, state: dict[str, Any]
    ) -> None:
        """Go on from what `state` returned, or {}."""
        self.config, self._log = config, log
        self.guard = Guard(device, config)
        self.guard.restore(state.get("guard", {}))
        self.record = SpikeRecord.restored(state.get("record", {}))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON; waits for the device."""
        return {"guard": self.guard.state(), "record": self.record.state()}

    def go_back(self, why: SpikeDecision, done: str, state: dict[str, Any] | None) -> None:
        """Go on from an earlier state, None: from this one, but for how often it has happened."""
        self.tell(replace(why, done=f"{done} (callbacks.watch.{why.kind}: roll_back)"))
        self.guard.release()
        if state is not None:
            self.guard.restore(state.get("guard", {}))

    def look(self) -> int | None:
        """Heed what was not heeded yet, and wait for it; the step from which there are no updates.

        That of a spike never is: it raises.
        """
        self.heed(read_verdicts(*self.guard.unread()))
        return self.guard.first_bad()

    def heed(self, verdicts: Sequence[StepVerdict]) -> None:
        """Tell of flagged steps, and do what the recipe says; in order, the same on all processes.

        Raises:
            RollBack: the run is to go back.
            GivenUp: it is to end.
        """
        for verdict in verdicts:
            decision, self.record = decide(verdict, self.config, self.record)
            if decision is None:
                continue
            if decision.kind == "not_finite" and self.config.not_finite == "stop":
                return  # the trainer says why
            if decision.action == "roll_back":
                raise RollBack(decision)  # who goes back tells how far
            self.tell(decision)
            if decision.action == "stop":
                raise GivenUp(f"{decision.seen}; {decision.done}; what was saved before is sound")

    def tell(self, decision: SpikeDecision) -> None:
        """Write an event."""
        self._log.event(
            decision.kind,
            decision.seen,
            decision.done,
            step=decision.batch + 1,
            action=decision.action,
        )
