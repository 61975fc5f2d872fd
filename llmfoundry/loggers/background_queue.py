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

PATIENCE_WHILE_AWAY = 5.0  # seconds after training, for a place that fails


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric."""

    name: str
    value: float
    milliseconds: int
    batch: int


@dataclass(frozen=True)
class Samples:
    """Texts that the model wrote after `batch` batches: (prompt, continuation) each."""

    batch: int
    milliseconds: int
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Task:
    """Something else to be done in an open session, again until it succeeds.

    Attributes:
        name: what is lacking where it was not done.
        act: gets the session, and a function that prints a line.
    """

    name: str
    act: Callable[[Any, Callable[[str], None]], None]


@dataclass(frozen=True)
class RunFacts:
    """A run apart from its metrics.

    `first_batch` steps were made by earlier processes; what was sent of later ones is repeated.
    `began` is in milliseconds since 1970. `params` are the recipe's, by dotted key.
    """

    name: str
    folder: Path
    first_batch: int
    began: int
    params: Mapping[str, Any]
    tags: Mapping[str, str]


class Session(Protocol):
    """An open run. A method may raise whatever its store raises; it is then called again."""

    @property
    def max_points(self) -> int:
        """Of one `send`."""

    def steps(self, name: str) -> Container[int]:
        """The batches for which the place has a value of a metric."""

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Write metrics, all or none."""

    def samples(self, samples: Samples) -> None:
        """Keep what the model wrote."""

    def upload(self, path: Path) -> None:
        """Keep a text file with the run."""

    def end(self, status: str) -> None:
        """Close the run: finished, failed or killed."""


@dataclass(frozen=True)
class LogTarget:
    """Where a run goes: how messages call it, and what opens it.

    `open` gets a function that prints a line. `begin_anew` is called once, where a run starts from
    its first batch in a folder that may hold an earlier one's traces. `is_permanent`: whether an
    error would come again. `patience_while_away`: seconds after training for a place that fails.
    `tag` gives a session's run tags, which replace those of the same names; None: it has none.
    `is_store`: it keeps what it gets; else it shows what is now, and nothing is made up for later.
    `is_in_order`: it takes no value of a step before its last one. `has_registry`: it keeps
    versions of models, too.
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
_BEFORE_REASON = re.compile(r"[)>]: |>, |\w+\((?:\d+, )?(?=['\"])")  # the object that failed
_QUOTES = re.compile(r"^['\"]|['\"]\)?$")


def describe(error: Exception) -> str:
    """The first line of an error, without passwords, at most 200 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # SQLAlchemy's advice to its callers may come before the reason.
    text = next((line for line in lines if not line.startswith("(raised as a result")), lines[0])
    if found := _MAX_RETRIES.fullmatch(text):  # urllib3's, which ends with the reason
        reason = _BEFORE_REASON.split(found[2])[-1]
        text = f"{_QUOTES.sub('', reason)}: {found[1]}"
    return public(text if len(text) <= 200 else text[:197] + "...")


_COLLECT_SECONDS = 2.0
_MAX_WAITING = 500_000  # values kept while a place is away: about 100 MB
_LONGEST_PAUSE = 60.0
PATIENCE = 30.0  # seconds for the rest, after training
# Trying again would not change these: no package, no permission, no such file, no such character.
_PERMANENT = (
    ImportError,
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    UnicodeError,
    TypeError,
)
Item = MetricPoint | Samples | Path | Task
KINDS = ("metric values", "samples")  # what is lost by number, and not by name


class _GivenUpError(Exception):
    """An item is refused, or time has run out."""


class BackgroundWriter:
    """Feeds one target. `note` and `warn` print a line, and are called from the thread too."""

    def __init__(
        self, target: LogTarget, *, note: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self._target, self._note, self._warn = target, note, warn
        self._waiting: deque[Item] = deque()
        self._changed = threading.Condition()
        self._status: str | None = None  # how the run ended; None while it runs
        self._deadline = float("inf")  # on the monotonic clock, set by end()
        self._session: Session | None = None
        self._is_away = False
        self._refusals = 0
        self._is_ended = True  # there, as far as is known
        self._lost: Counter[str] = Counter()  # by kind, files by name
        self._problem = ""
        self._thread: threading.Thread | None = None
        self._record = Path()  # metrics.jsonl
        self._tags_due, self._tagged = False, dict[str, str]()
        self.has_all = True  # once closed: whether nothing is lacking there

    @property
    def label(self) -> str:
        """How messages call the place."""
        return self._target.label

    @property
    def is_store(self) -> bool:
        """Whether the place keeps what it gets."""
        return self._target.is_store

    def start(self, facts: RunFacts) -> None:
        """Begin to send; call after the first training step."""
        assert self._thread is None, "a run starts once"
        self.events()  # those from before, too
        name = self._target.label
        self._record = facts.folder / "metrics.jsonl"
        self._thread = threading.Thread(target=self._work, args=(facts,), name=name, daemon=True)
        self._thread.start()

    def log(self, batch: int, metrics: Mapping[str, float], *, when: int | None = None) -> None:
        """Queue the metrics of a step, of now or of `when` in milliseconds; returns at once."""
        when = milliseconds() if when is None else when
        self._queue(
            [MetricPoint(name, float(value), when, batch) for name, value in metrics.items()]
        )

    def samples(self, batch: int, texts: Sequence[tuple[str, str]]) -> None:
        """Queue texts that the model wrote."""
        self._queue([Samples(batch, milliseconds(), list(texts))])

    def file(self, path: Path) -> None:
        """Queue a text file to be kept with the run, as it is when its turn comes."""
        self._queue([path])

    def registry(self, task: Task) -> None:
        """Queue what is to be done with versions of models, where the place keeps any."""
        if self._target.has_registry:
            self._queue([task])

    def events(self) -> None:
        """Have the tags of events.jsonl sent, as it is when their turn comes."""
        with self._changed:
            self._tags_due = self._target.tag is not None
            self._changed.notify()

    def end(self, status: str, *, timeout: float = PATIENCE) -> None:
        """Say how the run ended, and that nothing more comes; returns at once."""
        self.events()  # as others write some, too
        with self._changed:
            self._status = status
            away = min(timeout, self._target.patience_while_away)
            self._deadline = time.monotonic() + (away if self._is_away else timeout)
            self._changed.notify()

    def close(self) -> None:
        """After `end`: wait for the rest to be sent, until the timeout, and report what is lost."""
        if self._thread is None:
            return
        self._thread.join(min(3.0, self._left()))
        if self._thread.is_alive() and self._left() > 1:
            self._note(
                f"sending the rest to {self._target.label}, for at most {duration(self._left())}"
            )
        while self._thread.is_alive() and self._left() > 0:  # which an outage makes less
            self._thread.join(min(1.0, self._left()))
        self._thread.join(0.5)
        self._report_lost(cut_off=self._thread.is_alive())
        # A thread that was cut off must not print into the final message.
        self._note = self._warn = _discard

    def _queue(self, items: Sequence[Item]) -> None:
        with self._changed:
            refused = self._session is None and self._refusals > 0  # there will be no session
            room = max(0, _MAX_WAITING - len(self._waiting)) if all(map(_is_point, items)) else 1
            room = 0 if refused else room
            self._waiting.extend(items[:room])
            self._count_lost(items[room:])
            self._changed.notify()

    def _work(self, facts: RunFacts) -> None:
        """The thread: connect, send what is queued until the run ends, then end it there."""

        def forget() -> None:
            if facts.first_batch == 0:
                self._target.begin_anew(facts.folder)

        def connect() -> None:
            self._session = self._target.open(facts, lambda text: self._warn(text))

        if not (self._persist(forget, "the run") and self._persist(connect, "the run")):
            return
        assert self._session is not None
        if facts.first_batch > 0 and self._target.is_store:
            self._catch_up(self._session, facts.first_batch)
        while self._send_some(self._session):
            pass
        late = self._target.is_store and not self._target.is_in_order
        if late and self._lost.pop(KINDS[0], 0):  # the queue was too short
            self._catch_up(self._session, sys.maxsize)
        assert self._status is not None
        self._is_ended = self._persist(partial(self._session.end, self._status), "the run's end")

    def _catch_up(self, session: Session, last_batch: int) -> None:
        """Send what metrics.jsonl has up to a batch, and the place has not.

        That is what earlier processes logged before they were killed, or while it was away.
        """
        lacking: list[MetricPoint] = []

        def compare() -> None:
            found = find_lacking(self._record, last_batch, session.steps)
            lacking[:] = [MetricPoint(*value) for value in found]

        if not (self._record.exists() and self._persist(compare, "a look at what it has")):
            return
        n_sent = 0
        for start in range(0, len(lacking), session.max_points):
            points = lacking[start : start + session.max_points]
            if self._persist(*_request(session, points, self._note)):
                n_sent += len(points)
                continue
            self._count_lost(lacking[start:] if self._out_of_time() else points)
            if self._out_of_time():
                return
        if n_sent:
            self._note(f"{self._target.label} has {short_count(n_sent)} values that it lacked")

    def _send_some(self, session: Session) -> bool:
        """Wait for work and send one request; False when nothing more can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._tags_due or self._status)
            # Steps may be milliseconds apart: one request for those of two seconds.
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
        """Send those tags of events.jsonl that have changed."""
        tags = event_tags(read_events(self._record.parent))
        new = {name: text for name, text in tags.items() if self._tagged.get(name) != text}
        if new:
            tag(session, new)
            self._tagged |= new

    def _next_items(self, most: int) -> list[Item]:
        """What goes out together: values up to `most`, or one of anything else."""
        points = list(takewhile(_is_point, islice(self._waiting, most)))
        return points or list(islice(self._waiting, 1))

    def _settle(self, items: Sequence[Item], *, sent: bool) -> None:
        """Take items off the queue: sent, or refused and counted. Late ones stay in it."""
        with self._changed:
            if not sent and self._out_of_time():
                return
            for _ in items:
                self._waiting.popleft()
            if not sent:
                self._count_lost(items)

    def _persist(self, action: Callable[[], None], what: str) -> bool:
        """Do `action` until it succeeds; False if `what` is refused, or time runs out."""
        failed = 0

        def again(error: Exception, failures: int) -> float:
            nonlocal failed
            failed = failures
            self._problem = describe(error)
            if _is_permanent(error) or self._target.is_permanent(error):
                self._refuse(what)
                raise _GivenUpError from error
            if failures == 2:  # one failure may be a lock of a moment
                self._report_outage()
            return backoff(failures, first=1.0, longest=_LONGEST_PAUSE, jitter=(1.0, 1.0))

        try:
            retry(action, again=again, wait=self._pause)
        except _GivenUpError:
            return False
        if failed > 1 and self._is_away:
            self._note(f"{self._target.label} works again")
        self._is_away = False
        return True

    def _report_outage(self) -> None:
        """Warn once; after training it is reported with what is lost, which then comes soon."""
        self._is_away = True
        with self._changed:
            soon = time.monotonic() + self._target.patience_while_away
            self._deadline = min(self._deadline, soon) if self._status else self._deadline
        if self._status is None:
            self._warn(
                f"{self._target.label} fails: {self._problem}; training continues, sending is tried"
                " again"
            )

    def _refuse(self, what: str) -> None:
        """Say the first refusal; the others are likely to be the same, and are counted."""
        self._refusals += 1
        if self._refusals == 1:
            self._warn(
                f"{self._target.label} refuses {what}: {self._problem}; training continues"
                " without it"
            )

    def _pause(self, seconds: float) -> None:
        """Wait before another try, at most a second once the run has ended.

        Raises:
            _GivenUpError: time runs out.
        """
        with self._changed:
            if self._status is None:
                self._changed.wait_for(lambda: self._status, seconds)
            else:
                self._changed.wait(min(1.0, self._left()))
        if self._out_of_time():
            raise _GivenUpError

    def _out_of_time(self) -> bool:
        return self._left() == 0.0

    def _left(self) -> float:
        """Seconds until `end`'s timeout."""
        return max(0.0, self._deadline - time.monotonic())

    def _count_lost(self, items: Sequence[Item]) -> None:
        self._lost.update(_kind(item) for item in items)

    def _report_lost(self, *, cut_off: bool) -> None:
        """One line for what the target did not get, if anything."""
        with self._changed:
            self._count_lost(list(self._waiting))
        missing = [
            f"{short_count(n)} {kind}" if kind in KINDS else kind for kind, n in self._lost.items()
        ]
        if cut_off or not self._is_ended:
            missing.append("the end of the run")
        elif self._session is None and not missing:
            missing.append("the run")
        if not self._target.is_store:
            return
        self.has_all = not (missing or self._refusals)
        if not self.has_all:
            folder = self._record.parent
            later = f"; later: {command_line('track', f'run={folder}')}" * self._record.exists()
            self._warn(
                f"{self._target.label} lacks {', '.join(missing) or 'what it refused'}:"
                f" {self._problem or 'out of time'}; metrics.jsonl has every value{later}"
            )


def _request(
    session: Session, items: Sequence[Item], note: Callable[[str], None]
) -> tuple[Callable[[], None], str]:
    """The call that sends `items`, which are all points or one other thing, and its name."""
    first = items[0]
    if isinstance(first, Task):
        return partial(first.act, session, note), first.name
    if isinstance(first, Samples):
        return partial(session.samples, first), f"the samples of batch {first.batch}"
    if isinstance(first, Path):
        return partial(session.upload, first), first.name
    points = [item for item in items if isinstance(item, MetricPoint)]
    return partial(session.send, points), f"{len(points)} metric values"


def _is_permanent(error: Exception) -> bool:
    """Whether an error would come again: a file that cannot be read is no outage of the place."""
    names_file = isinstance(error, OSError) and error.filename is not None
    return isinstance(error, _PERMANENT) or (names_file and not disk_full(error))


def _is_point(item: Item) -> bool:
    return isinstance(item, MetricPoint)


def _kind(item: Item) -> str:
    return item.name if isinstance(item, Path | Task) else KINDS[isinstance(item, Samples)]


def _discard(text: str) -> None:
    """Print nothing."""


_MOST_KINDS, _LONGEST = 20, 500
_OWN = ("start", "decision")  # the supervisor's, which have tags of their own


def event_tags(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Tags of a run's events, in the order in which they were written; none where there are none.

    Returns:
        `events.KIND`: how many of a kind (of kinds beyond the twentieth together: `events.others`);
        `events.last`: the newest. Of a supervised run `supervise.attempts`, `supervise.restarts`,
        `supervise.last` (the newest decision), `supervise.cause` (why the attempt before it ended)
        and `supervise.bad_nodes` (machines that a check found bad).
    """
    events = list(events)
    seen = [event for event in events if event["kind"] not in _OWN]
    counts = Counter[str]()
    for event in seen:
        kind = str(event["kind"])
        counts[kind if kind in counts or len(counts) < _MOST_KINDS else "others"] += 1
    tags = {f"events.{kind}": str(n) for kind, n in counts.items()}
    if seen:
        tags["events.last"] = _line(seen[-1])
    return {**tags, **_supervised(events)}


def _supervised(events: list[Mapping[str, Any]]) -> dict[str, str]:
    decisions = [event for event in events if event["kind"] == "decision"]
    starts = sum(event["kind"] == "start" for event in events)
    tags = {"supervise.attempts": str(starts)} if starts else {}
    if decisions:
        bad = {node for event in decisions for node in names_in(event, "bad_nodes")}
        tags["supervise.restarts"] = str(sum(map(is_restart, decisions)))
        tags["supervise.last"] = _line(decisions[-1])
        tags |= {"supervise.cause": str(cause)} if (cause := decisions[-1].get("cause")) else {}
        tags |= {"supervise.bad_nodes": _cut(", ".join(sorted(bad)))} if bad else {}
    return tags


def _line(event: Mapping[str, Any]) -> str:
    """When, at which step, what was seen and what was done."""
    when = datetime.fromtimestamp(float(event["time"]), timezone.utc)
    step = "" if event.get("step") is None else f" step {event['step']}"
    done = event.get("done") or event.get("action") or "nothing is done"
    kind = "" if event["kind"] in _OWN else f" {event['kind']}:"
    return _cut(public(f"{when:%Y-%m-%d %H:%M:%S} UTC{step}{kind} {event.get('what')}; {done}"))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
