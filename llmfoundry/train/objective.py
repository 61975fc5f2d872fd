"""What a step minimizes: the protocol, and the cross-entropy.

`train_step` minimizes an `Objective`: a sum over a batch, and what that is divided by over all
processes. All are sums over rows, so that microbatches, accumulation and processes change nothing.
Those of preference tuning are in `preference_loss.py`; validation measures by them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.packed_layout import IGNORE, Batch
from llmfoundry.telemetry import span

Finish = Callable[[Decoder, Tensor], tuple[Tensor, dict[str, Tensor]]]
"""From model and hidden states (B, T, D) to a sum, and sums of what is reported, by name."""


Look = Callable[[Batch, Callable[[Batch], Callable[[Decoder, Tensor], Tensor]]], Tensor]
"""What a function gives for each row of a batch, (B, …), without gradients or dropout; it is made
for each microbatch, and called with the model and hidden states."""


class Objective(Protocol):
    """What a step minimizes.

    Attributes:
        is_cross_entropy: whether its mean is in nats of a labeled token.
    """

    is_cross_entropy: bool

    def prepare(self, batch: Batch, look: Look, data_group: dist.ProcessGroup | None) -> Batch:
        """The batch, with what must be known before the first microbatch; on every process."""

    def count(self, batch: Batch) -> Tensor:
        """(): what the sum is divided by, of this batch alone; the step adds up all of them."""

    def of(self, batch: Batch) -> Finish:
        """The sums of a microbatch, computed within the model's forward pass."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """What is logged, by metric name, of what was reported in all steps since the last log."""


class CrossEntropy:
    """Nats of each labeled token, times its weight; divided by the sum of the weights."""

    is_cross_entropy = True

    def prepare(self, batch: Batch, look: Look, data_group: dist.ProcessGroup | None) -> Batch:
        """Nothing to know."""
        return batch

    def count(self, batch: Batch) -> Tensor:
        """(): labeled tokens, or the sum of their weights."""
        return (batch.labels != IGNORE).sum() if batch.weights is None else batch.weights.sum()

    def of(self, batch: Batch) -> Finish:
        """The cross-entropy's sum."""

        def finish(model: Decoder, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return model.loss(hidden, batch.labels, batch.weights), {}

        return finish

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Nothing beside the loss."""
        return {}


def sum_over_processes(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum of a group's values, in their place; None: of all processes'."""
    if dist.is_initialized():
        with span("messages"):
            dist.all_reduce(value, group=group)
    return value


CROSS_ENTROPY = CrossEntropy()
