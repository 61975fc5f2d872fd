"""The section `callbacks.watch`: anomalies that a run detects in itself, and its actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llmfoundry.recipe.values.bounds import Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert, inert_change, set_defaults

SPIKE_ACTIONS = ("off", "log", "skip", "roll_back", "stop")
NOT_FINITE_ACTIONS = ("skip", "roll_back", "stop")
MACHINE_ACTIONS = ("off", "log", "stop")
LOG_ACTIONS = ("off", "log")
_MOST = Range(0, 2**31, "no run has as many steps")


@dataclass
class WatchConfig:
    """Anomalies that a run detects in itself, and its actions.

    By default it only logs: each event is a line on the console and in save_folder/events.jsonl.
    """

    loss_spike: Annotated[str, choice(SPIKE_ACTIONS)] = "log"
    """What to do about a step whose loss is spike_deviations above the mean of those before it: log
    it; skip: skip its update; roll_back: go back to a checkpoint, and skip the batches since; stop:
    end the run, with exit status 93."""
    gradient_spike: Annotated[str, choice(SPIKE_ACTIONS)] = "log"
    """The same of the gradient's norm, by its logarithm, and at least five times the mean: smaller
    ones are normal with small batches, and clipping handles them."""
    not_finite: Annotated[str, choice(NOT_FINITE_ACTIONS)] = "stop"
    """What to do about a step whose loss or gradient is not finite, which never is an update."""
    spike_window: Annotated[int, Range(8, 2**16, "each is kept on the device")] = 128
    """Steps of which mean and deviation are taken; nothing is a spike before half of them are
    there. OLMo-core has the same."""
    spike_deviations: Annotated[float, Range(1, 1000)] = 6.0
    """Standard deviations above the mean that make a spike. OLMo-core has the same."""
    spikes_in_a_row: Annotated[int, Range(1, 2**31)] = 20
    """With log, after so many spikes in a row the loss is at a new level, which becomes the usual
    one; with skip the run ends then, as it no longer learns."""
    roll_back_steps: Annotated[int | None, _MOST] = None
    """Only with roll_back: steps to go back at least, to the newest checkpoint that is as old;
    default 100 (PaLM). Where there is none, to the step before the spike, which is in memory."""
    roll_back_skip: Annotated[int | None, _MOST] = None
    """Only with roll_back: batches to skip after the spike's, in addition to those from the
    checkpoint up to it; default 100. PaLM skipped 200 to 500 in all."""
    roll_back_most: Annotated[int | None, Range(1, 2**31)] = None
    """Only with roll_back: times in a row that the run may go back without passing the furthest
    spike; then it ends. Default 3."""
    slow_rank: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """What to do about a process that computes, or waits for data, longer than the others: log
    names it and its machine; stop: save, and end the run with exit status 75."""
    slow_rank_above: Annotated[float, Range(above=1, most=1e6)] = 1.2
    """Times the median of all processes; it must be an outlier too (z above 3.5), and there must be
    four processes."""
    mfu_drop: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """What to do about a model FLOPs utilisation below that of the run's own earlier intervals on
    the same devices (by time, so also where the peak is not known). Evaluation, saving, compilation
    and waiting for data do not count."""
    mfu_drop_below: Annotated[float, Range(above=0, below=1)] = 0.85
    """Of the median of the earlier intervals."""
    data_wait: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """What to do about steps that wait longer for their batch than in earlier intervals."""
    data_wait_above: Annotated[float, Range(above=0, below=1)] = 0.1
    """Share of a step; it must be twice that of the earlier intervals too."""
    stall: Annotated[str, choice(MACHINE_ACTIONS)] = "log"
    """What to do about logged steps that took stall_above seconds longer than usual."""
    stall_above: Annotated[float, Range(above=0, most=1e6)] = 30.0
    """Seconds; it must be ten usual steps too."""
    gpu: Annotated[str, choice(LOG_ACTIONS)] = "log"
    """What to do about XIDs, throttling and lost GPUs, by NVML (package nvidia-ml-py);
    temperature and power are metrics then. Nothing without a GPU."""
    interval: Annotated[int, Range(1, 2**31)] = 100
    """Batches between two rounds in which all processes share their times, by one small all-gather
    that nobody waits for."""
    in_a_row: Annotated[int, Range(1, 1000)] = 2
    """Rounds in a row that must show a slow process, a drop or a wait before it is an event: one is
    often chance."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if "roll_back" not in (self.loss_spike, self.gradient_spike, self.not_finite):
            names = ["roll_back_steps", "roll_back_skip", "roll_back_most"]
            why = f"without {key}loss_spike, gradient_spike or not_finite: roll_back"
            yield from inert(key, self, names, why)
        for name, switches in _SWITCHES.items():
            if all(getattr(self, switch) == "off" for switch in switches):
                why = f"with {key}{switches[0]}" + "".join(f", {s}" for s in switches[1:]) + ": off"
                yield from inert_change(key, self, [name], why)
        if not {"log", "skip"} & {self.loss_spike, self.gradient_spike, self.not_finite}:
            why = f"without log or skip of {key}loss_spike, gradient_spike or not_finite"
            yield from inert_change(key, self, ["spikes_in_a_row"], why)

    def fill(self) -> None:
        """Write derived values in place."""
        if "roll_back" in (self.loss_spike, self.gradient_spike, self.not_finite):
            set_defaults(self, roll_back_steps=100, roll_back_skip=100, roll_back_most=3)

    @property
    def sees_spikes(self) -> bool:
        """Whether losses and norms are compared with those before."""
        return self.loss_spike != "off" or self.gradient_spike != "off"

    @property
    def has_rounds(self) -> bool:
        """Whether processes share their times."""
        names = (self.slow_rank, self.mfu_drop, self.data_wait, self.stall, self.gpu)
        return any(name != "off" for name in names)


_SPIKES = ("loss_spike", "gradient_spike")
_ROUNDS = ("slow_rank", "mfu_drop", "data_wait", "gpu")  # which must show several times
_SWITCHES: dict[str, tuple[str, ...]] = {
    "spike_window": _SPIKES,
    "spike_deviations": _SPIKES,
    "slow_rank_above": ("slow_rank",),
    "mfu_drop_below": ("mfu_drop",),
    "data_wait_above": ("data_wait",),
    "stall_above": ("stall",),
    "interval": (*_ROUNDS, "stall"),
    "in_a_row": _ROUNDS,
}
"""Keys, and those without which they have no effect."""
