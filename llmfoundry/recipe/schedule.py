"""The `schedule` section: the learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from llmfoundry.recipe.values.bounds import FRACTION, choice, out_of_bounds
from llmfoundry.recipe.values.checks import fill, inert
from llmfoundry.recipe.values.duration import check_duration

SCHEDULES = (
    "cosine_with_warmup",
    "linear_decay_with_warmup",
    "constant_with_warmup",
    "inv_sqrt_with_warmup",
    "warmup_stable_decay",
)


@dataclass
class ScheduleConfig:
    """A factor on the peak learning rate as a pure function of time."""

    name: Annotated[str, choice(SCHEDULES)] = "cosine_with_warmup"
    """After a linear warm-up: cosine_with_warmup, half a cosine to alpha_f at t_max;
    linear_decay_with_warmup, a line to alpha_f at t_max; constant_with_warmup, 1;
    warmup_stable_decay, 1, then a line to alpha_f over the last t_cooldown (Hu et al., 2024);
    inv_sqrt_with_warmup, one over the root of time, then a line over the last t_cooldown."""
    t_warmup: str = "0.05dur"
    """Length of the warm-up."""
    t_max: str | None = None
    """Only cosine and linear: when alpha_f is reached, and kept from there on; 1dur there."""
    alpha_f: Annotated[float | None, FRACTION] = None
    """Only cosine, linear and warmup_stable_decay: the factor at the end; 0.1, 0 and 0 there."""
    t_cooldown: str | None = None
    """Only inv_sqrt and warmup_stable_decay: length of the last decay; 0.2dur there."""
    t_scale: str | None = None
    """Only inv_sqrt, and required there: the time after the warm-up in which the root doubles."""
    alpha_f_decay: Annotated[float | None, FRACTION] = None
    """Only inv_sqrt: what the root falls to in infinite time; 0 there."""
    alpha_f_cooldown: Annotated[float | None, FRACTION] = None
    """Only inv_sqrt: the factor at the end of the cool-down; 0 there."""

    _USED: ClassVar[dict[str, tuple[str, ...]]] = {
        "cosine_with_warmup": ("t_max", "alpha_f"),
        "linear_decay_with_warmup": ("t_max", "alpha_f"),
        "constant_with_warmup": (),
        "inv_sqrt_with_warmup": ("t_cooldown", "t_scale", "alpha_f_decay", "alpha_f_cooldown"),
        "warmup_stable_decay": ("t_cooldown", "alpha_f"),
    }

    def check(self, key: str = "schedule.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.name not in SCHEDULES:
            return
        times, factors = ("t_max", "t_cooldown", "t_scale"), ("alpha_f", "alpha_f_decay")
        fields = (*times, *factors, "alpha_f_cooldown")
        unused = [f for f in fields if f not in self._USED[self.name]]
        yield from inert(key, self, unused, f"with name: {self.name}")
        if self.name == "inv_sqrt_with_warmup" and self.t_scale is None:
            yield f"{key}t_scale: inv_sqrt_with_warmup needs it; write a duration"
        for field in ("t_warmup", *times):
            if getattr(self, field) is not None:
                length = getattr(self, field)  # time is divided by t_scale
                yield from check_duration(f"{key}{field}", length, allow_zero=field != "t_scale")

    def fill(self) -> None:
        """Write derived values in place."""
        used = self._USED[self.name]
        ends = {"cosine_with_warmup": 0.1}
        defaults = {
            "t_max": "1dur",
            "alpha_f": ends.get(self.name, 0.0),
            "t_cooldown": "0.2dur",
            "alpha_f_decay": 0.0,
            "alpha_f_cooldown": 0.0,
        }
        fill(self, **{field: value for field, value in defaults.items() if field in used})
