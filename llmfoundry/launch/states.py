"""The states of a run, and which one it is in: decided by what its folder and its target say.

`runs.py` gathers that and calls `judge`, or `judge_unseen` where the run's folder is another
machine's. Both are pure functions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmfoundry.events import is_restart
from llmfoundry.exit_status import DONE, GIVE_UP, INTERRUPTED, SAVED
from llmfoundry.launch import record as records
from llmfoundry.launch.record import TargetState
from llmfoundry.loggers.pages.run_time import LONGEST_PAUSE

WAITING, RUNNING, RESTARTING = "waiting", "running", "restarting"
GIVEN_UP, FINISHED, STOPPED = "given up", "finished", "stopped"
FAILED, NOT_KNOWN = "failed", "unknown"
STATES = (WAITING, RUNNING, RESTARTING, GIVEN_UP, FINISHED, STOPPED, FAILED, NOT_KNOWN)
UNDER_WAY = (WAITING, RUNNING, RESTARTING)
ENDS = {"finished": FINISHED, "failed": FAILED, "killed": STOPPED}
"""By the status in run.json, of a process that came to its end."""
_STATUSES = {DONE: FINISHED, SAVED: STOPPED, GIVE_UP: GIVEN_UP, INTERRUPTED: STOPPED}


def judge(
    *,
    held: bool,
    target: TargetState | None,
    status: str,
    changed: float,
    events: Sequence[Mapping[str, Any]],
    supervised: bool | None = None,
    now: float | None = None,
) -> tuple[str, str]:
    """A run's state, one of STATES, and why.

    Args:
        held: a process has the run's lock now.
        target: what the target says; None: it was started by hand.
        status: in run.json, of the process that trained last.
        changed: when run.json was, in seconds since 1970.
        events: of events.jsonl.
        supervised: whether a supervisor is at work there; None: that cannot be told.
        now: seconds since 1970; unset: the clock's.
    """
    now = time.time() if now is None else now
    decision = next((e for e in reversed(events) if e["kind"] in ("decision", "start")), None)
    # A supervisor decides after the process has written its end; a later one was started by hand.
    decided = decision is not None and float(decision["time"]) + 5 >= changed
    if held:
        return RUNNING, target.reason if target else "a process holds its folder"
    if target is not None and target.state == records.WAITING:
        return WAITING, target.reason
    if target is not None and target.state == records.RUNNING:
        if decision is not None and is_restart(decision):
            return RESTARTING, str(decision["what"])
        if ENDS.get(status) == FINISHED:
            return FINISHED, target.reason
        return WAITING, f"{target.reason}, and does not train yet"
    if target is not None and target.state == records.UNKNOWN and ENDS.get(status) is None:
        return NOT_KNOWN, target.reason
    if decided and decision is not None:
        is_soon = supervised or float(decision["time"]) + LONGEST_PAUSE > now
        if decision["kind"] == "decision" and not is_restart(decision):
            return _state_of_status(_exit_status(decision)), str(decision["what"])
        if target is None and is_soon and supervised is not False:
            is_first = decision["kind"] == "start" and decision.get("attempt") == 1
            return WAITING if is_first else RESTARTING, str(decision["what"])
    if status in ENDS:
        return ENDS[status], target.reason if target else ""
    if target is not None and target.state == records.ENDED and not status:
        return _state_of_status(target.exit_status), target.reason
    return FAILED, "its process was killed, or lost its machine" if status else "it never trained"


def judge_unseen(target: TargetState, place: str) -> tuple[str, str]:
    """The state of a run whose folder this machine does not have, and why; as the target has it."""
    why = f"{target.reason}; {place} is unknown here"
    if target.state == records.WAITING:
        return WAITING, why
    if target.state == records.RUNNING:
        return RUNNING, why
    if target.state == records.ENDED and target.exit_status is not None:
        return _state_of_status(target.exit_status), why
    return NOT_KNOWN, f"{'ended, ' * (target.state == records.ENDED)}{why}"


def _state_of_status(status: int | None) -> str:
    return FAILED if status is None else _STATUSES.get(status, FAILED)


def _exit_status(decision: Mapping[str, Any]) -> int:
    status = decision.get("exit_status")
    return status if type(status) is int else DONE
