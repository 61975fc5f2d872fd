"""Values of logged steps, copied from the device to the host asynchronously.

The trainer creates a `LoggedStep` after a step was launched, and reads it after the next step was
launched. The values have arrived by then, so logging never leaves the device idle. On a CPU, both
happen at once. `LossWindow` sums the losses between two logs. `routing_metrics` returns the metrics
of a mixture of experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from llmfoundry.models.router import Routing
from llmfoundry.train.objective import Objective
from llmfoundry.train.spikes import Guard, StepVerdict, read_verdicts
from llmfoundry.train.step import StepResult


class HostCopy:
    """Asynchronous copy of tensors from one device to the host."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Start the copy. Later operations on the device do not affect it."""
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
        """Return the tensors on the host; waits for operations queued before the copy."""
        if self._event is not None:
            self._event.synchronize()
        parts = self._host.split([self._like[name][0].numel() for name in self._order])
        values = dict(zip(self._order, parts, strict=True))
        return {n: values[n].view(shape).to(kind) for n, (shape, kind) in self._like.items()}


class LoggedStep:
    """Logged step, whose values are copied to the host asynchronously and read later.

    Attributes:
        batch: steps done, this one included.
    """

    def __init__(
        self,
        batch: int,
        result: StepResult,
        losses: tuple[Tensor, int, Tensor],
        guard: Guard,
        measured: Mapping[str, float | Tensor],
    ) -> None:
        """Start to copy the values of a step.

        Args:
            batch: steps done, this one included.
            result: result of the step.
            losses: result of `LossWindow.take`: the losses since the last log.
            guard: the guard, with its unread verdicts.
            measured: metrics of the step, as numbers or as tensors on the device.
        """
        self.batch = batch
        sums, self._steps, left_out = losses
        self._observed, seen = guard.unread()  # steps, from 0, since the last log
        tensors = {"sums": sums, "norm": result.grad_norm, "first bad": guard.first, "seen": seen}
        tensors["left out"] = left_out
        if result.routing is not None:
            _, load, probability, tokens, _ = result.routing
            tensors |= {"load": load, "probability": probability, "tokens": tokens}
        waiting = {n: value for n, value in measured.items() if isinstance(value, Tensor)}
        tensors |= {f"metric {name}": value for name, value in waiting.items()}
        self._measured, self._copy = [*waiting], HostCopy(tensors)
        self._known = {n: value for n, value in measured.items() if not isinstance(value, Tensor)}
        self._losses, self._reported = ["total", *result.parts], [*result.reported]  # of the sums

    def read(self) -> LoggedStep:
        """Wait for the values; call it before the properties and methods below."""
        self._values = self._copy.read()
        return self

    @property
    def verdicts(self) -> list[StepVerdict]:
        """Verdicts of the guard since the last log."""
        return read_verdicts(self._observed, self._values["seen"])

    @property
    def first_bad(self) -> int | None:
        """Index (from 0) of the step since which updates are suspended; None: none."""
        first = int(self._values["first bad"])
        return None if first < 0 else first

    @property
    def routing(self) -> Routing | None:
        """Loads and probabilities of the step; None without experts."""
        if "load" not in self._values:
            return None
        return Routing({}, *(self._values[name] for name in ("load", "probability", "tokens")))

    def metrics(self, objective: Objective, *, bytes_per_token: float) -> dict[str, float]:
        """Return loss/train/*, the objective's metrics, and all measured metrics."""
        sums, steps = self._values["sums"].tolist(), self._steps - int(self._values["left out"])
        names = self._losses
        reported = dict(zip(self._reported, sums[len(names) :], strict=True))
        losses = {
            name: x / steps if steps else math.nan for name, x in zip(names, sums, strict=False)
        }
        metrics = {
            **{f"loss/train/{name}": loss for name, loss in losses.items()},
            "l2_norm/grad/global": self._values["norm"].item(),
            **objective.metrics(reported),
        }
        if objective.is_cross_entropy:
            language = losses.get("loss", losses["total"])
            metrics["metrics/train/bits_per_byte"] = language / math.log(2) / bytes_per_token
        waited = {name: self._values[f"metric {name}"].item() for name in self._measured}
        return metrics | self._known | waited


class LossWindow:
    """Sums of the losses, and of other values that the objective reports, over several steps."""

    def __init__(
        self,
        device: torch.device,
        sums: float | list[float] = 0.0,
        steps: int = 0,
        *,
        only_finite: bool = False,
    ) -> None:
        """Start from 0, or resume from the result of `state`.

        Args:
            device: device of the sums.
            sums: sums so far.
            steps: number of steps in the sums.
            only_finite: whether to skip steps whose first loss is not finite.
        """
        self._sums, self.steps = torch.tensor(sums, device=device), steps
        self._left_out = torch.zeros((), device=device, dtype=torch.int64)
        self._only_finite = only_finite

    def add(self, losses: Tensor) -> None:
        """Add the losses of a step."""
        if self._only_finite:
            is_finite = torch.isfinite(losses[0])
            losses = torch.where(is_finite, losses, 0.0)
            self._left_out = self._left_out + ~is_finite
        self._sums = self._sums + losses
        self.steps += 1

    def take(self) -> tuple[Tensor, int, Tensor]:
        """Return the sums, the steps, and the number of skipped steps ((), int64), and reset."""
        sums, steps, left_out = self._sums, self.steps, self._left_out
        self._sums, self._left_out = torch.zeros_like(sums), torch.zeros_like(left_out)
        self.steps = 0
        return sums, steps, left_out

    def state(self) -> tuple[float | list[float], int]:
        """Return sums and steps for a checkpoint; synchronizes the device."""
        return self._sums.tolist(), self.steps - int(self._left_out)


def routing_metrics(routing: Routing, *, choices: int) -> dict[str, float]:
    """Return moe/* of the global batch, over all layers and for each layer.

    Expert loads are relative to the mean of their layer: 1 at perfect balance, and at most E / k.
    The entropy is that of the router's mean probabilities, in nats: ln E at perfect balance.

    Args:
        routing: routing statistics of a step's global batch.
        choices: tokens of the step times k. Choices that no expert processed are reported as
            `moe/dropped_tokens`; a dropless mixture has none.
    """
    load = routing.load.double()
    mean = load.mean(1, keepdim=True)
    relative = load / mean
    p = routing.probability.double()
    p = p / p.sum(1, keepdim=True)
    entropy = -torch.special.xlogy(p, p).sum(1)
    layers = torch.stack([relative.amax(1), relative.amin(1), _spread(relative), entropy])
    over_all = torch.stack(
        [relative.max(), relative.min(), relative.sub(1).square().mean().sqrt(), entropy.mean()]
    )
    names = ("load_max", "load_min", "load_std", "router_entropy")
    columns = torch.cat([over_all[:, None], layers], dim=1).T.tolist()
    metrics = {"moe/dropped_tokens": choices * len(load) - load.sum().item()}
    for index, column in enumerate(columns):
        layer = f"layer_{index - 1:02d}/" if index else ""
        metrics |= {f"moe/{layer}{name}": v for name, v in zip(names, column, strict=True)}
    return metrics


def _spread(relative: Tensor) -> Tensor:
    """Return the standard deviation of each layer's loads, whose mean is 1."""
    return relative.sub(1).square().mean(1).sqrt()
