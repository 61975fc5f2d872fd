"""Background thread that sends a run's record to a logger (MLflow, Prometheus, W&B …).

The tracker creates one `BackgroundWriter` per `LogTarget` on the main rank. A logger takes seconds
to import, and its server may be remote, full or unreachable. All calls therefore run in a daemon
thread with a queue, which starts after the first training step. Training never waits for a logger
and never fails because of it. metrics.jsonl holds every value: a resumed run and scripts/track.py
compare it with the logger and send missing values. Values that could not be sent are counted and
reported at the end. `event_tags` converts the complete events.jsonl to tags each time, so that
events written while the run was not active are sent too.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Protocol

from llmfoundry.command_text import command_line
from llmfoundry.errors import disk_full
from llmfoundry.events import is_restart, names_in, read_events
from llmfoundry.loggers.console import duration, short_count
from llmfoundry.loggers.metrics_file import find_lacking, milliseconds
from llmfoundry.redaction import public
from llmfoundry.retry import backoff, retry

PATIENCE_WHILE_AWAY = 5.0  # seconds after training during which a failing logger is retried


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric."""

    name: str
    value: float
    milliseconds: int
    batch: int


@dataclass(frozen=True)
class TextSamples:
    """Texts that the model wrote after `batch` batches: (prompt, continuation) each."""

    batch: int
    milliseconds: int
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class DeferredTask:
    """Any other action in an open session, such as the registration of a model version.

    Transient errors are retried.

    Attributes:
        name: name in the list of missing items, if the action fails for good.
        act: function of the session and of a function that prints a line.
    """

    name: str
    act: Callable[[Any, Callable[[str], None]], None]


@dataclass(frozen=True)
class RunFacts:
    """Metadata of a run.

    Attributes:
        name: display name of the run.
        folder: save folder of the run.
        first_batch: number of steps that earlier processes made. Steps after it are repeated, so
            their values may reach the logger a second time.
        began: start of the run in milliseconds since 1970.
        params: resolved recipe, by dotted key.
        tags: texts that describe the run, such as package versions.
    """

    name: str
    folder: Path
    first_batch: int
    began: int
    params: Mapping[str, Any]
    tags: Mapping[str, str]


class Session(Protocol):
    """An open run of a logger.

    A method may raise any exception of its client library. The writer then calls it again.
    """

    @property
    def max_points(self) -> int:
        """Return the maximal number of points of one `send`."""

    def steps(self, name: str) -> Container[int]:
        """Return the batches for which the logger has a value of a metric."""

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Write metrics, all or none."""

    def samples(self, samples: TextSamples) -> None:
        """Store texts that the model generated."""

    def upload(self, path: Path) -> None:
        """Store a text file with the run."""

    def end(self, status: str) -> None:
        """Close the run: finished, failed or killed."""


@dataclass(frozen=True)
class LogTarget:
    """A logger of a run: its label in messages, how to open it, and its capabilities.

    Attributes:
        label: name in messages.
        open: opens a session. Its second argument is a function that prints a line.
        begin_anew: called once if a run starts from its first batch. It deletes the traces of an
            earlier run in the folder, such as a run id.
        is_permanent: whether an error is permanent, so that a retry is useless.
        patience_while_away: seconds after training during which a failing logger is retried.
        tag: sets tags of a session's run and replaces tags of the same names; None: the logger has
            no tags.
        is_store: the logger stores values. If false, it shows only current values, and missing ones
            are never sent later.
        is_in_order: the logger rejects a value of a step before the last step that it has.
        has_registry: the logger has a registry of model versions.
    """

    label: str
    open: Callable[[RunFacts, Callable[[str], None]], Session]
    begin_anew: Callable[[Path], None] = lambda folder: None
    is_permanent: Callable[[Exception], bool] = lambda error: False
    patience_while_away: float = PATIENCE_WHILE_AWAY
    tag: Callable[[Any, Mapping[str, str]], None] | None = None
    is_store: bool = True
    is_in_order: bool = False
    has_registry: bool = False


_MAX_RETRIES = re.compile(r"(.*): Max retries exceeded .*?\(Caused by \w+\((.*)\)\)")
_BEFORE_REASON = re.compile(r"[)>]: |>, |\w+\((?:\d+, )?(?=['\"])")  # the failing object's repr
_QUOTES = re.compile(r"^['\"]|['\"]\)?$")


def describe(error: Exception) -> str:
    """Return the first line of an error, without passwords, at most 200 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # SQLAlchemy may print advice for callers before the reason
    reasons = [line for line in lines if not line.startswith("(raised as a result")]
    text = reasons[0] if reasons else lines[0]
    # urllib3 puts the reason at the end of a long line: move it to the front
    max_retries = _MAX_RETRIES.fullmatch(text)
    if max_retries:
        reason = _BEFORE_REASON.split(max_retries[2])[-1]
        text = f"{_QUOTES.sub('', reason)}: {max_retries[1]}"
    return public(text if len(text) <= 200 else text[:197] + "...")


_COLLECT_SECONDS = 2.0
_MAX_WAITING = 500_000  # maximal queue length while a logger is unreachable: about 100 MB
_LONGEST_PAUSE = 60.0
PATIENCE = 30.0  # seconds after training in which the rest of the queue is sent
# permanent errors: missing package, missing permission, missing file, undecodable text
_PERMANENT = (
    ImportError,
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    UnicodeError,
    TypeError,
)
Item = MetricPoint | TextSamples | Path | DeferredTask
KINDS = ("metric values", "samples")  # lost items that are counted; others are reported by name


class _GivenUpError(Exception):
    """The logger rejected an item, or time has run out."""


class BackgroundWriter:
    """Queue and thread that send a run to one `LogTarget`.

    `note` and `warn` print a line. The thread calls them too.
    """

    def __init__(
        self, target: LogTarget, *, note: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._target, self._note, self._warn = target, note, warn
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._status: str | None = None  # final status of the run; None while it runs
        self._deadline = float("inf")  # time.monotonic() after which sending stops; set by end()
        self._session: Session | None = None
        self._is_away = False
        self._refusals = 0
        self._is_closed = True  # the logger has the end of the run, or there is no run to close
        self._lost: Counter[str] = Counter()  # lost items by kind, files by name
        self._problem = ""
        self._thread: threading.Thread | None = None
        self._record = Path()  # metrics.jsonl
        self._tags_due, self._tagged = False, dict[str, str]()
        self.has_all = True  # valid after close(): the logger has the complete record

    @property
    def label(self) -> str:
        """Return the name of the logger in messages."""
        return self._target.label

    @property
    def is_store(self) -> bool:
        """Return whether the logger stores values; see `LogTarget`."""
        return self._target.is_store

    def start(self, facts: RunFacts) -> None:
        """Start the thread that sends the queue; call after the first training step."""
        assert self._thread is None, "a run starts once"
        self.events()  # events of earlier processes are sent too
        name = self._target.label
        self._record = facts.folder / "metrics.jsonl"
        self._thread = threading.Thread(target=self._work, args=(facts,), name=name, daemon=True)
        self._thread.start()

    def log(self, batch: int, metrics: Mapping[str, float], *, when: int | None = None) -> None:
        """Queue the metrics of a step and return immediately.

        `when` is the wall-clock time in milliseconds since 1970; None: now.
        """
        when = milliseconds() if when is None else when
        points = [MetricPoint(name, float(value), when, batch) for name, value in metrics.items()]
        self._queue(points)

    def samples(self, batch: int, texts: Sequence[tuple[str, str]]) -> None:
        """Queue texts that the model generated."""
        self._queue([TextSamples(batch, milliseconds(), list(texts))])

    def file(self, path: Path) -> None:
        """Queue a text file to be stored with the run; it is read when it is sent."""
        self._queue([path])

    def registry(self, task: DeferredTask) -> None:
        """Queue a task for the registry of model versions, if the logger has one."""
        if self._target.has_registry:
            self._queue([task])

    def events(self) -> None:
        """Request that the tags of events.jsonl are sent; the file is read when they are sent."""
        with self._changed:
            self._tags_due = self._target.tag is not None
            self._changed.notify()

    def end(self, status: str, *, timeout: float = PATIENCE) -> None:
        """Set the final status of the run and return immediately; nothing is queued after it."""
        self.events()  # the supervisor writes events too
        with self._changed:
            self._status = status
            seconds = timeout
            if self._is_away:
                seconds = min(timeout, self._target.patience_while_away)
            self._deadline = time.monotonic() + seconds
            self._changed.notify()

    def close(self) -> None:
        """Wait after `end` until the rest is sent or the timeout passes; report lost values."""
        if self._thread is None:
            return

        # wait, with a message if it takes longer than three seconds
        self._thread.join(min(3.0, self._seconds_left()))
        if self._thread.is_alive() and self._seconds_left() > 1:
            self._note(
                f"sending the rest to {self._target.label}, for at most"
                f" {duration(self._seconds_left())}"
            )
        # an outage shortens the deadline meanwhile
        while self._thread.is_alive() and self._seconds_left() > 0:
            self._thread.join(min(1.0, self._seconds_left()))
        self._thread.join(0.5)

        self._report_lost(cut_off=self._thread.is_alive())
        # a thread that is still alive must not print into the final message
        self._note = self._warn = _discard

    def _queue(self, items: Sequence[Item]) -> None:
        """Append items; count as lost those beyond the maximal queue length."""
        with self._changed:
            if self._session is None and self._refusals > 0:
                room = 0  # the logger rejected the run: there will be no session
            elif all(map(_is_point, items)):
                room = max(0, _MAX_WAITING - len(self._waiting))
            else:
                room = 1
            self._waiting.extend(items[:room])
            self._count_lost(items[room:])
            self._changed.notify()

    def _work(self, facts: RunFacts) -> None:
        """Run the thread: connect, send the queue until the run ends, then close the run."""

        def forget() -> None:
            if facts.first_batch == 0:
                self._target.begin_anew(facts.folder)

        def connect() -> None:
            self._session = self._target.open(facts, lambda text: self._warn(text))

        if not (self._persist(forget, "the run") and self._persist(connect, "the run")):
            return
        assert self._session is not None

        # backfill the steps of earlier processes, then follow the queue
        if facts.first_batch > 0 and self._target.is_store:
            self._catch_up(self._session, facts.first_batch)
        while self._send_some(self._session):
            pass

        # send again what did not fit into the queue
        can_backfill = self._target.is_store and not self._target.is_in_order
        if can_backfill and self._lost.pop(KINDS[0], 0):
            self._catch_up(self._session, sys.maxsize)
        assert self._status is not None
        self._is_closed = self._persist(partial(self._session.end, self._status), "the run's end")

    def _catch_up(self, session: Session, last_batch: int) -> None:
        """Send the values of metrics.jsonl up to `last_batch` that the logger does not have.

        Earlier processes logged them before they were killed, or during an outage of the logger.
        """
        missing: list[MetricPoint] = []

        def compare() -> None:
            values = find_lacking(self._record, last_batch, session.steps)
            missing[:] = [MetricPoint(*value) for value in values]

        if not (self._record.exists() and self._persist(compare, "a look at what it has")):
            return
        n_sent = 0
        for start in range(0, len(missing), session.max_points):
            points = missing[start : start + session.max_points]
            if self._persist(*_request(session, points, self._note)):
                n_sent += len(points)
                continue
            # out of time: the rest is lost. Rejected: only these points are lost.
            self._count_lost(missing[start:] if self._out_of_time() else points)
            if self._out_of_time():
                return
        if n_sent:
            self._note(f"{self._target.label} has {short_count(n_sent)} values that it lacked")

    def _send_some(self, session: Session) -> bool:
        """Wait for work and send one request; return False after the last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._tags_due or self._status)
            # steps may be milliseconds apart: collect two seconds of them in one request
            self._changed.wait_for(
                lambda: self._status or len(self._waiting) >= session.max_points, _COLLECT_SECONDS
            )
            items = self._next_items(session.max_points)
            tags_due, self._tags_due = self._tags_due, False
        if tags_due and self._target.tag is not None:
            self._persist(partial(self._send_tags, session, self._target.tag), "the tags of events")
        if items:
            sent = self._persist(*_request(session, items, self._note))
            self._settle(items, sent=sent)
        with self._changed:
            done = self._status is not None and not (self._waiting or self._tags_due)
        return not (done or self._out_of_time())

    def _send_tags(self, session: Session, tag: Callable[[Any, Mapping[str, str]], None]) -> None:
        """Send the tags of events.jsonl that have changed since the last call."""
        tags = event_tags(read_events(self._record.parent))
        changed = {name: text for name, text in tags.items() if self._tagged.get(name) != text}
        if changed:
            tag(session, changed)
            self._tagged |= changed

    def _next_items(self, most: int) -> list[Item]:
        """Return the items of the next request: at most `most` points, or one other item."""
        points = list(takewhile(_is_point, islice(self._waiting, most)))
        return points or list(islice(self._waiting, 1))

    def _settle(self, items: Sequence[Item], *, sent: bool) -> None:
        """Remove items from the queue that were sent or rejected; count the rejected ones.

        When time has run out, items that were not sent stay in the queue.
        """
        with self._changed:
            if not sent and self._out_of_time():
                return
            for _ in items:
                self._waiting.popleft()
            if not sent:
                self._count_lost(items)

    def _persist(self, action: Callable[[], None], what: str) -> bool:
        """Retry `action` until it succeeds.

        Returns:
            False if the logger rejects `what` (a name for messages), or if time runs out.
        """
        n_failures = 0

        def again(error: Exception, failures: int) -> float:
            nonlocal n_failures
            n_failures = failures
            self._problem = describe(error)
            if _is_permanent(error) or self._target.is_permanent(error):
                self._report_refusal(what)
                raise _GivenUpError from error
            if failures == 2:  # a single failure may be a short lock
                self._report_outage()
            return backoff(failures, first=1.0, longest=_LONGEST_PAUSE, jitter=(1.0, 1.0))

        try:
            retry(action, again=again, wait=self._pause)
        except _GivenUpError:
            return False
        if n_failures > 1 and self._is_away:
            self._note(f"{self._target.label} works again")
        self._is_away = False
        return True

    def _report_outage(self) -> None:
        """Warn of an outage.

        After training there is no warning, because lost values are reported soon: the deadline is
        shortened to `patience_while_away`.
        """
        self._is_away = True
        with self._changed:
            if self._status:
                soon = time.monotonic() + self._target.patience_while_away
                self._deadline = min(self._deadline, soon)
        if self._status is None:
            self._warn(
                f"{self._target.label} fails: {self._problem}; training continues, sending is tried"
                " again"
            )

    def _report_refusal(self, what: str) -> None:
        """Warn of the first refusal; later ones probably have the same reason and are counted."""
        self._refusals += 1
        if self._refusals == 1:
            self._warn(
                f"{self._target.label} refuses {what}: {self._problem}; training continues"
                " without it"
            )

    def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, at most one second after the run has ended.

        Raises:
            _GivenUpError: time has run out.
        """
        with self._changed:
            if self._status is None:
                self._changed.wait_for(lambda: self._status, seconds)
            else:
                self._changed.wait(min(1.0, self._seconds_left()))
        if self._out_of_time():
            raise _GivenUpError

    def _out_of_time(self) -> bool:
        return self._seconds_left() == 0.0

    def _seconds_left(self) -> float:
        """Return the seconds until the deadline that `end` sets."""
        return max(0.0, self._deadline - time.monotonic())

    def _count_lost(self, items: Sequence[Item]) -> None:
        self._lost.update(_kind(item) for item in items)

    def _report_lost(self, *, cut_off: bool) -> None:
        """Warn in one line of the items that the logger did not get, if any."""
        with self._changed:
            self._count_lost(list(self._waiting))
        missing = []
        for kind, n in self._lost.items():
            missing.append(f"{short_count(n)} {kind}" if kind in KINDS else kind)
        if cut_off or not self._is_closed:
            missing.append("the end of the run")
        elif self._session is None and not missing:
            missing.append("the run")
        if not self._target.is_store:
            return
        self.has_all = not (missing or self._refusals)
        if not self.has_all:
            later = ""
            if self._record.exists():
                later = f"; later: {command_line('track', f'run={self._record.parent}')}"
            self._warn(
                f"{self._target.label} lacks {', '.join(missing) or 'what it refused'}:"
                f" {self._problem or 'out of time'}; metrics.jsonl has every value{later}"
            )


def _request(
    session: Session, items: Sequence[Item], note: Callable[[str], None]
) -> tuple[Callable[[], None], str]:
    """Return the call that sends `items` (only points, or one other item), and its name."""
    first = items[0]
    if isinstance(first, DeferredTask):
        return partial(first.act, session, note), first.name
    if isinstance(first, TextSamples):
        return partial(session.samples, first), f"the samples of batch {first.batch}"
    if isinstance(first, Path):
        return partial(session.upload, first), first.name
    points = [item for item in items if isinstance(item, MetricPoint)]
    return partial(session.send, points), f"{len(points)} metric values"


def _is_permanent(error: Exception) -> bool:
    """Return whether an error is permanent.

    An error about a local file is permanent, except for a full disk: it is no outage of the logger.
    """
    is_about_file = isinstance(error, OSError) and error.filename is not None
    return isinstance(error, _PERMANENT) or (is_about_file and not disk_full(error))


def _is_point(item: Item) -> bool:
    return isinstance(item, MetricPoint)


def _kind(item: Item) -> str:
    if isinstance(item, Path | DeferredTask):
        return item.name
    return KINDS[1] if isinstance(item, TextSamples) else KINDS[0]


def _discard(text: str) -> None:
    """Print nothing."""


_MOST_KINDS, _MOST_CHARACTERS = 20, 500
_SUPERVISOR_KINDS = ("start", "decision")  # they become the tags supervise.*


def event_tags(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return tags that summarize the events of a run; empty without events.

    Args:
        events: in the order in which they were written.

    Returns:
        `events.KIND`: number of events of a kind. Kinds beyond the twentieth are counted together
        as `events.others`.
        `events.last`: the newest event.
        Only for a supervised run: `supervise.attempts`, `supervise.restarts`, `supervise.last` (the
        newest decision), `supervise.cause` (why the previous attempt ended) and
        `supervise.bad_nodes` (nodes that failed a check).
    """
    events = list(events)
    run_events = [event for event in events if event["kind"] not in _SUPERVISOR_KINDS]
    counts = Counter[str]()
    for event in run_events:
        kind = str(event["kind"])
        has_room = kind in counts or len(counts) < _MOST_KINDS
        counts[kind if has_room else "others"] += 1
    tags = {f"events.{kind}": str(n) for kind, n in counts.items()}
    if run_events:
        tags["events.last"] = _line(run_events[-1])
    return {**tags, **_supervisor_tags(events)}


def _supervisor_tags(events: list[Mapping[str, Any]]) -> dict[str, str]:
    decisions = [event for event in events if event["kind"] == "decision"]
    n_starts = sum(event["kind"] == "start" for event in events)
    tags = {"supervise.attempts": str(n_starts)} if n_starts else {}
    if not decisions:
        return tags
    tags["supervise.restarts"] = str(sum(map(is_restart, decisions)))
    tags["supervise.last"] = _line(decisions[-1])
    cause = decisions[-1].get("cause")
    if cause:
        tags["supervise.cause"] = str(cause)
    bad_nodes = {node for event in decisions for node in names_in(event, "bad_nodes")}
    if bad_nodes:
        tags["supervise.bad_nodes"] = _truncate(", ".join(sorted(bad_nodes)))
    return tags


def _line(event: Mapping[str, Any]) -> str:
    """Return time, step, observation and action of an event in one line."""
    when = datetime.fromtimestamp(float(event["time"]), timezone.utc)
    step = "" if event.get("step") is None else f" step {event['step']}"
    action = event.get("done") or event.get("action") or "nothing is done"
    kind = "" if event["kind"] in _SUPERVISOR_KINDS else f" {event['kind']}:"
    text = f"{when:%Y-%m-%d %H:%M:%S} UTC{step}{kind} {event.get('what')}; {action}"
    return _truncate(public(text))


def _truncate(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
