"""What is done about steps that the guard flagged: log, skip, roll back or stop.

The trainer gives `StepWatch` what the guard (`guard.py`, on the device) saw, as soon as the host
has it: at each step on a CPU, where there is nothing to wait for, else at each log. `decide_spike`
is a pure function, the same on every process: what a decision depends on beside the verdict, how
often this has happened, is a value that goes in and comes out, and that the checkpoint keeps. A
roll-back itself is `builders/resume.py`, which loads an earlier checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from llmfoundry.errors import GivenUp
from llmfoundry.recipe.resilience.watch import WatchConfig
from llmfoundry.train.spikes.guard import KINDS, Guard, StepVerdict, read_verdicts

_SEVERITY = ("off", "log", "skip", "roll_back", "stop")


@dataclass(frozen=True)
class SpikeRecord:
    """How often it has happened.

    Attributes:
        in_a_row: flagged steps up to the latest.
        skipped: updates of the run that were left out by skip.
        roll_backs: times that the run went back, since it last passed the furthest spike.
        furthest: steps done before the furthest spike for which it went back; -1: none.
    """

    in_a_row: int = 0
    skipped: int = 0
    roll_backs: int = 0
    furthest: int = -1

    @classmethod
    def restored(cls, state: dict[str, Any]) -> SpikeRecord:
        """From what `state` returned, or {}."""
        return cls(**{name: state[name] for name in asdict(cls()) if name in state})

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class SpikeDecision:
    """What is done about a step.

    Attributes:
        kind: of KINDS; of several the one about which most is done.
        action: log, skip, roll_back or stop.
        seen: what was seen, for people.
        done: what is done, for people.
        batch: steps done before it.
    """

    kind: str
    action: str
    seen: str
    done: str
    batch: int


def decide_spike(
    verdict: StepVerdict, config: WatchConfig, record: SpikeRecord
) -> tuple[SpikeDecision | None, SpikeRecord]:
    """What is done about a step, None where it was sound, and the record after it."""
    flagged = [kind for kind, flag in zip(KINDS, verdict.flags, strict=True) if flag]
    if not flagged:
        return None, replace(record, in_a_row=0)
    kind = max(flagged, key=lambda kind: _SEVERITY.index(getattr(config, kind)))
    action, seen = getattr(config, kind), _describe(verdict, kind)
    key = f"callbacks.watch.{kind}: {action}"
    record = replace(record, in_a_row=record.in_a_row + 1)
    done = {
        "log": f"nothing is done ({key})",
        "skip": f"its update is left out ({key})",
        "roll_back": f"the run goes back ({key})",
        "stop": f"the run ends, with the weights of before ({key})",
    }[action]
    if action == "skip":
        record = replace(record, skipped=record.skipped + 1)
        if record.in_a_row > config.spikes_in_a_row:
            done = f"the run ends: {record.in_a_row} updates in a row were left out ({key})"
            action = "stop"
    if action == "roll_back":
        again = record.roll_backs + 1 if verdict.batch <= record.furthest else 1
        furthest = max(verdict.batch, record.furthest)
        record = replace(record, roll_backs=again, furthest=furthest)
        assert config.roll_back_most is not None, "the recipe was not filled"
        if again > config.roll_back_most:
            done = f"the run ends: it went back {again - 1} times without passing this ({key})"
            action = "stop"
    return SpikeDecision(kind, action, seen, done, verdict.batch), record


def _describe(verdict: StepVerdict, kind: str) -> str:
    step = f"step {verdict.batch + 1:,}"
    loss, norm = verdict.values[0], _norm(verdict.values[1])
    if kind == "not_finite":
        return f"{step}: the loss is {loss:.4g} and its gradient's norm {norm:.4g}"
    if kind == "loss_spike":
        usual, limit = verdict.usual[0], verdict.limits[0]
        return f"{step}: the loss is {loss:.4g}; {usual:.4g} is usual, {limit:.4g} the limit"
    usual, limit = _norm(verdict.usual[1]), _norm(verdict.limits[1])
    return f"{step}: the gradient's norm is {norm:.4g}; {usual:.4g} is usual, {limit:.4g} the limit"


def _norm(logarithm: float) -> float:
    return math.exp(min(logarithm, 700.0)) if math.isfinite(logarithm) else logarithm


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
            decision, self.record = decide_spike(verdict, self.config, self.record)
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


@dataclass(frozen=True)
class Return:
    """Where a run goes on after a spike.

    Attributes:
        batch: steps done.
        skipped: batches that are left out, from there.
        name: of the checkpoint; empty: the weights of before the spike were in memory.
        state: the checkpoint's.
    """

    batch: int
    skipped: int
    name: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """What was done, for people."""
        where = f"to {self.name}" if self.name else "to the step before, as no checkpoint is older"
        last = self.batch + self.skipped
        return (
            f"the run went back {where}; what were to be batches {self.batch + 1:,} to {last:,} are"
            " left out"
        )
