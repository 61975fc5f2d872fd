"""What a supervisor says of itself to Prometheus: at a port, in a file, and after its end."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.resilience.supervise import exporter as module
from llmfoundry.resilience.supervise.exporter import STATES, Exporter, ExportTo, export_to
from tests.loggers.hearing import closed_port

pytest.importorskip("prometheus_client", reason="needs the package prometheus-client")


def scrape(port: int) -> str:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()


def samples(text: str) -> dict[str, float]:
    """By name, and of the state by its name."""
    from prometheus_client.parser import text_string_to_metric_families

    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert {sample.labels["run"] for sample in found} == {"mine"}
    start = "llmfoundry_supervisor_"
    return {s.labels.get("state", s.name.removeprefix(start)): s.value for s in found}


def test_the_state_is_served_and_the_end_until_it_was_seen() -> None:
    port = closed_port()
    exporter = Exporter("mine", ExportTo(port=port))
    first = samples(scrape(port))
    assert first["starting"] == 1 and first["checkpoint_step"] == -1
    assert "exit_status" not in first and "last_attempt_status" not in first
    values = {"attempts": 2, "restarts": 1, "last_attempt_status": -9, "checkpoint_step": 40}
    exporter.update("waiting", **values)
    text = scrape(port)
    found = samples(text)
    assert (found["attempts_total"], found["restarts_total"]) == (2, 1)
    assert (found["last_attempt_status"], found["checkpoint_step"]) == (-9, 40)
    assert {name: found[name] for name in STATES} == dict.fromkeys(STATES, 0) | {"waiting": 1}
    assert abs(found["timestamp_seconds"] - time.time()) < 600
    if shutil.which("promtool"):
        words = ["promtool", "check", "metrics"]
        done = subprocess.run(words, input=text, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    ending = threading.Thread(target=lambda: exporter.end(93, lambda: False))
    ending.start()
    time.sleep(0.3)
    assert ending.is_alive()  # nobody has seen it
    assert samples(scrape(port))["exit_status"] == 93
    ending.join(10)
    assert not ending.is_alive()
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)


def test_who_is_asked_or_is_to_be_started_again_waits_for_no_scrape() -> None:
    for status, asked in ((75, False), (93, True)):
        exporter = Exporter("mine", ExportTo(port=closed_port()))
        began = time.monotonic()
        exporter.end(status, lambda asked=asked: asked)  # type: ignore[misc]
        assert time.monotonic() - began < 5


def test_a_file_stays_with_the_exit_status(tmp_path: Path) -> None:
    file = tmp_path / "run-supervisor.prom"
    exporter = Exporter("mine", ExportTo(textfile=str(file)))
    assert samples(file.read_text())["starting"] == 1
    exporter.end(93, lambda: False)
    assert samples(file.read_text())["exit_status"] == 93
    assert [*tmp_path.iterdir()] == [file]
    with pytest.raises(UserError, match=r"^supervise.prometheus_textfile: .* is no folder"):
        Exporter("mine", ExportTo(textfile=str(tmp_path / "nowhere/x.prom")))


def test_a_port_that_is_taken_is_reported_once_and_had_later(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINGER_SECONDS", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        exporter = Exporter("mine", ExportTo(port=port))
        exporter.update(attempts=1)
        said = capsys.readouterr().err
        assert said.count("is not served for Prometheus") == 1
        assert "write another supervise.prometheus_port" in said
    exporter.update(attempts=2)
    assert samples(scrape(port))["attempts_total"] == 2
    exporter.end(0, lambda: False)


def test_where_it_is_served_goes_by_the_runs_own() -> None:
    def filled(**keys: object) -> LoggerConfig:
        config = LoggerConfig(**keys)  # type: ignore[arg-type]
        config.fill()
        return config

    assert export_to(SuperviseConfig(), filled()) is None
    assert export_to(SuperviseConfig(), filled(prometheus=True)) == ExportTo("127.0.0.1", 9564)
    everywhere = filled(prometheus=True, prometheus_host="0.0.0.0", prometheus_port=80)
    assert export_to(SuperviseConfig(), everywhere) == ExportTo("0.0.0.0", 180)
    last = filled(prometheus=True, prometheus_port=65_500)
    assert export_to(SuperviseConfig(), last) == ExportTo("127.0.0.1", 65_400)
    file = filled(prometheus=True, prometheus_textfile="/n/run.prom")
    wanted = ExportTo("127.0.0.1", None, "/n/run-supervisor.prom")
    assert export_to(SuperviseConfig(), file) == wanted
    assert export_to(SuperviseConfig(prometheus_port=7), filled()) == ExportTo("127.0.0.1", 7)
    (line,) = SuperviseConfig(prometheus_textfile="x.txt").check()
    assert line.startswith("supervise.prometheus_textfile: 'x.txt' does not end in .prom")
