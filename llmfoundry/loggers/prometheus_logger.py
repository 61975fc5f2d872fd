"""Prometheus' side of a run: the newest metrics at a port, or in a file for node-exporter.

The tracker calls `prometheus_target`, a `BackgroundWriter` the rest. The idea: Prometheus comes and
asks, so nothing is kept here but the last value of each metric; events are counted in events.jsonl
when it asks, so that it also hears what the monitor of a hanging run and the supervisor have
written, and counts continue where an earlier process of the run had ended.
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
from llmfoundry.loggers.background_queue import LogTarget, MetricPoint, RunFacts, Samples
from llmfoundry.loggers.metrics_file import TOKEN
from llmfoundry.loggers.metrics_server import serve
from llmfoundry.loggers.pages.titles import title
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import public


class _Gauge(NamedTuple):
    """What a metric of metrics.jsonl is called here: in base units, as Prometheus has it."""

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
    "l2_norm/grad/global": _Gauge("gradient_norm", "Norm of the whole gradient."),
}
"""By their names in metrics.jsonl; all others are llmfoundry_metric{name="..."}."""
KINDS = (
    *("loss_spike", "gradient_spike", "not_finite", "slow_rank", "mfu_drop", "data_wait"),
    *("stall", "gpu", "save_failed", "hang", "waiting", "check", "returned"),
)
"""Events that are counted from 0 on: a count that begins at 1 has not increased to Prometheus."""
_MOST = 500  # metrics without a name of their own: norms of each parameter may be thousands


class RunCollector:
    """What is served: asked anew at each scrape (prometheus_client's custom collector)."""

    def __init__(self, run: str, folder: Path) -> None:
        """For a run of this name in a folder."""
        self._run, self._folder = run, folder
        self._values: dict[str, float] = {}
        self._batch, self._at = 0, 0.0
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._counted: tuple[Counter[str], int] = Counter(), 0
        self.left_out: set[str] = set()

    def take(self, points: Sequence[MetricPoint]) -> None:
        """Keep the newest value of each metric."""
        with self._lock:
            for point in points:
                others = len(self._values.keys() - GAUGES.keys())
                if point.name in self._values or point.name in GAUGES or others < _MOST:
                    self._values[point.name] = point.value
                else:
                    self.left_out.add(point.name)
                self._batch = max(self._batch, point.batch)
                self._at = max(self._at, point.milliseconds / 1000)

    def collect(self) -> Iterator[Any]:
        """The families of a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values, batch, at = dict(self._values), self._batch, self._at

        def gauge(name: str, meaning: str, value: float) -> Any:
            family = GaugeMetricFamily(f"llmfoundry_{name}", meaning, labels=["run"])
            family.add_metric([self._run], value)
            return family

        if batch:
            yield gauge("step", "Steps (batches) done.", batch)
            yield gauge("last_log_timestamp_seconds", "When a step was last logged.", at)
        for name, known in GAUGES.items():
            if name in values:
                yield gauge(known.name, known.meaning, values.pop(name) * known.times)
        if values:
            meaning = "Metrics of metrics.jsonl without a name of their own here."
            others = GaugeMetricFamily(
                "llmfoundry_metric", meaning, labels=["run", "name", "title"]
            )
            for name, value in sorted(values.items()):
                others.add_metric([self._run, name, title(name).text], value)
            yield others
        counts, restarts = self._count_events()
        meaning = "Lines of events.jsonl by kind."
        events = CounterMetricFamily("llmfoundry_events", meaning, labels=["run", "kind"])
        for kind, number in counts.items():
            events.add_metric([self._run, kind], number)
        yield events
        meaning = "Restarts by the supervisor."
        again = CounterMetricFamily("llmfoundry_restarts", meaning, labels=["run"])
        again.add_metric([self._run], restarts)
        yield again

    def _count_events(self) -> tuple[Counter[str], int]:
        """Events by kind, and restarts; read again where the file has changed."""
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
    """An open port, or a file that is written again."""

    max_points = 10_000

    def __init__(self, config: LoggerConfig, facts: RunFacts, say: Callable[[str], None]) -> None:
        """Serve.

        Raises:
            OSError: the port is taken, or not to be had.
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
        """All: nobody asks for what was."""
        return range(sys.maxsize)

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Serve these values from now on."""
        known = len(self._collector.left_out)
        self._collector.take(points)
        if self._collector.left_out and not known:
            self._say(
                f"Prometheus gets {_MOST} metrics beside those with a name of their own; others,"
                f" such as {min(self._collector.left_out)}, are in metrics.jsonl alone"
            )
        if self._textfile is not None:
            from prometheus_client import write_to_textfile

            write_to_textfile(self._textfile, self._registry)

    def samples(self, samples: Samples) -> None:
        """Texts are not for Prometheus."""

    def upload(self, path: Path) -> None:
        """Nor are files."""

    def end(self, status: str) -> None:
        """Serve no more: what has ended is to be missing, and not to stand still."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._textfile is not None:
            Path(self._textfile).unlink(missing_ok=True)


def prometheus_target(config: LoggerConfig, run_folder: Path) -> LogTarget:
    """The port, or the file, of a section that is filled.

    Raises:
        UserError: the package is not installed, or the file's folder is not there.
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
    """Refuse `key` where Prometheus' package is not installed.

    Raises:
        UserError: it is not.
    """
    if find_spec("prometheus_client") is None:
        raise UserError(
            f"{key}: needs the package prometheus-client; pip install prometheus-client"
        )


def check_textfile(key: str, path: str) -> None:
    """Refuse a file for node-exporter whose folder cannot be written.

    Raises:
        UserError: so it is.
    """
    folder = Path(path).absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(
            f"{key}: {public(str(folder))} is no folder that can be written; make it, or write"
            " another file"
        )


def _is_permanent(error: Exception) -> bool:
    """Whether an address can never be had; a taken port may be left by a run that ends."""
    is_nowhere = isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
    return isinstance(error, socket.gaierror) or is_nowhere
