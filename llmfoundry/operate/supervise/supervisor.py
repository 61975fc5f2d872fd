"""Start a run, look on, and decide what to do when it ends; every decision is an event.

`commands/supervise.py` calls `Supervisor.run`, whose result is the exit status. What is known of an
attempt is gathered by `attempt` and `machines`, its cause found by `causes`, and what to do about
it by `decide`: the last two are pure functions. The idea: a run is exact, so to start it again is
always right, and the question is only whether it is of use.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from types import FrameType
from typing import Any

from llmfoundry.ends import DONE, SAVED, STOPS, on_stops, own_node, read_ends, read_places
from llmfoundry.events import add_event, names_in, read_events
from llmfoundry.heartbeat import memory
from llmfoundry.masking import public_override
from llmfoundry.operate.check.probes import kernel_log
from llmfoundry.operate.supervise import machines, slurm, stand_by
from llmfoundry.operate.supervise.attempt import AttemptTimes, RunningAttempt
from llmfoundry.operate.supervise.causes import KINDS, Cause, Evidence, find_cause
from llmfoundry.operate.supervise.decide import RESTART, WITHOUT, Attempt, Decision, Policy, decide
from llmfoundry.operate.supervise.notify import notify
from llmfoundry.recipe.operate.supervise import EXCLUDE, SuperviseConfig

FOLDER = "supervise"
"""Below a run's folder: what processes said at their ends, by attempt, and the check's report."""
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
        self._newest, self._first = self._checkpoint(), 0
        self._asked: list[int] = []
        self._notifier: threading.Thread | None = None
        self._running: RunningAttempt | None = None
        self._stand_by: subprocess.Popen[bytes] | None = None
        self._before: tuple[AttemptTimes, float] | None = None
        """Of the attempt before, and when it last went on."""

    def run(self) -> int:
        """Start the run as often as it is of use; the exit status."""
        beats = Path(tempfile.mkdtemp(prefix="llmfoundry-supervise-", dir=memory()))
        before = on_stops(self._hear)
        try:
            while True:
                decision = self._attempt(beats / str(len(self.attempts)))
                if decision.action not in (RESTART, WITHOUT):
                    self._tell_last(decision)
                    return self._leave(decision.status)
                self._pause(decision.wait)
                if self._asked:
                    why = "stopped between two attempts"
                    event = self._tell("decision", why, "stop", exit_status=SAVED)
                    self._notify(f"{self.folder.name} on {self.node}: {why}", event or {})
                    return self._leave(SAVED)
        finally:
            self._notified()
            self._end_stand_by()
            for number, handler in before.items():  # who was asked answers, if asked again too
                signal.signal(number, signal.SIG_IGN if self._asked else handler)
            shutil.rmtree(beats, ignore_errors=True)

    def _leave(self, status: int) -> int:
        """The exit status, after this job has been put back into the queue where it is to be.

        Schedulers send TERM or USR1; INT is a person's, who does not want it back.
        """
        self._notified()  # Slurm kills what is not done soon
        is_person = self._asked[:1] == [signal.SIGINT]
        if status == SAVED and self.config.requeue and slurm.in_job() and not is_person:
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)  # Slurm ends the job with one
            done = slurm.requeue(self._kept)
            self._tell("requeue", f"job {os.environ['SLURM_JOB_ID']}: {done}", "requeue")
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
                self._stand_by = stand_by.start(self.node, excluded)
        self._without = tuple(sorted(excluded))
        return machines.launch_words(self.config.launch, excluded, left)

    def _end_stand_by(self) -> None:
        if self._stand_by is not None:  # its machine may be the one that is lost
            self._stand_by.terminate()

    def _attempt(self, beats: Path) -> Decision:
        number = len(self.attempts) + 1
        ends = new_folder(self.folder.absolute() / FOLDER, f"attempt-{number}")
        launch = self._launch_words()
        command = [*launch, *self.script] if launch else [sys.executable, *self.script]
        words = [public_override(word) for word in command]
        start = self._tell("start", f"attempt {number}", "start", attempt=number, command=words)
        logged = kernel_log.size(self.kernel_log)
        running = RunningAttempt(command, beats=beats, ends=ends, is_local=not launch)
        self._running, has_returned = running, False
        if self._asked:  # while it was being started
            running.ask(self._asked[0])
        looks = True
        while looks:
            looks = running.look()
            if not has_returned and running.times.stepped is not None:
                has_returned = True
                self._returned(running.times)
        status = running.end()
        self._running = None
        places = read_places(ends)
        has_begun = bool(places) or running.times.joined is not None
        told = self._events_behind(start)
        evidence = Evidence(
            status=status,
            node=self.node,
            asked=signal.Signals(self._asked[0]).name if self._asked else "",
            ends=read_ends(ends),
            hang=_first(told, "end", "hang"),
            watch=_first(told, "stop", *_WATCHED),
            kernel=machines.kernel_events(
                self.kernel_log,
                self.node,
                seconds=running.times.ended - running.times.started,
                start=logged,
            ),
            gpu=_first((event for event in told if event.get("is_bad")), "log", "gpu"),
            tail=list(running.tail),
            expects_word=self.sees_checkpoints,
            places=places,
            lost=self._lost() if status else {},
        )
        self._before = (running.times, last_moved(running.times, evidence.hang, self.node))
        cause = find_cause(evidence)
        return self._decide(number, status, cause, running.times, has_begun=has_begun)

    def _decide(
        self, number: int, status: int, cause: Cause, times: AttemptTimes, *, has_begun: bool
    ) -> Decision:
        newest, before = self._checkpoint(), self._newest
        self._newest = max(newest, before)
        progressed = newest > before
        if not self.sees_checkpoints:  # what this attempt began with was saved by those before
            progressed = 0 < self._first < (times.first_step or 0)
            self._first = max(self._first, times.first_step or 0)
        bad = self._confirm(cause) if not self._asked else ()
        without = () if has_begun else self._without
        self.attempts.append(Attempt(cause, progressed, bad, without))
        policy = Policy(
            no_progress=self.config.no_progress,
            max_restarts=self.config.max_restarts,
            wait_seconds=self.config.wait_seconds,
            act=self.config.act,
            can_exclude=self._can_exclude(bad),
        )
        decision = decide(self.attempts, policy)
        done = decision.action
        if bad and self.config.act:
            self.excluded |= set(bad)
            told, kept = machines.take_out(bad, cause.why, silent=self._silent)
            self._kept |= kept
            done += f" ({told})" if told else ""
        event = self._tell(
            "decision",
            f"attempt {number} ended: {decision.why}",
            decision.action,
            done=done,
            step=times.last_step or None,
            attempt=number,
            cause=cause.kind,
            why=cause.why,
            status=status,
            nodes=list(cause.nodes),
            bad_nodes=list(bad),
            checkpoint=newest,
            progressed=progressed,
            seconds=round(times.ended - times.started, 1),
            took=round(time.monotonic() - times.started, 1),  # with the check
            wait=decision.wait,
            exit_status=decision.status,
        )
        text = f"{self.folder.name} on {self.node}: attempt {number} ended: {decision.why}"
        self._notify(f"{text}; {done}", event or {})
        return decision

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
            bad, self._silent, verdict = machines.find_bad(cause.nodes, command, output)
        elif set(cause.nodes) <= {self.node}:
            bad, verdict = machines.check([sys.executable, *words], output)
        else:
            self._tell("check", f"{', '.join(cause.nodes)} cannot be checked from here", "none")
            return ()
        self._tell("check", f"{', '.join(cause.nodes)} suspected; {verdict}", "check")
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
        self._tell(
            "returned",
            f"back at step {times.first_step} after {whole:.1f} s ({told});"
            f" {lost} steps are done again",
            "none",
            step=times.first_step,
            seconds={name: round(part, 2) for name, part in parts.items()},
            lost_steps=lost,
        )

    def _events_behind(self, start: dict[str, Any] | None) -> list[dict[str, Any]]:
        """The events of an attempt, which are behind that of its start."""
        events = list(read_events(self.folder))
        return events[events.index(start) + 1 :] if start in events else []

    def _checkpoint(self) -> int:
        """The batch of the newest checkpoint that was committed; -1: there is none."""
        found = (p.parent.name[2:] for p in self.folder.glob("checkpoints/ba*/COMMIT"))
        return max((int(batch) for batch in found if batch.isdecimal()), default=-1)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._asked:
            time.sleep(0.1)

    def _tell(
        self, kind: str, what: str, action: str, step: int | None = None, **more: Any
    ) -> dict[str, Any] | None:
        """Say it, and add it to the run's events; the line, None if it cannot be written."""
        if kind != "start":
            done = more.get("done") or (action if action != "none" else "")
            print(f"supervise: {what}" + f"; {done}" * bool(done), file=sys.stderr, flush=True)
        with suppress(OSError):  # the disk may be what failed
            return add_event(self.folder, kind, what, step=step, action=action, **more)
        return None

    def _notify(self, text: str, event: dict[str, Any]) -> None:
        """Tell the webhook, beside the restart: who does not answer holds nothing up."""
        self._notified()
        webhook, form = self.config.webhook, self.config.webhook_form
        if webhook:
            self._notifier = threading.Thread(target=_post, args=(webhook, form, text, event))
            self._notifier.daemon = True
            self._notifier.start()

    def _notified(self) -> None:
        """Wait until the last line is told, or not; `notify` has a limit of time."""
        if self._notifier is not None:
            self._notifier.join()

    def _tell_last(self, decision: Decision) -> None:
        """Tell of the last decision, unless the same command is to go on, whose start does so."""
        if decision.status == SAVED:
            return
        status = "finished" if decision.status == DONE else "failed"
        for problem in filter(None, (tell(status) for tell in self.last_words)):
            print(f"supervise: {problem}", file=sys.stderr, flush=True)


def _post(webhook: str, form: str | None, text: str, event: dict[str, Any]) -> None:
    problem = notify(webhook, form, text, event)
    if problem:
        print(problem, file=sys.stderr, flush=True)


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
            found.append(Attempt(cause, bool(event.get("progressed"))))
    return found
