"""MLflow gets the run, training never waits for it, and what it lacks is said.

The store is a real SQLite file, read back through MLflow's own client.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from llmfoundry.errors import UserError
from llmfoundry.events import add_event
from llmfoundry.loggers.background_queue import BackgroundWriter, describe
from llmfoundry.loggers.folder_run import FolderRun
from llmfoundry.loggers.mlflow_database import sqlite_path
from llmfoundry.loggers.mlflow_logger import (
    check_uri,
    find_experiment,
    metric_name,
    open_client,
    open_session,
    param_value,
)
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.redaction import public
from llmfoundry.resilience.supervise import notify
from tests.loggers.hearing import Hears, closed_port, facts, finish, writer
from tests.selection import slow_but


def mlflow_writer(uri: str, folder: Path, heard: Hears) -> BackgroundWriter:
    return writer("mlflow", folder, heard, tracking_uri=uri, experiment_name="tests")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/runs/mlflow.db"


def read_back(uri: str, folder: Path) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    return client, client.get_run((folder / "mlflow_run_id").read_text().strip())


def test_a_run_reads_back_from_sqlite(store: str, tmp_path: Path) -> None:
    heard, began = Hears(), time.time()
    params = {f"section.key_{i}": str(i) for i in range(150)} | {"long": "x" * 7000}
    mlflow = mlflow_writer(store, tmp_path / "tiny", heard)
    mlflow.log(0, {"metrics/eval/bits_per_byte": 8.0})  # before the first step: kept
    tags = {"torch": "2.9", "git commit": "abc"}
    mlflow.start(facts(tmp_path / "tiny", params=params, tags=tags))
    for batch in range(1, 301):
        mlflow.log(batch, {"lr-DecoupledAdamW/group0": batch / 7, "loss/train/total": 1 / batch})
    mlflow.log(301, {"icl/metrics/eval_gauntlet/a (b)": 0.5, "loss/train/total": math.nan})
    for name in ("recipe.yaml", "report.html"):
        (tmp_path / name).write_text(f"the {name} http://me:secret@host")
        mlflow.file(tmp_path / name)
    mlflow.samples(301, [("def f(", "x):"), ("a", "b")])
    finish(mlflow)

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
        assert kept.read_text() == f"the {name} http://me:***@host"
    [kept] = runs.glob(f"mlartifacts/{run.info.run_id}/artifacts/samples/ba0000301.txt")
    assert kept.read_text() == "> def f(x):\n\n> ab"
    assert [text for text in heard if "sending the rest" not in text] == [
        "MLflow: long exceeds its 6000 characters and is cut there; recipe.yaml is not"
    ]


def test_events_of_all_who_write_them_become_tags(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "FINAL_SECONDS", 300.0)  # a busy machine
    folder, heard = tmp_path / "reported", Hears()
    add_event(folder, "hang", "rank 1 hung in the attempt before", action="end")
    sender = mlflow_writer(store, folder, heard)
    sender.start(facts(folder))
    sender.log(1, {"loss": 1.0})
    add_event(folder, "loss_spike", "a loss of 9", step=1, action="log")
    sender.events()
    add_event(folder, "waiting", "by a monitor, as the run ends", action="none")
    finish(sender, timeout=300.0)
    client, run = read_back(store, folder)
    found = {name: text for name, text in run.data.tags.items() if name.startswith("events.")}
    assert found.pop("events.last").endswith("waiting: by a monitor, as the run ends; none")
    assert found == {"events.hang": "1", "events.loss_spike": "1", "events.waiting": "1"}
    assert not heard or "sending the rest" in heard[0]  # a busy machine

    # Killed meanwhile: its supervisor reports the end, by a process of its own.
    client.update_run(run.info.run_id, status="RUNNING")
    add_event(folder, "decision", "attempt 1 ended: given up", action="stop", cause="given up")
    config = LoggerConfig(tracking_uri=store)
    config.fill()
    assert notify.send_to_mlflow(config, folder, "failed") == ""
    _, run = read_back(store, folder)
    assert run.data.tags["supervise.last"].endswith("attempt 1 ended: given up; stop")
    assert (run.info.status, run.data.tags["supervise.cause"]) == ("FAILED", "given up")
    config.mlflow = False
    assert notify.send_to_mlflow(config, folder, "failed") == ""


def test_a_resumed_run_resumes_in_the_same_mlflow_run(store: str, tmp_path: Path) -> None:
    """With the same recipe each step is there once; with another the repeated ones are twice."""
    folder, heard = tmp_path / "again", Hears()
    ids, steps = [], []
    starts: list[tuple[int, int, dict[str, Any]]] = [
        (0, 14, {"seed": 17}),
        (9, 20, {"seed": 17, "new": 1.5}),  # resumed after 9
        (18, 22, {"seed": 18, "new": 1.5}),  # with another recipe
        (21, 24, {"seed": 18, "new": 1.5}),  # with the same as the last time
        (0, 2, {"seed": 17}),  # from the first batch
    ]
    for first, last, params in starts:
        mlflow = mlflow_writer(store, folder, heard)
        mlflow.start(facts(folder, first, params=params))
        for batch in range(first + 1, last + 1):
            mlflow.log(batch, {"loss": 1 / batch})
            if batch % 5 == 0:
                mlflow.log(batch, {"eval": 2 / batch})
        finish(mlflow, "killed" if first == 0 else "finished")
        client, run = read_back(store, folder)
        ids.append(run.info.run_id)
        history = client.get_metric_history(run.info.run_id, "loss")
        assert all(m.value == 1 / m.step for m in history)
        steps.append(sorted(m.step for m in history))
        if first == 9:
            assert run.info.status == "FINISHED"
            assert run.data.params == {"seed": "17", "new": "1.5"}
            evaluations = client.get_metric_history(run.info.run_id, "eval")
            assert sorted(m.step for m in evaluations) == [5, 10, 15, 20]
        if first == 18:
            assert run.data.tags["resumed.seed"] == "18"
    assert len(set(ids[:4])) == 1 and ids[4] not in ids[:4]
    assert steps[:2] == [[*range(1, 15)], [*range(1, 21)]]
    assert steps[2] == sorted([*range(1, 23), 19, 20])
    assert steps[3] == sorted([*range(1, 25), 19, 20])
    assert steps[4] == [1, 2]
    assert heard.text().count("these changed and are tags: seed") == 1


def test_a_resumed_run_whose_mlflow_run_is_gone_begins_another(store: str, tmp_path: Path) -> None:
    folder, heard = tmp_path / "gone", Hears()
    folder.mkdir()
    (folder / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    mlflow = mlflow_writer(store, folder, heard)
    mlflow.start(facts(folder, 4))
    mlflow.log(5, {"loss": 1.0})
    finish(mlflow)
    assert read_back(store, folder)[1].data.metrics == {"loss": 1.0}
    assert "is no longer in the store; a new one begins" in heard.text()


def test_a_dead_server_never_holds_training_up(tmp_path: Path) -> None:
    import mlflow.tracking  # noqa: F401  (loading a library may hold every thread for a moment)

    heard = Hears()
    sender = mlflow_writer(f"http://me:secret@127.0.0.1:{closed_port()}", tmp_path / "run", heard)
    slowest = 0.0

    def timed(action: Any) -> None:
        nonlocal slowest
        began = time.perf_counter()
        action()
        slowest = max(slowest, time.perf_counter() - began)

    timed(lambda: sender.start(facts(tmp_path / "run")))
    until = time.monotonic() + 120
    while not heard and time.monotonic() < until:  # as training: until the outage is noticed
        timed(lambda: sender.log(1, {"loss": 1.0, "lr": 2.0}))
        time.sleep(0.01)
    sent = len(sender._waiting)
    assert slowest < 0.5
    assert len(heard) == 1 and "fails: " in heard[0] and "training continues" in heard[0]
    began = time.monotonic()
    finish(sender, timeout=2.0)
    assert time.monotonic() - began < 20
    assert "metric values" in heard[-1] and "metrics.jsonl has every value" in heard[-1]
    assert f"lacks {sent} " in heard[-1] or sent >= 1000
    assert "secret" not in heard.text()


def test_an_outage_after_training_is_given_up_soon(tmp_path: Path) -> None:
    heard = Hears()
    mlflow = mlflow_writer(f"http://127.0.0.1:{closed_port()}", tmp_path / "run", heard)
    mlflow.start(facts(tmp_path / "run"))
    mlflow.log(1, {"loss": 1.0})
    began = time.monotonic()
    finish(mlflow, timeout=60.0)
    assert time.monotonic() - began < 20
    assert "lacks 1 metric values" in heard[-1]


def test_a_server_that_hangs_is_given_up_in_time(tmp_path: Path) -> None:
    class Hangs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(60)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hangs)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    heard = Hears()
    mlflow = mlflow_writer(f"http://127.0.0.1:{server.server_port}", tmp_path / "run", heard)
    mlflow.start(facts(tmp_path / "run"))
    mlflow.log(1, {"loss": 1.0})
    began = time.monotonic()
    finish(mlflow, timeout=1.0)
    assert time.monotonic() - began < 20
    assert "lacks 1 metric values" in heard.text()
    server.shutdown()


def test_a_server_that_is_not_mlflow_gets_no_run(tmp_path: Path) -> None:
    class Agrees(BaseHTTPRequestHandler):
        """As a proxy that answers everything."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Agrees)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    heard, folder = Hears(), tmp_path / "run"
    mlflow = mlflow_writer(f"http://127.0.0.1:{server.server_port}", folder, heard)
    mlflow.start(facts(folder))
    finish(mlflow)
    server.shutdown()
    assert "lacks the run: its answer names no experiment" in heard[-1]
    assert not (folder / "mlflow_run_id").exists()
    assert not mlflow.has_all
    assert "what is at this address is not MLflow" in heard[-1]


def test_a_server_that_refuses_the_credentials_is_said_once(tmp_path: Path) -> None:
    asked = []

    class Refuses(BaseHTTPRequestHandler):
        """As MLflow's server with basic-auth answers."""

        def do_GET(self) -> None:
            asked.append(self.path)
            body = b"You are not authenticated. Please see https://mlflow.org/docs/latest/auth"
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="mlflow"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    heard = Hears()
    uri = f"http://me:secret@127.0.0.1:{server.server_port}"
    mlflow = mlflow_writer(uri, tmp_path / "run", heard)
    mlflow.start(facts(tmp_path / "run"))
    until = time.monotonic() + 120
    while not heard and time.monotonic() < until:
        mlflow.log(1, {"loss": 1.0})
        time.sleep(0.01)
    mlflow.log(2, {"loss": 1.0})
    began = time.monotonic()
    finish(mlflow)
    assert time.monotonic() - began < 10 and len(asked) == 1
    assert "MLflow (http://me:***@127.0.0.1" in heard[0] and "refuses the run" in heard[0]
    assert "401" in heard[0] and "training continues" in heard[0]
    assert len(heard) == 2 and "metric values" in heard[1] and "secret" not in heard.text()
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
    mlflow = mlflow_writer(store, tmp_path / "run", heard)
    mlflow.start(facts(tmp_path / "run"))
    for batch in range(1, 11):
        mlflow.log(batch, {"loss": float(batch)})
    until = time.monotonic() + 120
    while away.is_set() and time.monotonic() < until:
        time.sleep(0.05)
    finish(mlflow)
    client, run = read_back(store, tmp_path / "run")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(m.value for m in history) == [float(b) for b in range(1, 11)]
    assert ["fails: " in heard[0], "works again" in heard[1], len(heard)] == [1, 1, 2]


def test_a_missing_driver_is_said_once(tmp_path: Path) -> None:
    heard = Hears()
    mlflow = mlflow_writer("mysql+nosuchdriver://me:secret@127.0.0.1/db", tmp_path / "run", heard)
    mlflow.start(facts(tmp_path / "run"))
    mlflow.log(1, {"loss": 1.0})
    finish(mlflow, "failed")
    assert "secret" not in heard.text()
    assert ["refuses the run" in text for text in heard if "sending" not in text] == [1, 0]
    assert "lacks 1 metric values" in heard[-1]


def test_nothing_is_imported_before_the_first_step_and_nothing_printed(tmp_path: Path) -> None:
    code = (
        "import io, sys; from functools import partial; from pathlib import Path\n"
        "from llmfoundry.recipe.train import TrainRecipe\n"
        "from llmfoundry.loggers import tracker as module\n"
        "from llmfoundry.loggers.console import Console\n"
        "from llmfoundry.loggers.tracker import Tracker\n"
        # A busy machine imports MLflow in more than the seconds that a run's end waits.
        "module.close_all = partial(module.close_all, timeout=300.0)\n"
        "recipe = TrainRecipe(run_name='tiny').resolve()\n"
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


@pytest.mark.parametrize(
    ("caused_by", "reason"),
    [
        ("ResponseError('too many 500 error responses')", "too many 500 error responses"),
        (
            "ReadTimeoutError(\"HTTPPool(host='h', port=1): Read timed out. (read timeout=1)\")",
            "Read timed out. (read timeout=1)",
        ),
        (
            "NewConnectionError('<urllib3.HTTPConnection object at 0x7f>: Failed: [Errno 111] No')",
            "Failed: [Errno 111] No",
        ),
        (
            "ConnectTimeoutError(<urllib3.Connection object at 0x7f>, 'timed out. (timeout=1)')",
            "timed out. (timeout=1)",
        ),
        (
            "ProtocolError('Connection aborted.', RemoteDisconnected('Remote end closed it'))",
            "Remote end closed it",
        ),
        (
            "SSLError(SSLError(1, '[SSL: WRONG] wrong (_ssl.c:1006)'))",
            "[SSL: WRONG] wrong (_ssl.c:1006)",
        ),
    ],
)
def test_the_reason_why_a_server_does_not_answer_comes_first(caused_by: str, reason: str) -> None:
    pool = "failed with exception HTTPPool(host='h', port=1)"
    error = Exception(f"{pool}: Max retries exceeded with url: /x (Caused by {caused_by})")
    assert describe(error) == f"{reason}: {pool}"
    advice = "(raised as a result of Query-invoked autoflush; consider using session.no_autoflush)"
    assert describe(Exception(f"{advice}\nattempt to write a readonly database")).startswith("att")


def test_names_values_and_addresses_fit_mlflow() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param

    for name in ("lr-DecoupledAdamW/group0", "a:b c.d_e", "x" * 400, "é%$", "metrics/x/0-shot/Y"):
        _validate_metric_name(metric_name(name))
    assert metric_name("lr-DecoupledAdamW/group0") == "lr-DecoupledAdamW/group0"
    _validate_param("key", param_value("x" * 10_000))
    assert len(param_value("x" * 10_000)) == 6000 and param_value("x" * 6000) == "x" * 6000
    assert [param_value(v) for v in ([0.9, 0.95], None, True)] == ["[0.9, 0.95]", "null", "true"]
    assert public("at http://a:b@h:1/x and postgresql://c:d@e") == (
        "at http://a:***@h:1/x and postgresql://c:***@e"
    )
    assert public("http://a:b@c@h:1/x") == "http://a:***@h:1/x"
    assert public("sqlite:///runs/mlflow.db") == "sqlite:///runs/mlflow.db"


def record_of(folder: Path, steps: int) -> None:
    """A run's metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = ({"time/batch": n, "time/unix_ms": 1000 + n, "loss": 1 / n} for n in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def send(store: str, folder: Path, first_batch: int) -> tuple[Any, Any, Hears]:
    heard = Hears()
    sender = mlflow_writer(store, folder, heard)
    sender.start(facts(folder, first_batch))
    finish(sender)
    return *read_back(store, folder), heard


def steps_of(client: Any, run: Any) -> list[int]:
    return sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss"))


def test_a_copied_folder_begins_a_run_of_its_own_and_a_moved_one_continues(
    store: str, tmp_path: Path
) -> None:
    original, copy, moved = (tmp_path / name for name in ("original", "copy", "moved"))
    record_of(original, 3)
    client, first, _ = send(store, original, 3)
    copy.mkdir()
    subprocess.run(f"cp -r {original}/* {copy}", shell=True, check=True)  # no hidden files
    record_of(copy, 5)
    _, second, heard = send(store, copy, 5)
    assert second.info.run_id != first.info.run_id
    assert second.data.tags["mlflow.parentRunId"] == first.info.run_id
    assert f"is a copy of a folder that logs into run {first.info.run_id}" in heard.text()
    assert steps_of(client, second) == [1, 2, 3, 4, 5] and steps_of(client, first) == [1, 2, 3]
    assert send(store, copy, 5)[1].info.run_id == second.info.run_id
    assert send(store, original, 3)[1].info.run_id == first.info.run_id
    original.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    for folder in (moved, tmp_path / "link"):
        assert send(store, folder, 3)[1].info.run_id == first.info.run_id


def test_a_process_killed_between_the_run_and_its_id_leaves_no_second_run(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "killed"
    record_of(folder, 3)
    keep = FolderRun.keep

    def dies(self: FolderRun, run_id: str) -> None:
        if not run_id.startswith("pending-"):
            raise SystemExit
        keep(self, run_id)

    monkeypatch.setattr(FolderRun, "keep", dies)
    client = open_client(store)
    experiment = find_experiment(client, store, "tests")
    with pytest.raises(SystemExit):
        open_session(store, "tests", facts(folder, 3), print)
    monkeypatch.undo()
    _, run, _ = send(store, folder, 3)
    name = f"attributes.run_name = '{folder.name}'"
    assert [r.info.run_id for r in client.search_runs([experiment], name)] == [run.info.run_id]
    assert steps_of(client, run) == [1, 2, 3]


KILLED = {  # what a process that is killed while MLflow makes its tables leaves
    "empty": "",
    "first table": "CREATE TABLE experiments (experiment_id INTEGER); CREATE TABLE runs (a);",
    "before an upgrade": "CREATE TABLE experiments (a); CREATE TABLE alembic_version (b);"
    " INSERT INTO alembic_version VALUES ('534353b11cbc'); CREATE TABLE evaluation_datasets (c);",
}


@pytest.mark.parametrize("kind", slow_but(["first table", "damaged"], [*KILLED, "damaged"]))
def test_a_broken_database_is_set_aside_and_filled_again(kind: str, tmp_path: Path) -> None:
    database, folder = tmp_path / "mlflow.db", tmp_path / "run"
    store = f"sqlite:///{database}"
    record_of(folder, 3)
    if kind == "damaged":
        database.write_bytes(b"SQLite format 3\0" + b"damaged" * 1000)
    else:
        with closing(sqlite3.connect(database)) as connection:
            connection.executescript(KILLED[kind])
        database.touch()
    broken = database.read_bytes()
    if broken:  # another process may be making its tables
        with pytest.raises(RuntimeError, match="another process may be creating it"):
            open_client(store)
    os.utime(database, (1, 1))
    client, run, heard = send(store, folder, 3)
    assert steps_of(client, run) == [1, 2, 3]
    kept = [*tmp_path.glob("mlflow.db.broken-*")]
    assert [path.read_bytes() for path in kept] == ([broken] if broken else [])
    assert ("is now mlflow.db.broken-" in heard.text()) == bool(broken)
    assert not [*tmp_path.glob("*.partial*")]


@pytest.mark.parametrize("path", ["runs/mlflow.db", "/t/a b%20ü#.db", "/50%/x.db"])
def test_a_databases_file_is_the_one_that_mlflow_opens(path: str) -> None:
    uri = sqlalchemy.URL.create("sqlite", database=path).render_as_string()
    assert sqlite_path(uri) == Path(path) == Path(str(sqlalchemy.make_url(uri).database))


def test_an_address_that_cannot_be_parsed_is_one_line() -> None:
    with pytest.raises(UserError, match=r"'http://\[::1' is no address: Invalid IPv6"):
        check_uri("http://[::1")


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    file, folder = tmp_path / "notes.txt", tmp_path / "run"
    file.write_text("important")
    os.utime(file, (1, 1))
    for place in (file, tmp_path):
        heard = Hears()
        mlflow = mlflow_writer(f"sqlite:///{place}", folder, heard)
        mlflow.start(facts(folder))
        finish(mlflow)
        assert "is not a" in heard[0] and "lacks the run" in heard[-1]
    assert file.read_text() == "important"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "run"]


def test_a_database_of_another_program_and_one_of_mlflow_stay_as_they_are(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.db", tmp_path / "mlflow.db"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.executescript("CREATE TABLE mine (a); INSERT INTO mine VALUES (7);")
    for file in (theirs, ours):
        store = f"sqlite:///{file}"
        number = find_experiment(open_client(store), store, "tests")
        os.utime(file, (1, 1))
        assert find_experiment(open_client(store), store, "tests") == number
    with closing(sqlite3.connect(theirs)) as connection:
        assert connection.execute("SELECT a FROM mine").fetchall() == [(7,)]
    assert not [*tmp_path.glob("*.broken-*")]
