"""State of a run, derived from its folder and its launch target.

`runs.py` collects the inputs and calls `judge`, or `judge_unseen` if this machine cannot see the
run's folder. Both are pure functions.
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
"""State by the status in run.json, which a process writes when it ends by itself."""
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
    """Return the state of a run, one of STATES, and the reason.

    Args:
        held: whether a process holds the run's lock now.
        target: state on the launch target; None: the run was started by hand.
        status: in run.json, written by the process that trained last.
        changed: modification time of run.json, in seconds since 1970.
        events: of events.jsonl.
        supervised: whether a supervisor is running; None: not known.
        now: seconds since 1970; None: the current time.
    """
    now = time.time() if now is None else now
    decision = next((e for e in reversed(events) if e["kind"] in ("decision", "start")), None)
    # A supervisor decides after the process has written its end. If run.json is newer than the
    # decision, the last process was started by hand.
    decided = decision is not None and float(decision["time"]) + 5 >= changed

    # a live process or job
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

    # no live process: the supervisor's last decision, then run.json, then the target
    if decided and decision is not None:
        is_soon = supervised or float(decision["time"]) + LONGEST_PAUSE > now
        if decision["kind"] == "decision" and not is_restart(decision):
            return _state_of_status(_exit_status(decision)), str(decision["what"])
        # A short run ends within those seconds of its supervisor's start.
        has_finished = ENDS.get(status) == FINISHED and changed > float(decision["time"])
        if target is None and is_soon and supervised is not False and not has_finished:
            is_first = decision["kind"] == "start" and decision.get("attempt") == 1
            return WAITING if is_first else RESTARTING, str(decision["what"])
    if status in ENDS:
        return ENDS[status], target.reason if target else ""
    if target is not None and target.state == records.ENDED and not status:
        return _state_of_status(target.exit_status), target.reason
    return FAILED, "its process was killed, or lost its machine" if status else "it never trained"


def judge_unseen(target: TargetState, place: str) -> tuple[str, str]:
    """Return the state and reason of a run whose folder is not visible here, from the target."""
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
