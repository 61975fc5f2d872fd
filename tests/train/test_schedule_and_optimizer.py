"""Learning rates against the formula, updates against the papers' rules written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from llmfoundry.recipe.duration import Clock, Duration
from llmfoundry.recipe.optimizer import OptimizerConfig
from llmfoundry.recipe.schedule import ScheduleConfig
from llmfoundry.train.optim import OPTIMIZERS
from llmfoundry.train.schedule import lr_factor

CLOCK = Clock(
    samples_per_batch=4,
    tokens_per_batch=400,
    batches_per_epoch=50,
    max_duration=Duration.parse("100ba"),
)


@pytest.mark.parametrize("warmup", ["10ba", "4000tok", "40sp", "0.1dur", "0.2ep"])
def test_cosine_with_warmup_in_every_unit_of_time(warmup: str) -> None:
    config = ScheduleConfig(t_warmup=warmup, alpha_f=0.1)
    factors = [lr_factor(config, CLOCK, batch) for batch in range(100)]
    assert factors[0] == pytest.approx(0.1)  # the first step learns
    assert factors[9] == pytest.approx(1.0)
    assert factors[54] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert factors[99] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0)


def test_the_factor_stays_at_the_end_after_t_max() -> None:
    config = ScheduleConfig(t_warmup="0ba", t_max="50ba", alpha_f=0.2)
    assert lr_factor(config, CLOCK, 49) == pytest.approx(0.2)
    assert lr_factor(config, CLOCK, 99) == pytest.approx(0.2)


def written_out(name: str, weights: torch.Tensor, gradients: list[torch.Tensor], lrs: list[float]):
    """Adam with bias correction and the two weight decays, in float64."""
    w, m, v = weights.double().clone(), torch.zeros(5).double(), torch.zeros(5).double()
    for step, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        g = g.double()
        w *= 1 - (0.1 * lr if name == "adamw" else 0.1 * lr / 0.02)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g**2
        w -= lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    return w


@pytest.mark.parametrize("name", ["adamw", "decoupled_adamw"])
def test_updates_follow_the_rule(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, generator=generator)
    gradients = [torch.randn(5, generator=generator) for _ in range(4)]
    lrs = [0.01, 0.02, 0.015, 0.005]
    parameter = nn.Parameter(weights.clone())
    config = OptimizerConfig(name=name, lr=0.02, weight_decay=0.1)
    optimizer = OPTIMIZERS[name]([parameter], config)
    for gradient, lr in zip(gradients, lrs, strict=True):
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    expected = written_out(name, weights, gradients, lrs)
    torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)
