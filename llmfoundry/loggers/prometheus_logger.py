"""Prometheus logger: serves the newest metrics at a port, or in a file for node-exporter.

The tracker calls `prometheus_target`; a `BackgroundWriter` calls everything else. Prometheus
scrapes the run, so only the last value of each metric is stored. Events are counted from
events.jsonl at each scrape. The counts therefore include events of the hang monitor and of the
supervisor, and they continue after a restart.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from llmfoundry.errors import UserError
from llmfoundry.events import NAME as EVENTS
from llmfoundry.events import is_restart, read_events
from llmfoundry.loggers.background_queue import LogTarget, MetricPoint, RunFacts, TextSamples
from llmfoundry.loggers.metrics_file import TOKEN
from llmfoundry.loggers.metrics_server import serve
from llmfoundry.loggers.pages.titles import title
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import public


class _Gauge(NamedTuple):
    """Name, help text and factor of a metric; Prometheus uses base units (seconds, bytes)."""

    name: str
    meaning: str
    times: float = 1.0


GAUGES = {
    TOKEN: _Gauge("tokens", "Tokens trained on."),
    "loss/train/total": _Gauge("train_loss", "Training loss of the last logged step."),
    "metrics/eval/LanguageCrossEntropy": _Gauge("validation_loss", "Validation loss."),
    "throughput/tokens_per_sec": _Gauge("tokens_per_second", "Tokens a second, all devices."),
    "throughput/device/flops_per_sec": _Gauge("device_flops_per_second", "FLOPs of one device."),
    "throughput/device/mfu": _Gauge("mfu_ratio", "Model FLOPs utilisation, 0 to 1."),
    "time/data_wait": _Gauge("data_wait_seconds", "Wait for a step's rows."),
    "time/checkpoint_blocking": _Gauge("checkpoint_blocking_seconds", "Time a save takes."),
    "time/remaining_estimate": _Gauge("remaining_seconds", "Estimate of the time that remains."),
    "time/slowest_rank": _Gauge("slowest_rank_ratio", "Slowest process, times the median."),
    "memory/peak_allocated_mem": _Gauge("peak_memory_bytes", "Peak memory of the device.", 2.0**30),
    "gpu/temperature": _Gauge("gpu_temperature_celsius", "Highest of this process's GPU."),
    "gpu/power": _Gauge("gpu_power_watts", "Power of this process's GPU."),
    "gpu/energy_kwh": _Gauge("gpu_energy_joules", "Energy of all GPUs since the start.", 3.6e6),
    "cpu/energy_kwh": _Gauge("cpu_energy_joules", "Energy of all processors since then.", 3.6e6),
    "l2_norm/grad/global": _Gauge("gradient_norm", "Norm of the whole gradient."),
}
"""Gauges by metric name in metrics.jsonl; other metrics are llmfoundry_metric{name="..."}."""
KINDS = (
    *("loss_spike", "gradient_spike", "not_finite", "slow_rank", "mfu_drop", "data_wait"),
    *("stall", "gpu", "save_failed", "hang", "waiting", "check", "returned"),
)
"""Kinds of events whose counters start at 0. Prometheus sees no increase if one starts at 1."""
_MOST = 500  # maximal number of metrics outside GAUGES: there may be thousands of parameter norms


class RunCollector:
    """Custom collector of prometheus_client: returns the current metrics at each scrape.

    Attributes:
        left_out: names of metrics that exceed the maximal number.
    """

    def __init__(self, run: str, folder: Path) -> None:
        """Collect the metrics of the run with this name in a save folder."""
        self._run, self._folder = run, folder
        self._values: dict[str, float] = {}
        self._batch, self._at = 0, 0.0
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._counted: tuple[Counter[str], int] = Counter(), 0
        self.left_out: set[str] = set()

    def take(self, points: Sequence[MetricPoint]) -> None:
        """Store the newest value of each metric."""
        with self._lock:
            for point in points:
                n_others = len(self._values.keys() - GAUGES.keys())
                if point.name in self._values or point.name in GAUGES or n_others < _MOST:
                    self._values[point.name] = point.value
                else:
                    self.left_out.add(point.name)
                self._batch = max(self._batch, point.batch)
                self._at = max(self._at, point.milliseconds / 1000)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values, batch, at = dict(self._values), self._batch, self._at

        def gauge(name: str, meaning: str, value: float) -> Any:
            family = GaugeMetricFamily(f"llmfoundry_{name}", meaning, labels=["run"])
            family.add_metric([self._run], value)
            return family

        # progress and the metrics in GAUGES
        if batch:
            yield gauge("step", "Steps (batches) done.", batch)
            yield gauge("last_log_timestamp_seconds", "When a step was last logged.", at)
        for name, spec in GAUGES.items():
            if name in values:
                yield gauge(spec.name, spec.meaning, values.pop(name) * spec.times)

        # all other metrics, in one family
        if values:
            meaning = "Metrics of metrics.jsonl without a name of their own here."
            others = GaugeMetricFamily(
                "llmfoundry_metric", meaning, labels=["run", "name", "title"]
            )
            for name, value in sorted(values.items()):
                others.add_metric([self._run, name, title(name).text], value)
            yield others

        # counters of events
        counts, n_restarts = self._count_events()
        meaning = "Lines of events.jsonl by kind."
        events = CounterMetricFamily("llmfoundry_events", meaning, labels=["run", "kind"])
        for kind, number in counts.items():
            events.add_metric([self._run, kind], number)
        yield events
        meaning = "Restarts by the supervisor."
        restarts = CounterMetricFamily("llmfoundry_restarts", meaning, labels=["run"])
        restarts.add_metric([self._run], n_restarts)
        yield restarts

    def _count_events(self) -> tuple[Counter[str], int]:
        """Return the number of events by kind, and of restarts; read the file if it changed."""
        stamp = None
        with suppress(OSError):
            status = (self._folder / EVENTS).stat()
            stamp = (status.st_size, status.st_mtime_ns)
        if stamp is None or stamp != self._stamp:
            counts, restarts = Counter(dict.fromkeys(KINDS, 0)), 0
            for event in read_events(self._folder):
                counts[str(event["kind"])] += 1
                restarts += is_restart(event)
            self._stamp, self._counted = stamp, (counts, restarts)
        return self._counted


class PrometheusSession:
    """An open port, or a file that is rewritten after each request."""

    max_points = 10_000

    def __init__(self, config: LoggerConfig, facts: RunFacts, say: Callable[[str], None]) -> None:
        """Start to serve the run.

        Raises:
            OSError: the port is in use or not available.
        """
        from prometheus_client import CollectorRegistry

        self._say, self._textfile = say, config.prometheus_textfile
        self._collector = RunCollector(facts.name, facts.folder)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._collector)
        self._server = None
        if config.prometheus_port is not None:
            host = str(config.prometheus_host)
            self._server = serve(host, config.prometheus_port, self._registry)

    def steps(self, name: str) -> Container[int]:
        """Return all batches: only current values are served, so that nothing is missing."""
        return range(sys.maxsize)

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Serve these values from now on."""
        was_reported = bool(self._collector.left_out)
        self._collector.take(points)
        if self._collector.left_out and not was_reported:
            self._say(
                f"Prometheus gets {_MOST} metrics beside those with a name of their own; others,"
                f" such as {min(self._collector.left_out)}, are in metrics.jsonl alone"
            )
        if self._textfile is not None:
            from prometheus_client import write_to_textfile

            write_to_textfile(self._textfile, self._registry)

    def samples(self, samples: TextSamples) -> None:
        """Ignore texts: Prometheus stores numbers only."""

    def upload(self, path: Path) -> None:
        """Ignore files: Prometheus stores numbers only."""

    def end(self, status: str) -> None:
        """Stop serving: the metrics of an ended run must be missing, not constant."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._textfile is not None:
            Path(self._textfile).unlink(missing_ok=True)


def prometheus_target(config: LoggerConfig, run_folder: Path) -> LogTarget:
    """Return the target for the port or the file of a resolved `logger` section.

    Raises:
        UserError: the package is not installed, or the folder of the file is missing.
    """
    need_client("logger.prometheus")
    where = f"port {config.prometheus_port}"
    if config.prometheus_textfile is not None:
        check_textfile("logger.prometheus_textfile", config.prometheus_textfile)
        file = public(config.prometheus_textfile)
        where = file if config.prometheus_port is None else f"{where}, {file}"
    return LogTarget(
        f"Prometheus ({where})",
        partial(PrometheusSession, config),
        is_permanent=_is_permanent,
        patience_while_away=0.0,
        is_store=False,
    )


def need_client(key: str) -> None:
    """Check that the package prometheus-client is installed, which the recipe key `key` needs.

    Raises:
        UserError: it is not installed.
    """
    if find_spec("prometheus_client") is None:
        raise UserError(
            f"{key}: needs the package prometheus-client; pip install prometheus-client"
        )


def check_textfile(key: str, path: str) -> None:
    """Check that the folder of a file for node-exporter is writable.

    Raises:
        UserError: the folder does not exist or is not writable.
    """
    folder = Path(path).absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(
            f"{key}: {public(str(folder))} is no folder that can be written; make it, or write"
            " another file"
        )


def _is_permanent(error: Exception) -> bool:
    """Return whether an error is permanent: an address that is not of this machine.

    A port in use is not permanent: another run that ends may release it.
    """
    is_unavailable = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
    return isinstance(error, socket.gaierror) or is_unavailable
