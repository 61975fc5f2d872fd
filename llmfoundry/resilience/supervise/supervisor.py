"""Supervisor: start a run, monitor it, and decide what to do when it ends.

Entry point: `Supervisor.run`, called by `cli/commands/supervise.py`. An attempt has these stages:
the checkpoints must still exist (`checkpoints`), the run is started and monitored (`attempt`), its
evidence is collected here, its cause is classified (`causes`), suspected machines are checked
(`nodes`), and `decide_restart` decides. The decisions are pure functions, and each one is recorded
as an event. A resumed run computes exactly the same steps, so a restart is always correct. The
question is only whether it is useful.
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
"""Subfolder of a run's folder for the ends of processes, by attempt, and the check's report."""
_IN_MEMORY = "llmfoundry-supervisor-"
"""Prefix of a supervisor's folder in memory, which the supervisor locks."""
_LOCKED_SECONDS = 60.0  # a younger folder may not be locked yet
_LISTING_SECONDS = 120.0  # timeout of a listing of checkpoints
_REMOTE_SECONDS = 60.0  # without a local heartbeat, after which ranks may be on other machines
_WATCHED = ("slow_rank", "mfu_drop", "data_wait", "stall")
"""Events of callbacks.watch for which a run may save and stop itself."""


@dataclass
class Supervisor:
    """Process that starts a run and restarts it after failures."""

    config: SuperviseConfig
    folder: Path
    """The run's folder."""
    script: list[str]
    """Training command: scripts/train.py RECIPE ..."""
    check: list[str]
    """Command of the machine check, without the folder of its report."""
    list_checkpoints: Callable[[], CheckpointListing]
    url: str = ""
    """URL of the run's checkpoints, without secrets; empty: they are in the run's folder."""
    kernel_log: str | None = None
    """health_check.kernel_log."""
    export: ExportTo | None = None
    """Where the supervisor's state is exported for Prometheus; None: not exported."""
    final_events: Sequence[Callable[[str], str]] = ()
    """Called with the run's status (finished, failed) after the last decision. Each sends the last
    events to a tracker or store, and returns an error message or an empty string."""
    attempts: list[Attempt] = field(default_factory=list)
    """Attempts of this job so far."""

    def __post_init__(self) -> None:
        self.node = own_node()
        self._reporter = Reporter(self.config, self.folder)
        self._report = self._reporter.report
        self._exporter = Exporter(self.folder.name, self.export)
        self._nodes = Nodes(self.config)
        self._signals: list[int] = []  # received signals; the first requests a stop
        self._running: RunningAttempt | None = None
        self._lock: LockedFile | None = None  # shows other processes that a supervisor is running
        # batch of the newest checkpoint that must exist; -1: none
        self._newest = self._recorded_newest()
        # resume from a checkpoint before this batch; None: from the newest
        self._resume_before: int | None = None
        # the previous attempt, and when it last made progress
        self._previous: tuple[AttemptTimes, float] | None = None

    def run(self) -> int:
        """Start the run, and restart it while that is useful; return the exit status."""
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
            for number, handler in handlers.items():  # after a stop, ignore further signals
                signal.signal(number, signal.SIG_IGN if self._signals else handler)
            shutil.rmtree(heartbeats, ignore_errors=True)
            lock.release()

    def _until_last(self, heartbeats: Path) -> Decision:
        """Run attempts until a decision other than a restart; return this decision."""
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
        """Wait until the expected checkpoints exist; return a decision if they do not appear."""
        began, tries, reported = time.monotonic(), 0, ""
        while not self._signals:
            listing = self._list_checkpoints()
            if not self.attempts and listing.batches:
                self._newest = listing.newest  # a person may have deleted newer checkpoints
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
        """List the run's checkpoints in a thread, so that a stop does not wait for a store."""
        results: list[CheckpointListing] = []
        work = threading.Thread(target=lambda: results.append(self._listing()), daemon=True)
        work.start()
        work.join(1.0)
        deadline = time.monotonic() + _LISTING_SECONDS
        while work.is_alive() and time.monotonic() < deadline and not self._signals:
            work.join(0.1)
        return results[0] if results else CheckpointListing(problem="no answer", may_pass=True)

    def _listing(self) -> CheckpointListing:
        try:
            return self.list_checkpoints()
        except Exception as error:  # an unexpected error would end the thread silently
            return CheckpointListing(problem=_reason(error))

    def _recorded_newest(self) -> int:
        """Return the batch of the newest checkpoint in the run's events; -1: none.

        At a URL, the events before the first attempt are ignored, because they may belong to an
        earlier run of this name.
        """
        if self.url and not self.attempts:
            return -1
        newest = -1
        for event in read_events(self.folder):
            batch = event.get("checkpoint")
            if event["kind"] == "decision" and type(batch) is int:
                newest = batch
        return newest

    def _attempt(self, heartbeats: Path) -> Decision:
        """Run one attempt and return the decision after it."""
        # not locked earlier, so that a missing run folder is detected before it is created
        if self._lock is None:
            self._lock = self._show_itself()

        # start the command
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

        # wait for its end, and collect the events since its start
        status = self._watch(running)
        events = list(read_events(self.folder))
        first = events.index(start) + 1 if start in events else known  # a full disk has no start
        evidence = self._evidence(running, status, log_size, events[first:], excluded)
        self._previous = running.times, running.times.last_moved(evidence.hang, self.node)
        return self._decide(number, running.times, evidence, excluded)

    def _show_itself(self) -> LockedFile | None:
        """Lock a file with this machine's name; None: the file cannot be written."""
        path = self.folder / FOLDER / f"{os.path.basename(self.node)}.lock"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return try_lock(path, mode=0o644)
        return None

    def _watch(self, running: RunningAttempt) -> int:
        """Wait until an attempt has ended; return its exit status."""
        self._running, has_stepped, is_elsewhere = running, False, False
        if self._signals:  # received while the command was being started
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
        """Report the time from the failure to the first step of a restarted run, by part."""
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
        """Return the evidence of an attempt.

        Args:
            running: the ended attempt.
            status: exit status of its command.
            log_size: size of the kernel log's file when the attempt began.
            events: events of the attempt.
            excluded: machines that it did not use.
        """
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
        """Classify an attempt, decide, exclude bad machines, and report the decision."""
        # classify and decide
        cause = find_cause(evidence)
        attempt = self._as_attempt(cause, times, evidence, excluded)
        bad = attempt.bad_nodes
        self.attempts.append(attempt)
        can_exclude = self._nodes.can_exclude(bad)
        decision = decide_restart(self.attempts, self.config, can_exclude=can_exclude)
        self._resume_before = decision.resume_before or self._resume_before
        self.attempts[-1] = replace(attempt, seconds=attempt.seconds + decision.wait)

        # exclude bad machines
        done = decision.action
        if bad and self.config.act:
            result = self._nodes.take_out(bad, cause.why)
            done += f" ({result})" if result else ""

        # report
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
            took=round(attempt.seconds, 1),  # including the check
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
        """Return the summary of an ended attempt, after a check of suspected machines."""
        # progress: the newest checkpoint now, compared with before
        before, listing = self._newest, self._list_checkpoints()
        went_back = evidence.went_back
        self._newest = expected_newest(before, times.saved, listing, went_back=went_back)
        limit = self._resume_before
        if limit is not None and max(times.saved, self._newest - 1) >= limit:
            self._resume_before = (
                None  # the suspected checkpoint was replaced, or a later one saved
            )

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
        """Check the suspected machines of a cause, and return the bad ones."""
        bad, line, action = self._nodes.find_bad(cause.nodes, self.check, self.folder / FOLDER)
        if line:
            self._report("check", line, action)
        return bad

    def _end_with(self, cause: str, line: str, *, status: int) -> Decision:
        """Report a stop that is not the end of an attempt; `cause` is none of KINDS."""
        event = self._report("decision", line, STOP, cause=cause, exit_status=status)
        self._reporter.notify(f"{self.folder.name} on {self.node}: {line}", event)
        return Decision(STOP, line, status)

    def _send_final_events(self, decision: Decision) -> None:
        """Send the last decision to trackers and stores, unless the run will be resumed."""
        if decision.status == SAVED:
            return
        status = "finished" if decision.status == DONE else "failed"
        for problem in filter(None, (send(status) for send in self.final_events)):
            print_stderr(f"supervise: {problem}")

    def _leave(self, status: int) -> int:
        """Requeue this job if the recipe requests that; return the exit status.

        SIGINT comes from a person, who does not want the job requeued. Schedulers send TERM or
        USR1.
        """
        self._reporter.wait()  # Slurm kills this job soon after the requeue
        is_person = self._signals[:1] == [signal.SIGINT]
        if status == SAVED and self.config.requeue and slurm_nodes.in_job() and not is_person:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # Slurm signals the requeued job
            self._report("requeue", self._nodes.requeue(), "requeue")
        return status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the first lets the run save and end, the second kills it.

        In a Slurm job the second signal is ignored: Slurm sends one signal before the time limit
        and one at the limit, and then kills the job itself.
        """
        if number == signal.SIGHUP and number in self._signals:
            return  # shell and kernel both send SIGHUP when a terminal is closed
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
    """Create and lock a folder for heartbeats; delete the folders of killed supervisors."""
    folder = Path(tempfile.mkdtemp(prefix=_IN_MEMORY, dir=memory_folder()))
    lock = try_lock(folder)
    assert lock is not None
    for other in folder.parent.glob(f"{_IN_MEMORY}*"):
        with suppress(OSError):  # another user's folder
            is_new = time.time() - other.stat().st_mtime < _LOCKED_SECONDS
            if other == folder or is_new:
                continue
            other_lock = try_lock(other)
            if other_lock is not None:  # its supervisor has died
                shutil.rmtree(other, ignore_errors=True)
                other_lock.release()
    return folder, lock


def _reason(error: BaseException) -> str:
    """Return the error as one line."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _has_begun_elsewhere(running: RunningAttempt) -> bool:
    """Return whether ranks have begun, but none on this machine."""
    times = running.times
    is_late = times.joined is None and time.monotonic() - times.started > _REMOTE_SECONDS
    return is_late and bool(read_ranks(running.ends))


def _first(events: Iterable[dict[str, Any]], action: str, *kinds: str) -> dict[str, Any] | None:
    """Return the first event of one of the kinds with an action; None: there is none."""
    for event in events:
        if event["kind"] in kinds and event.get("action") == action:
            return event
    return None


def earlier_attempts(folder: Path) -> list[Attempt]:
    """Return the attempts of this job before it was requeued, from the run's events."""
    requeued = os.environ.get("SLURM_RESTART_COUNT", "")
    if not requeued.isdecimal() or int(requeued) == 0:
        return []
    attempts = list[Attempt]()
    for event in read_events(folder):
        if event["kind"] == "decision" and event.get("cause") in KINDS:
            if event.get("attempt") == 1:  # earlier attempts are of another job
                attempts = []
            cause = Cause(event["cause"], str(event.get("why")), names_in(event, "nodes"))
            took, wait = _seconds(event.get("took")), _seconds(event.get("wait"))
            useful = _seconds(event.get("useful", took))
            progressed = bool(event.get("progressed"))
            attempts.append(Attempt(cause, progressed, seconds=took + wait, useful=useful))
    return attempts


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
