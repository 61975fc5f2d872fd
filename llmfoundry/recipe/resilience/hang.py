"""The `hang` section: when a process counts as hanging, and what is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert

MONITORS = ("auto", "on", "off")
ACTIONS = ("end", "report")
SECONDS = Range(1, 31_536_000, "a year")


@dataclass
class HangConfig:
    """A monitor process on each machine that detects which rank hangs.

    It reports the phase, keeps stacks in the run's folder (hangs/), and ends the processes. Without
    it a hang ends the run after parallel.dist_timeout seconds.
    """

    monitor: Annotated[str, choice(MONITORS)] = "auto"
    """on, off, or auto: where a run has several processes, or a supervisor."""
    action: Annotated[str | None, choice(ACTIONS)] = None
    """end: kill the processes once their stacks are kept, so that torchrun or the supervisor
    restarts them (the default); report: only report."""
    step_seconds: Annotated[float | None, SECONDS] = None
    """How long the forward and backward pass, or the update, may take; unset: five times the
    longest of the last hundred steps, at least 30 s (300 s with compile)."""
    first_step_seconds: Annotated[float | None, SECONDS] = None
    """The same of the first three steps, which compile and connect; default 1800."""
    stopped_seconds: Annotated[float | None, SECONDS] = None
    """How long a process may be stopped (SIGSTOP, a debugger) or a zombie, in any phase; default
    30."""
    data_seconds: Annotated[float | None, SECONDS] = None
    """How long a step's batch may take; default 900, as a store that fails is retried."""
    save_seconds: Annotated[float | None, SECONDS] = None
    """How long a save may block training; default 1800."""
    evaluation_seconds: Annotated[float | None, SECONDS] = None
    """How long an evaluation may take; default 14400. Tokenizing, loading and the end of a run have
    no limit but stopped_seconds; processes join within parallel.rendezvous_timeout."""
    callback_seconds: Annotated[float | None, SECONDS] = None
    """How long one call of a callback (samples are one), of yours too, may take in any phase of a
    step; default 1800. It is named."""
    notice_seconds: Annotated[float | None, SECONDS] = None
    """After how long it is reported that processes wait for one which is behind; default 60."""

    def check(self, key: str = "hang.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.monitor == "off":
            yield from inert(key, self, ["action", *_SECONDS], f"with {key}monitor: off")

    def fill(self) -> None:
        """Write derived values in place."""
        if self.monitor == "off":
            return
        self.action = self.action or "end"
        for name, default in _SECONDS.items():
            if getattr(self, name) is None:
                setattr(self, name, default)


_SECONDS: dict[str, float | None] = {
    "step_seconds": None,
    "first_step_seconds": 1800.0,
    "stopped_seconds": 30.0,
    "data_seconds": 900.0,
    "save_seconds": 1800.0,
    "evaluation_seconds": 14_400.0,
    "callback_seconds": 1800.0,
    "notice_seconds": 60.0,
}
