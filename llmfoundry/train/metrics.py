"""A logged step's values on their way from the device to the host, where nobody waits for them.

The trainer begins a `LoggedStep` when the step has been launched and finishes it after the next
one, when the device has long computed the values: it never runs out of work because of a log. On a
CPU there is nothing to wait for, and both happen at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmfoundry.models.load_balance import Routing
from llmfoundry.train.objective import Objective
from llmfoundry.train.spikes.guard import Guard, StepVerdict, read_verdicts
from llmfoundry.train.step import StepResult


class HostCopy:
    """Tensors of one device, copied to the host without waiting for it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy; what is queued on the device after this changes nothing."""
        self._like = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        kinds = {tensor.dtype: None for tensor in tensors.values()}  # in order
        self._order = [n for kind in kinds for n, t in tensors.items() if t.dtype == kind]
        alike = [  # a call for each dtype, not for each tensor; float64 holds every value exactly
            torch.cat([t.detach().reshape(-1) for t in tensors.values() if t.dtype == kind])
            for kind in kinds
        ]
        flat = torch.cat([part.double() for part in alike])
        self._event: torch.Event | None = None
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.Event(flat.device)
            self._event.record()
        else:
            self._host = flat.cpu()

    def read(self) -> dict[str, Tensor]:
        """The tensors, on the host; waits for what was queued before the copy."""
        if self._event is not None:
            self._event.synchronize()
        parts = self._host.split([self._like[name][0].numel() for name in self._order])
        found = dict(zip(self._order, parts, strict=True))
        return {n: found[n].view(shape).to(kind) for n, (shape, kind) in self._like.items()}


@dataclass
class LoggedStep:
    """A step that is logged, between its end and the reading of its values.

    Attributes:
        batch: steps done, this one included.
        steps: so many since the last log.
        known: metrics that the host knew at its end.
        losses: names of the loss and, where there are several, its summands.
        reported: names of what else the objective reported.
        looked: steps, from 0, at which the guard looked since the last log.
        values: what the device knew.
    """

    batch: int
    steps: int
    known: dict[str, float]
    losses: list[str]
    reported: list[str]
    looked: list[int]
    values: HostCopy

    @classmethod
    def begin(
        cls,
        batch: int,
        result: StepResult,
        losses: tuple[Tensor, int, Tensor],
        guard: Guard,
        measured: Mapping[str, float | Tensor],
    ) -> LoggedStep:
        """Begin to copy what a step left on the device.

        Args:
            batch: steps done, this one included.
            result: of the step.
            losses: since the last log, of `LossWindow.take`.
            guard: which step was the first that went wrong, and what else it saw.
            measured: metrics of the step, known already or on the device.
        """
        sums, steps, left_out = losses
        looked, seen = guard.unread()
        tensors = {"sums": sums, "norm": result.grad_norm, "first bad": guard.first, "seen": seen}
        tensors["left out"] = left_out
        if result.routing is not None:
            _, load, probability, tokens = result.routing
            tensors |= {"load": load, "probability": probability, "tokens": tokens}
        waiting = {n: value for n, value in measured.items() if isinstance(value, Tensor)}
        known = {n: value for n, value in measured.items() if not isinstance(value, Tensor)}
        names, reported = ["total", *result.parts], [*result.reported]
        copy = HostCopy(tensors | {f"metric {name}": value for name, value in waiting.items()})
        return cls(batch, steps, known, names, reported, looked, copy)

    def read(self) -> ReadStep:
        """All values, on the host."""
        return ReadStep(self, self.values.read())


@dataclass
class ReadStep:
    """A logged step whose values are on the host."""

    step: LoggedStep
    values: dict[str, Tensor]

    @property
    def verdicts(self) -> list[StepVerdict]:
        """What the guard saw since the last log."""
        return read_verdicts(self.step.looked, self.values["seen"])

    @property
    def first_bad(self) -> int | None:
        """The step, counted from 0, from which there are no updates, where there is one."""
        first = int(self.values["first bad"])
        return None if first < 0 else first

    @property
    def routing(self) -> Routing | None:
        """Loads and probabilities of the step; None without experts."""
        if "load" not in self.values:
            return None
        return Routing({}, *(self.values[name] for name in ("load", "probability", "tokens")))

    def metrics(self, objective: Objective, *, bytes_per_token: float) -> dict[str, float]:
        """loss/train/*, what the objective makes of its sums, and all that was measured."""
        sums, steps = self.values["sums"].tolist(), self.step.steps - int(self.values["left out"])
        names = self.step.losses
        reported = dict(zip(self.step.reported, sums[len(names) :], strict=True))
        losses = {
            name: x / steps if steps else math.nan for name, x in zip(names, sums, strict=False)
        }
        found = {
            **{f"loss/train/{name}": loss for name, loss in losses.items()},
            "l2_norm/grad/global": self.values["norm"].item(),
            **objective.metrics(reported),
        }
        if objective.is_cross_entropy:
            language = losses.get("loss", losses["total"])
            found["metrics/train/bits_per_byte"] = language / math.log(2) / bytes_per_token
        prefix = "metric "
        waited = {
            name.removeprefix(prefix): value.item()
            for name, value in self.values.items()
            if name.startswith(prefix)
        }
        return found | self.step.known | waited
