"""Looks at every step's loss and gradient norm on the device, before its update.

The step calls it, the trainer reads what it saw once the host has it. Nothing here asks the device
for a value: an update is left out by the optimizer's fused kernel, which leaves weights and state
alone while `found_inf` is 1 (the switch that PyTorch's GradScaler uses). Loss and norm are sums
over all processes, the same on each, and so is what is decided. `decide.py` is the host's part.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmfoundry.recipe.resilience.watch import WatchConfig

KINDS = ("not_finite", "loss_spike", "gradient_spike")
LOSS_RISE = 0.05  # of the mean, at least: a converged loss hardly deviates
NORM_RISE = math.log(5)  # of the logarithm: small batches' norms jump by four; clipping serves
_MOST_UNREAD = 1024  # verdicts kept for a log that comes every so many steps, or later
_WIDTH = 9  # numbers of a verdict


class Observed(Protocol):
    """A step's loss and global gradient norm, tensors ()."""

    loss: Tensor
    grad_norm: Tensor


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

    def __init__(self, device: torch.device, config: WatchConfig | None = None) -> None:
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
        self._tells = self._config.sees_spikes or self._config.not_finite != "stop"
        self.release()

    def release(self) -> None:
        """Let updates go on, and forget what was not read."""
        self.found_inf = torch.zeros((), device=self._device)
        self.first = torch.full((), -1, device=self._device, dtype=torch.int64)
        self._unread.clear()

    def observe(self, batch: int, result: Observed) -> None:
        """Look at a step before its update."""
        values = torch.stack([result.loss.detach(), result.grad_norm.detach()]).double()
        bad = ~torch.isfinite(values).all()
        if not self._tells:
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
        """Go on from what `state` returned; with another spike_window, and from {}, anew."""
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
