"""Prometheus exporter of the supervisor's state, at a port or in a file for node-exporter.

A run that has failed exports nothing, so the supervisor exports its own state. It calls `update` on
every change and `end` last. The final state must be scraped too: the port stays open until one more
scrape, and the file remains.
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
_PORT_OFFSET, _LAST_PORT = 100, 65_535  # adjacent ports belong to other runs of the machine
_WRITE_SECONDS = 15.0  # between two writes of the file
_LINGER_SECONDS = 90.0  # wait for the last scrape: 1.5 times the usual interval


@dataclass(frozen=True)
class ExportTo:
    """Destinations of the exported state; None: not used."""

    host: str = "127.0.0.1"
    port: int | None = None
    textfile: str | None = None


def export_to(supervise: SuperviseConfig, logger: LoggerConfig) -> ExportTo | None:
    """Return the destinations that a recipe sets (`logger` resolved); None: none."""
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
    """Exporter of the supervisor's state. A failure is reported once and does not block."""

    def __init__(self, run: str, where: ExportTo | None) -> None:
        """Start to export, unless `where` is None.

        Raises:
            UserError: prometheus_client is not installed, or the file's folder does not exist.
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
        """Export changes: the state (one of STATES), and metrics by name."""
        self._state = state or self._state
        self._values |= values
        if self._where is None:
            return
        if self._where.port is not None and self._server is None:
            self._try(self._open)
        if self._where.textfile is not None:
            self._try(self._write)

    def end(self, status: int, is_stopped: Callable[[], bool]) -> None:
        """Export the final state, and wait until it was scraped once.

        Do not wait if there were no scrapes so far, or if the run was stopped to be resumed.

        Args:
            status: exit status of the supervisor.
            is_stopped: returns whether the supervisor has received a stop signal.
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
            time.sleep(0.2)  # let the response be sent
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of a scrape (custom collector of prometheus_client)."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def family(name: str, meaning: str, value: float) -> Any:
            kind = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            metrics = kind(f"{_PREFIX}{name}", meaning, labels=["run"])
            metrics.add_metric([self._run], value)
            return metrics

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
        self._scrapes -= 1  # `collect` has counted this write as a scrape
