"""Loss spikes and steps that are not finite: seen on the device, decided on the host.

`Guard` checks every step's loss and gradient norm on the device, before its update, and asks the
device for no value: an update is left out by the optimizer's fused kernel, which leaves weights and
state alone while `found_inf` is 1 (the switch that PyTorch's GradScaler uses). The host decides
about its verdicts once they have arrived: at each step on a CPU, where there is nothing to wait
for, else at each log. Loss and norm are sums over all processes, the same on each, and
`decide_spike` is a pure function of them and of a record that checkpoints keep: so every process
decides the same. A roll-back itself is `builders/resume.py`, which loads an earlier checkpoint.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llmfoundry.errors import GivenUp
from llmfoundry.recipe.resilience import ResolvedWatchConfig, WatchConfig

KINDS = ("not_finite", "loss_spike", "gradient_spike")
_SEVERITY = ("off", "log", "skip", "roll_back", "stop")
LOSS_RISE = 0.05  # of the mean, at least: a converged loss hardly deviates
NORM_RISE = math.log(5)  # of the logarithm: small batches' norms jump by four; clipping serves
_MOST_UNREAD = 1024  # verdicts kept for a log that comes every so many steps, or later
_WIDTH = 9  # numbers of a verdict


@dataclass(frozen=True)
class StepVerdict:
    """What was seen in one step.

    Attributes:
        batch: steps done before it.
        values: loss, and natural logarithm of the gradient's norm.
        usual: means of the steps before.
        limits: above which they are spikes; infinite while few steps are known.
        flags: of KINDS.
    """

    batch: int
    values: tuple[float, float]
    usual: tuple[float, float]
    limits: tuple[float, float]
    flags: tuple[bool, bool, bool]


class Guard:
    """Sees, on the device, steps that are not finite, and spikes.

    Attributes:
        found_inf: (), 1.0 where the step under way is no update, else 0.0.
        first: (), int64, the first step from which there are no updates until the host has decided;
            -1: there was none.
    """

    def __init__(self, device: torch.device, config: ResolvedWatchConfig | None = None) -> None:
        """`config` unset: steps that are not finite stop the updates, and spikes are not seen."""
        self._device = device
        self._config = config or WatchConfig(loss_spike="off", gradient_spike="off")
        self._actions = [getattr(self._config, kind) for kind in KINDS]
        double: dict[str, Any] = {"device": device, "dtype": torch.float64}
        seen = [action != "off" for action in self._actions[1:]]
        settles = [action == "log" for action in self._actions[1:]]
        self._sees = None if all(seen) else torch.tensor(seen, device=device)
        self._settles = torch.tensor(settles, device=device) if any(settles) else None
        self._least = torch.tensor([-math.inf, 1e-30], **double)  # a norm has a logarithm
        self._is_norm = torch.tensor([False, True], device=device)
        self._share, self._rise = torch.tensor([[LOSS_RISE, 0.0], [0.0, NORM_RISE]], **double)
        self._window = torch.zeros(2, self._config.spike_window, **double)
        self._in_a_row = torch.zeros(2, device=device, dtype=torch.int64)
        self._seen = 0  # steps, known to the host: every one has its place in the window
        self._unread: deque[tuple[int, Tensor]] = deque(maxlen=_MOST_UNREAD)
        self._gives_verdicts = self._config.sees_spikes or self._config.not_finite != "stop"
        self.release()

    def release(self) -> None:
        """Allow updates again, and forget what was not read."""
        self.found_inf = torch.zeros((), device=self._device)
        self.first = torch.full((), -1, device=self._device, dtype=torch.int64)
        self._unread.clear()

    def observe(self, batch: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Check a step's loss and global gradient norm, tensors (), before its update."""
        values = torch.stack([loss.detach(), grad_norm.detach()]).double()
        bad = ~torch.isfinite(values).all()
        if not self._gives_verdicts:
            self._hold(batch, bad)
            self.found_inf = (self.first >= 0).float()
            return
        values = torch.maximum(values, self._least)
        values = torch.where(self._is_norm, values.log(), values)
        usual, limits, spikes = self._compare(values, bad)
        flags = [bad, *spikes.unbind()]
        if (holds := self._any_of(flags, "roll_back", "stop")) is not None:
            self._hold(batch, holds)
        skips, held = self._any_of(flags, "skip"), self.first >= 0
        self.found_inf = (held if skips is None else held | skips).float()
        self._unread.append((batch, torch.cat([values, usual, limits, torch.stack(flags)])))

    def _any_of(self, flags: list[Tensor], *actions: str) -> Tensor | None:
        """Whether one of the flags (), of KINDS, has one of these actions; None: no kind has."""
        found = [f for f, action in zip(flags, self._actions, strict=True) if action in actions]
        return functools.reduce(torch.logical_or, found) if found else None

    def _hold(self, batch: int, flag: Tensor) -> None:
        self.first = torch.where(flag & (self.first < 0), batch, self.first)

    def _compare(self, values: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means (2,) of the steps before, limits (2,), which values (2,) are spikes.

        A spike takes its place in the window as the mean, so that it does not hide the next; under
        `log`, after spikes_in_a_row, as what it is, so that a new level becomes the usual one.
        """
        size = self._config.spike_window
        place, known = self._seen % size, self._window[:, : min(self._seen, size)]
        self._seen += 1
        if known.shape[1] < size // 2:
            usual = known.mean(dim=1) if known.shape[1] else torch.zeros_like(values)
            self._window[:, place] = torch.where(bad, usual, values)
            return usual, torch.full_like(usual, math.inf), torch.zeros_like(self._is_norm)
        variance, usual = torch.var_mean(known, dim=1, correction=0)
        least = torch.addcmul(self._rise, usual.abs(), self._share)
        limits = usual + torch.maximum(self._config.spike_deviations * variance.sqrt_(), least)
        spikes = (values > limits) & ~bad
        if self._sees is not None:
            spikes = spikes & self._sees
        if self._settles is not None:
            self._in_a_row = (self._in_a_row + 1) * spikes
            spikes = spikes & ((self._in_a_row <= self._config.spikes_in_a_row) | ~self._settles)
        self._window[:, place] = torch.where(spikes | bad, usual, values)
        return usual, limits, spikes

    def first_bad(self) -> int | None:
        """The step from which there are no updates, if there was one; waits for the device."""
        first = int(self.first)
        return None if first < 0 else first

    def unread(self) -> tuple[list[int], Tensor]:
        """Steps that were not read yet, and what was seen in them, (steps, 9) on the device."""
        batches = [batch for batch, _ in self._unread]
        found = [verdict for _, verdict in self._unread]
        self._unread.clear()
        empty = torch.zeros(0, _WIDTH, device=self._device, dtype=torch.float64)
        if len(found) == 1:
            return batches, found[0].unsqueeze(0)
        return batches, torch.stack(found) if found else empty

    def state(self) -> dict[str, Any]:
        """The steps before, as JSON; waits for the device."""
        return {
            "seen": self._seen,
            "window": self._window.tolist(),
            "in_a_row": self._in_a_row.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from what `state` returned; with another spike_window, and from {}, start over."""
        window = state.get("window", [[]])
        fits = len(window[0]) == self._config.spike_window
        self._seen = state["seen"] if fits else 0
        if fits:
            self._window.copy_(torch.tensor(window, dtype=torch.float64))
        in_a_row = state["in_a_row"] if fits else [0, 0]
        self._in_a_row = torch.tensor(in_a_row, device=self._device, dtype=torch.int64)


def read_verdicts(batches: Sequence[int], found: Tensor) -> list[StepVerdict]:
    """What `Guard.unread` gave, of tensors on the host."""
    return [
        StepVerdict(batch, (a, b), (c, d), (e, f), (bool(g), bool(h), bool(i)))
        for batch, (a, b, c, d, e, f, g, h, i) in zip(batches, found.tolist(), strict=True)
    ]


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
    verdict: StepVerdict, config: ResolvedWatchConfig, record: SpikeRecord
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


class RollBack(Exception):
    """The run is to go back before a step, on every process."""

    def __init__(self, decision: SpikeDecision) -> None:
        super().__init__(decision.seen)
        self.decision = decision


class SpikeHandler:
    """Checks every step, and does what the recipe asks for about spikes.

    Attributes:
        guard: the device's part, which the step calls.
        config: filled.
        record: how often something was done.
    """

    def __init__(
        self,
        config: ResolvedWatchConfig,
        device: torch.device,
        report: Callable[..., None],
        state: dict[str, Any],
    ) -> None:
        """Resume from what `state` returned, or {}; `report` is `TrainingLog.event`."""
        self.config, self._report = config, report
        self.guard = Guard(device, config)
        self.guard.restore(state.get("guard", {}))
        known = state.get("record", {}).items()
        self.record = SpikeRecord(**{k: v for k, v in known if k in SpikeRecord.__match_args__})

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON; waits for the device."""
        return {"guard": self.guard.state(), "record": asdict(self.record)}

    def go_back(self, why: SpikeDecision, done: str, state: dict[str, Any] | None) -> None:
        """Resume from an earlier state, None: from this one; how often it happened is kept."""
        self._log(replace(why, done=f"{done} (callbacks.watch.{why.kind}: roll_back)"))
        self.guard.release()
        if state is not None:
            self.guard.restore(state.get("guard", {}))

    def check(self) -> int | None:
        """Handle all steps so far, and wait for them; the step from which there are no updates.

        That of a spike never is: it raises.
        """
        self.handle(read_verdicts(*self.guard.unread()))
        return self.guard.first_bad()

    def handle(self, verdicts: Sequence[StepVerdict]) -> None:
        """Log flagged steps, and do what the recipe asks for; in order, the same on all processes.

        Raises:
            RollBack: the run is to go back.
            GivenUp: it is to end.
        """
        for verdict in verdicts:
            decision, self.record = decide_spike(verdict, self.config, self.record)
            if decision is None:
                continue
            if decision.kind == "not_finite" and self.config.not_finite == "stop":
                return  # the trainer reports why
            if decision.action == "roll_back":
                raise RollBack(decision)  # logged once it is known how far
            self._log(decision)
            if decision.action == "stop":
                raise GivenUp(f"{decision.seen}; {decision.done}; what was saved before is sound")

    def _log(self, why: SpikeDecision) -> None:
        self._report(why.kind, why.seen, why.done, step=why.batch + 1, action=why.action)


@dataclass(frozen=True)
class Return:
    """Where a run resumes after a spike.

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
