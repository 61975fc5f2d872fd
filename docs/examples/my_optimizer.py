"""Signum: the sign of a running mean of gradients (Bernstein et al., 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from llmfoundry.recipe.optimizer import OPTIMIZERS, OptimizerType


class Signum(torch.optim.Optimizer):
    """An optimizer of torch.optim's kind; its keyword arguments are the recipe's keys."""

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                mean.lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(mean.sign(), alpha=-group["lr"])


OPTIMIZERS["signum"] = OptimizerType(
    Signum, keys={"momentum": 0.9}, moments=1, meaning="Bernstein et al., 2018."
)
