"""Optimizers by recipe name; a new one is one entry in OPTIMIZERS."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

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


def _fused_adamw(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, weight_decay: float
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=weight_decay,
        fused=True,
    )


OPTIMIZERS: dict[
    str, Callable[[Iterable[nn.Parameter], OptimizerConfig], torch.optim.Optimizer]
] = {"adamw": adamw, "decoupled_adamw": decoupled_adamw}

# How Composer's learning-rate metric names them: lr-<class>/group0.
CLASS_NAMES = {"adamw": "AdamW", "decoupled_adamw": "DecoupledAdamW"}
