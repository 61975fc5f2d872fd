"""Stopping a run, wherever it was launched: it saves a checkpoint first, or is killed.

Entry point: `stop`, which `llmfoundry runs stop` calls. A run on this machine gets a signal. A run
that was launched on a target is stopped through the target. Two callers at the same time request
the stop once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from llmfoundry.errors import UserError
from llmfoundry.events import add_event, read_events
from llmfoundry.exit_status import ENDS_FOLDER
from llmfoundry.files import try_lock
from llmfoundry.launch import record as records
from llmfoundry.launch.record import read
from llmfoundry.launch.runs import (
    RunState,
    find,
    holder,
    is_held,
    poll_interval,
    state_of,
    target_state,
)
from llmfoundry.launch.states import NOT_KNOWN, UNDER_WAY
from llmfoundry.launch.targets import TARGETS
from llmfoundry.processes import is_alive, kill_all
from llmfoundry.recipe.paths import show

_HARD_S = 20.0  # seconds from the first signal to SIGKILL, with now=true


def stop(
    name: str, folder: Path | str = "runs", *, now: bool = False, timeout: float = 600.0
) -> RunState:
    """Stop a run, wait until it has ended, and return its last state.

    Args:
        name: name or folder of the run.
        folder: folder of runs.
        now: kill the run at once; the steps since the last checkpoint are lost. Otherwise the run
            saves a checkpoint first.
        timeout: seconds to wait until the run has ended.

    Raises:
        UserError: there is no such run, it is not running, it cannot be stopped from here, or it
            still runs after `timeout`.
    """
    record_folder = find(name, folder)
    record, before = read(record_folder), state_of(record_folder)
    place = records.run_folder(record_folder, record)
    is_here = before.is_seen and is_held(place)
    shown = show(record_folder)
    if before.state == NOT_KNOWN and not is_here:
        raise UserError(
            f"{shown}: whether it runs is unknown here: {before.why}; try again, or stop it"
            " where it runs"
        )
    if before.state not in UNDER_WAY and not is_here:
        raise UserError(f"{shown}: is {before.state}, so there is nothing to stop")

    # request the stop once, through the target or by a signal
    target = target_state(record, held=False)
    with _alone(record_folder) as is_first:
        if (
            record is not None
            and target is not None
            and target.state in (records.WAITING, records.RUNNING)
        ):
            who = f"{record.job} {record.submitted_at:.0f}"
            event_folder = place if before.is_seen else record_folder
            if is_first and (now or not _was_asked(event_folder, who)):
                TARGETS[record.target].stop(record, now=now)
                _note_stop(event_folder, who, now=now)  # only after a successful request
        elif is_first:
            _stop_here(place, timeout=timeout, now=now)

    # wait until the run has ended
    deadline = time.monotonic() + timeout
    while True:
        after = state_of(record_folder)
        if after.state not in UNDER_WAY and not (after.is_seen and is_held(place)):
            return after
        if time.monotonic() > deadline:
            raise UserError(
                f"{shown}: was asked to save and end, and is {after.state} after"
                f" {timeout:.0f} s; look again, or write now=true"
            )
        time.sleep(min(poll_interval(record), max(0.1, deadline - time.monotonic())))


@contextmanager
def _alone(place: Path) -> Iterator[bool]:
    """Lock the run's folder; yield whether no other `stop` holds the lock."""
    lock, is_first = None, True
    with suppress(OSError):  # some file systems have no locks
        lock = try_lock(place)
        is_first = lock is not None
    try:
        yield is_first
    finally:
        if lock is not None:
            lock.release()


def _was_asked(place: Path, who: str) -> bool:
    """Return whether a stop was requested before: a second signal would kill without a save."""
    return any(e["kind"] == "stop" and e.get("who") == who for e in read_events(place))


def _note_stop(place: Path, who: str, *, now: bool) -> None:
    """Record the stop request of a process or job as an event of the run."""
    with suppress(OSError):
        what = "is ended at once" if now else "is asked to save and end"
        add_event(place, "stop", f"{what} by llmfoundry runs stop", action="stop", who=who)


def _stop_here(place: Path, *, timeout: float, now: bool) -> None:
    """Signal the process that trains on this machine, or its supervisor if it has one.

    Between two attempts of a supervisor no process holds the folder. Wait for the next attempt.
    """
    deadline = time.monotonic() + timeout
    while not is_held(place):
        if time.monotonic() > deadline or state_of(place).state not in UNDER_WAY:
            raise UserError(f"{show(place)}: no process trains it; there is nothing to stop")
        time.sleep(0.2)
    process = _outermost(holder(place))
    who = f"{process.pid} {process.create_time():.0f}"
    if not now and _was_asked(place, who):
        return
    _note_stop(place, who, now=now)
    process.send_signal(signal.SIGTERM)  # a shell's background processes ignore SIGINT
    if not now:
        return

    # kill: a second signal, then SIGKILL for the process and all that it started
    deadline = time.monotonic() + _HARD_S
    time.sleep(1.0)
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGINT)
        while is_alive(process):
            if time.monotonic() > deadline:
                return kill_all(process.pid)
            time.sleep(0.1)


def _outermost(process: psutil.Process) -> psutil.Process:
    """Return the supervisor of a training process; the process itself if it has none."""
    with suppress(psutil.Error):  # a supervisor sets ENDS_FOLDER for its child processes
        if ENDS_FOLDER in process.environ():
            return next(p for p in process.parents() if ENDS_FOLDER not in p.environ())
    return process
