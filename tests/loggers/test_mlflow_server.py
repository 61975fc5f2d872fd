"""A real `mlflow server` on loopback: it gets the run, is killed, and comes back or does not."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.events import add_event
from llmfoundry.loggers.background_queue import BackgroundWriter
from tests.loggers.hearing import Hears, closed_port, facts, finish, writer

try:
    importlib.metadata.version("mlflow")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("mlflow-skinny has no server; install mlflow", allow_module_level=True)


class Server:
    """An mlflow server's process, with a store that outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, closed_port()
        self._store = f"sqlite:///{folder}/mlflow.db"
        self.address = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        where = ["--host", "127.0.0.1", "--port", str(self._port), "--workers", "1"]
        files = str(self._folder / "files")
        kept = ["--backend-store-uri", self._store, "--artifacts-destination", files]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *where, *kept],
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # quicker to start
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 90
        while time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=2).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise AssertionError("mlflow server did not start")

    def kill(self) -> None:
        """End it and its workers at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def losses(self, folder: Path) -> list[tuple[int, float]]:
        """What its store holds, whether it runs or not."""
        client, run_id = connect(self._store, folder)
        history = client.get_metric_history(run_id, "loss/train/total")
        return sorted((m.step, m.value) for m in history)


def connect(uri: str, folder: Path) -> tuple[Any, str]:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri), (folder / "mlflow_run_id").read_text().strip()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    made.start()
    yield made
    made.kill()


def begin(server: Server, folder: Path, heard: Hears, first: int = 0) -> BackgroundWriter:
    address = server.address.replace("://", "://me:secret@")
    sender = writer("mlflow", folder, heard, tracking_uri=address)
    sender.start(facts(folder, first))
    return sender


def train(sender: BackgroundWriter, first: int, last: int) -> None:
    for batch in range(first + 1, last + 1):
        sender.log(batch, {"loss/train/total": 1 / batch})


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so() and time.monotonic() < until:
        time.sleep(0.05)
    assert is_so()


def wait_for(heard: Hears, words: str, lines: int) -> None:
    wait_until(lambda: len(heard) >= lines)
    assert len(heard) == lines and words in heard[-1], heard.text()


def test_a_server_gets_the_run_and_a_resumed_one_repeats_nothing(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard, folder = Hears(), tmp_path / "tiny"
    (tmp_path / "recipe.yaml").write_text("uri: http://me:secret@host\n")
    for first, last in ((0, 14), (9, 20)):  # the second was resumed after 9
        sender = begin(server, folder, heard, first)
        add_event(folder, "hang", f"a rank hangs after {first}", action="end")
        sender.events()
        train(sender, first, last)
        sender.samples(last, [("def f(", "x):")])
        sender.file(tmp_path / "recipe.yaml")
        finish(sender)
    assert capfd.readouterr() == ("", "")  # not a line of MLflow's own
    assert [line for line in heard if "sending the rest" not in line] == []  # a busy machine
    client, run_id = connect(server.address, folder)
    tags = client.get_run(run_id).data.tags
    assert tags["events.hang"] == "2" and tags["events.last"].endswith("hangs after 9; end")
    assert server.losses(folder) == [(b, 1 / b) for b in range(1, 21)]
    client, run_id = connect(server.address, folder)
    assert client.get_run(run_id).info.status == "FINISHED"
    kept = tmp_path / "kept"
    kept.mkdir()
    client.download_artifacts(run_id, "recipe.yaml", str(kept))
    client.download_artifacts(run_id, "samples", str(kept))
    assert (kept / "recipe.yaml").read_text() == "uri: http://me:***@host\n"
    assert (kept / "samples" / "ba0000014.txt").read_text() == "> def f(x):"


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_has_every_value(
    server: Server, tmp_path: Path
) -> None:
    heard, folder = Hears(), tmp_path / "tiny"
    sender = begin(server, folder, heard)
    train(sender, 0, 10)
    wait_until(lambda: not sender._waiting)
    server.kill()
    train(sender, 10, 20)
    wait_for(heard, "training continues", lines=1)
    train(sender, 20, 30)
    server.start()
    wait_for(heard, "works again", lines=2)
    train(sender, 30, 40)
    finish(sender)
    assert "MLflow (http://me:***@127.0.0.1" in heard[0] and "secret" not in heard.text()
    assert len(heard) == 2 and server.losses(folder) == [(b, 1 / b) for b in range(1, 41)]


def test_a_server_that_stays_away_is_given_up_with_a_count(server: Server, tmp_path: Path) -> None:
    heard, folder = Hears(), tmp_path / "tiny"
    sender = begin(server, folder, heard)
    train(sender, 0, 10)
    wait_until(lambda: not sender._waiting)
    server.kill()
    train(sender, 10, 25)
    wait_for(heard, "training continues", lines=1)
    began = time.monotonic()
    finish(sender)
    assert time.monotonic() - began < 25
    assert [line for line in heard[1:] if "sending the rest" not in line] == heard[-1:]
    assert "MLflow" in heard[-1] and "lacks 15 metric values" in heard[-1]
    assert server.losses(folder) == [(b, 1 / b) for b in range(1, 11)]
