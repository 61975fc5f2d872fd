"""Training objectives: the protocol, and cross-entropy.

`train_step` minimizes an `Objective`: a sum over the global batch, divided by a count over the
global batch. Both are sums over sequences, so the loss does not depend on the microbatch size,
gradient accumulation or the number of ranks. The objectives of preference tuning are in
`preference_loss.py`. Validation uses the same objectives.
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
"""Map the model and hidden states (B, T, D) to the loss sum and the reported sums, by name."""


Look = Callable[[Batch, Callable[[Batch], Callable[[Decoder, Tensor], Tensor]]], Tensor]
"""Forward pass without gradients and dropout: (batch, factory) to one result per sequence, (B, …).

`factory(microbatch)` returns the function that maps the model and hidden states to the result."""


Z_LOSS = "z_loss"
"""Among the reported sums: the part of the loss sum that `train_step` reports under this name."""
OWN_COUNT = "own count"
"""Among the reported sums: the divisor of the loss, if it is only known with the sums. Then the
result of `Objective.count` is provisional, and `train_step` corrects the gradients."""


class Objective(Protocol):
    """Loss that a training step minimizes.

    Attributes:
        is_cross_entropy: whether the mean loss is in nats per labeled token.
    """

    is_cross_entropy: bool

    def prepare(self, batch: Batch, look: Look, data_group: dist.ProcessGroup | None) -> Batch:
        """Add values that all microbatches need to the batch. Every rank calls it.

        Args:
            batch: this rank's part of the global batch.
            look: runs the model without gradients.
            data_group: ranks with the other parts of the global batch; None: all ranks.
        """

    def count(self, batch: Batch) -> Tensor:
        """Return (), the divisor of this batch; the step sums it over the global batch."""

    def of(self, batch: Batch) -> Finish:
        """Return the function that computes the sums of a microbatch inside the forward pass."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return metrics by name, from the reported sums of all steps since the last log."""


class CrossEntropy:
    """Cross-entropy in nats: the weighted mean over labeled tokens, with the z-loss of logits."""

    is_cross_entropy = True

    def __init__(self, z_loss_weight: float | None = None) -> None:
        """Set the weight of the z-loss; None: no z-loss."""
        self._z_loss_weight = z_loss_weight

    def prepare(self, batch: Batch, look: Look, data_group: dist.ProcessGroup | None) -> Batch:
        """Return the batch unchanged."""
        return batch

    def count(self, batch: Batch) -> Tensor:
        """Return (), the number of labeled tokens, or the sum of their weights."""
        return (batch.labels != IGNORE).sum() if batch.weights is None else batch.weights.sum()

    def of(self, batch: Batch) -> Finish:
        """Return the function that computes the sum of the cross-entropy, and of the z-loss."""

        def finish(model: Decoder, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            if self._z_loss_weight is None:
                return model.loss(hidden, batch.labels, batch.weights), {}
            total, z_loss = model.losses(
                hidden, batch.labels, batch.weights, z_loss_weight=self._z_loss_weight
            )
            return total, {Z_LOSS: z_loss}

        return finish

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return no metrics besides the loss."""
        return {}


def sum_over_processes(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce `value` in place over the ranks of `group` and return it; None: over all ranks."""
    if dist.is_initialized():
        with span("messages"):
            dist.all_reduce(value, group=group)
    return value


CROSS_ENTROPY = CrossEntropy()
