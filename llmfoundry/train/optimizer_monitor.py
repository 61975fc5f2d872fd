"""Norms of every parameter, of its gradient and of the optimizer's moment; a callback.

The idea: norms stay on the device until all are known, so that a logged step waits for it once,
and a step that is not logged does nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmfoundry.train.checkpoints.shards import l2_norms
from llmfoundry.train.trainer import Callback, Trainer

MOMENTS = ("exp_avg", "momentum_buffer")  # what optimizers call the running mean of gradients


class OptimizerMonitor(Callback):
    """Composer's l2_norm/{grad,param,moment}/<parameter>, and /global of each.

    Gradients are those before clipping; weights and moments those after the step. Composer's
    l2_norm/update is left out: it takes a second copy of all weights, whatever the optimizer.
    """

    def on_gradients(self, trainer: Trainer) -> None:
        """Measure the gradients, which the step is about to clip and drop."""
        parameters = trainer.root.model.named_parameters()
        found = {f"grad/{name}": p.grad for name, p in parameters if p.grad is not None}
        self._names, self._norms = list(found), l2_norms(list(found.values()))

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add l2_norm/*; the gradient's global norm is there already."""
        found: dict[str, Tensor] = {}
        for name, parameter in trainer.root.model.named_parameters():
            found[f"param/{name}"] = parameter.detach()
            state = trainer.optimizer.state.get(parameter, {})
            found |= {f"moment/{name}": state[key] for key in MOMENTS if key in state}
        values = torch.cat([self._norms, l2_norms(list(found.values()))]).tolist()
        norms = dict(zip([*self._names, *found], values, strict=True))
        for kind in ("param", "moment"):
            norms[f"{kind}/global"] = math.hypot(*(norms[n] for n in found if n.startswith(kind)))
        metrics.update({f"l2_norm/{name}": value for name, value in norms.items()})
