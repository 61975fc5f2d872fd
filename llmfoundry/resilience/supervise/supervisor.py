"""Start a run, look on, and decide what to do when it ends; every decision is an event.

`commands/supervise.py` calls `Supervisor.run`, whose result is the exit status. What is known of an
attempt is gathered by `attempt` and `machines`, its cause found by `causes`, what to do about it by
`decide`, and whether its checkpoints are still there judged by `checkpoints`: pure functions. The
idea: a run is exact, so to start it again is always right, and the question is only whether it is
of use.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
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
from llmfoundry.heartbeat import memory_folder
from llmfoundry.recipe.front.paths import show
from llmfoundry.recipe.resilience.supervise import EXCLUDE, SuperviseConfig
from llmfoundry.redaction import public_override
from llmfoundry.resilience.check import kernel_log
from llmfoundry.resilience.supervise import nodes, slurm
from llmfoundry.resilience.supervise.attempt import AttemptTimes, RunningAttempt
from llmfoundry.resilience.supervise.causes import KINDS, Cause, Evidence, find_cause
from llmfoundry.resilience.supervise.checkpoints import (
    START,
    Look,
    expected_newest,
    judge_look,
    look_in_folder,
)
from llmfoundry.resilience.supervise.checkpoints import STOP as STOP_LOOKING
from llmfoundry.resilience.supervise.decide import (
    RESTART,
    STOP,
    WITHOUT,
    Attempt,
    Decision,
    Policy,
    decide,
)
from llmfoundry.resilience.supervise.exporter import Exporter, ExportTo
from llmfoundry.resilience.supervise.notify import Reporter, print_stderr

FOLDER = "supervise"
"""Below a run's folder: what processes said at their ends, by attempt, and the check's report."""
_LOOK_SECONDS = 120.0  # for a store's answer
_REMOTE_SECONDS = 60.0  # after which processes that are not seen here may be elsewhere
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
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
    kernel_log: str | None = None
    """health_check.kernel_log."""
    sees_checkpoints: bool = True
    """Whether they are committed in the run's folder, and not in a store."""
    look: Callable[[], Look] | None = None
    """Looks for the checkpoints of a run at a URL; None: those of its folder."""
    place: str = ""
    """The run's URL, without secrets; empty: it has none."""
    export: ExportTo | None = None
    """Where Prometheus gets its state; None: nowhere."""
    last_words: Sequence[Callable[[str], str]] = ()
    """Tell those who keep the run's record of the last decision; each is given the run's status and
    returns why it failed."""
    attempts: list[Attempt] = field(default_factory=list)
    """The attempts so far, of this job."""

    def __post_init__(self) -> None:
        self.node = own_node()
        self.excluded: set[str] = set()
        self._silent = set[str]()  # of those that are suspected
        self._kept = set[str]()  # bad ones that the scheduler may still use
        self._without: tuple[str, ...] = ()  # of the attempt under way
        self._is_slurm = bool(self.config.launch) and slurm.in_job()
        self._reporter = Reporter(self.config, self.folder)
        self._report = self._reporter.report
        self._exporter = Exporter(self.folder.name, self.export)
        self._newest = self._recorded()
        self._avoided: int | None = None  # resume from a checkpoint before this batch
        self._asked: list[int] = []
        self._running: RunningAttempt | None = None
        self._stand_by: subprocess.Popen[bytes] | None = None
        self._before: tuple[AttemptTimes, float] | None = None
        """Of the attempt before, and when it last went on."""

    def run(self) -> int:
        """Start the run as often as it is of use; the exit status."""
        beats = Path(tempfile.mkdtemp(prefix="llmfoundry-supervise-", dir=memory_folder()))
        before = on_stops(self._hear)
        try:
            decision = self._until_last(beats)
            self._tell_last(decision)
            status = self._leave(decision.status)
            self._exporter.end(status, lambda: bool(self._asked))
            return status
        except Exception as error:
            status = MISTAKE if isinstance(error, UserError) else FAILED
            self._end_with("failed", f"the supervisor failed: {_said(error)}", status=status)
            self._exporter.end(status, lambda: bool(self._asked))
            raise
        finally:
            self._reporter.wait()
            self._end_stand_by()
            for number, handler in before.items():  # who was asked answers, if asked again too
                signal.signal(number, signal.SIG_IGN if self._asked else handler)
            shutil.rmtree(beats, ignore_errors=True)

    def _until_last(self, beats: Path) -> Decision:
        """Attempt after attempt; the decision that ends it."""
        while True:
            stopped = self._await_checkpoints()
            if stopped is not None:
                return stopped
            decision = self._attempt(beats / str(len(self.attempts)))
            if decision.action not in (RESTART, WITHOUT):
                return decision
            self._exporter.update(state="waiting", restarts=len(self.attempts))
            self._pause(decision.wait)
            if self._asked:
                return self._end_with("stopped", "stopped between two attempts", status=SAVED)

    def _end_with(self, cause: str, line: str, *, status: int) -> Decision:
        """Report an end that no attempt has led to; `cause`: a word that no attempt ends with."""
        event = self._report("decision", line, STOP, cause=cause, exit_status=status)
        self._reporter.notify(f"{self.folder.name} on {self.node}: {line}", event)
        return Decision(STOP, line, status)

    def _await_checkpoints(self) -> Decision | None:
        """Wait for the checkpoints that are to be there; the decision where they do not come."""
        began, looks, told = time.monotonic(), 0, ""
        while not self._asked:
            look = self._look()
            if not self.attempts and look.batches:
                self._newest = look.newest  # whoever started it may have removed newer ones
            looks += 1
            verdict = judge_look(
                self._newest,
                look,
                place=self.place or show(self.folder),
                waited=time.monotonic() - began,
                looks=looks,
                vanished_seconds=self.config.vanished_seconds,
                store_seconds=self.config.store_seconds,
            )
            if verdict.action == START:
                return None
            if verdict.action == STOP_LOOKING:
                why = f"not started: {verdict.why}"
                return self._end_with("checkpoints", why, status=verdict.status)
            if verdict.why != told:
                self._report("checkpoints", verdict.why, "wait")
            told = verdict.why
            self._exporter.update(state="waiting")
            self._pause(verdict.wait)
        why = "stopped before its checkpoints were there"
        return self._end_with("stopped", why, status=SAVED)

    def _look(self) -> Look:
        """What is seen of the checkpoints; who is asked to stop does not wait for a store."""
        look = self.look or (lambda: look_in_folder(self.folder))
        found: list[Look] = []
        looking = threading.Thread(target=lambda: found.append(_seen(look)), daemon=True)
        looking.start()
        looking.join(1.0)
        deadline = time.monotonic() + _LOOK_SECONDS
        while looking.is_alive() and time.monotonic() < deadline and not self._asked:
            looking.join(0.1)
        return found[0] if found else Look(problem="no answer", may_pass=True)

    def _recorded(self) -> int:
        """The newest checkpoint that the run's events have; -1: none.

        Of a run at a URL they may be another's, which was there before.
        """
        if self.look is not None and not self.attempts:
            return -1
        found = (e.get("checkpoint") for e in read_events(self.folder) if e["kind"] == "decision")
        return next(iter([batch for batch in found if type(batch) is int][-1:]), -1)

    def _leave(self, status: int) -> int:
        """The exit status, after this job has been put back into the queue where it is to be.

        Schedulers send TERM or USR1; INT is a person's, who does not want it back.
        """
        self._reporter.wait()  # Slurm kills what is not done soon
        is_person = self._asked[:1] == [signal.SIGINT]
        if status == SAVED and self.config.requeue and slurm.in_job() and not is_person:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # Slurm ends the job with one
            done = slurm.requeue(self._kept)
            self._report("requeue", f"job {os.environ['SLURM_JOB_ID']}: {done}", "requeue")
        return status

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Asked to stop: the run saves and ends; asked again: it ends at once.

        Slurm asks ahead of a job's limit and once more at it, and kills by itself.
        """
        if number == signal.SIGHUP and number in self._asked:
            return  # shell and system both tell that a terminal is closed
        self._asked.append(number)
        if self._running is not None:
            if len(self._asked) == 1:
                self._running.ask(number)
            elif not slurm.in_job():
                self._running.kill()

    def _launch_words(self) -> list[str]:
        """The launcher's, on the machines that are left."""
        excluded, left = set(self.excluded), 0
        if self._is_slurm:
            if self.config.act and self.attempts:  # somebody else wants them to be free
                excluded |= slurm.drained_nodes().keys()
            there = {*slurm.job_nodes()}  # empty: its controller is away
            if not there - excluded:
                excluded = set(self.excluded)
            first = int(os.environ.get("SLURM_NNODES", 1))
            left = len(there - excluded) if there else first - len(excluded)
            self._end_stand_by()
            if self.config.requeue:
                self._stand_by = slurm.start_standby(self.node, excluded)
        self._without = tuple(sorted(excluded))
        return nodes.launch_words(self.config.launch, excluded, left)

    def _end_stand_by(self) -> None:
        if self._stand_by is not None:  # its machine may be the one that is lost
            self._stand_by.terminate()

    def _attempt(self, beats: Path) -> Decision:
        number = len(self.attempts) + 1
        launch = self._launch_words()
        command = [*launch, *self.script] if launch else [sys.executable, *self.script]
        words = [public_override(word) for word in command]
        self._exporter.update(state="starting", attempts=number, checkpoint=self._newest)
        known = len(list(read_events(self.folder)))
        start = self._report("start", f"attempt {number}", "start", attempt=number, command=words)
        logged = kernel_log.log_size(self.kernel_log)
        running = RunningAttempt(
            command,
            beats=beats,
            ends=_ends_folder(self.folder.absolute() / FOLDER, number, beats),
            is_local=not launch,
            limits=ResumeLimits(self._newest, self._avoided),
        )
        status = self._watch(running)
        evidence = self._evidence(running, status, logged, self._events_behind(start, known))
        self._before = (running.times, last_moved(running.times, evidence.hang, self.node))
        return self._decide(number, find_cause(evidence), running.times, evidence)

    def _watch(self, running: RunningAttempt) -> int:
        """Look on until an attempt has ended; its status."""
        self._running, has_returned, is_elsewhere = running, False, False
        if self._asked:  # while it was being started
            running.ask(self._asked[0])
        looks = True
        while looks:
            looks = running.look()
            if running.times.saved > self._newest:
                self._exporter.update(checkpoint=running.times.saved)
            if not (is_elsewhere or has_returned) and _has_begun_elsewhere(running):
                is_elsewhere = True
                self._exporter.update(state="training")
            if not has_returned and running.times.stepped is not None:
                has_returned = True
                self._exporter.update(state="training")
                self._returned(running.times)
        status = running.end()
        self._running = None
        self._exporter.update(state="checking", last_status=status)
        return status

    def _evidence(
        self, running: RunningAttempt, status: int, logged: int, told: list[dict[str, Any]]
    ) -> Evidence:
        """What an attempt has left behind; `told`: its events."""
        return Evidence(
            status=status,
            node=self.node,
            asked=signal.Signals(self._asked[0]).name if self._asked else "",
            ends=read_ends(running.ends),
            hang=_first(told, "end", "hang"),
            watch=_first(told, "stop", *_WATCHED),
            kernel=nodes.kernel_events(
                self.kernel_log,
                self.node,
                seconds=running.times.ended - running.times.started,
                start=logged,
            ),
            gpu=_first((event for event in told if event.get("is_bad")), "log", "gpu"),
            tail=list(running.tail),
            expects_word=self.sees_checkpoints,
            places=read_ranks(running.ends),
            lost=self._lost() if status else {},
            went_back=any(event.get("action") == "roll_back" for event in told),
        )

    def _decide(
        self, number: int, cause: Cause, times: AttemptTimes, evidence: Evidence
    ) -> Decision:
        attempt = self._as_attempt(cause, times, evidence)
        self.attempts.append(attempt)
        bad, newest = attempt.bad_nodes, self._newest
        policy = Policy(
            no_progress=self.config.no_progress,
            max_restarts=self.config.max_restarts,
            max_restarts_per_day=self.config.max_restarts_per_day,
            min_goodput=self.config.min_goodput,
            wait_seconds=self.config.wait_seconds,
            act=self.config.act,
            can_exclude=self._can_exclude(bad),
        )
        decision = decide(self.attempts, policy)
        self._avoided = decision.resume_before or self._avoided
        self.attempts[-1] = replace(attempt, seconds=attempt.seconds + decision.wait)
        done = decision.action
        if bad and self.config.act:
            self.excluded |= set(bad)
            told, kept = nodes.take_out_of_service(bad, cause.why, silent=self._silent)
            self._kept |= kept
            done += f" ({told})" if told else ""
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
            checkpoint=newest,
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

    def _as_attempt(self, cause: Cause, times: AttemptTimes, evidence: Evidence) -> Attempt:
        """What counts of an attempt that has ended; suspected machines are checked."""
        before, look = self._newest, self._look()
        went_back = evidence.went_back
        self._newest = expected_newest(before, times.saved, look, went_back=went_back)
        if self._avoided is not None and max(times.saved, self._newest - 1) >= self._avoided:
            self._avoided = None  # it was saved anew, or another after it
        bad = self._confirm(cause) if not self._asked else ()
        has_begun = bool(evidence.places) or times.joined is not None
        took, progressed = time.monotonic() - times.started, self._newest > before
        resumed = max(0, self._avoided or before) if times.resumed is None else times.resumed
        return Attempt(
            cause,
            progressed=progressed,
            bad_nodes=bad,
            without=() if has_begun else self._without,
            seconds=took,
            useful=times.useful(self._newest) if times.joined else took * progressed,
            resumed=resumed,
            earlier=look.before(resumed),
        )

    def _lost(self) -> dict[str, str]:
        """Machines that the scheduler has lost, of those that the attempt could be on."""
        found = slurm.lost_nodes() if self._is_slurm else {}
        return {node: what for node, what in found.items() if node not in self._without}

    def _can_exclude(self, bad: tuple[str, ...]) -> bool:
        """Whether the launcher can leave machines out, and any other is left."""
        if not any(EXCLUDE in word for word in self.config.launch):
            return False
        return not self._is_slurm or bool(set(slurm.job_nodes()) - self.excluded - set(bad))

    def _confirm(self, cause: Cause) -> tuple[str, ...]:
        """Which of the suspected machines are bad: lost, or found so by the check."""
        is_off = self.config.confirm == "off"
        if not cause.nodes or (is_off and not self._is_slurm):
            return ()
        output = self.folder / FOLDER
        words = [*self.check, f"level={self.config.confirm}", f"output={output}"]
        if self._is_slurm:
            command = [] if is_off else words
            bad, self._silent, verdict = nodes.find_bad(cause.nodes, command, output)
        elif set(cause.nodes) <= {self.node}:
            bad, verdict = nodes.run_check([sys.executable, *words], output)
        else:
            self._report("check", f"{', '.join(cause.nodes)} cannot be checked from here", "none")
            return ()
        self._report("check", f"{', '.join(cause.nodes)} suspected; {verdict}", "check")
        return tuple(node for node in bad if node in cause.nodes)

    def _returned(self, times: AttemptTimes) -> None:
        """Tell how long the way back took, once a restarted run has done its first step."""
        if self._before is None or times.joined is None or times.loaded is None:
            return
        before, died = self._before
        assert times.stepped is not None
        parts = {
            "detect": before.ended - died,
            "restart": times.started - before.ended,
            "start": times.joined - times.started,
            "load": times.loaded - times.joined,
            "first_step": times.stepped - times.loaded,
        }
        whole = times.stepped - died
        told = ", ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in parts.items())
        lost = max(0, before.last_step - (times.first_step or 0))
        self._report(
            "returned",
            f"back at step {times.first_step} after {whole:.1f} s ({told});"
            f" {lost} steps are done again",
            "none",
            step=times.first_step,
            seconds={name: round(part, 2) for name, part in parts.items()},
            lost_steps=lost,
        )

    def _events_behind(self, start: dict[str, Any] | None, known: int) -> list[dict[str, Any]]:
        """The events of an attempt: behind that of its start, or (unwritten) those known before."""
        events = list(read_events(self.folder))
        return events[events.index(start) + 1 if start in events else known :]

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._asked:
            time.sleep(0.1)

    def _tell_last(self, decision: Decision) -> None:
        """Tell of the last decision, unless the same command is to go on, whose start does so."""
        if decision.status == SAVED:
            return
        status = "finished" if decision.status == DONE else "failed"
        for problem in filter(None, (tell(status) for tell in self.last_words)):
            print_stderr(f"supervise: {problem}")


def _seen(look: Callable[[], Look]) -> Look:
    """What is seen, or why nothing is."""
    try:
        return look()
    except Exception as error:  # of a library, in a thread whose errors nobody sees
        return Look(problem=_said(error))


def _has_begun_elsewhere(running: RunningAttempt) -> bool:
    """Whether processes have begun none of which is on this machine."""
    times = running.times
    is_late = times.joined is None and time.monotonic() - times.started > _REMOTE_SECONDS
    return is_late and bool(read_ranks(running.ends))


def _said(error: BaseException) -> str:
    """Why it failed, in a line."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _ends_folder(above: Path, number: int, beats: Path) -> Path:
    """A new folder for what processes say at their ends; in memory where the disk takes none.

    Processes of other machines say nothing there.
    """
    folder = new_folder(above, f"attempt-{number}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            return folder  # a mistake, which the attempt tells
        return beats.with_name(f"{beats.name}-ends")
    return folder


def _first(events: Iterable[dict[str, Any]], action: str, *kinds: str) -> dict[str, Any] | None:
    """The first event of one of these kinds for which this was done."""
    found = (event for event in events if event["kind"] in kinds)
    return next((event for event in found if event.get("action") == action), None)


def last_moved(times: AttemptTimes, hang: dict[str, Any] | None, node: str) -> float:
    """When a process of an attempt last went on by itself, in seconds of CLOCK_MONOTONIC.

    Args:
        times: of the attempt, which has ended.
        hang: the event in which a monitor named who hangs. A process that it has woken for its
            stack beats once more.
        node: this machine: on another the clock is another one, and only how long it hung counts.
    """
    last = times.ended if times.last_beat is None else times.last_beat
    if hang is None or not isinstance(hang.get("seconds"), int | float):
        return last
    if hang.get("host") == node and isinstance(hang.get("moved"), int | float):
        return min(last, max(times.started, float(hang["moved"])))
    return min(last, max(times.started, times.ended - float(hang["seconds"])))


def new_folder(above: Path, name: str) -> Path:
    """A folder that nobody has used: what it will hold is of one attempt, whatever the clock."""
    stamped = above / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stamped.with_name(f"{stamped.name}-{n}") for n in count(2))
    return next(path for path in chain([stamped], names) if not path.exists())


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
