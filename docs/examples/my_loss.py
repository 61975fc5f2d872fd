"""Focal loss counts tokens less of which the model is sure (Lin et al., 2017)."""

from __future__ import annotations

from torch import Tensor

from llmfoundry.ops.packed_layout import Batch
from llmfoundry.recipe.loss import LOSSES, LossType
from llmfoundry.train.own_loss import LossModel


def focal(model: LossModel, batch: Batch, *, gamma: float) -> Tensor:
    """Return the losses (B, T) of a microbatch."""
    log_probs = model.log_probs()
    return -((1 - log_probs.exp()) ** gamma) * log_probs


LOSSES["focal"] = LossType(focal, keys={"gamma": 2.0}, meaning="Lin et al., 2017.")
