"""Loss spikes and steps that are not finite: detected on the device, decided on the host.

Entry point: `SpikeHandler`. Its `Guard` checks the loss and gradient norm of every step on the
device, before the update, without synchronization. To skip an update it sets `found_inf` to 1, the
switch of PyTorch's GradScaler: fused optimizer kernels then leave weights and state unchanged. The
host reads the verdicts at each step on a CPU, and at each log on a GPU. Every rank makes the same
decision, because loss and norm are sums over all ranks, and `decide_spike` is a pure function of
them and of a record that is saved in checkpoints. `builders/resume.py` performs a roll-back: it
loads an earlier checkpoint.
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

from llmfoundry.errors import NoRestart
from llmfoundry.recipe.resilience import ResolvedWatchConfig, WatchConfig

KINDS = ("not_finite", "loss_spike", "gradient_spike")
_SEVERITY = ("off", "log", "skip", "roll_back", "stop")
LOSS_RISE = 0.05  # minimum rise, relative to the mean: a converged loss hardly deviates
NORM_RISE = math.log(5)  # minimum rise of log(norm): norms of small batches vary by factors of four
_MOST_UNREAD = 1024  # unread verdicts that are retained, for long log intervals
_WIDTH = 9  # values per verdict


@dataclass(frozen=True)
class StepVerdict:
    """Measurements of one step.

    Attributes:
        batch: index of the step, from 0.
        values: loss, and natural logarithm of the gradient norm.
        usual: means of both over the preceding steps.
        limits: thresholds above which a value is a spike; infinite during the first steps.
        flags: whether each of KINDS occurred.
    """

    batch: int
    values: tuple[float, float]
    usual: tuple[float, float]
    limits: tuple[float, float]
    flags: tuple[bool, bool, bool]


class Guard:
    """Detector, on the device, of spikes and of steps that are not finite.

    Attributes:
        found_inf: (), 1.0 if the optimizer must skip the update of the current step, else 0.0.
        first: (), int64, the first step since which updates are skipped until the host decides; -1:
            updates are not suspended.
    """

    def __init__(self, device: torch.device, config: ResolvedWatchConfig | None = None) -> None:
        """Without `config`, steps that are not finite suspend updates, and spikes are ignored."""
        self._device = device
        self._config = config or WatchConfig(loss_spike="off", gradient_spike="off")
        self._actions = [getattr(self._config, kind) for kind in KINDS]
        double: dict[str, Any] = {"device": device, "dtype": torch.float64}

        # settings as tensors (2,): loss, log of the gradient norm
        detected = [action != "off" for action in self._actions[1:]]
        settles = [action == "log" for action in self._actions[1:]]
        self._detects = None if all(detected) else torch.tensor(detected, device=device)
        self._settles = torch.tensor(settles, device=device) if any(settles) else None
        self._minimum = torch.tensor([-math.inf, 1e-30], **double)  # log(0) is not finite
        self._is_norm = torch.tensor([False, True], device=device)
        self._share, self._rise = torch.tensor([[LOSS_RISE, 0.0], [0.0, NORM_RISE]], **double)

        # ring buffer of the preceding values, and unread verdicts
        self._window = torch.zeros(2, self._config.spike_window, **double)
        self._in_a_row = torch.zeros(2, device=device, dtype=torch.int64)
        self._seen = 0  # number of steps, known to the host: gives the index in the ring buffer
        self._unread: deque[tuple[int, Tensor]] = deque(maxlen=_MOST_UNREAD)
        self._gives_verdicts = self._config.sees_spikes or self._config.not_finite != "stop"
        self.release()

    def release(self) -> None:
        """Allow updates again, and drop unread verdicts."""
        self.found_inf = torch.zeros((), device=self._device)
        self.first = torch.full((), -1, device=self._device, dtype=torch.int64)
        self._unread.clear()

    def observe(self, batch: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Check a step before its update.

        Args:
            batch: index of the step, from 0.
            loss: (), over the global batch.
            grad_norm: (), global gradient norm before clipping.
        """
        values = torch.stack([loss.detach(), grad_norm.detach()]).double()
        bad = ~torch.isfinite(values).all()
        if not self._gives_verdicts:
            self._suspend(batch, bad)
            self.found_inf = (self.first >= 0).float()
            return

        # compare with the preceding steps
        values = torch.maximum(values, self._minimum)
        values = torch.where(self._is_norm, values.log(), values)
        usual, limits, spikes = self._compare(values, bad)
        flags = [bad, *spikes.unbind()]

        # skip this update, or this and all further updates
        suspends = self._any_of(flags, "roll_back", "stop")
        if suspends is not None:
            self._suspend(batch, suspends)
        skips, is_suspended = self._any_of(flags, "skip"), self.first >= 0
        self.found_inf = (is_suspended if skips is None else is_suspended | skips).float()
        self._unread.append((batch, torch.cat([values, usual, limits, torch.stack(flags)])))

    def _any_of(self, flags: list[Tensor], *actions: str) -> Tensor | None:
        """Return (), whether a flag whose action is one of `actions` is set; None: no such kind."""
        pairs = zip(flags, self._actions, strict=True)
        matches = [flag for flag, action in pairs if action in actions]
        return functools.reduce(torch.logical_or, matches) if matches else None

    def _suspend(self, batch: int, flag: Tensor) -> None:
        """Skip all updates from step `batch` on, if `flag` () is set."""
        self.first = torch.where(flag & (self.first < 0), batch, self.first)

    def _compare(self, values: Tensor, bad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compare a step's values (2,) with the preceding steps.

        A spike enters the window as the mean, so that it does not raise the limit for the next
        spike. Under the action `log`, values above the limit enter the window unchanged after
        spikes_in_a_row of them, so that a new level becomes the usual level.

        Returns:
            Means (2,) of the preceding steps, limits (2,), and whether each value (2,) is a spike.
        """
        size = self._config.spike_window
        index, window = self._seen % size, self._window[:, : min(self._seen, size)]
        self._seen += 1

        # too few steps: no limits yet
        if window.shape[1] < size // 2:
            usual = window.mean(dim=1) if window.shape[1] else torch.zeros_like(values)
            self._window[:, index] = torch.where(bad, usual, values)
            return usual, torch.full_like(usual, math.inf), torch.zeros_like(self._is_norm)

        # limit: a number of standard deviations above the mean, but at least a minimum rise
        variance, usual = torch.var_mean(window, dim=1, correction=0)
        minimum_rise = torch.addcmul(self._rise, usual.abs(), self._share)
        deviation = self._config.spike_deviations * variance.sqrt_()
        limits = usual + torch.maximum(deviation, minimum_rise)

        # which values are spikes, under the recipe's actions
        spikes = (values > limits) & ~bad
        if self._detects is not None:
            spikes = spikes & self._detects
        if self._settles is not None:
            self._in_a_row = (self._in_a_row + 1) * spikes
            spikes = spikes & ((self._in_a_row <= self._config.spikes_in_a_row) | ~self._settles)
        self._window[:, index] = torch.where(spikes | bad, usual, values)
        return usual, limits, spikes

    def first_bad(self) -> int | None:
        """Return the step since which updates are suspended, if any; synchronizes the device."""
        first = int(self.first)
        return None if first < 0 else first

    def unread(self) -> tuple[list[int], Tensor]:
        """Return the steps that were not read yet, and their verdicts (steps, 9) on the device."""
        batches = [batch for batch, _ in self._unread]
        verdicts = [verdict for _, verdict in self._unread]
        self._unread.clear()
        empty = torch.zeros(0, _WIDTH, device=self._device, dtype=torch.float64)
        if len(verdicts) == 1:
            return batches, verdicts[0].unsqueeze(0)
        return batches, torch.stack(verdicts) if verdicts else empty

    def state(self) -> dict[str, Any]:
        """Return the window of preceding steps, as JSON; synchronizes the device."""
        return {
            "seen": self._seen,
            "window": self._window.tolist(),
            "in_a_row": self._in_a_row.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from the result of `state`. Start over from {}, or if spike_window changed."""
        window = state.get("window", [[]])
        fits = len(window[0]) == self._config.spike_window
        self._seen = state["seen"] if fits else 0
        if fits:
            self._window.copy_(torch.tensor(window, dtype=torch.float64))
        in_a_row = state["in_a_row"] if fits else [0, 0]
        self._in_a_row = torch.tensor(in_a_row, device=self._device, dtype=torch.int64)


def read_verdicts(batches: Sequence[int], found: Tensor) -> list[StepVerdict]:
    """Convert the result of `Guard.unread`, copied to the host, to verdicts."""
    return [
        StepVerdict(batch, (a, b), (c, d), (e, f), (bool(g), bool(h), bool(i)))
        for batch, (a, b, c, d, e, f, g, h, i) in zip(batches, found.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class SpikeRecord:
    """Counts of the spikes of a run, saved in checkpoints.

    Attributes:
        in_a_row: number of consecutive flagged steps, up to the latest step.
        skipped: number of updates that the action skip left out.
        roll_backs: number of roll-backs since the run last passed the furthest spike.
        furthest: index of the furthest step that caused a roll-back; -1: none.
    """

    in_a_row: int = 0
    skipped: int = 0
    roll_backs: int = 0
    furthest: int = -1


@dataclass(frozen=True)
class SpikeDecision:
    """Action taken for a flagged step.

    Attributes:
        kind: one of KINDS; if several occurred, the one with the most severe action.
        action: log, skip, roll_back or stop.
        seen: description of the observation, for the log.
        done: description of the action, for the log.
        batch: index of the step, from 0.
    """

    kind: str
    action: str
    seen: str
    done: str
    batch: int


def decide_spike(
    verdict: StepVerdict, config: ResolvedWatchConfig, record: SpikeRecord
) -> tuple[SpikeDecision | None, SpikeRecord]:
    """Return the decision about a step (None: the step was not flagged), and the new record."""
    flagged = [kind for kind, flag in zip(KINDS, verdict.flags, strict=True) if flag]
    if not flagged:
        return None, replace(record, in_a_row=0)

    # the most severe of the configured actions
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
    # repeated skips and roll-backs become a stop
    if action == "skip":
        record = replace(record, skipped=record.skipped + 1)
        if record.in_a_row > config.spikes_in_a_row:
            done = f"the run ends: {record.in_a_row} updates in a row were left out ({key})"
            action = "stop"
    if action == "roll_back":
        count = record.roll_backs + 1 if verdict.batch <= record.furthest else 1
        furthest = max(verdict.batch, record.furthest)
        record = replace(record, roll_backs=count, furthest=furthest)
        if count > config.roll_back_most:
            done = f"the run ends: it went back {count - 1} times without passing this ({key})"
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
    """The run must roll back to before a step; raised on every rank."""

    def __init__(self, decision: SpikeDecision) -> None:
        super().__init__(decision.seen)
        self.decision = decision


class SpikeHandler:
    """Detection of spikes, and the actions that the recipe configures for them.

    Attributes:
        guard: detector on the device, which the step calls.
        config: resolved section of the recipe.
        record: counts of spikes and actions.
    """

    def __init__(
        self,
        config: ResolvedWatchConfig,
        device: torch.device,
        report: Callable[..., None],
        state: dict[str, Any],
    ) -> None:
        """Resume from the result of `state`, or start from {}; `report` is `TrainingLog.event`."""
        self.config, self._report = config, report
        self.guard = Guard(device, config)
        self.guard.restore(state.get("guard", {}))
        fields = SpikeRecord.__match_args__
        counts = {k: v for k, v in state.get("record", {}).items() if k in fields}
        self.record = SpikeRecord(**counts)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; synchronizes the device."""
        return {"guard": self.guard.state(), "record": asdict(self.record)}

    def go_back(self, why: SpikeDecision, done: str, state: dict[str, Any] | None) -> None:
        """Resume the guard from an earlier state (None: keep its state), and retain the record."""
        self._log(replace(why, done=f"{done} (callbacks.watch.{why.kind}: roll_back)"))
        self.guard.release()
        if state is not None:
            self.guard.restore(state.get("guard", {}))

    def check(self) -> int | None:
        """Handle all steps so far; synchronizes the device.

        Returns:
            The first step that was not finite, if it suspended updates; else None. A spike that
            suspends updates raises.
        """
        self.handle(read_verdicts(*self.guard.unread()))
        return self.guard.first_bad()

    def handle(self, verdicts: Sequence[StepVerdict]) -> None:
        """Log flagged steps and take the configured actions, in order, alike on all ranks.

        Raises:
            RollBack: the run must roll back.
            NoRestart: the run must end.
        """
        for verdict in verdicts:
            decision, self.record = decide_spike(verdict, self.config, self.record)
            if decision is None:
                continue
            if decision.kind == "not_finite" and self.config.not_finite == "stop":
                return  # the trainer reports why
            if decision.action == "roll_back":
                raise RollBack(decision)  # logged once the target step is known
            self._log(decision)
            if decision.action == "stop":
                raise NoRestart(f"{decision.seen}; {decision.done}; what was saved before is sound")

    def _log(self, why: SpikeDecision) -> None:
        self._report(why.kind, why.seen, why.done, step=why.batch + 1, action=why.action)


@dataclass(frozen=True)
class ResumeStep:
    """Step at which a run resumes after a roll-back.

    Attributes:
        batch: number of steps done.
        skipped: number of batches that are skipped from there on.
        name: name of the checkpoint; empty: the weights before the spike were still in memory.
        state: state of the checkpoint.
    """

    batch: int
    skipped: int
    name: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return a description of the roll-back, for the log."""
        where = f"to {self.name}" if self.name else "to the step before, as no checkpoint is older"
        last = self.batch + self.skipped
        return (
            f"the run went back {where}; what were to be batches {self.batch + 1:,} to {last:,} are"
            " left out"
        )
