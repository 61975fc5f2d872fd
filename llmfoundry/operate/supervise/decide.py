"""What to do after an attempt: a pure function of the attempts so far and the policy.

The idea: only progress, a newer checkpoint, earns further tries. What fails the same way again and
again, however politely, costs machines for nothing, and so does a supervisor that never gives up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmfoundry.ends import DONE, FAILED, GIVE_UP, MISTAKE, SAVED
from llmfoundry.operate.supervise.causes import Cause

FINISH, RESTART, WITHOUT, STOP = "finish", "restart", "restart_without", "stop"
_LONGEST_WAIT = 300.0  # seconds
_TRIES = {"numerical": 1, "unknown": 2}
"""Restarts at most, of causes that another try seldom mends."""


@dataclass(frozen=True)
class Policy:
    """What may be done; see `recipe.operate.supervise.SuperviseConfig`."""

    no_progress: int = 3
    max_restarts: int = 3
    wait_seconds: float = 2.0
    act: bool = False
    can_exclude: bool = False
    """Whether the next start can do without a machine."""


@dataclass(frozen=True)
class Attempt:
    """A start of the run, and how it ended.

    Attributes:
        cause: why it ended.
        progressed: whether it left a newer checkpoint than all before.
        bad_nodes: machines that the check found bad after it.
        without: machines that it was to do without, if none of its processes began.
    """

    cause: Cause
    progressed: bool = False
    bad_nodes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What is done.

    Attributes:
        action: FINISH, RESTART, WITHOUT (restart without `nodes`) or STOP.
        why: for people, a line.
        status: the supervisor's exit status, where it ends.
        wait: seconds before a restart.
        nodes: machines to take out.
    """

    action: str
    why: str
    status: int = DONE
    wait: float = 0.0
    nodes: tuple[str, ...] = ()


def decide(attempts: Sequence[Attempt], policy: Policy) -> Decision:
    """What to do after the last of these attempts."""
    last = attempts[-1]
    cause = last.cause
    if cause.kind == "done":
        return Decision(FINISH, cause.why)
    if cause.kind == "preemption":
        return Decision(STOP, f"{cause.why}; run the same command again", SAVED)
    if last.without:
        why = f"it does not start here without {', '.join(last.without)}: {cause.why}"
        return Decision(STOP, f"{why}; run it elsewhere", SAVED)
    if cause.kind == "user":
        return Decision(STOP, f"{cause.why}; the same again would fail again", MISTAKE)
    if cause.kind == "given up":
        return Decision(STOP, cause.why, GIVE_UP)
    since = _since_progress(attempts)
    idle = sum(not attempt.progressed for attempt in since)
    if idle >= policy.no_progress:
        why = f"{idle} attempts in a row left no newer checkpoint; the last: {cause.why}"
        return Decision(STOP, why, GIVE_UP)
    same = sum(attempt.cause.kind == cause.kind for attempt in since)
    allowed = min(policy.max_restarts, _TRIES.get(cause.kind, policy.max_restarts))
    if same > allowed:
        again = (
            f"{same} times since the last newer checkpoint" if same > 1 else "no restart is left"
        )
        status = GIVE_UP if cause.kind == "numerical" else FAILED
        return Decision(STOP, f"{cause.kind}, {again}: {cause.why}", status)
    wait = min(_LONGEST_WAIT, policy.wait_seconds * 2 ** max(0, idle - 1))
    return _restart(last, policy, wait)


def _since_progress(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The last attempt that left a newer checkpoint, and those after it; else all."""
    for index in range(len(attempts) - 1, -1, -1):
        if attempts[index].progressed:
            return attempts[index:]
    return attempts


def _restart(last: Attempt, policy: Policy, wait: float) -> Decision:
    bad, why = last.bad_nodes, last.cause.why
    if not bad:
        return Decision(RESTART, f"{last.cause.kind}: {why}", wait=wait)
    named = ", ".join(bad)
    if not policy.act:
        advice = f"the check finds {named} bad: take it out (supervise.act is false)"
        return Decision(RESTART, f"{last.cause.kind}: {why}; {advice}", wait=wait)
    if policy.can_exclude:
        return Decision(WITHOUT, f"{last.cause.kind}: {why}; without {named}", wait=wait, nodes=bad)
    return Decision(
        STOP, f"{why}; {named} is bad, and there is no other machine: run it elsewhere", SAVED
    )
