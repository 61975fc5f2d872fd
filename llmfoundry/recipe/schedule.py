"""The `schedule` section: the learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmfoundry.recipe.checks import fraction, one_of
from llmfoundry.recipe.duration import check_duration

SCHEDULES = ("cosine_with_warmup",)


@dataclass
class ScheduleConfig:
    """A factor on the peak learning rate as a pure function of time."""

    name: str = "cosine_with_warmup"
    """cosine_with_warmup: linear from 0 to 1 over t_warmup, then half a cosine to alpha_f."""
    t_warmup: str = "0.05dur"
    """Length of the warm-up."""
    t_max: str = "1dur"
    """When the cosine ends; the factor stays at alpha_f after it."""
    alpha_f: float = 0.1
    """The factor at the end."""

    def check(self, key: str = "schedule.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from one_of(f"{key}name", self.name, SCHEDULES)
        yield from check_duration(f"{key}t_warmup", self.t_warmup)
        yield from check_duration(f"{key}t_max", self.t_max)
        yield from fraction(f"{key}alpha_f", self.alpha_f)
