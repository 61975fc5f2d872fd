"""Decide what to do after an attempt: `decide_restart`, a pure function of attempts and policy.

Only progress (a newer checkpoint) allows further attempts. The supervisor gives up a run that fails
repeatedly in the same way. It also gives up a run that makes progress but restarts too often, or
whose goodput is too low.
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
"""Maximum number of restarts after causes that a restart seldom fixes."""
_HALVINGS = 24
"""Maximum number of out-of-memory restarts; halving a microbatch of a million to 1 takes 20."""
_DAY, _HOUR = 86_400.0, 3600.0  # seconds
_FEWEST = 5  # attempts before goodput is judged


@dataclass(frozen=True)
class Attempt:
    """One start of the run, and how it ended.

    Attributes:
        cause: why it ended.
        progressed: whether it saved a newer checkpoint than all earlier attempts.
        bad_nodes: machines that the check after it found bad.
        without: excluded machines, if no process of the attempt began.
        seconds: from its start to the start of the next attempt.
        useful: seconds in steps that a checkpoint contains.
        resumed: batch of the checkpoint that it resumed from; 0: none.
        earlier: batch of the newest checkpoint before `resumed`; -1: none.
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
        """Whether the first step after the checkpoint was not finite, so it may be damaged."""
        cause = self.cause
        is_first = cause.is_first or cause.step == self.resumed + 1
        return cause.kind == "numerical" and self.resumed > 0 and is_first


@dataclass(frozen=True)
class Decision:
    """Decision after an attempt.

    Attributes:
        action: FINISH, RESTART, WITHOUT (restart without `nodes`) or STOP.
        why: explanation of one line.
        status: exit status of the supervisor if it ends.
        wait: seconds before the restart.
        nodes: machines to exclude.
        resume_before: resume from a checkpoint of fewer batches than this; None: no change.
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
    """Return the decision after the last of these attempts.

    Args:
        attempts: attempts of the job, oldest first.
        policy: limits of the recipe.
        can_exclude: whether the next attempt can run without a machine.
    """
    # ends that a restart does not change
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

    # limits on attempts without progress, per day, and on goodput
    since = _since_progress(attempts)
    shortages = sum(_is_same(attempt, OUT_OF_MEMORY) for attempt in since)
    if cause.kind == OUT_OF_MEMORY and shortages <= _HALVINGS:
        return Decision(RESTART, f"{cause.kind}: {cause.why}")
    counted = [attempt for attempt in since if not _is_same(attempt, OUT_OF_MEMORY)]
    idle = sum(not attempt.progressed for attempt in counted)
    if idle >= policy.no_progress:
        why = f"{idle} attempts in a row left no newer checkpoint; the last: {cause.why}"
        return Decision(STOP, why, GIVE_UP)
    wait = min(_LONGEST_WAIT, policy.wait_seconds * 2 ** max(0, idle - 1))
    spent = _spent(attempts, policy)
    if spent:
        return Decision(STOP, f"{spent}; the last: {cause.why}", GIVE_UP)

    # a damaged checkpoint: resume from the one before it
    if _goes_back(last):
        why = f"{cause.kind}: {cause.why}; that was the first step after ba{last.resumed:07d}"
        why = f"{why}, so it resumes from ba{last.earlier:07d}, the checkpoint before it"
        return Decision(RESTART, why, wait=wait, resume_before=last.resumed)

    # limit on the same cause, else restart
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
    """Return whether an attempt failed of this cause and does not fall back to a checkpoint."""
    return attempt.cause.kind == kind and not _goes_back(attempt)


def _spent(attempts: Sequence[Attempt], policy: SuperviseConfig) -> str:
    """Return why a run that makes progress is given up anyway; empty: it is not given up."""
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
    """Return the attempts from the last one that progressed; all attempts if none did."""
    for index in range(len(attempts) - 1, -1, -1):
        if attempts[index].progressed:
            return attempts[index:]
    return attempts


def _restart(last: Attempt, policy: SuperviseConfig, wait: float, *, can_exclude: bool) -> Decision:
    """Return the decision to restart, without bad machines if that is possible."""
    bad, why = last.bad_nodes, last.cause.why
    if not bad:
        return Decision(RESTART, f"{last.cause.kind}: {why}", wait=wait)
    names = ", ".join(bad)
    if not policy.act:
        advice = f"the check finds {names} bad: take it out (supervise.act is false)"
        return Decision(RESTART, f"{last.cause.kind}: {why}; {advice}", wait=wait)
    if can_exclude:
        return Decision(WITHOUT, f"{last.cause.kind}: {why}; without {names}", wait=wait, nodes=bad)
    return Decision(
        STOP, f"{why}; {names} is bad, and there is no other machine: run it elsewhere", SAVED
    )
