"""What is done about steps that the guard flagged: a pure function, the same on every process.

`steps.py` calls `decide` for each verdict in order. The idea: what a decision depends on beside the
verdict, how often this has happened, is a value that goes in and comes out, and that the checkpoint
keeps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmfoundry.recipe.resilience.watch import WatchConfig
from llmfoundry.train.spikes.guard import KINDS, StepVerdict

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


def decide(
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
