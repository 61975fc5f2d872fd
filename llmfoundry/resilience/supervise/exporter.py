"""The supervisor's own state for Prometheus, at a port or in a file for node-exporter.

A trainer that is dead serves nothing, so somebody beside it has to say that it is. The supervisor
calls `update` as its state changes and `end` last. The idea: who scrapes needs to see the end too,
so a port stays open until somebody has asked once more, and a file stays for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmfoundry.exit_status import SAVED
from llmfoundry.loggers.prometheus_logger import check_textfile, need_client, serve
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.resilience.supervise import SuperviseConfig
from llmfoundry.resilience.supervise.notify import print_stderr

STATES = ("starting", "training", "checking", "waiting", "ended")
_APART, _LAST_PORT = 100, 65_535  # other runs of a machine have the ports beside the run's own
_EVERY = 15.0  # seconds between two writes of the file
_LINGER = 90.0  # seconds that an end waits to be scraped: one and a half of the usual minutes


@dataclass(frozen=True)
class ExportTo:
    """Where the state can be had; None: not there."""

    host: str = "127.0.0.1"
    port: int | None = None
    textfile: str | None = None


def export_to(supervise: SuperviseConfig, logger: LoggerConfig) -> ExportTo | None:
    """Where a recipe wants it; None: nowhere.

    Args:
        supervise: its section.
        logger: its section, filled.
    """
    port, textfile = supervise.prometheus_port, supervise.prometheus_textfile
    if logger.prometheus and port is None and logger.prometheus_port is not None:
        apart = _APART if logger.prometheus_port + _APART <= _LAST_PORT else -_APART
        port = logger.prometheus_port + apart
    if logger.prometheus and textfile is None and logger.prometheus_textfile is not None:
        textfile = logger.prometheus_textfile.removesuffix(".prom") + "-supervisor.prom"
    if port is None and textfile is None:
        return None
    return ExportTo(logger.prometheus_host or "127.0.0.1", port, textfile)


@dataclass(frozen=True)
class State:
    """What is known of a supervisor and its run.

    Attributes:
        state: one of STATES.
        attempts: begun so far.
        restarts: of these, after a decision.
        last_status: of the last attempt that has ended; None: none has.
        checkpoint: the batch of the newest; -1: there is none.
        exit_status: of the supervisor; None: it has not ended.
    """

    state: str = "starting"
    attempts: int = 0
    restarts: int = 0
    last_status: int | None = None
    checkpoint: int = -1
    exit_status: int | None = None


class Exporter:
    """Serves the state; what cannot be served is told once, and nothing waits for it."""

    def __init__(self, run: str, where: ExportTo | None) -> None:
        """Serve from now on; nothing, where there is nowhere to.

        Raises:
            UserError: Prometheus' package is not installed, or the file's folder is not there.
        """
        self._run, self._where = run, where
        self._now = State()
        self._scrapes, self._told = 0, False
        self._server: Any = None
        if where is None:
            return
        need_client("supervise.prometheus_port")
        if where.textfile is not None:
            check_textfile("supervise.prometheus_textfile", where.textfile)
            threading.Thread(target=self._keep_writing, daemon=True).start()
        from prometheus_client import CollectorRegistry

        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.update()

    def update(self, **facts: Any) -> None:
        """Serve what has changed of the state."""
        self._now = replace(self._now, **facts)
        if self._where is None:
            return
        if self._where.port is not None and self._server is None:
            self._try(self._open)
        if self._where.textfile is not None:
            self._try(self._write)

    def end(self, status: int, is_asked: Callable[[], bool]) -> None:
        """Serve the end until it was scraped once, unless nobody ever has or a scheduler waits.

        Args:
            status: the supervisor's exit status.
            is_asked: whether somebody has asked it to end at once.
        """
        self.update(state="ended", exit_status=status)
        scrapes, deadline = self._scrapes, time.monotonic() + _LINGER
        while (
            self._server is not None
            and status != SAVED
            and 0 < self._scrapes == scrapes
            and time.monotonic() < deadline
            and not is_asked()
        ):
            time.sleep(0.1)
        if self._server is not None:
            time.sleep(0.2)  # the answer is on its way
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """The families of a scrape, as prometheus_client has it of a custom collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._now
        numbers = {
            "timestamp_seconds": ("When the supervisor was last there.", time.time()),
            "last_attempt_status": ("Exit status of the last attempt.", now.last_status),
            "exit_status": ("Exit status of the supervisor, which has ended.", now.exit_status),
            "checkpoint_step": ("Step of the newest checkpoint; -1: none.", now.checkpoint),
        }
        for name, (meaning, value) in numbers.items():
            if value is not None:
                gauge = GaugeMetricFamily(_named(name), meaning, labels=["run"])
                gauge.add_metric([self._run], value)
                yield gauge
        counts = {"attempts": ("Attempts begun.", now.attempts)}
        counts["restarts"] = ("Attempts begun after another had failed.", now.restarts)
        for name, (meaning, count) in counts.items():
            counter = CounterMetricFamily(_named(name), meaning, labels=["run"])
            counter.add_metric([self._run], count)
            yield counter
        states = GaugeMetricFamily(
            _named("state"), "1: what the supervisor does.", labels=["run", "state"]
        )
        for name in STATES:
            states.add_metric([self._run, name], name == now.state)
        yield states
        self._scrapes += 1

    def _keep_writing(self) -> None:
        while self._now.exit_status is None:
            time.sleep(_EVERY)
            self._try(self._write)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            if not self._told:
                print_stderr(f"supervise: its state is not served for Prometheus: {error}")
            self._told = True

    def _open(self) -> None:
        assert self._where is not None and self._where.port is not None
        key = "supervise.prometheus_port"
        self._server = serve(self._where.host, self._where.port, self._registry, key=key)

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        assert self._where is not None and self._where.textfile is not None
        write_to_textfile(self._where.textfile, self._registry)
        self._scrapes -= 1  # that was no scrape


def _named(name: str) -> str:
    return f"llmfoundry_supervisor_{name}"
