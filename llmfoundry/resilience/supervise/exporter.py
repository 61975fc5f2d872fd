"""The supervisor's own state for Prometheus, at a port or in a file for node-exporter.

A dead trainer serves nothing, so the supervisor calls `update` as its state changes and `end` last.
The idea: a scraper needs to see the end too, so the port stays open until one more scrape, and the
file for good.
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

_PREFIX = "llmfoundry_supervisor_"
STATES = ("starting", "training", "checking", "waiting", "ended")
_PORT_OFFSET, _LAST_PORT = 100, 65_535  # other runs of a machine have the ports beside the run's
_WRITE_SECONDS = 15.0  # between two writes of the file
_LINGER_SECONDS = 90.0  # for the end to be scraped: one and a half of the usual minute


@dataclass(frozen=True)
class ExportTo:
    """Where the state is served; None: not there."""

    host: str = "127.0.0.1"
    port: int | None = None
    textfile: str | None = None


def export_to(supervise: SuperviseConfig, logger: LoggerConfig) -> ExportTo | None:
    """Where a recipe's sections (`logger` filled) set it; None: nowhere."""
    port, textfile = supervise.prometheus_port, supervise.prometheus_textfile
    if logger.prometheus and port is None and logger.prometheus_port is not None:
        fits = logger.prometheus_port + _PORT_OFFSET <= _LAST_PORT
        port = logger.prometheus_port + (_PORT_OFFSET if fits else -_PORT_OFFSET)
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
    """Serves the state; a failure to serve it is reported once, and nothing waits for it."""

    def __init__(self, run: str, where: ExportTo | None) -> None:
        """Serve from now on, unless `where` is None.

        Raises:
            UserError: Prometheus' package is not installed, or the file's folder is not there.
        """
        self._run, self._where = run, where
        self._now = State()
        self._scrapes, self._reported = 0, False
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

    def end(self, status: int, is_stopped: Callable[[], bool]) -> None:
        """Serve the end until it was scraped once, unless nobody scrapes or a scheduler waits.

        Args:
            status: the supervisor's exit status.
            is_stopped: whether a signal has made it stop.
        """
        self.update(state="ended", exit_status=status)
        scrapes, deadline = self._scrapes, time.monotonic() + _LINGER_SECONDS
        while (
            self._server is not None
            and status != SAVED
            and 0 < self._scrapes == scrapes
            and time.monotonic() < deadline
            and not is_stopped()
        ):
            time.sleep(0.1)
        if self._server is not None:
            time.sleep(0.2)  # the answer is on its way
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """The metric families of a scrape (prometheus_client's custom collector)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._now
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        families = (
            (gauge, "timestamp_seconds", "Time of this scrape.", time.time()),
            (gauge, "last_attempt_status", "Exit status of the last attempt.", now.last_status),
            (gauge, "exit_status", "Exit status of the supervisor, at its end.", now.exit_status),
            (gauge, "checkpoint_step", "Step of the newest checkpoint; -1: none.", now.checkpoint),
            (counter, "attempts", "Attempts begun.", now.attempts),
            (counter, "restarts", "Attempts begun after another had failed.", now.restarts),
        )
        for family_type, name, meaning, value in families:
            if value is not None:
                family = family_type(f"{_PREFIX}{name}", meaning, labels=["run"])
                family.add_metric([self._run], value)
                yield family
        meaning = "1: what the supervisor does."
        states = GaugeMetricFamily(f"{_PREFIX}state", meaning, labels=["run", "state"])
        for name in STATES:
            states.add_metric([self._run, name], name == now.state)
        yield states
        self._scrapes += 1

    def _keep_writing(self) -> None:
        while self._now.exit_status is None:
            time.sleep(_WRITE_SECONDS)
            self._try(self._write)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            if not self._reported:
                print_stderr(f"supervise: its state is not served for Prometheus: {error}")
            self._reported = True

    def _open(self) -> None:
        assert self._where is not None and self._where.port is not None
        key = "supervise.prometheus_port"
        self._server = serve(self._where.host, self._where.port, self._registry, key=key)

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        assert self._where is not None and self._where.textfile is not None
        write_to_textfile(self._where.textfile, self._registry)
        self._scrapes -= 1  # that was no scrape
