"""Learning-rate schedules: pure functions of time, so a resumed run needs no state of theirs.

Step number b (from 0) runs at the factor of time b + 1: the first step of a warm-up learns, and
the last step of the run is at the schedule's end. (Composer lags: its first two steps are at 0.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmfoundry.recipe.checks import Clock
from llmfoundry.recipe.choice_table import load_code
from llmfoundry.recipe.schedule import SCHEDULES, ResolvedScheduleConfig


def build_schedule(config: ResolvedScheduleConfig, clock: Clock) -> Callable[[int], float]:
    """The factor on the peak learning rate by the step's number, from 0; `config` is filled."""
    warmup, after = clock.batches(config.t_warmup), _function(config.name)

    def factor(batch: int) -> float:
        time = batch + 1
        return time / warmup if time < warmup else after(config, clock, time - warmup)

    return factor


def _function(name: str) -> Callable[[ResolvedScheduleConfig, Clock, float], float]:
    """The factor after the warm-up, of one of SCHEDULES."""
    return load_code(SCHEDULES[name].make, FUNCTIONS.get(name))


def cosine(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """Multiplier that follows half a cosine from 1 to alpha_f at t_max."""
    share = _share_done(config, clock, since)
    return config.alpha_f + (1 - config.alpha_f) * 0.5 * (1 + math.cos(math.pi * share))


def linear(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """Multiplier that decreases linearly from 1 to alpha_f."""
    return 1 - (1 - config.alpha_f) * _share_done(config, clock, since)


def constant(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """Multiplier of 1."""
    return 1.0


def stable_decay(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """Multiplier of 1 that decreases linearly to alpha_f over the last t_cooldown of the run.

    Source: MiniCPM (Hu et al., 2024).
    """
    return 1 - (1 - config.alpha_f) * _share_cooled(config, clock, since)


def inverse_sqrt(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """Root decay from the warm-up's end, then a line to alpha_f_cooldown (LLM Foundry).

    alpha_f_decay + (1 - alpha_f_decay) / sqrt((t + t_scale) / t_scale) of the time t since then.
    """
    floor, last = config.alpha_f_decay or 0.0, config.alpha_f_cooldown or 0.0
    scale = clock.batches(config.t_scale)
    stable = clock.total - clock.batches(config.t_cooldown) - clock.batches(config.t_warmup)
    decayed = floor + (1 - floor) / math.sqrt((min(since, stable) + scale) / scale)
    return decayed + (last - decayed) * _share_cooled(config, clock, since)


def _share_done(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """How far from the warm-up's end to t_max, at most 1."""
    length = clock.batches(config.t_max) - clock.batches(config.t_warmup)
    return min(1.0, since / max(length, 1e-9))


def _share_cooled(config: ResolvedScheduleConfig, clock: Clock, since: float) -> float:
    """How far into the run's last t_cooldown, from 0 to 1."""
    cooldown = clock.batches(config.t_cooldown)
    left = clock.total - clock.batches(config.t_warmup) - since
    return min(1.0, max(0.0, 1 - left / max(cooldown, 1e-9)))


FUNCTIONS = {
    "cosine_with_warmup": cosine,
    "linear_decay_with_warmup": linear,
    "constant_with_warmup": constant,
    "inv_sqrt_with_warmup": inverse_sqrt,
    "warmup_stable_decay": stable_decay,
}
"""The code of the entries of SCHEDULES that come with the project."""
