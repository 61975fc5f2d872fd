"""Learning rates against the formula, updates against the papers' rules written out."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.recipe.optimizer import OPTIMIZERS, OptimizerConfig
from llmfoundry.recipe.schedule import ScheduleConfig
from llmfoundry.train.optim.optimizers import new_optimizer
from llmfoundry.train.optim.schedule import build_schedule
from llmfoundry.train.trainer import falls_due

CLOCK = Clock(
    samples_per_batch=4,
    tokens_per_batch=400,
    batches_per_epoch=50,
    max_duration=Duration.parse("100ba"),
)


def factors(name: str, **settings: object) -> list[float]:
    """Of every step of a run of 100; element 0 is time 1."""
    config = ScheduleConfig(name=name, **settings)
    assert list(config.check()) == []
    config.fill()
    return [*map(build_schedule(config, CLOCK), range(100))]


@pytest.mark.parametrize(
    ("interval", "length"),
    [
        ("1ba", Fraction(1)),
        ("7ba", Fraction(7)),
        ("1000tok", Fraction(1000, 512)),
        ("100tok", Fraction(100, 512)),
        ("20sp", Fraction(20, 8)),
        ("1ep", Fraction(25, 2)),
        ("0.1dur", Fraction(10)),
        ("0.07dur", Fraction(7)),
        ("0.01ep", Fraction(1, 8)),
    ],
)
def test_an_event_fires_at_the_first_batch_at_or_after_each_multiple(
    interval: str, length: Fraction
) -> None:
    expected = [
        batch
        for batch in range(1, 101)
        if any(batch - 1 < length * k <= batch for k in range(1, int(101 / length) + 2))
    ]
    clock = Clock(8, 512, 12.5, Duration.parse("100ba"))  # 8 rows of 64 tokens a batch
    batches = clock.batches(interval)
    assert [batch for batch in range(1, 101) if falls_due(batches, batch)] == expected


def test_an_interval_of_nothing_never_fires() -> None:
    assert not any(falls_due(CLOCK.batches("0ba"), batch) for batch in range(200))


@pytest.mark.parametrize("warmup", ["10ba", "4000tok", "40sp", "0.1dur", "0.2ep"])
def test_cosine_with_warmup_in_every_unit_of_time(warmup: str) -> None:
    found = factors("cosine_with_warmup", t_warmup=warmup)
    assert found[0] == pytest.approx(0.1)  # the first step learns
    assert found[9] == pytest.approx(1.0)
    assert found[54] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert found[99] == pytest.approx(0.1)
    assert max(found) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["cosine_with_warmup", "linear_decay_with_warmup"])
def test_the_factor_stays_at_the_end_after_t_max(name: str) -> None:
    found = factors(name, t_warmup="0ba", t_max="50ba", alpha_f=0.2)
    assert found[49] == pytest.approx(0.2)
    assert found[99] == pytest.approx(0.2)


def test_linear_decay_is_a_line() -> None:
    found = factors("linear_decay_with_warmup", t_warmup="20ba")
    assert found[:20] == pytest.approx([(t + 1) / 20 for t in range(20)])
    assert found[19:] == pytest.approx([1 - t / 80 for t in range(81)])


def test_constant_stays() -> None:
    assert factors("constant_with_warmup", t_warmup="2ba") == pytest.approx([0.5] + [1.0] * 99)


def test_warmup_stable_decay_falls_at_the_end_only() -> None:
    found = factors("warmup_stable_decay", t_warmup="10ba", t_cooldown="0.25dur", alpha_f=0.5)
    assert found[9:75] == pytest.approx([1.0] * 66)
    assert found[75:] == pytest.approx([1 - 0.5 * t / 25 for t in range(1, 26)])


def test_inverse_square_root_with_its_cooldown() -> None:
    found = factors(
        "inv_sqrt_with_warmup",
        t_warmup="10ba",
        t_scale="5ba",
        t_cooldown="20ba",
        alpha_f_decay=0.1,
        alpha_f_cooldown=0.05,
    )
    decay = [0.1 + 0.9 / math.sqrt((t + 5) / 5) for t in range(71)]
    assert found[9:80] == pytest.approx(decay)
    cooled = [decay[-1] + (0.05 - decay[-1]) * t / 20 for t in range(1, 21)]
    assert found[80:] == pytest.approx(cooled)


def test_a_schedules_setting_that_another_schedule_has_is_refused() -> None:
    config = ScheduleConfig(name="constant_with_warmup", alpha_f=0.1)
    (line,) = config.check()
    assert line.startswith("schedule.alpha_f: has no effect with schedule.name: constant_with")
    (line,) = ScheduleConfig(name="inv_sqrt_with_warmup").check()
    assert line.startswith("schedule.t_scale: inv_sqrt_with_warmup needs it")


def written_out(name: str, weights: torch.Tensor, gradients: list[torch.Tensor], lrs: list[float]):
    """Adam with bias correction and two weight decays (muon's, of a vector), and Lion; float64."""
    w, m, v = weights.double().clone(), torch.zeros(5).double(), torch.zeros(5).double()
    for step, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        g = g.double()
        w *= 1 - 0.1 * (lr / 0.02 if name.startswith("decoupled") else lr)
        if name == "decoupled_lionw":
            w -= lr * torch.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
            continue
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g**2
        w -= lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
    return w


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_follow_the_rule(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, generator=generator)
    gradients = [torch.randn(5, generator=generator) for _ in range(4)]
    lrs = [0.01, 0.02, 0.015, 0.005]
    parameter = nn.Parameter(weights.clone())
    config = OptimizerConfig(name=name, lr=0.02, weight_decay=0.1)
    config.fill()
    optimizer = new_optimizer([parameter], config)
    for gradient, lr in zip(gradients, lrs, strict=True):
        parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    expected = written_out(name, weights, gradients, lrs)
    torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)
