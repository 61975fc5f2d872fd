"""MLflow gets the run, training never waits for it, and what it lacks is said.

The store is a real SQLite file, read back through MLflow's own client.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.track.mlflow_store import cut, metric_name, public
from llmfoundry.track.mlflow_writer import MlflowWriter


class Hears(list[str]):
    """Collects what the writer says."""

    def text(self) -> str:
        return "\n".join(self)


def writer(
    uri: str, folder: Path, heard: Hears, params: dict[str, str] | None = None
) -> MlflowWriter:
    config = LoggerConfig(tracking_uri=uri, experiment_name="tests")
    folder.mkdir(parents=True, exist_ok=True)
    return MlflowWriter(
        config,
        run_name=folder.name,
        run_folder=folder,
        params={"seed": "17"} if params is None else params,
        note=heard.append,
        warn=heard.append,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/runs/mlflow.db"


def read_back(uri: str, folder: Path) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    return client, client.get_run((folder / "mlflow_run_id").read_text().strip())


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_run_reads_back_from_sqlite(store: str, tmp_path: Path) -> None:
    heard, began = Hears(), time.time()
    params = {f"section.key_{i}": str(i) for i in range(150)} | {"long": "x" * 7000}
    mlflow = writer(store, tmp_path / "tiny", heard, params)
    mlflow.log(0, {"metrics/eval/bits_per_byte": 8.0})  # before the first step: kept
    mlflow.start(resume=False, tags={"torch": "2.9", "git commit": "abc"})
    for batch in range(1, 301):
        mlflow.log(batch, {"lr-DecoupledAdamW/group0": batch / 7, "loss/train/total": 1 / batch})
    mlflow.log(301, {"icl/metrics/eval_gauntlet/a (b)": 0.5, "loss/train/total": math.nan})
    for name in ("recipe.yaml", "report.html"):
        (tmp_path / name).write_text(f"the {name}")
        mlflow.file(tmp_path / name)
    mlflow.close("finished")

    client, run = read_back(store, tmp_path / "tiny")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert abs(run.info.start_time / 1000 - began) < 1
    assert client.get_experiment(run.info.experiment_id).name == "tests"
    history = client.get_metric_history(run.info.run_id, "lr-DecoupledAdamW/group0")
    assert sorted((m.step, m.value) for m in history) == [(b, b / 7) for b in range(1, 301)]
    [first] = client.get_metric_history(run.info.run_id, "metrics/eval/bits_per_byte")
    assert (first.step, first.value) == (0, 8.0)
    assert run.data.metrics["icl/metrics/eval_gauntlet/a _b_"] == 0.5
    assert math.isnan(run.data.metrics["loss/train/total"])
    assert len(run.data.params) == 151 and run.data.params["section.key_149"] == "149"
    assert run.data.params["long"].endswith("(cut; 7000 characters)")
    assert run.data.tags["git commit"] == "abc"
    assert socket.gethostname() not in str(run.data.tags)
    runs = Path(store.removeprefix("sqlite:///")).parent
    for name in ("recipe.yaml", "report.html"):
        [kept] = runs.glob(f"mlartifacts/{run.info.run_id}/artifacts/{name}")
        assert kept.read_text() == f"the {name}"
    assert [text for text in heard if "sending the rest" not in text] == [
        "MLflow: long exceeds its 6000 characters and is cut there; recipe.yaml is not"
    ]


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(store: str, tmp_path: Path) -> None:
    folder, heard = tmp_path / "again", Hears()
    ids, values = [], []
    for batch, resume, seed in ((1, False, "17"), (2, True, "18"), (1, False, "17")):
        params = {"seed": seed} | ({"new": "1"} if resume else {})
        mlflow = writer(store, folder, heard, params)
        mlflow.start(resume=resume, tags={})
        mlflow.log(batch, {"loss": float(batch)})
        mlflow.close("killed" if batch == 1 else "finished")
        client, run = read_back(store, folder)
        ids.append(run.info.run_id)
        values.append([m.value for m in client.get_metric_history(run.info.run_id, "loss")])
        if resume:
            assert run.info.status == "FINISHED"
            assert run.data.params == {"seed": "17", "new": "1"}
            assert run.data.tags["resumed.seed"] == "18"
    assert ids[0] == ids[1] != ids[2]
    assert values == [[1.0], [1.0, 2.0], [1.0]]
    assert "these changed and are tags: seed" in heard.text()


def test_a_resumed_run_whose_mlflow_run_is_gone_begins_another(store: str, tmp_path: Path) -> None:
    folder, heard = tmp_path / "gone", Hears()
    folder.mkdir()
    (folder / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    mlflow = writer(store, folder, heard)
    mlflow.start(resume=True, tags={})
    mlflow.log(5, {"loss": 1.0})
    mlflow.close("finished")
    assert read_back(store, folder)[1].data.metrics == {"loss": 1.0}
    assert "is no longer in the store; a new one begins" in heard.text()


def test_a_dead_server_never_holds_training_up(tmp_path: Path) -> None:
    import mlflow.tracking  # noqa: F401  (loading a library may hold every thread for a moment)

    heard = Hears()
    sender = writer(f"http://me:secret@127.0.0.1:{closed_port()}", tmp_path / "run", heard)
    slowest = 0.0

    def timed(action: Any) -> None:
        nonlocal slowest
        began = time.perf_counter()
        action()
        slowest = max(slowest, time.perf_counter() - began)

    timed(lambda: sender.start(resume=False, tags={}))
    until = time.monotonic() + 30
    while not heard and time.monotonic() < until:  # as training: until the outage is noticed
        timed(lambda: sender.log(1, {"loss": 1.0, "lr": 2.0}))
        time.sleep(0.01)
    sent = len(sender._points)
    assert slowest < 0.05
    assert len(heard) == 1 and "does not answer" in heard[0] and "training goes on" in heard[0]
    began = time.monotonic()
    sender.close("finished", timeout=2.0)
    assert time.monotonic() - began < 3.5
    assert "metric values" in heard[-1] and "metrics.jsonl has every value" in heard[-1]
    assert f"lacks {sent} " in heard[-1] or sent >= 1000
    assert "secret" not in heard.text()


def test_a_server_that_hangs_is_given_up_in_time(tmp_path: Path) -> None:
    class Hangs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(60)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    heard = Hears()
    mlflow = writer(f"http://127.0.0.1:{server.server_port}", tmp_path / "run", heard)
    mlflow.start(resume=False, tags={})
    mlflow.log(1, {"loss": 1.0})
    began = time.monotonic()
    mlflow.close("finished", timeout=1.0)
    assert time.monotonic() - began < 3
    assert "lacks 1 metric values" in heard.text()
    server.shutdown()


def test_a_store_that_comes_back_gets_everything(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    heard, away, write = Hears(), threading.Event(), MlflowClient.log_batch
    refusals = []

    def log_batch(*args: Any, **kwargs: Any) -> Any:
        if away.is_set() and kwargs.get("metrics"):
            refusals.append(1)
            if len(refusals) == 3:
                away.clear()
            raise OSError("connection lost")
        return write(*args, **kwargs)

    away.set()
    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    mlflow = writer(store, tmp_path / "run", heard)
    mlflow.start(resume=False, tags={})
    for batch in range(1, 11):
        mlflow.log(batch, {"loss": float(batch)})
    until = time.monotonic() + 30
    while away.is_set() and time.monotonic() < until:
        time.sleep(0.05)
    mlflow.close("finished")
    client, run = read_back(store, tmp_path / "run")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(m.value for m in history) == [float(b) for b in range(1, 11)]
    assert ["does not answer" in heard[0], "answers again" in heard[1], len(heard)] == [1, 1, 2]


def test_a_missing_driver_is_said_once(tmp_path: Path) -> None:
    heard = Hears()
    mlflow = writer("mysql+nosuchdriver://me:secret@127.0.0.1/db", tmp_path / "run", heard)
    mlflow.start(resume=False, tags={})
    mlflow.log(1, {"loss": 1.0})
    mlflow.close("failed")
    assert "secret" not in heard.text()
    assert ["refuses the run" in text for text in heard if "sending" not in text] == [1, 0]
    assert "lacks 1 metric values" in heard[-1]


def test_nothing_is_imported_before_the_first_step_and_nothing_printed(tmp_path: Path) -> None:
    code = (
        "import io, sys; from pathlib import Path\n"
        "from llmfoundry.recipe.train import TrainRecipe\n"
        "from llmfoundry.track.console import Console\n"
        "from llmfoundry.track.loggers import Tracker\n"
        "recipe = TrainRecipe(run_name='tiny'); recipe.fill()\n"
        "folder = Path('runs/tiny'); folder.mkdir(parents=True)\n"
        "(folder / 'recipe.yaml').write_text('run_name: tiny')\n"
        "console = Console(stream=io.StringIO())\n"
        "tracker = Tracker(recipe, folder, is_main=True, console=console)\n"
        "tracker.start(0, total=2, facts=[('device', 'CPU')])\n"
        "tracker.log(0, 0, {'metrics/eval/bits_per_byte': 8.0})\n"
        "assert not {'mlflow', 'torch', 'sqlalchemy', 'pandas'} & set(sys.modules)\n"
        "tracker.log(1, 8, {'loss/train/total': 1.0})\n"
        "tracker.close('finished')\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["runs"]
    _, run = read_back(f"sqlite:///{tmp_path}/runs/mlflow.db", tmp_path / "runs" / "tiny")
    assert run.data.metrics["loss/train/total"] == 1.0 and run.data.metrics["time/token"] == 8
    assert run.data.tags["device"] == "CPU" and run.data.tags["torch"]
    kept = {p.name for p in (tmp_path / "runs" / "mlartifacts").rglob("*") if p.is_file()}
    assert kept == {"recipe.yaml", "report.html"}


def test_names_values_and_addresses_fit_mlflow() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param

    for name in ("lr-DecoupledAdamW/group0", "a:b c.d_e", "x" * 400, "é%$", "metrics/x/0-shot/Y"):
        _validate_metric_name(metric_name(name))
    assert metric_name("lr-DecoupledAdamW/group0") == "lr-DecoupledAdamW/group0"
    _validate_param("key", cut("x" * 10_000))
    assert len(cut("x" * 10_000)) == 6000 and cut("x" * 6000) == "x" * 6000
    assert public("at http://a:b@h:1/x and postgresql://c:d@e") == (
        "at http://a:***@h:1/x and postgresql://c:***@e"
    )
    assert public("sqlite:///runs/mlflow.db") == "sqlite:///runs/mlflow.db"
