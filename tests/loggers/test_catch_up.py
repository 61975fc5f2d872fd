"""What metrics.jsonl has reaches the stores: after a kill, a lock, an outage, and a move of runs/.

The stores are MLflow's SQLite file and TensorBoard's event files, read back with their own readers
and compared with metrics.jsonl value by value.
"""

from __future__ import annotations

import io
import shutil
import sqlite3
import subprocess
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmfoundry.cli.commands.track import track
from llmfoundry.errors import UserError
from llmfoundry.loggers import background_queue as writer_module
from llmfoundry.loggers.background_queue import BackgroundWriter, DeferredTask, LogTarget, RunFacts
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.metrics_file import BATCH, TOKEN, WALL, read_metrics
from llmfoundry.loggers.tracker import Tracker
from llmfoundry.recipe.after_training import TrackRecipe
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_yaml
from tests.tiny import ENV, command, write_recipe
from tests.tiny import run as start

Points = dict[str, list[tuple[int, float, int]]]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store: MLflow takes seconds to make one."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def store(database: Path, tmp_path: Path) -> Path:
    """The folder runs/ with an empty store."""
    (tmp_path / "a b" / "runs").mkdir(parents=True)
    shutil.copy(database, tmp_path / "a b" / "runs")
    return tmp_path / "a b" / "runs"


def tracker(folder: Path, *, tensorboard: bool = False, uri: str | None = None) -> Tracker:
    recipe = TrainRecipe(run_name="tiny", save_folder=str(folder))
    recipe.logger.tracking_uri = uri or f"sqlite:///{folder.parent}/mlflow.db"
    recipe.logger.tensorboard = tensorboard
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    recipe = recipe.resolve()
    return Tracker(recipe, folder, is_main=True, console=Console(stream=io.StringIO()))


def steps(record: Tracker, first: int, last: int) -> None:
    for batch in range(first + 1, last + 1):
        record.log(batch, 8 * batch, {"loss/train/total": 1 / batch})
        if batch % 4 == 0:
            record.log(batch, 8 * batch, {"metrics/eval/loss": 2 / batch})


def run(folder: Path, first: int, last: int, *, sends: bool = True, **where: Any) -> Tracker:
    """A run that is not closed. Without `sends` it was killed before anything was sent."""
    made = tracker(folder, **where)
    made.start(first, total=100)
    if not sends:
        made._writers.clear()
    steps(made, first, last)
    return made


def recorded(folder: Path) -> Points:
    """Step, value and time by metric, as metrics.jsonl has them."""
    found: Points = {}
    for row in read_metrics(folder / "metrics.jsonl"):
        batch, when = row.pop(BATCH), row.pop(WALL)
        for name, value in row.items():
            found.setdefault(name, []).append((batch, value, when))
    return {name: once(points) if name == TOKEN else points for name, points in found.items()}


def once(points: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    """The first of each step: time/token stands on each line of a step."""
    return sorted({step: (step, value, when) for step, value, when in reversed(points)}.values())


def in_mlflow(folder: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    run_id = (folder / "mlflow_run_id").read_text().strip()
    names = client.get_run(run_id).data.metrics
    histories = {name: client.get_metric_history(run_id, name) for name in names}
    found = {
        name: sorted((m.step, m.value, m.timestamp) for m in history)
        for name, history in histories.items()
    }
    return found | {TOKEN: once(found[TOKEN])}


def in_tensorboard(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    logged = {name: [e.step for e in seen.Tensors(name)] for name in recorded(folder)}
    return logged | {TOKEN: sorted(set(logged[TOKEN]))}


def test_a_resumed_run_sends_what_a_killed_one_could_not(store: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    folder = store / "tiny"
    run(folder, 0, 6, tensorboard=True).close("killed")
    run(folder, 6, 20, tensorboard=True, sends=False)
    run(folder, 18, 24, tensorboard=True).close("finished")  # its checkpoint was at 18
    assert in_mlflow(folder) == recorded(folder)
    logged = {name: [step for step, _, _ in points] for name, points in recorded(folder).items()}
    assert in_tensorboard(folder) == logged


def test_a_hole_in_the_store_is_filled_and_nothing_is_there_twice(store: Path) -> None:
    """As versions before left it behind, which sent nothing twice and nothing again."""
    folder = store / "tiny"
    run(folder, 0, 12).close("finished")
    with closing(sqlite3.connect(store / "mlflow.db")) as lost, lost:
        lost.execute("DELETE FROM metrics WHERE step BETWEEN 4 AND 7")
    assert in_mlflow(folder) != recorded(folder)
    run(folder, 12, 13).close("finished")
    assert in_mlflow(folder) == recorded(folder)


def test_the_command_sends_what_a_killed_run_could_not(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = store / "tiny"
    run(folder, 0, 3).close("killed")
    run(folder, 3, 9, sends=False)
    assert len(in_mlflow(folder)["loss/train/total"]) == 3
    complete = run(folder, 9, 9)  # the same command, after all steps
    complete.close("finished")
    assert not complete.has_sent_all
    track(TrackRecipe(run=str(folder)))
    complete = run(folder, 9, 9)
    complete.close("finished")
    assert complete.has_sent_all
    assert in_mlflow(folder) == recorded(folder)
    assert "has 16 values that it lacked" in capsys.readouterr().out
    track(TrackRecipe(run=str(folder)))
    assert in_mlflow(folder) == recorded(folder)
    assert "lacked" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["during", "after"])
def test_a_lock_of_25_seconds_costs_no_value(store: Path, ends: str) -> None:
    """The run ends while the database is locked, or continues."""
    folder = store / "tiny"
    record = run(folder, 0, 3)
    until = time.monotonic() + 60
    while record._writers[0]._waiting and time.monotonic() < until:
        time.sleep(0.1)
    lock = sqlite3.connect(store / "mlflow.db", isolation_level=None, check_same_thread=False)
    lock.execute("BEGIN EXCLUSIVE")
    threading.Timer(25.0, lambda: lock.execute("COMMIT")).start()
    steps(record, 3, 9)
    time.sleep(1.0 if ends == "during" else 26.0)
    steps(record, 9, 12)
    record.close("finished")
    lock.close()
    assert in_mlflow(folder) == recorded(folder)


def test_another_store_gets_a_whole_run_by_the_command(store: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    folder = store / "tiny"
    run(folder, 0, 9).close("finished")
    track(TrackRecipe(str(folder), LoggerConfig(mlflow=False, tensorboard=True)))
    logged = {name: [step for step, _, _ in points] for name, points in recorded(folder).items()}
    assert in_tensorboard(folder) == logged


def test_the_command_says_what_it_cannot_send(store: Path) -> None:
    folder = store / "tiny"
    with pytest.raises(UserError, match="run: nothing at"):
        track(TrackRecipe(str(folder)))
    run(folder, 0, 2).close("finished")
    nowhere = LoggerConfig(tracking_uri="http://127.0.0.1:9")
    with pytest.raises(UserError, match="logger: not every place got everything"):
        track(TrackRecipe(str(folder), nowhere))
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="is empty"):
        track(TrackRecipe(str(folder)))


def test_a_queue_that_was_too_short_is_made_up_for_at_the_end(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_MAX_WAITING", 10)
    folder = store / "tiny"
    record = run(folder, 0, 40)  # faster than the store is opened
    record.close("finished")
    assert in_mlflow(folder) == recorded(folder)
    assert "lacks" not in record.console._stream.getvalue()


def test_a_place_that_takes_steps_in_order_is_said_to_lack_what_its_queue_had_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_MAX_WAITING", 10)
    got: list[int] = []
    session = SimpleNamespace(
        max_points=100,
        steps=lambda name: (),
        send=lambda points: got.extend(point.batch for point in points),
        end=lambda status: None,
    )
    said: list[str] = []
    target = LogTarget("W", lambda facts, say: session, is_in_order=True)  # type: ignore[arg-type, return-value]
    writer = BackgroundWriter(target, note=said.append, warn=said.append)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"time/batch": {batch}, "loss": 1.0}}\n' for batch in range(1, 16))
    )
    for batch in range(1, 16):
        writer.log(batch, {"loss": 1.0})
    writer.start(RunFacts("r", tmp_path, 0, 0, {}, {}))
    writer.end("finished")
    writer.close()
    assert got == list(range(1, 11)) and not writer.has_all
    assert any("W lacks 5 metric values" in line for line in said)


def test_a_file_that_cannot_be_read_is_no_outage_of_the_place(tmp_path: Path) -> None:
    """As a checkpoint's COMMIT: it is reported at once, and what comes after it is sent."""
    got: list[int] = []
    session = SimpleNamespace(
        max_points=100,
        send=lambda points: got.extend(point.batch for point in points),
        end=lambda status: None,
    )
    said: list[str] = []
    target = LogTarget(
        "W",
        lambda facts, say: session,  # type: ignore[arg-type, return-value]
        patience_while_away=600.0,
        has_registry=True,
    )
    writer = BackgroundWriter(target, note=said.append, warn=said.append)
    writer.registry(DeferredTask("versions of m", lambda session, note: tmp_path.open()))  # type: ignore[arg-type, return-value]
    writer.log(1, {"loss": 1.0})
    began = time.monotonic()
    writer.start(RunFacts("r", tmp_path, 0, 0, {}, {}))
    writer.end("finished", timeout=600.0)
    writer.close()
    assert time.monotonic() - began < 300 and got == [1] and not writer.has_all
    assert "W refuses versions of m: [Errno 21] Is a directory" in said[0]
    assert "W lacks versions of m: [Errno 21]" in said[-1]


@pytest.mark.parametrize("n_refused", [1, 2])
def test_only_the_values_that_a_store_accepts_are_reported_as_sent(
    tmp_path: Path, n_refused: int
) -> None:
    """As an MLflow run that was deleted while it trained: every request is refused."""
    rows = [f'{{"{BATCH}": {batch}, "loss": 1.0}}\n' for batch in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    stored: list[int] = []

    def send(points: list[Any]) -> None:
        if points[0].batch <= n_refused:
            raise FileNotFoundError("the run is deleted")
        stored.extend(point.batch for point in points)

    session = SimpleNamespace(
        max_points=1, steps=lambda name: stored, send=send, end=lambda status: None
    )
    messages: list[str] = []
    target = LogTarget("W", lambda facts, say: session)  # type: ignore[arg-type, return-value]
    writer = BackgroundWriter(target, note=messages.append, warn=messages.append)
    writer.start(RunFacts("r", tmp_path, 2, 0, {}, {}))
    writer.end("finished", timeout=60.0)
    writer.close()
    n_sent = 2 - n_refused
    sent = [line for line in messages if "that it lacked" in line]
    assert sent == [f"W has {n_sent} values that it lacked"] * bool(n_sent)
    assert f"W lacks {n_refused} metric values" in messages[-1] and not writer.has_all


@pytest.mark.parametrize("original", ["moved", "copied"])
def test_a_moved_runs_folder_keeps_its_artifacts(
    store: Path, tmp_path: Path, original: str
) -> None:
    from mlflow.tracking import MlflowClient
    from mlflow.tracking._tracking_service.utils import _artifact_repos_cache

    before, after = store, tmp_path / "elsewhere" / "runs"
    for name, last in (("tiny", 3), ("other", 2)):
        run(before / name, 0, last).close("finished")
    after.parent.mkdir()
    shutil.copytree(before, after)
    if original == "moved":
        shutil.rmtree(before)
    old = {p: p.read_bytes() for p in before.rglob("*") if p.is_file()}
    _artifact_repos_cache.clear()  # of this process
    record = run(after / "tiny", 3, 5)
    record.samples(5, [("a", "b")])
    record.close("finished")
    assert {p: p.read_bytes() for p in before.rglob("*") if p.is_file()} == old
    assert in_mlflow(after / "tiny") == recorded(after / "tiny")
    client = MlflowClient(f"sqlite:///{after}/mlflow.db")
    for name, kept in (("tiny", ["recipe.yaml", "report.html", "samples"]), ("other", None)):
        run_id = (after / name / "mlflow_run_id").read_text().strip()
        listed = sorted(artifact.path for artifact in client.list_artifacts(run_id))
        assert listed == (kept or ["recipe.yaml", "report.html"])
        target = tmp_path / "read" / name
        target.mkdir(parents=True)
        client.download_artifacts(run_id, "report.html", str(target))
        assert "<html" in (target / "report.html").read_text()
        assert str(before.parent) not in client.get_run(run_id).info.artifact_uri
    run(after / "new", 0, 1).close("finished")
    assert (after / "mlartifacts" / (after / "new" / "mlflow_run_id").read_text().strip()).is_dir()


def test_artifacts_that_were_never_beside_the_database_stay_where_they_are(
    store: Path, tmp_path: Path
) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / "disk" / "mlartifacts").mkdir(parents=True)
    theirs = (tmp_path / "disk" / "mlartifacts").as_uri()
    client = MlflowClient(f"sqlite:///{store}/mlflow.db")
    client.create_experiment("llmfoundry", artifact_location=theirs)
    run(store / "tiny", 0, 1).close("finished")
    assert client.get_experiment_by_name("llmfoundry").artifact_location == theirs
    assert len(list((tmp_path / "disk" / "mlartifacts").iterdir())) == 1


@pytest.mark.slow
def test_after_kill_9_between_checkpoints_mlflow_has_every_value(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    path.write_text(path.read_text().replace("mlflow: false", "mlflow: true"))
    words = ("train.py", "tiny.yaml", "max_duration=120ba", "save_interval=20ba")
    folder, ends = tmp_path / "runs" / "tiny", []
    for last in (30, 50, 75):
        process = subprocess.Popen(command(*words), cwd=tmp_path, env=ENV, stdout=subprocess.PIPE)
        assert process.stdout is not None
        for line in process.stdout:
            if line.split(b"/")[0].strip() == str(last).encode():
                process.kill()
                break
        process.wait()
        ends.append(len(recorded(folder)["loss/train/total"]))
    start(*words, cwd=tmp_path)
    assert len(recorded(folder)["loss/train/total"]) == 120 and len(ends) == 3, ends
    held, logged = in_mlflow(folder), recorded(folder)
    exact = ["loss/train/total", "l2_norm/grad/global", "metrics/eval/LanguageCrossEntropy"]
    assert {name: [p[:2] for p in held[name]] for name in exact} == {
        name: [p[:2] for p in logged[name]] for name in exact
    }
    assert {name: [p[0] for p in held[name]] for name in logged} == {
        name: [p[0] for p in points] for name, points in logged.items()
    }
