"""Optimizers by recipe name; a new one is one entry in OPTIMIZERS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from llmfoundry.recipe.optimizer import OptimizerConfig


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019): weights shrink by weight_decay * lr a step."""
    return _fused_adamw(parameters, config, config.weight_decay)


def decoupled_adamw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Composer's DecoupledAdamW: weights shrink by weight_decay * lr / (first lr) a step.

    That is AdamW with weight_decay divided by the first learning rate, so PyTorch's kernel serves.
    """
    return _fused_adamw(parameters, config, config.weight_decay / config.lr)


def decoupled_lionw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """LLM Foundry's DecoupledLionW."""
    return DecoupledLionW(
        parameters, lr=config.lr, betas=_pair(config.betas), weight_decay=config.weight_decay
    )


def _fused_adamw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, weight_decay: float
) -> torch.optim.Optimizer:
    assert config.eps is not None, "the recipe was not filled"
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=_pair(config.betas),
        eps=config.eps,
        weight_decay=weight_decay,
        fused=True,
    )


def _pair(betas: list[float] | None) -> tuple[float, float]:
    assert betas is not None, "the recipe was not filled"
    return betas[0], betas[1]


class DecoupledLionW(torch.optim.Optimizer):
    """Lion (Chen et al., 2023) with a weight decay that the peak learning rate does not scale.

    u = sign(lerp(m, g, 1 - beta_1)); p <- p (1 - weight_decay lr / first lr) - lr u;
    m <- lerp(m, g, 1 - beta_2). While `found_inf` is 1 a step changes nothing, as PyTorch's fused
    optimizers have it, and the host is not asked.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "initial_lr": lr}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean, (beta_1, beta_2) = state["exp_avg"], group["betas"]
        taken: float | Tensor = 1.0
        if self.found_inf is not None:
            taken, grad = 1 - self.found_inf, torch.nan_to_num(grad, 0.0, 0.0, 0.0)
        lr, peak = group["lr"], group["initial_lr"]
        update = torch.lerp(mean, grad, 1 - beta_1).sign_()
        parameter.mul_(1 - taken * group["weight_decay"] * lr / peak)
        parameter.sub_(update * (taken * lr))
        mean.add_((grad - mean) * (taken * (1 - beta_2)))


OPTIMIZERS: dict[
    str, Callable[[Iterable[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]
] = {"adamw": adamw, "decoupled_adamw": decoupled_adamw, "decoupled_lionw": decoupled_lionw}

# How Composer's learning-rate metric names them: lr-<class>/group0.
CLASS_NAMES = {
    "adamw": "AdamW",
    "decoupled_adamw": "DecoupledAdamW",
    "decoupled_lionw": "DecoupledLionW",
}
