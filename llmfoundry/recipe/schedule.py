"""The `schedule` section: the learning rate over the run.

`SCHEDULES` is the table of schedules; `train/optim/schedule.py` computes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from llmfoundry.recipe.checks import check_duration
from llmfoundry.recipe.choice_table import (
    REQUIRED,
    SHIPPED,
    ChoiceRecord,
    ChoiceTable,
    check_settings,
)
from llmfoundry.recipe.schema import FRACTION, Only, check_fields, choice


@dataclass(frozen=True)
class ScheduleType(ChoiceRecord):
    """A kind of schedule.

    `make(config, clock, since)` returns the factor on the learning rate; `since` is the end of the
    warm-up.
    """


SCHEDULES = ChoiceTable(
    "schedule.name",
    ScheduleType,
    {
        "cosine_with_warmup": ScheduleType(
            SHIPPED,
            meaning="a half cosine that falls to alpha_f at t_max.",
            keys={"t_max": "1dur", "alpha_f": 0.1},
        ),
        "linear_decay_with_warmup": ScheduleType(
            SHIPPED,
            meaning="a linear decay to alpha_f at t_max.",
            keys={"t_max": "1dur", "alpha_f": 0.0},
        ),
        "constant_with_warmup": ScheduleType(SHIPPED, meaning="a constant factor of 1."),
        "inv_sqrt_with_warmup": ScheduleType(
            SHIPPED,
            meaning="one over the square root of time, then a linear decay over the last"
            " t_cooldown.",
            keys={
                "t_scale": REQUIRED,
                "t_cooldown": "0.2dur",
                "alpha_f_decay": 0.0,
                "alpha_f_cooldown": 0.0,
            },
        ),
        "warmup_stable_decay": ScheduleType(
            SHIPPED,
            meaning="1, then a linear decay to alpha_f over the last t_cooldown (Hu et al., 2024).",
            keys={"t_cooldown": "0.2dur", "alpha_f": 0.0},
        ),
    },
)
_TIMES = ("t_max", "t_cooldown", "t_scale")


@dataclass
class ScheduleConfig:
    """The factor on the peak learning rate, a pure function of time."""

    name: Annotated[str, choice(SCHEDULES)] = "cosine_with_warmup"
    """The curve after the linear warm-up."""
    t_warmup: str = "0.05dur"
    """Length of the linear warm-up."""
    t_max: Annotated[str | None, Only("name", SCHEDULES.taking("t_max"))] = None
    """When the factor reaches alpha_f, where it stays; default 1dur."""
    alpha_f: Annotated[float | None, FRACTION, Only("name", SCHEDULES.taking("alpha_f"))] = None
    """The final factor. Default 0.1 for cosine_with_warmup, 0 for the other schedules."""
    t_cooldown: Annotated[str | None, Only("name", SCHEDULES.taking("t_cooldown"))] = None
    """Length of the linear decay at the end of the run; default 0.2dur."""
    t_scale: Annotated[str | None, Only("name", SCHEDULES.taking("t_scale"))] = None
    """The time after the warm-up in which the square root doubles; required."""
    alpha_f_decay: Annotated[
        float | None, FRACTION, Only("name", SCHEDULES.taking("alpha_f_decay"))
    ] = None
    """The factor that the square root approaches in infinite time; default 0."""
    alpha_f_cooldown: Annotated[
        float | None, FRACTION, Only("name", SCHEDULES.taking("alpha_f_cooldown"))
    ] = None
    """The factor at the end of the cool-down; default 0."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of a schedule that a plugin adds."""

    def check(self, key: str = "schedule.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self.name not in SCHEDULES:
            return
        kind = SCHEDULES[self.name]
        for name, default in kind.keys.items():
            if default == REQUIRED and getattr(self, name, REQUIRED) is None:
                yield f"{key}{name}: {self.name} needs it; write a duration"
        for name in ("t_warmup", *_TIMES):
            if getattr(self, name) is not None:
                length = getattr(self, name)  # time is divided by t_scale
                yield from check_duration(f"{key}{name}", length, allow_zero=name != "t_scale")
        yield from check_settings(f"{key}kwargs.", self.kwargs, kind.own_keys(self))

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.name in SCHEDULES:  # unknown if the plugin of a run is not imported
            SCHEDULES[self.name].fill(self)


class ResolvedScheduleConfig(ScheduleConfig):
    """`ScheduleConfig` with defaults resolved."""

    t_max: str
    alpha_f: float
    t_cooldown: str
    t_scale: str
    alpha_f_decay: float
    alpha_f_cooldown: float
