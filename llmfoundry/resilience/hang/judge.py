"""Detect hung ranks: pure functions of the readings of all ranks, called by the monitor's hub.

All ranks take part in the same steps, so a hung rank soon stops all others. A run is stuck if no
rank makes progress. The ranks with the lowest (step, phase) are then those that the others wait
for, and the timeout of their phase applies. A rank that waits in `step` for a rank whose data is
late is not hung.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmfoundry.recipe.resilience import ResolvedHangConfig
from llmfoundry.telemetry import LEARNED, PHASES

_FACTOR = 5.0  # timeout in longest steps, as in NVIDIA's resiliency extension
_LEAST, _LEAST_COMPILED = 30.0, 300.0  # minimum timeout in seconds; blocks may be recompiled
STOPPED = ("stopped", "tracing-stop", "dead", "zombie", "gone")
"""Process states in which a process cannot continue by itself."""
_NAMED = 8  # maximum number of ranks in a message


@dataclass(frozen=True)
class RankReading:
    """State of one rank.

    Attributes:
        rank: global rank.
        node: name of its machine.
        step: current step (from 1).
        phase: one of PHASES.
        age: seconds since the rank entered the phase.
        state: process state: running, sleeping, disk-sleep, stopped, zombie, gone ...
        stopped_for: seconds in a state of STOPPED; otherwise 0.
        longest: longest recent seconds by phase; empty in the first steps.
        callback: callback that has not returned; empty: none.
        waits: whether the stack ends in PyTorch, as in a wait for other ranks; None: not known.
    """

    rank: int
    node: str
    step: int
    phase: str
    age: float
    state: str = "running"
    stopped_for: float = 0.0
    longest: dict[str, float] = field(default_factory=dict)
    callback: str = ""
    waits: bool | None = None

    @property
    def position(self) -> tuple[int, int]:
        """(step, index of the phase), which increases as the rank makes progress."""
        return self.step, PHASES.index(self.phase)


@dataclass(frozen=True)
class HangVerdict:
    """Ranks that hang, or that other ranks wait for.

    Attributes:
        culprits: hung ranks; all ranks if the hung ones cannot be distinguished.
        nodes: their machines.
        step: their current step.
        phase: their phase.
        seconds: time in this phase.
        why: reason for the verdict.
        callback: their callback; empty: none.
        is_final: False: the other ranks wait for them, but no timeout has passed.
    """

    culprits: tuple[int, ...]
    nodes: tuple[str, ...]
    step: int
    phase: str
    seconds: float
    why: str
    callback: str = ""
    is_final: bool = True

    def line(self) -> str:
        """Return a description of one line."""
        several = len(self.culprits) > 1
        shown = ", ".join(map(str, self.culprits[:_NAMED]))
        shown += f" and {len(self.culprits) - _NAMED} more" if len(self.culprits) > _NAMED else ""
        who = f"rank{'s' if several else ''} {shown} on {', '.join(self.nodes[:_NAMED])}"
        verb = ("hang" if several else "hangs") if self.is_final else "kept the others waiting"
        where = f"in callback {self.callback}, " if self.callback else ""
        where += f"in phase {self.phase} of step {self.step} for {self.seconds:.0f} s"
        return f"{who} {verb} {where}: {self.why}"


def judge(
    readings: Sequence[RankReading], config: ResolvedHangConfig, *, is_compiled: bool = False
) -> HangVerdict | None:
    """Return the hung ranks if the run is stuck, or the ranks that others have long waited for.

    Args:
        readings: readings of all running ranks.
        config: settings from the recipe.
        is_compiled: whether steps may be recompiled.

    Returns:
        A final verdict after the timeout, one that is not final after `notice_seconds`, or None.
    """
    if not readings:
        return None

    # stopped or dead processes
    stopped = [r for r in readings if r.stopped_for > config.stopped_seconds]
    if stopped:
        states = " and ".join(sorted({r.state for r in stopped}))
        return _verdict(stopped, f"process state: {states}")

    # ranks with the lowest (step, phase), and the timeout of their phase
    idle_seconds = min(r.age for r in readings)  # time without progress of any rank
    lowest = min(r.position for r in readings)
    last = [r for r in readings if r.position == lowest]
    steps = [sum(r.longest.values()) for r in readings if r.longest]
    longest = max(steps, default=None)
    others_wait = len(last) < len(readings)
    limit = max(_limit(r, longest, config, is_compiled) for r in last)

    # hung
    if min(r.age for r in last) > limit and idle_seconds > min(limit, config.stopped_seconds):
        halted = [r for r in last if r.stopped_for > 0]  # stopped recently, which explains the hang
        if halted:
            return _verdict(halted, f"process state: {halted[0].state}")
        why = "all others wait for it" if others_wait else "all processes are in this phase"
        return _verdict(last, why)

    # only late
    if others_wait and idle_seconds > config.notice_seconds:
        return _verdict(last, "they are in a later phase", is_final=False)
    return None


def _limit(
    reading: RankReading, longest: float | None, config: ResolvedHangConfig, is_compiled: bool
) -> float:
    """Return the timeout in seconds of a rank's callback, or of its phase if it is in none.

    Args:
        reading: reading of the rank.
        longest: seconds of the longest recent step of any rank; None: not known.
        config: settings from the recipe.
        is_compiled: whether steps may be recompiled.
    """
    if reading.phase in LEARNED and not reading.callback:
        if config.step_seconds is not None:
            return config.step_seconds
        if longest is not None:
            return max(_LEAST_COMPILED if is_compiled else _LEAST, _FACTOR * longest)
    limits = {
        **dict.fromkeys(LEARNED, config.first_step_seconds),
        "data": config.data_seconds,
        "evaluation": config.evaluation_seconds,
        "callbacks": config.callback_seconds,
        "save": config.save_seconds,
    }
    limit = limits.get("callbacks" if reading.callback else reading.phase)
    return float("inf") if limit is None else limit


def refine(verdict: HangVerdict, readings: Sequence[RankReading]) -> HangVerdict:
    """Return the verdict, narrowed by stacks: hung ranks are those that do not wait in PyTorch."""
    suspects = [r for r in readings if r.rank in verdict.culprits]
    hung = [r for r in suspects if r.waits is False]
    if not 0 < len(hung) < len(suspects):
        return verdict
    return replace(
        verdict,
        culprits=tuple(sorted(r.rank for r in hung)),
        nodes=tuple(sorted({r.node for r in hung})),
        why="the others wait in PyTorch, which is not where its stack ends",
        callback=_callback(hung),
    )


def _verdict(readings: Sequence[RankReading], why: str, *, is_final: bool = True) -> HangVerdict:
    first = min(readings, key=lambda r: r.position)
    return HangVerdict(
        culprits=tuple(sorted(r.rank for r in readings)),
        nodes=tuple(sorted({r.node for r in readings})),
        step=first.step,
        phase=first.phase,
        seconds=min(r.age for r in readings),
        why=why,
        callback=_callback(readings),
        is_final=is_final,
    )


def _callback(readings: Sequence[RankReading]) -> str:
    """Return the first callback that a rank is in; empty: none."""
    return next((r.callback for r in readings if r.callback), "")


def waits_in_torch(stacks: str) -> bool | None:
    """Return whether the main thread is in PyTorch, from faulthandler's stacks; None: no stacks.

    Threads are listed newest first, so the main thread is the last.
    """
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", f"\n{stacks}")
    frames = re.findall(r'File "([^"]+)", line \d+', threads[-1])
    return "/torch/" in frames[0].replace("\\", "/") if frames else None
