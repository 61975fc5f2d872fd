"""Objective of distillation: cross-entropy, and the divergence from a teacher's stored tokens.

Entry point: `build_distillation`, for training and validation. The formulas are in
`ops/distillation.py`. Like the cross-entropy, the loss is a mean over the labeled tokens of the
global batch, so it does not depend on microbatches, accumulation or the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from llmfoundry.models.decoder import Decoder
from llmfoundry.ops.distillation import DistillationWeights
from llmfoundry.ops.packed_layout import Batch, TeacherTokens
from llmfoundry.recipe.loss import DISTILL, ResolvedLossConfig
from llmfoundry.train.objective import CROSS_ENTROPY, Z_LOSS, Finish, Look

REVERSE_SHARES = {"forward": 0.0, "reverse": 1.0, "symmetric": 0.5}
"""Share of the reverse divergence, by loss.divergence."""


class Distillation:
    """Objective that adds a teacher's divergence to the cross-entropy."""

    is_cross_entropy = False

    def __init__(self, config: ResolvedLossConfig) -> None:
        """Take the weights of a resolved section `loss` with name: distill."""
        reverse = REVERSE_SHARES[config.divergence]
        self._kl_weight, self._z_loss_weight = config.kl_weight, config.z_loss_weight
        self._by = DistillationWeights(
            config.cross_entropy_weight,
            config.kl_weight * (1 - reverse),
            config.kl_weight * reverse,
            config.temperature,
        )

    def prepare(self, batch: Batch, look: Look, data_group: ProcessGroup | None) -> Batch:
        """Return the batch unchanged."""
        return batch

    def count(self, batch: Batch) -> Tensor:
        """Return (), the number of labeled tokens, or the sum of their weights."""
        return CROSS_ENTROPY.count(batch)

    def of(self, batch: Batch) -> Finish:
        """Return the function that computes the sums of a microbatch."""

        def finish(model: Decoder, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            count = self.count(batch).float()
            if batch.teacher is None:  # the empty batch of a rank that could not read its own
                zero = torch.zeros_like(count)
                names = ("cross_entropy", "kl", "count", *[Z_LOSS] * bool(self._z_loss_weight))
                return model.loss(hidden, batch.labels), dict.fromkeys(names, zero)
            losses = model.distillation(
                hidden, batch, self._by, z_loss_weight=self._z_loss_weight or 0.0
            )
            reported = {
                "cross_entropy": losses.cross_entropy,
                "kl": losses.divergence / self._kl_weight,
                "count": count,
            }
            if self._z_loss_weight is not None:
                reported[Z_LOSS] = losses.z_loss
            return losses.total, reported

        return finish

    def sums(self, model: Decoder, hidden: Tensor, batch: Batch) -> Tensor:
        """Return (2,): sums of cross-entropy and divergence over the labels of held-out data."""
        losses = model.distillation(hidden, batch, self._by)
        return torch.stack([losses.cross_entropy, losses.divergence / self._kl_weight])

    def metrics(self, sums: dict[str, float], split: str = "train") -> dict[str, float]:
        """Return cross-entropy and divergence, each without its weight, per labeled token."""
        if not sums or not sums["count"]:
            return {}
        names = ("cross_entropy", "kl")
        return {f"loss/{split}/{name}": sums[name] / sums["count"] for name in names}


TYPICAL_K = 64
"""Tokens of a teacher that memory is counted with before the data is read."""


def with_any_teacher(batch: Batch, config: ResolvedLossConfig) -> Batch:
    """Return a batch to measure memory with: with any tokens of a teacher if the loss has one."""
    if config.name != DISTILL:
        return batch
    ids = torch.arange(TYPICAL_K, dtype=torch.int32).expand(*batch.tokens.shape, -1).contiguous()
    return replace(batch, teacher=TeacherTokens(ids, torch.zeros_like(ids, dtype=torch.float16)))


def build_distillation(config: ResolvedLossConfig) -> Distillation | None:
    """Return the objective of a recipe; None: it has no teacher."""
    return Distillation(config) if config.name == DISTILL else None
