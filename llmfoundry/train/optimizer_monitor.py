"""Norms of every parameter, of its gradient and of the optimizer's moment; a callback.

The idea: norms stay on the device, from where the trainer reads them with all else that a step has
measured, and a step that is not logged does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmfoundry.distributed.local_shards import l2_norms
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

    def measure(self, trainer: Trainer) -> dict[str, Tensor]:
        """l2_norm/*; the gradient's global norm is there already."""
        parameters = [(n, p.detach()) for n, p in trainer.root.model.named_parameters()]
        state = trainer.optimizer.state
        moments = [
            (name, state[p][key])
            for name, p in trainer.root.model.named_parameters()
            for key in MOMENTS
            if key in state.get(p, {})
        ]
        found = l2_norms([tensor for _, tensor in parameters + moments])
        kinds = {"param": found[: len(parameters)], "moment": found[len(parameters) :]}
        names = [f"param/{name}" for name, _ in parameters]
        names += [f"moment/{name}" for name, _ in moments]
        values = [*self._norms.unbind(), *found.unbind()]
        norms = dict(zip([*self._names, *names], values, strict=True))
        for kind, each in kinds.items():
            norms[f"{kind}/global"] = torch.linalg.vector_norm(each.double())
        return {f"l2_norm/{name}": value for name, value in norms.items()}
