"""What to do after an attempt: `decide_restart`, a pure function of attempts and policy.

The idea: only progress, a newer checkpoint, earns further attempts. A run that fails the same way
again and again wastes its machines; one that does make progress, but restarts all day or spends the
day starting up, is given up too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmfoundry.exit_status import DONE, FAILED, GIVE_UP, MISTAKE, SAVED
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.resilience.supervise.causes import OUT_OF_MEMORY, Cause

FINISH, RESTART, WITHOUT, STOP = "finish", "restart", "restart_without", "stop"
_LONGEST_WAIT = 300.0  # seconds
_TRIES = {"numerical": 1, "unknown": 2}
"""Restarts at most, after causes that a restart seldom fixes."""
_HALVINGS = 24
"""Restarts at most for lack of memory: a microbatch of a million rows, halved to one, takes 20."""
_DAY, _HOUR = 86_400.0, 3600.0  # seconds
_FEWEST = 5  # attempts of which goodput is judged


@dataclass(frozen=True)
class Attempt:
    """A start of the run, and how it ended.

    Attributes:
        cause: why it ended.
        progressed: whether it left a newer checkpoint than all before.
        bad_nodes: machines that the check found bad after it.
        without: machines that were excluded, if none of its processes began.
        seconds: from its start to the next one's.
        useful: of these, seconds in steps that a checkpoint has kept.
        resumed: the batch of the checkpoint from which it resumed; 0: of none.
        earlier: the batch of the newest checkpoint before that; -1: there is none.
    """

    cause: Cause
    progressed: bool = False
    bad_nodes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    seconds: float = 0.0
    useful: float = 0.0
    resumed: int = 0
    earlier: int = -1

    @property
    def began_with_bad_weights(self) -> bool:
        """Whether the first step after a checkpoint was not finite: then that may be damaged."""
        cause = self.cause
        is_first = cause.is_first or cause.step == self.resumed + 1
        return cause.kind == "numerical" and self.resumed > 0 and is_first


@dataclass(frozen=True)
class Decision:
    """What is done.

    Attributes:
        action: FINISH, RESTART, WITHOUT (restart without `nodes`) or STOP.
        why: for people, a line.
        status: the supervisor's exit status, where it ends.
        wait: seconds before a restart.
        nodes: machines to take out.
        resume_before: resume from a checkpoint of fewer batches than this; None: as before.
    """

    action: str
    why: str
    status: int = DONE
    wait: float = 0.0
    nodes: tuple[str, ...] = ()
    resume_before: int | None = None


def decide_restart(
    attempts: Sequence[Attempt], policy: SuperviseConfig, *, can_exclude: bool = False
) -> Decision:
    """What to do after the last of these attempts.

    `can_exclude`: whether the next start can do without a machine.
    """
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
    short = sum(_is_same(attempt, OUT_OF_MEMORY) for attempt in since)
    if cause.kind == OUT_OF_MEMORY and short <= _HALVINGS:
        return Decision(RESTART, f"{cause.kind}: {cause.why}")
    idle = sum(not attempt.progressed for attempt in since if not _is_same(attempt, OUT_OF_MEMORY))
    if idle >= policy.no_progress:
        why = f"{idle} attempts in a row left no newer checkpoint; the last: {cause.why}"
        return Decision(STOP, why, GIVE_UP)
    wait = min(_LONGEST_WAIT, policy.wait_seconds * 2 ** max(0, idle - 1))
    spent = _spent(attempts, policy)
    if spent:
        return Decision(STOP, f"{spent}; the last: {cause.why}", GIVE_UP)
    if _goes_back(last):
        why = f"{cause.kind}: {cause.why}; that was the first step after ba{last.resumed:07d}"
        why = f"{why}, so it resumes from ba{last.earlier:07d}, the checkpoint before it"
        return Decision(RESTART, why, wait=wait, resume_before=last.resumed)
    same = sum(_is_same(attempt, cause.kind) for attempt in since)
    allowed = min(policy.max_restarts, _TRIES.get(cause.kind, policy.max_restarts))
    if same > allowed:
        again = (
            f"{same} times since the last newer checkpoint" if same > 1 else "no restart is left"
        )
        status = GIVE_UP if cause.kind == "numerical" else FAILED
        return Decision(STOP, f"{cause.kind}, {again}: {cause.why}", status)
    return _restart(last, policy, wait, can_exclude=can_exclude)


def _goes_back(attempt: Attempt) -> bool:
    return attempt.began_with_bad_weights and attempt.earlier >= 0


def _is_same(attempt: Attempt, kind: str) -> bool:
    """Whether an attempt failed of this; one after which an older checkpoint is tried did not."""
    return attempt.cause.kind == kind and not _goes_back(attempt)


def _spent(attempts: Sequence[Attempt], policy: SuperviseConfig) -> str:
    """Why a run that still makes progress is not worth another restart; empty: it is."""
    seconds, of_day = 0.0, list[Attempt]()
    for attempt in reversed(attempts):
        seconds += attempt.seconds
        if seconds > _DAY and of_day:
            break
        of_day.append(attempt)
    if len(of_day) > policy.max_restarts_per_day:
        restarts = len(of_day) - 1
        return f"{restarts} restarts within a day (supervise.max_restarts_per_day)"
    total = sum(attempt.seconds for attempt in of_day)
    goodput = sum(attempt.useful for attempt in of_day) / total if total else 1.0
    if len(of_day) >= _FEWEST and total >= _HOUR and goodput < policy.min_goodput:
        return (
            f"goodput is {goodput:.0%} over the last {len(of_day)} attempts, {total / _HOUR:.1f} h"
            f" (supervise.min_goodput: {policy.min_goodput:g})"
        )
    return ""


def _since_progress(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """The last attempt that left a newer checkpoint, and those after it; else all."""
    for index in range(len(attempts) - 1, -1, -1):
        if attempts[index].progressed:
            return attempts[index:]
    return attempts


def _restart(last: Attempt, policy: SuperviseConfig, wait: float, *, can_exclude: bool) -> Decision:
    bad, why = last.bad_nodes, last.cause.why
    if not bad:
        return Decision(RESTART, f"{last.cause.kind}: {why}", wait=wait)
    named = ", ".join(bad)
    if not policy.act:
        advice = f"the check finds {named} bad: take it out (supervise.act is false)"
        return Decision(RESTART, f"{last.cause.kind}: {why}; {advice}", wait=wait)
    if can_exclude:
        return Decision(WITHOUT, f"{last.cause.kind}: {why}; without {named}", wait=wait, nodes=bad)
    return Decision(
        STOP, f"{why}; {named} is bad, and there is no other machine: run it elsewhere", SAVED
    )
