"""Learning-rate schedules: pure functions of time, so a resumed run needs no state of theirs.

Step number b (from 0) runs at the factor of time b + 1: the first step of a warm-up learns, and
the last step of the run is at the schedule's end. (Composer lags: its first two steps are at 0.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmfoundry.recipe.duration import Clock
from llmfoundry.recipe.schedule import ScheduleConfig


def cosine_with_warmup(config: ScheduleConfig, clock: Clock, time: float) -> float:
    """Linear to 1 over t_warmup, then alpha_f + (1 - alpha_f) (1 + cos(pi x)) / 2 to t_max."""
    warmup, end = clock.batches(config.t_warmup), clock.batches(config.t_max)
    if time < warmup:
        return time / warmup
    done = min(1.0, (time - warmup) / max(end - warmup, 1e-9))
    return config.alpha_f + (1 - config.alpha_f) * 0.5 * (1 + math.cos(math.pi * done))


SCHEDULES: dict[str, Callable[[ScheduleConfig, Clock, float], float]] = {
    "cosine_with_warmup": cosine_with_warmup,
}


def lr_factor(config: ScheduleConfig, clock: Clock, batch: int) -> float:
    """The factor on the peak learning rate in step number `batch`, from 0."""
    return SCHEDULES[config.name](config, clock, batch + 1)
