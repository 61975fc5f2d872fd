"""The supervisor's own state for Prometheus, at a port or in a file for node-exporter.

A dead trainer serves nothing, so the supervisor calls `update` as its state changes and `end` last.
The idea: a scraper needs to see the end too, so the port stays open until one more scrape, and the
file for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llmfoundry.exit_status import SAVED
from llmfoundry.loggers.metrics_server import serve
from llmfoundry.loggers.prometheus_logger import check_textfile, need_client
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.resilience import SuperviseConfig
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


_METRICS = {
    "last_attempt_status": "Exit status of the last attempt.",
    "exit_status": "Exit status of the supervisor, at its end.",
    "checkpoint_step": "Step of the newest checkpoint; -1: none.",
    "attempts": "Attempts begun.",
    "restarts": "Attempts begun after another had failed.",
}
_COUNTERS = ("attempts", "restarts")


class Exporter:
    """Serves the state; a failure to serve it is reported once, and nothing waits for it."""

    def __init__(self, run: str, where: ExportTo | None) -> None:
        """Serve from now on, unless `where` is None.

        Raises:
            UserError: Prometheus' package is not installed, or the file's folder is not there.
        """
        self._run, self._where = run, where
        self._state = STATES[0]
        self._values = {"attempts": 0, "restarts": 0, "checkpoint_step": -1}
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

    def update(self, state: str | None = None, **values: int) -> None:
        """Serve what has changed: the state, one of STATES, and metrics by name."""
        self._state = state or self._state
        self._values |= values
        if self._where is None:
            return
        if self._where.port is not None and self._server is None:
            self._try(self._open)
        if self._where.textfile is not None:
            self._try(self._write)

    def end(self, status: int, is_stopped: Callable[[], bool]) -> None:
        """Serve the end until it was scraped once, unless nobody scrapes or a scheduler waits.

        `is_stopped`: whether a signal has made the supervisor stop.
        """
        self.update("ended", exit_status=status)
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

        def family(name: str, meaning: str, value: float) -> Any:
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            made = kind(f"{_PREFIX}{name}", meaning, labels=["run"])
            made.add_metric([self._run], value)
            return made

        yield family("timestamp_seconds", "Time of this scrape.", time.time())
        for name, meaning in _METRICS.items():
            if name in self._values:
                yield family(name, meaning, self._values[name])
        meaning = "1: what the supervisor does."
        states = GaugeMetricFamily(f"{_PREFIX}state", meaning, labels=["run", "state"])
        for name in STATES:
            states.add_metric([self._run, name], name == self._state)
        yield states
        self._scrapes += 1

    def _keep_writing(self) -> None:
        while "exit_status" not in self._values:
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
