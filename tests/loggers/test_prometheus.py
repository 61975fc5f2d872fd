"""Prometheus gets the newest metrics and counts of events; a real one, where it is installed.

Debian's package prometheus has promtool too; without it the tests that need it are skipped.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.events import add_event
from llmfoundry.loggers import metrics_server
from llmfoundry.loggers.background_queue import BackgroundWriter
from llmfoundry.loggers.writers import stores
from llmfoundry.recipe.logger import LoggerConfig
from tests.half_open import FOREIGN_HOSTS, LOCAL_HOSTS, get, half_sent, is_closed
from tests.loggers.hearing import Hears, closed_port, facts, finish, writer
from tests.tiny import ROOT

pytest.importorskip("prometheus_client", reason="needs the package prometheus-client")
RULES = ROOT / "llmfoundry/resilience/examples/prometheus-rules.yaml"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt install prometheus)"
)


def begin(folder: Path, heard: Hears, first: int = 0, **keys: Any) -> BackgroundWriter:
    sender = writer("prometheus", folder, heard, **keys)
    sender.start(facts(folder, first))
    return sender


@contextmanager
def taken(port: int) -> Iterator[None]:
    """Somebody else serves there."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        yield


def scrape(port: int) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()


def parsed(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and labels, in order, but for the run's."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"tiny"}
    return {
        (s.name.removeprefix("llmfoundry_"), *(v for k, v in s.labels.items() if k != "run")): (
            s.value
        )
        for s in samples
    }


def served(port: int, wanted: str) -> str:
    """What is served, once it has this."""
    deadline, text = time.monotonic() + 60, ""
    while time.monotonic() < deadline:
        try:
            text = scrape(port)
        except urllib.error.URLError:
            text = ""
        if wanted in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"{wanted} is not in {text}")


@pytest.fixture
def port() -> int:
    return closed_port()


@pytest.fixture
def sender(tmp_path: Path, port: int) -> Iterator[tuple[Path, Hears, BackgroundWriter]]:
    folder, heard = tmp_path / "tiny", Hears()
    folder.mkdir()
    add_event(folder, "hang", "of an attempt before", action="end")
    for action in ("restart", "restart_without", "stop"):
        add_event(folder, "decision", "x", action=action)
    made = begin(folder, heard, first=9, prometheus_port=port, prometheus_host="127.0.0.1")
    made.log(10, {"loss/train/total": 3.5, "throughput/device/mfu": 0.4, "lr-AdamW/group0": 1e-3})
    made.log(20, {"loss/train/total": 2.5, "memory/peak_allocated_mem": 1.5, "time/token": 40960})
    yield folder, heard, made
    finish(made)


def test_the_newest_of_each_metric_is_served_in_base_units_until_the_end(
    sender: tuple[Path, Hears, BackgroundWriter], port: int
) -> None:
    folder, heard, made = sender
    found = parsed(served(port, "train_loss"))
    wanted = {
        ("step",): 20,
        ("tokens",): 40960,
        ("train_loss",): 2.5,
        ("mfu_ratio",): 0.4,
        ("peak_memory_bytes",): 1.5 * 1024**3,
        ("metric", "lr-AdamW/group0", "learning rate, AdamW/group0"): 1e-3,
        ("restarts_total",): 2,
        ("events_total", "hang"): 1,
        ("events_total", "loss_spike"): 0,
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert abs(found[("last_log_timestamp_seconds",)] - time.time()) < 600
    add_event(folder, "hang", "by a monitor beside, while nothing is logged", action="end")
    assert parsed(scrape(port))[("events_total", "hang")] == 2
    finish(made)
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)
    assert [line for line in heard if "sending the rest" not in line] == []


def test_a_port_that_is_taken_is_reported_and_had_once_it_is_free(
    tmp_path: Path, port: int
) -> None:
    heard = Hears()
    with taken(port):
        made = begin(tmp_path / "tiny", heard, prometheus_port=port, prometheus_host="127.0.0.1")
        made.log(1, {"loss/train/total": 1.0})
        deadline = time.monotonic() + 60
        while not heard and time.monotonic() < deadline:
            time.sleep(0.02)
        assert heard[0] == (
            f"Prometheus (port {port}) fails: port {port} of 127.0.0.1 is taken, perhaps by another"
            " run; write another logger.prometheus_port; training continues, sending is tried again"
        )
    served(port, "train_loss")
    finish(made)
    assert heard[1:2] == [f"Prometheus (port {port}) works again"]


def test_a_port_that_stays_taken_holds_no_end_up(tmp_path: Path, port: int) -> None:
    heard = Hears()
    with taken(port):
        made = begin(tmp_path / "tiny", heard, prometheus_port=port, prometheus_host="127.0.0.1")
        made.log(1, {"loss/train/total": 1.0})
        finish(made, timeout=0.2)
    assert "track.py" not in heard.text()  # nothing is made up for later


def test_an_address_that_is_not_this_machines_is_refused_once(tmp_path: Path) -> None:
    heard = Hears()
    made = begin(tmp_path / "tiny", heard, prometheus_host="192.0.2.1")
    made.log(1, {"loss/train/total": 1.0})
    finish(made)
    assert len(heard) == 1 and "refuses the run" in heard[0]


def test_node_exporters_file_is_whole_at_any_time_and_gone_after_the_run(tmp_path: Path) -> None:
    heard, file = Hears(), tmp_path / "textfiles" / "run.prom"
    config = {"prometheus_textfile": str(file)}
    with pytest.raises(UserError, match=r"^logger.prometheus_textfile: .*textfiles is no folder"):
        writer("prometheus", tmp_path / "tiny", heard, **config)
    file.parent.mkdir()
    made = begin(tmp_path / "tiny", heard, **config)
    made.log(7, {"loss/train/total": 1.25})
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert parsed(file.read_text())[("train_loss",)] == 1.25
    finish(made)
    assert [*file.parent.iterdir()] == []


def test_thousands_of_norms_do_not_become_thousands_of_series(tmp_path: Path, port: int) -> None:
    heard = Hears()
    made = begin(tmp_path / "tiny", heard, prometheus_port=port, prometheus_host="127.0.0.1")
    norms = {f"l2_norm/grad/layer{i:04d}": float(i) for i in range(700)}
    made.log(1, norms)
    made.log(2, {**norms, "loss/train/total": 2.0})
    text = served(port, "train_loss")
    finish(made)
    assert text.count("llmfoundry_metric{") == 500
    assert len(heard) == 1 and "others, such as l2_norm/grad/layer0500, are in" in heard[0]


def test_a_run_that_has_ended_is_not_sent_there(tmp_path: Path) -> None:
    heard = Hears()
    assert stores([writer("prometheus", tmp_path, heard)], heard.append) == []
    assert heard == ["Prometheus (port 9464) shows a run that is under way; nothing is sent there"]


@pytest.mark.parametrize(
    ("keys", "line"),
    {
        ("prometheus_port",): "logger.prometheus_port: has no effect with logger.prometheus: f",
        ("prometheus", "prometheus_textfile"): "logger.prometheus_textfile: 'x.txt' does not end",
        ("prometheus", "prometheus_file", "prometheus_host"): (
            "logger.prometheus_host: has no effect without logger.prometheus_port"
        ),
    }.items(),
)
def test_keys_that_cannot_be_are_one_line(keys: tuple[str, ...], line: str) -> None:
    values: dict[str, Any] = {
        "prometheus": True,
        "prometheus_port": 9,
        "prometheus_textfile": "x.txt",
        "prometheus_file": "x.prom",
        "prometheus_host": "::1",
    }
    chosen = {key.replace("_file", "_textfile"): values[key] for key in keys}
    found = list(LoggerConfig(**chosen).check())
    assert len(found) == 1 and found[0].startswith(line), found


def test_a_file_alone_opens_no_port() -> None:
    config = LoggerConfig(prometheus=True, prometheus_textfile="x.prom")
    for _ in range(2):
        config.fill()
        assert (config.prometheus_port, config.prometheus_host) == (None, None)
    config = LoggerConfig(prometheus=True, prometheus_textfile="x.prom", prometheus_port=1)
    config.fill()
    assert (config.prometheus_port, config.prometheus_host) == (1, "127.0.0.1")


@needs_promtool
def test_promtool_finds_no_fault_in_what_is_served(
    sender: tuple[Path, Hears, BackgroundWriter], port: int
) -> None:
    from llmfoundry.loggers.prometheus_logger import GAUGES

    sender[2].log(30, dict.fromkeys(GAUGES, 1.0))
    text = served(port, "gpu_power_watts")
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_promtool
def test_the_alerts_fire_when_they_should(tmp_path: Path) -> None:
    tests = (ROOT / "tests/loggers/prometheus_rules_test.yaml").read_text()
    (tmp_path / "tests.yaml").write_text(tests.replace("RULES", str(RULES)))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_it_and_reports_of_a_hang(
    sender: tuple[Path, Hears, BackgroundWriter], port: int, tmp_path: Path
) -> None:
    folder, own = sender[0], closed_port()
    served(port, "train_loss")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "llm", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    process = subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address=127.0.0.1:{own}"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )

    def ask(query: str) -> list[Any]:
        words = urllib.parse.urlencode({"query": query})
        try:
            address = f"http://127.0.0.1:{own}/api/v1/query?{words}"
            return list(json.load(urllib.request.urlopen(address, timeout=10))["data"]["result"])
        except OSError:
            return []

    def until(query: str) -> Any:
        deadline = time.monotonic() + 90
        while not (found := ask(query)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert found, query
        return found[0]

    try:
        found = until('llmfoundry_train_loss{run="tiny"}')
        assert found["value"][1] == "2.5" and found["metric"]["job"] == "llm"
        until('count_over_time(llmfoundry_events_total{kind="hang"}[1m]) > 2')
        add_event(folder, "hang", "rank 1 hangs", action="end")
        fired = until('ALERTS{alertname="LlmfoundryEvent", kind="hang"}')
        assert fired["metric"]["alertstate"] == "firing"
        assert not ask("ALERTS{alertname!='LlmfoundryEvent'}")
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def metrics_port(port: int) -> Iterator[int]:
    """Of a server of one metric."""
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    Gauge("alive", "One.", registry=registry).set(1)
    server = metrics_server.serve("127.0.0.1", port, registry)
    yield port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS, None])
def test_metrics_of_this_machine_are_given_to_no_other_host(
    metrics_port: int, host: str | None
) -> None:
    assert b" 403 " in get(metrics_port, "/metrics", host)


@pytest.mark.parametrize("host", LOCAL_HOSTS)
def test_metrics_of_this_machine_are_given_to_its_own_names(metrics_port: int, host: str) -> None:
    reply = get(metrics_port, "/metrics", host)
    assert b" 200 " in reply and b"alive 1.0" in reply


def test_half_sent_scrapes_are_ended_and_hold_up_nobody(
    metrics_port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server, "HEAD_SECONDS", 2.0)
    monkeypatch.setattr(metrics_server, "MOST_CONNECTIONS", 10)
    threads_before = threading.active_count()  # other tests of this process leave some
    with half_sent(metrics_port, 40) as connections:
        assert "alive 1.0" in scrape(metrics_port)
        assert threading.active_count() - threads_before < 30
        assert all(is_closed(connection) for connection in connections[:29])
        connections[-1].send(b"y")  # a byte now and then is no more time
        assert all(is_closed(connection) for connection in connections)
    assert "alive 1.0" in scrape(metrics_port)
    assert capfd.readouterr().err == ""
