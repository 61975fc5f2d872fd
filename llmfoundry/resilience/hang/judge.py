"""Which rank hangs: pure functions of the readings of each process, called by the monitor's hub.

All processes of a run take part in the same steps, so a process that hangs soon stops all others.
The idea: the run is stuck only if nobody has moved; then whoever is behind the others in (step,
phase) is who they wait for, and the limit of its phase decides. A process that waits in `step` for
one whose data is late is not hung, however long it waits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from llmfoundry.recipe.resilience import ResolvedHangConfig
from llmfoundry.telemetry import LEARNED, PHASES

_FACTOR = 5.0  # times the longest step, as in NVIDIA's resiliency extension
_LEAST, _LEAST_COMPILED = 30.0, 300.0  # seconds; a compiled block may be recompiled
STOPPED = ("stopped", "tracing-stop", "dead", "zombie", "gone")
"""States in which a process cannot continue by itself."""
_NAMED = 8  # ranks in a line


@dataclass(frozen=True)
class RankReading:
    """The state of one process.

    Attributes:
        rank: among all.
        node: its machine.
        step: the current step (from 1).
        phase: one of PHASES.
        age: seconds since it entered the phase.
        state: the system's: running, sleeping, disk-sleep, stopped, zombie, gone ...
        stopped_for: seconds in a state of STOPPED; else 0.
        longest: seconds of the longest of its last steps, by phase; empty in its first ones.
        callback: that it has called and that has not returned; empty: none.
        waits: whether its stack ends in PyTorch, as if it waits for others; None: unknown.
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
        """Grows as a process moves."""
        return self.step, PHASES.index(self.phase)


@dataclass(frozen=True)
class HangVerdict:
    """`culprits` hang; all processes, where those that hang cannot be distinguished.

    Attributes:
        culprits: their ranks.
        step: the current step.
        phase: in which they are.
        seconds: for how long.
        why: how they were found.
        callback: in which they are; empty: in none.
        is_final: False: the others wait for them, within the limits.
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
        """For people."""
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
    """Who hangs, if the run is stuck for too long; who is behind, after `notice_seconds`.

    `readings`: of every process that still runs; `config`: filled; `is_compiled`: whether steps may
    compile once more.
    """
    if not readings:
        return None
    stopped = [r for r in readings if r.stopped_for > config.stopped_seconds]
    if stopped:
        states = " and ".join(sorted({r.state for r in stopped}))
        return _verdict(stopped, f"process state: {states}")
    still = min(r.age for r in readings)  # nobody has moved for so long
    behind = min(r.position for r in readings)
    last = [r for r in readings if r.position == behind]
    steps = [sum(r.longest.values()) for r in readings if r.longest]
    longest, alone = max(steps, default=None), len(last) < len(readings)
    limit = max(_limit(r, longest, config, is_compiled) for r in last)
    if min(r.age for r in last) > limit and still > min(limit, config.stopped_seconds):
        halted = [r for r in last if r.stopped_for > 0]  # not yet for long, but it explains all
        if halted:
            return _verdict(halted, f"process state: {halted[0].state}")
        why = "all others wait for it" if alone else "all processes are in this phase"
        return _verdict(last, why)
    if alone and still > config.notice_seconds:
        return _verdict(last, "they are in a later phase", is_final=False)
    return None


def _limit(
    reading: RankReading, longest: float | None, config: ResolvedHangConfig, is_compiled: bool
) -> float:
    """Seconds for a callback, in whichever phase, or a phase.

    `longest`: of the longest recent step of any process, if known.
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
    """The verdict with stacks known: in one phase, those hang that do not wait in PyTorch."""
    named = [r for r in readings if r.rank in verdict.culprits]
    blamed = [r for r in named if r.waits is False]
    if not 0 < len(blamed) < len(named):
        return verdict
    return replace(
        verdict,
        culprits=tuple(sorted(r.rank for r in blamed)),
        nodes=tuple(sorted({r.node for r in blamed})),
        why="the others wait in PyTorch, which is not where its stack ends",
        callback=_callback(blamed),
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
    """The first one that any of them is in."""
    return next((r.callback for r in readings if r.callback), "")


def waits_in_torch(stacks: str) -> bool | None:
    """Whether faulthandler's stacks of a process show its main thread in PyTorch.

    None: there are none. Threads are listed the newest first, so the main one is the last.
    """
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", f"\n{stacks}")
    frames = re.findall(r'File "([^"]+)", line \d+', threads[-1])
    return "/torch/" in frames[0].replace("\\", "/") if frames else None
