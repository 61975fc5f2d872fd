"""Start a run, watch it, and decide what to do when it ends; every decision is an event.

`cli/commands/supervise.py` calls `Supervisor.run`, whose result is the exit status. In the order of
an attempt: its checkpoints must still be there (`checkpoints`), it runs (`attempt`), what it left
behind is gathered here, its cause is found (`causes`), suspected machines are checked (`nodes`),
and `decide_restart` decides; `causes`, `decide_restart` and the judgement of `checkpoints` are pure
functions. The idea: a run is exact, so that a restart is always correct, and the question is only
whether it is of use.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from llmfoundry.errors import UserError
from llmfoundry.events import names_in, read_events
from llmfoundry.exit_status import (
    DONE,
    FAILED,
    MISTAKE,
    SAVED,
    STOPS,
    ResumeLimits,
    on_stops,
    own_node,
    read_ends,
    read_ranks,
)
from llmfoundry.files import LockedFile, try_lock
from llmfoundry.recipe.paths import show
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.redaction import public_override
from llmfoundry.resilience.check import kernel_log
from llmfoundry.resilience.supervise import checkpoints, slurm_nodes
from llmfoundry.resilience.supervise.attempt import AttemptTimes, RunningAttempt, make_ends_folder
from llmfoundry.resilience.supervise.causes import KINDS, Cause, Evidence, find_cause
from llmfoundry.resilience.supervise.checkpoints import CheckpointListing, expected_newest
from llmfoundry.resilience.supervise.decide import (
    RESTART,
    STOP,
    WITHOUT,
    Attempt,
    Decision,
    decide_restart,
)
from llmfoundry.resilience.supervise.exporter import Exporter, ExportTo
from llmfoundry.resilience.supervise.nodes import Nodes, kernel_events
from llmfoundry.resilience.supervise.notify import Reporter, print_stderr
from llmfoundry.telemetry import memory_folder

FOLDER = "supervise"
"""Below a run's folder: records of processes' ends, by attempt, and the check's report."""
_IN_MEMORY = "llmfoundry-supervisor-"
"""Before the name of a folder in memory that its supervisor holds locked."""
_LOCKED_SECONDS = 60.0  # within which a new one has been locked
_LISTING_SECONDS = 120.0  # for a store's answer
_REMOTE_SECONDS = 60.0  # after which processes that send no heartbeat here may be elsewhere
_WATCHED = ("slow_rank", "mfu_drop", "data_wait", "stall")
"""Events of callbacks.watch at which a run may save and stop by itself."""


@dataclass
class Supervisor:
    """The process around a run."""

    config: SuperviseConfig
    folder: Path
    """The run's."""
    script: list[str]
    """The words that train: scripts/train.py RECIPE ..."""
    check: list[str]
    """The words that check machines, without the folder of the report."""
    list_checkpoints: Callable[[], CheckpointListing]
    url: str = ""
    """The store of the run's checkpoints, without secrets; empty: the run's folder has them."""
    kernel_log: str | None = None
    """health_check.kernel_log."""
    export: ExportTo | None = None
    """Where its state is served for Prometheus; None: nowhere."""
    final_events: Sequence[Callable[[str], str]] = ()
    """Called with the run's status (finished, failed) after the last decision; each sends it where
    the run's record is kept, and returns why that failed."""
    attempts: list[Attempt] = field(default_factory=list)
    """The attempts so far, of this job."""

    def __post_init__(self) -> None:
        self.node = own_node()
        self._reporter = Reporter(self.config, self.folder)
        self._report = self._reporter.report
        self._exporter = Exporter(self.folder.name, self.export)
        self._nodes = Nodes(self.config)
        self._signals: list[int] = []  # received: the first makes it stop
        self._running: RunningAttempt | None = None
        self._lock: LockedFile | None = None  # by which others see that it is at work
        # Checkpoints, by batch: the newest that must be there; resume from one before (None: any).
        self._newest = self._recorded_newest()
        self._resume_before: int | None = None
        # The attempt before, and when it last moved.
        self._previous: tuple[AttemptTimes, float] | None = None

    def run(self) -> int:
        """Start the run as often as it is of use; the exit status."""
        heartbeats, lock = _folder_in_memory()
        handlers = on_stops(self._on_signal)
        try:
            decision = self._until_last(heartbeats)
            self._send_final_events(decision)
            status = self._leave(decision.status)
            self._exporter.end(status, lambda: bool(self._signals))
            return status
        except Exception as error:
            status = MISTAKE if isinstance(error, UserError) else FAILED
            self._end_with("failed", f"the supervisor failed: {_reason(error)}", status=status)
            self._exporter.end(status, lambda: bool(self._signals))
            raise
        finally:
            if self._lock is not None:
                self._lock.release()
            self._reporter.wait()
            self._nodes.end_standby()
            for number, handler in handlers.items():  # stopping already: further signals do nothing
                signal.signal(number, signal.SIG_IGN if self._signals else handler)
            shutil.rmtree(heartbeats, ignore_errors=True)
            lock.release()

    def _until_last(self, heartbeats: Path) -> Decision:
        """Attempt after attempt; the decision that ends it."""
        while True:
            stopped = self._await_checkpoints()
            if stopped is not None:
                return stopped
            decision = self._attempt(heartbeats / str(len(self.attempts)))
            if decision.action not in (RESTART, WITHOUT):
                return decision
            self._exporter.update("waiting", restarts=len(self.attempts))
            self._pause(decision.wait)
            if self._signals:
                return self._end_with("stopped", "stopped between two attempts", status=SAVED)

    def _await_checkpoints(self) -> Decision | None:
        """Wait for the checkpoints that must be there; a decision where they do not come."""
        began, tries, reported = time.monotonic(), 0, ""
        while not self._signals:
            listing = self._list_checkpoints()
            if not self.attempts and listing.batches:
                self._newest = listing.newest  # a person may have removed newer ones
            tries += 1
            verdict = checkpoints.judge_listing(
                self._newest,
                listing,
                self.config,
                where=self.url or show(self.folder),
                waited=time.monotonic() - began,
                tries=tries,
            )
            if verdict.action == checkpoints.START:
                return None
            if verdict.action == STOP:
                why = f"not started: {verdict.why}"
                return self._end_with("checkpoints", why, status=verdict.status)
            if verdict.why != reported:
                self._report("checkpoints", verdict.why, "wait")
            reported = verdict.why
            self._exporter.update("waiting")
            self._pause(verdict.wait)
        why = "stopped before its checkpoints were there"
        return self._end_with("stopped", why, status=SAVED)

    def _list_checkpoints(self) -> CheckpointListing:
        """The run's checkpoints; a signal does not wait for a store."""
        found: list[CheckpointListing] = []
        work = threading.Thread(target=lambda: found.append(self._listing()), daemon=True)
        work.start()
        work.join(1.0)
        deadline = time.monotonic() + _LISTING_SECONDS
        while work.is_alive() and time.monotonic() < deadline and not self._signals:
            work.join(0.1)
        return found[0] if found else CheckpointListing(problem="no answer", may_pass=True)

    def _listing(self) -> CheckpointListing:
        try:
            return self.list_checkpoints()
        except Exception as error:  # of a library, in a thread whose errors nobody sees
            return CheckpointListing(problem=_reason(error))

    def _recorded_newest(self) -> int:
        """The newest checkpoint in the run's events; -1: none.

        Those at a URL may belong to another run, which was there before.
        """
        if self.url and not self.attempts:
            return -1
        found = (e.get("checkpoint") for e in read_events(self.folder) if e["kind"] == "decision")
        return next(iter([batch for batch in found if type(batch) is int][-1:]), -1)

    def _attempt(self, heartbeats: Path) -> Decision:
        if self._lock is None:  # not before: the folder may be missing, and is to be seen so
            self._lock = self._show_itself()
        number = len(self.attempts) + 1
        launcher, excluded = self._nodes.launcher(is_first=not self.attempts)
        command = [*launcher, *self.script]
        words = [public_override(word) for word in command]
        self._exporter.update("starting", attempts=number, checkpoint_step=self._newest)
        known = len(list(read_events(self.folder)))
        start = self._report("start", f"attempt {number}", "start", attempt=number, command=words)
        log_size = kernel_log.log_size(self.kernel_log)
        running = RunningAttempt(
            command,
            heartbeats=heartbeats,
            ends=make_ends_folder(self.folder.absolute() / FOLDER, number, heartbeats),
            is_local=not self.config.launch,
            limits=ResumeLimits(self._newest, self._resume_before),
        )
        status = self._watch(running)
        events = list(read_events(self.folder))
        first = events.index(start) + 1 if start in events else known  # unwritten: those since
        evidence = self._evidence(running, status, log_size, events[first:], excluded)
        self._previous = running.times, running.times.last_moved(evidence.hang, self.node)
        return self._decide(number, running.times, evidence, excluded)

    def _show_itself(self) -> LockedFile | None:
        """Lock a file of this machine's name, as long as it can be written."""
        path = self.folder / FOLDER / f"{os.path.basename(self.node)}.lock"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return try_lock(path, mode=0o644)
        return None

    def _watch(self, running: RunningAttempt) -> int:
        """Wait until an attempt has ended; its status."""
        self._running, has_stepped, is_elsewhere = running, False, False
        if self._signals:  # while it was being started
            running.request_stop(self._signals[0])
        is_running = True
        while is_running:
            is_running = running.poll()
            if running.times.saved > self._newest:
                self._exporter.update(checkpoint_step=running.times.saved)
            if not (is_elsewhere or has_stepped) and _has_begun_elsewhere(running):
                is_elsewhere = True
                self._exporter.update("training")
            if not has_stepped and running.times.stepped is not None:
                has_stepped = True
                self._exporter.update("training")
                self._report_return(running.times)
        status = running.end()
        self._running = None
        self._exporter.update("checking", last_attempt_status=status)
        return status

    def _report_return(self, times: AttemptTimes) -> None:
        """Report how long it took from the failure to the first step of a restarted run."""
        if self._previous is None or times.joined is None or times.loaded is None:
            return
        previous, died = self._previous
        assert times.stepped is not None
        parts = {
            "detect": previous.ended - died,
            "restart": times.started - previous.ended,
            "start": times.joined - times.started,
            "load": times.loaded - times.joined,
            "first_step": times.stepped - times.loaded,
        }
        listed = ", ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in parts.items())
        lost = max(0, previous.last_step - (times.first_step or 0))
        self._report(
            "returned",
            f"back at step {times.first_step} after {times.stepped - died:.1f} s ({listed});"
            f" {lost} steps are repeated",
            "none",
            step=times.first_step,
            seconds={name: round(part, 2) for name, part in parts.items()},
            lost_steps=lost,
        )

    def _evidence(
        self,
        running: RunningAttempt,
        status: int,
        log_size: int,
        events: list[dict[str, Any]],
        excluded: set[str],
    ) -> Evidence:
        """What an attempt has left behind; `events`: its own."""
        times = running.times
        lost = self._nodes.lost() if status else {}
        return Evidence(
            status=status,
            node=self.node,
            stop_signal=signal.Signals(self._signals[0]).name if self._signals else "",
            ends=read_ends(running.ends),
            hang=_first(events, "end", "hang"),
            watch=_first(events, "stop", *_WATCHED),
            kernel=kernel_events(
                self.kernel_log, self.node, seconds=times.ended - times.started, start=log_size
            ),
            gpu=_first((event for event in events if event.get("is_bad")), "log", "gpu"),
            stderr=list(running.stderr_tail),
            expects_end=not self.url,
            node_of=read_ranks(running.ends),
            lost={node: what for node, what in lost.items() if node not in excluded},
            went_back=any(event.get("action") == "roll_back" for event in events),
        )

    def _decide(
        self, number: int, times: AttemptTimes, evidence: Evidence, excluded: set[str]
    ) -> Decision:
        cause = find_cause(evidence)
        attempt = self._as_attempt(cause, times, evidence, excluded)
        bad = attempt.bad_nodes
        self.attempts.append(attempt)
        can_exclude = self._nodes.can_exclude(bad)
        decision = decide_restart(self.attempts, self.config, can_exclude=can_exclude)
        self._resume_before = decision.resume_before or self._resume_before
        self.attempts[-1] = replace(attempt, seconds=attempt.seconds + decision.wait)
        done = decision.action
        if bad and self.config.act:
            result = self._nodes.take_out(bad, cause.why)
            done += f" ({result})" if result else ""
        event = self._report(
            "decision",
            f"attempt {number} ended: {decision.why}",
            decision.action,
            done=done,
            step=times.last_step or None,
            attempt=number,
            cause=cause.kind,
            why=cause.why,
            status=evidence.status,
            nodes=list(cause.nodes),
            bad_nodes=list(bad),
            checkpoint=self._newest,
            progressed=attempt.progressed,
            seconds=round(times.ended - times.started, 1),
            took=round(attempt.seconds, 1),  # with the check
            useful=round(attempt.useful, 1),
            wait=decision.wait,
            exit_status=decision.status,
        )
        text = f"{self.folder.name} on {self.node}: attempt {number} ended: {decision.why}"
        self._reporter.notify(f"{text}; {done}", event)
        return decision

    def _as_attempt(
        self, cause: Cause, times: AttemptTimes, evidence: Evidence, excluded: set[str]
    ) -> Attempt:
        """What counts of an attempt that has ended; suspected machines are checked."""
        before, listing = self._newest, self._list_checkpoints()
        went_back = evidence.went_back
        self._newest = expected_newest(before, times.saved, listing, went_back=went_back)
        limit = self._resume_before
        if limit is not None and max(times.saved, self._newest - 1) >= limit:
            self._resume_before = None  # it was saved anew, or another after it
        bad = () if self._signals else self._confirm(cause)
        has_begun = bool(evidence.node_of) or times.joined is not None
        took, progressed = time.monotonic() - times.started, self._newest > before
        resumed = times.resumed
        if resumed is None:
            resumed = max(0, self._resume_before or before)
        return Attempt(
            cause,
            progressed=progressed,
            bad_nodes=bad,
            without=() if has_begun else tuple(sorted(excluded)),
            seconds=took,
            useful=times.useful(self._newest) if times.joined else took * progressed,
            resumed=resumed,
            earlier=listing.before(resumed),
        )

    def _confirm(self, cause: Cause) -> tuple[str, ...]:
        """Which of the suspected machines are bad."""
        bad, line, action = self._nodes.find_bad(cause.nodes, self.check, self.folder / FOLDER)
        if line:
            self._report("check", line, action)
        return bad

    def _end_with(self, cause: str, line: str, *, status: int) -> Decision:
        """Report an end that no attempt has led to; `cause`: a word that no attempt ends with."""
        event = self._report("decision", line, STOP, cause=cause, exit_status=status)
        self._reporter.notify(f"{self.folder.name} on {self.node}: {line}", event)
        return Decision(STOP, line, status)

    def _send_final_events(self, decision: Decision) -> None:
        """Send the last decision, unless the run will be resumed: the next start does so then."""
        if decision.status == SAVED:
            return
        status = "finished" if decision.status == DONE else "failed"
        for problem in filter(None, (send(status) for send in self.final_events)):
            print_stderr(f"supervise: {problem}")

    def _leave(self, status: int) -> int:
        """The exit status, after requeueing this job where the recipe has that.

        Schedulers send TERM or USR1; INT is a person's, who does not want it back.
        """
        self._reporter.wait()  # before the requeue, after which Slurm kills soon
        is_person = self._signals[:1] == [signal.SIGINT]
        if status == SAVED and self.config.requeue and slurm_nodes.in_job() and not is_person:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # Slurm ends the job with one
            self._report("requeue", self._nodes.requeue(), "requeue")
        return status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first signal lets the run save and end; the second ends it at once.

        Not in a job: Slurm sends one ahead of the job's limit and one at it, and kills by itself.
        """
        if number == signal.SIGHUP and number in self._signals:
            return  # both shell and system send one when a terminal is closed
        self._signals.append(number)
        if self._running is not None:
            if len(self._signals) == 1:
                self._running.request_stop(number)
            elif not slurm_nodes.in_job():
                self._running.kill()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals:
            time.sleep(0.1)


def _folder_in_memory() -> tuple[Path, LockedFile]:
    """A new folder for heartbeats, locked while it is used; folders of killed supervisors go."""
    above = memory_folder()
    made = Path(tempfile.mkdtemp(prefix=_IN_MEMORY, dir=above))
    lock = try_lock(made)
    assert lock is not None
    for other in made.parent.glob(f"{_IN_MEMORY}*"):
        with suppress(OSError):  # of another user
            is_new = time.time() - other.stat().st_mtime < _LOCKED_SECONDS
            found = None if other == made or is_new else try_lock(other)
            if found is not None:
                shutil.rmtree(other, ignore_errors=True)
                found.release()
    return made, lock


def _reason(error: BaseException) -> str:
    """Why it failed, in a line."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _has_begun_elsewhere(running: RunningAttempt) -> bool:
    """Whether processes have begun, and none of them on this machine."""
    times = running.times
    is_late = times.joined is None and time.monotonic() - times.started > _REMOTE_SECONDS
    return is_late and bool(read_ranks(running.ends))


def _first(events: Iterable[dict[str, Any]], action: str, *kinds: str) -> dict[str, Any] | None:
    """The first event of one of these kinds with this action."""
    found = (event for event in events if event["kind"] in kinds)
    return next((event for event in found if event.get("action") == action), None)


def earlier_attempts(folder: Path) -> list[Attempt]:
    """The attempts of this job before it was requeued, from the run's events; else none."""
    requeued = os.environ.get("SLURM_RESTART_COUNT", "")
    if not requeued.isdecimal() or int(requeued) == 0:
        return []
    found = list[Attempt]()
    for event in read_events(folder):
        if event["kind"] == "decision" and event.get("cause") in KINDS:
            if event.get("attempt") == 1:
                found = []
            cause = Cause(event["cause"], str(event.get("why")), names_in(event, "nodes"))
            took, wait = _seconds(event.get("took")), _seconds(event.get("wait"))
            useful = _seconds(event.get("useful", took))
            progressed = bool(event.get("progressed"))
            found.append(Attempt(cause, progressed, seconds=took + wait, useful=useful))
    return found


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
