"""The run in MLflow, from a thread of its own: parameters, metrics, tags, recipe and report.

The tracker calls it on the main rank. The idea: MLflow takes seconds to import and its store may be
far away or gone, so everything happens in a daemon thread fed by a queue that starts after the
first training step; training never waits and never fails because of it. What could not be sent is
counted and said at the end; metrics.jsonl has it in any case.

A resume repeats the steps after its checkpoint. MLflow cannot delete metrics, so it holds these
steps twice; metrics.jsonl holds them once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.track.format import count
from llmfoundry.track.mlflow_store import (
    MAX_METRICS,
    RUN_ID_FILE,
    Point,
    RunFacts,
    Session,
    check_uri,
    error_code,
    metric_name,
    open_session,
    public,
)

STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_COLLECT_SECONDS = 2.0
_MAX_WAITING = 500_000  # points kept while the store is away: about 100 MB
_LONGEST_PAUSE = 60.0
# Answers that a repetition would not change.
_PERMANENT = {
    "BAD_REQUEST",
    "ENDPOINT_NOT_FOUND",
    "INVALID_PARAMETER_VALUE",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
}
T = TypeVar("T")


class MlflowWriter:
    """Feeds MLflow. `config` is filled; `note` and `warn` print a line, from the thread too.

    Raises:
        UserError: logger.tracking_uri is of no kind that MLflow writes to.
    """

    def __init__(
        self,
        config: LoggerConfig,
        *,
        run_name: str,
        run_folder: Path,
        params: Mapping[str, str],
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        assert config.tracking_uri is not None and config.experiment_name is not None
        check_uri(config.tracking_uri)
        self._uri, self._experiment = config.tracking_uri, config.experiment_name
        self._name, self._folder = run_name, run_folder
        self._params, self._note, self._warn = dict(params), note, warn
        self._began = _now()
        self._points: deque[Point] = deque()
        self._files: deque[Path] = deque()
        self._changed = threading.Condition()
        self._status: str | None = None  # how the run ended; None while it goes on
        self._deadline = float("inf")  # on the monotonic clock, set by close()
        self._refused = False  # the store will never take this run
        self._lost = 0
        self._problem = ""
        self._thread: threading.Thread | None = None

    def start(self, *, resume: bool, tags: Mapping[str, str]) -> None:
        """Begin to send; call after the first training step. Without `resume` a new MLflow run."""
        if self._thread is not None:
            return
        if not resume:
            (self._folder / RUN_ID_FILE).unlink(missing_ok=True)
        facts = RunFacts(
            experiment=self._experiment,
            name=self._name,
            folder=self._folder,
            began=self._began,
            params=self._params,
            tags=dict(tags),
            say=self._warn,
        )
        self._thread = threading.Thread(
            target=self._work, args=(facts,), name="mlflow", daemon=True
        )
        self._thread.start()

    def log(self, batch: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step; returns at once."""
        now = _now()
        points = [Point(metric_name(n), float(v), now, batch) for n, v in metrics.items()]
        with self._changed:
            room = 0 if self._refused else max(0, _MAX_WAITING - len(self._points))
            self._points.extend(points[:room])
            self._lost += len(points[room:])
            self._changed.notify()

    def file(self, path: Path) -> None:
        """Queue a file to be kept with the run, as it is when its turn comes."""
        with self._changed:
            self._files.append(path)
            self._changed.notify()

    def close(self, status: str, *, timeout: float = 30.0) -> None:
        """Send the rest and mark the run finished, failed or killed; waits `timeout` s at most."""
        if self._thread is None:
            return
        with self._changed:
            self._status = STATUS[status]
            self._deadline = time.monotonic() + timeout
            self._changed.notify()
        patience = min(3.0, timeout)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._note(f"sending the rest to MLflow, for at most {timeout:.0f} s")
            self._thread.join(timeout - patience + 0.5)
        self._tell_lost(cut_off=self._thread.is_alive())
        self._note = self._warn = (
            _nobody  # a thread that was cut off is not to speak into the final message
        )

    def _work(self, facts: RunFacts) -> None:
        """The thread: connect, send what is queued until the run ends, then end MLflow's run."""
        session = self._persist(partial(open_session, self._uri, facts), "the run")
        if session is None:
            self._refused = True
            return
        while self._send_some(session):
            pass
        assert self._status is not None
        self._persist(partial(session.end, self._status), "the run's end")

    def _send_some(self, session: Session) -> bool:
        """Wait for work and send one request of each kind; False when nothing more can come."""
        with self._changed:
            self._changed.wait_for(lambda: self._points or self._files or self._status)
            if self._status is None:
                # Steps may be milliseconds apart: one request for those of two seconds.
                self._changed.wait_for(lambda: self._status, _COLLECT_SECONDS)
            points = list(islice(self._points, MAX_METRICS))
            path = self._files[0] if self._files else None
        if points:
            sent = self._persist(partial(session.send, points), f"{len(points)} metric values")
            self._settle(self._points, len(points), sent=bool(sent))
        if path is not None:
            sent = self._persist(partial(session.upload, path), path.name)
            self._settle(self._files, 1, sent=bool(sent))
        with self._changed:
            done = self._status is not None and not (self._points or self._files)
        return not (done or self._out_of_time())

    def _settle(self, queue: deque[Any], n: int, *, sent: bool) -> None:
        """Take `n` entries off the queue: sent, or refused and counted. Late ones stay in it."""
        with self._changed:
            if not sent and self._out_of_time():
                return
            for _ in range(n):
                queue.popleft()
            if not sent and queue is self._points:
                self._lost += n

    def _persist(self, action: Callable[[], T], what: str) -> T | None:
        """Do `action` until it succeeds; None if the store refuses `what`, or time runs out."""
        failures = 0
        while True:
            try:
                result = action()
            except Exception as error:
                failures += 1
                self._problem = _describe(error)
                if _is_permanent(error):
                    self._warn(f"MLflow ({public(self._uri)}) refuses {what}: {self._problem}")
                    return None
                # One failure may be a lock of a moment; the second is an outage, said once.
                if failures == 2 and self._status is None:
                    self._warn(
                        f"MLflow ({public(self._uri)}) does not answer: {self._problem}; training"
                        " goes on, sending is tried again"
                    )
                if not self._pause(min(2.0 ** (failures - 1), _LONGEST_PAUSE)):
                    return None
            else:
                if failures > 1:
                    self._note(f"MLflow ({public(self._uri)}) answers again")
                return result

    def _pause(self, seconds: float) -> bool:
        """Wait before another try, at most a second once the run has ended; False: give up."""
        with self._changed:
            if self._status is None:
                self._changed.wait_for(lambda: self._status, seconds)
            else:
                self._changed.wait(max(0.0, min(1.0, self._deadline - time.monotonic())))
        return not self._out_of_time()

    def _out_of_time(self) -> bool:
        return time.monotonic() >= self._deadline

    def _tell_lost(self, *, cut_off: bool) -> None:
        """One line for what MLflow did not get, if anything."""
        with self._changed:
            lost = self._lost + len(self._points)
            missing = [path.name for path in self._files]
        if lost:
            missing.insert(0, f"{count(lost)} metric values")
        if missing or cut_off or self._refused:
            self._warn(
                f"MLflow ({public(self._uri)}) lacks {', '.join(missing) or 'the end of the run'}:"
                f" {self._problem or 'out of time'}; metrics.jsonl has every value"
            )


def _is_permanent(error: Exception) -> bool:
    """Whether trying again is in vain: a driver that is not installed, or a refusal."""
    missing = isinstance(error, ImportError) or type(error).__name__ == "NoSuchModuleError"
    return missing or error_code(error) in _PERMANENT


def _now() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def _nobody(text: str) -> None:
    """Hears nothing."""


def _describe(error: Exception) -> str:
    """The first line of an error, without passwords, at most 200 characters."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = text.split(": Max retries exceeded")[0]  # what follows repeats the address
    return public(text if len(text) <= 200 else text[:197] + "...")
