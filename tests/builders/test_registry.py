"""Checkpoints become versions: once, compared rightly, marked when they go, whoever else writes.

The registry is MLflow's own, in a SQLite file, read back through its client.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow.artifacts
import pytest

from llmfoundry.builders import registry
from llmfoundry.builders.registry import (
    Tag,
    VersionSource,
    best_saved,
    find_address,
    fingerprint,
    register,
    register_saved,
    registration,
    score_link,
    settle_best,
    versions,
)
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.errors import UserError
from llmfoundry.loggers.metrics_file import JsonLines
from llmfoundry.loggers.mlflow_logger import MlflowSession, find_experiment, open_client
from llmfoundry.recipe.registry import CROSS_ENTROPY, BestConfig, RegistryConfig
from llmfoundry.recipe.train import TrainRecipe
from tests.loggers.hearing import Hears, facts, finish, writer

ACCURACY = "icl/metrics/eval_gauntlet/core_average"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


class Run:
    """A run's folder with checkpoints that are COMMIT alone, and its side of the registry."""

    def __init__(self, uri: str, folder: Path, name: str, best: BestConfig | None = None) -> None:
        self.client, self.name, self.storage = open_client(uri), name, Storage(folder)
        experiment = find_experiment(self.client, uri, "tests")
        run_id = self.client.create_run(experiment).info.run_id
        self.session = MlflowSession(self.client, run_id, 0, {})
        self.config = RegistryConfig(name=name, best=best or BestConfig())
        self.config.fill(has_validation=True)
        self.record, self.heard = JsonLines(folder / "metrics.jsonl", print), Hears()
        self.record.start(0)

    def save(self, batch: int, loss: float | None = None, **more: float) -> Path:
        folder = self.storage.checkpoint_folder(batch)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "COMMIT").write_text(f"{self.storage.folder} {batch} {loss}")
        row = {"time/batch": batch, "time/unix_ms": 1000 + batch}
        self.record.write({**row, "loss/train/total": 1.0})
        if loss is not None:
            self.record.write({**row, CROSS_ENTROPY: loss, **more})
        return folder

    def register(self) -> list[str]:
        """What was said; the alias `best` is as `bests` says then."""
        self.heard.clear()
        act = {"config": self.config, "run": self.storage, "run_name": "tiny"}
        register_saved(self.session, self.heard.append, **act)
        return [*self.heard]

    def best(self) -> str | None:
        holder = self.client.get_registered_model(self.name).aliases.get("best")
        return None if holder is None else str(holder)

    def tags(self, version: int) -> dict[str, str]:
        return dict(self.client.get_model_version(self.name, str(version)).tags)


def address(written: str, store: str) -> str:
    return find_address(written, "checkpoint", uri=store, note=print)


@pytest.fixture
def run(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    return Run(store, tmp_path / "run", request.node.name[:60])


def test_versions_are_what_the_folder_has(
    run: Run, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.save(4, 3.0, **{"metrics/eval/bits_per_byte": 4.5})
    run.session.client.log_metric(run.session.run_id, CROSS_ENTROPY, 3.0, 1004, 4)  # as it is sent
    run.save(8, 2.0)
    (run.storage.checkpoint_folder(12)).mkdir()  # being written
    assert run.register() == [
        f"ba0000004 is version 1 of {run.name}",
        f"ba0000008 is version 2 of {run.name}, the best",
    ]
    with monkeypatch.context() as patch:  # where nothing is new, MLflow is asked for no more
        for request in ("search_registered_models", "search_logged_models", "get_run"):
            patch.setattr(run.client, request, None)
        assert run.register() == [] and run.best() == "2"
    tags = run.tags(1)
    assert tags[Tag.ADDRESS] == str(first.resolve()) and tags[Tag.STEP] == "4"
    assert tags[Tag.RUN] == "tiny"
    model = run.client.get_logged_model(tags[Tag.MODEL])
    assert (model.status, model.model_type) == ("READY", "checkpoint")
    assert model.source_run_id == run.session.run_id
    assert {(m.key, m.value, m.step) for m in model.metrics} == {
        (CROSS_ENTROPY, 3.0, 4),
        ("metrics/eval/bits_per_byte", 4.5, 4),
    }
    history = run.client.get_metric_history(run.session.run_id, CROSS_ENTROPY)
    assert sorted((m.step, m.value) for m in history) == [(4, 3.0), (8, 2.0)]  # no point twice
    stored = Path(store.removeprefix("sqlite:///")).parent
    assert [path.name for path in stored.rglob("*") if path.is_file()] == ["mlflow.db"]


def test_best_leaves_a_run_whose_folder_was_deleted_whoever_settles(
    run: Run, store: str, tmp_path: Path
) -> None:
    other = Run(store, tmp_path / "other", run.name)
    for batch, loss in ((4, 2.0), (8, 3.0)):
        run.save(batch, loss)
    run.register()
    other.save(4, 1.0)
    assert other.register() == [f"ba0000004 is version 3 of {run.name}, the best"]
    shutil.rmtree(other.storage.folder)
    assert address(f"models:/{run.name}/latest", store).endswith("run/checkpoints/ba0000008")
    run.client.set_registered_model_alias(run.name, "best", "1")  # by hand
    run.register()
    assert run.best() == "1" and Tag.PRUNED not in run.tags(3)
    shutil.rmtree(run.storage.folder / "checkpoints")
    assert settle_best(run.client, run.name) is None and run.best() is None


def test_weights_on_a_machine_that_is_not_seen_stay_the_best(
    run: Run, store: str, tmp_path: Path
) -> None:
    other = Run(store, tmp_path / "machine" / "runs" / "other", run.name)
    other.save(4, 1.0)
    other.register()
    (tmp_path / "machine").rename(tmp_path / "away")
    run.save(4, 2.0)
    run.register()
    assert run.best() == "1"


def test_a_version_deleted_in_mlflow_does_not_come_back(run: Run, store: str) -> None:
    run.save(4, 1.0)
    run.save(8, 2.0)
    run.register()
    run.client.delete_model_version(run.name, "1")
    run.save(12, 3.0)
    assert run.register() == [f"ba0000012 is version 3 of {run.name}"]
    assert run.register() == [] and run.best() == "2"
    run.client.delete_registered_model(run.name)  # as a whole: what is saved begins another
    assert len(run.register()) == 3 and run.best() == "1"


def test_what_is_pruned_or_replaced_is_marked_and_never_the_best(run: Run, store: str) -> None:
    for batch, loss in ((4, 1.0), (8, 2.0), (12, 3.0)):
        run.save(batch, loss)
    run.register()
    assert run.best() == "1"
    shutil.rmtree(run.storage.checkpoint_folder(4))
    run.register()
    assert run.best() == "2" and Tag.PRUNED in run.tags(1) and Tag.PRUNED not in run.tags(2)
    with pytest.raises(UserError, match="nothing is there any more, as of 20"):
        address(f"models:/{run.name}/1", store)
    run.record.start(4)  # the run went back, and saves other weights in the same place
    run.save(8, 5.0)
    run.save(12, 4.0)
    assert run.register()[1].endswith(", the best")
    assert [Tag.PRUNED in run.tags(n) for n in range(1, 6)] == [True, True, True, False, False]
    assert run.best() == "5"
    shutil.rmtree(run.storage.folder)
    run.register()
    assert run.best() is None
    with pytest.raises(UserError, match="no such version or alias; there are: latest, 1 to 5"):
        address(f"models:/{run.name}@best", store)
    with pytest.raises(UserError, match=r"version 5 names .* nothing is there any more, as of 20"):
        address(f"models:/{run.name}/latest", store)


def test_best_is_by_one_metric_and_whoever_has_another_is_told(store: str, tmp_path: Path) -> None:
    loss = Run(store, tmp_path / "a", "two-metrics")
    score = Run(store, tmp_path / "b", "two-metrics", BestConfig(metric=ACCURACY))
    loss.save(1, 3.0)
    loss.save(2)  # which was not evaluated
    loss.register()
    score.save(1, 1.0, **{ACCURACY: 0.9})
    said = score.register()
    assert loss.best() == "1" and len(said) == 2
    assert f"max {ACCURACY}, but the best of two-metrics is by min {CROSS_ENTROPY}," in said[1]
    assert [score.config.best.mode, Tag.VALUE in loss.tags(2)] == ["max", False]
    score.save(2, 0.5, **{ACCURACY: float("nan")})
    score.register()
    assert Tag.VALUE not in score.tags(4) and loss.best() == "1"


def test_a_late_writer_does_not_take_best_from_a_better_version(store: str, tmp_path: Path) -> None:
    """The other run registers between this one's look and its write, and is not overwritten."""
    slow, other = (Run(store, tmp_path / name, "raced") for name in ("slow", "other"))
    slow.save(1, 2.0)
    other.save(1, 1.0)
    write, between = slow.client.set_registered_model_alias, []

    def late(*words: str) -> None:
        if not between:
            between.append(other.register())
            assert slow.best() == "2"
        write(*words)

    slow.client.set_registered_model_alias = late
    assert slow.register() == ["ba0000001 is version 1 of raced"]
    assert between and slow.best() == "2"


def test_an_outage_is_caught_up(store: str, tmp_path: Path, monkeypatch: Any) -> None:
    """By the queue once the registry is back; what was not sent in time is named at the end."""
    heard, run = Hears(), Run(store, tmp_path / "run", "outage")
    recipe = TrainRecipe(run_name="tiny", registry=run.config)
    create, failures, task = registry.register, [], registration(recipe, run.storage)
    assert task is not None

    def fails(*words: Any, **given: Any) -> Any:
        failures.append(1)
        if len(failures) < 3:
            raise OSError("connection lost")
        return create(*words, **given)

    monkeypatch.setattr(registry, "register", fails)
    mlflow = writer("mlflow", tmp_path / "run", heard, tracking_uri=store)
    mlflow.start(facts(tmp_path / "run"))
    run.save(4, 3.0)
    mlflow.registry(task)
    finish(mlflow)
    assert "ba0000004 is version 1 of outage, the best" in heard and len(failures) == 3

    monkeypatch.setattr(registry, "register", lambda *words, **given: 1 / 0)
    mlflow = writer("mlflow", tmp_path / "run", heard, tracking_uri=store)
    mlflow.start(facts(tmp_path / "run", 4))
    run.save(8, 2.0)
    mlflow.registry(task)
    finish(mlflow, timeout=4.0)
    assert "lacks versions of outage: division by zero" in heard[-1] and not mlflow.has_all


def test_a_kill_before_the_version_leaves_a_model_that_the_next_try_takes(run: Run) -> None:
    run.save(4, 3.0)
    create = run.client.create_model_version
    run.client.create_model_version = lambda *words, **given: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.register()
    run.client.create_model_version = create
    assert run.register() == [f"ba0000004 is version 1 of {run.name}, the best"]
    experiment = run.client.get_run(run.session.run_id).info.experiment_id
    mine = f"source_run_id = '{run.session.run_id}'"
    models = run.client.search_logged_models([experiment], filter_string=mine)
    assert [model.model_id for model in models] == [run.tags(1)[Tag.MODEL]]
    assert {m.key: m.value for m in models[0].metrics} == {CROSS_ENTROPY: 3.0}


def test_the_best_of_a_run_is_what_its_record_says(run: Run) -> None:
    for batch, loss in ((4, 2.0), (8, 1.0), (12, float("nan")), (16, 1.0)):
        run.save(batch, loss)
    record = run.storage.folder / "metrics.jsonl"
    assert best_saved(record, run.config.best, [4, 8, 12, 16]) == 8
    assert best_saved(record, run.config.best, [12]) is None
    assert best_saved(record, BestConfig("loss/train/total", "min"), [4, 16]) == 4


def test_scores_of_an_evaluation_reach_its_version(run: Run, store: str, tmp_path: Path) -> None:
    run.save(4, 3.0)
    run.save(8)
    run.register()
    checkpoint = Checkpoint(run.storage, run.storage.checkpoint_folder(8))
    experiment = find_experiment(run.client, store, "tests")

    def link(**metrics: float) -> MlflowSession:
        session = MlflowSession(run.client, run.client.create_run(experiment).info.run_id, 0, {})
        task = score_link(run.name, checkpoint, metrics, batch=8, folder=tmp_path / "eval")
        task.act(session, run.heard.append)
        return session

    scores = {CROSS_ENTROPY: 2.5, ACCURACY: 0.5}
    session = link(**scores)
    assert run.heard[-1] == f"models:/{run.name}/2 has the scores, the best"
    assert run.best() == "2"
    tags = run.tags(2)
    assert tags[Tag.EVALUATED] == f"{session.run_id} {tmp_path / 'eval'}"
    model = run.client.get_logged_model(tags[Tag.MODEL])
    assert {m.key: (m.value, m.run_id) for m in model.metrics} == {
        name: (value, session.run_id) for name, value in scores.items()
    }
    # What training measured stays what versions are compared by.
    link(**{CROSS_ENTROPY: 9.0})
    assert run.tags(2)[Tag.VALUE] == "2.5"
    (checkpoint.folder / "COMMIT").write_text("other weights, which are no version")
    link(**{CROSS_ENTROPY: 1.0})
    assert run.tags(2)[Tag.VALUE] == "2.5" and len(run.heard) == 4


def test_names_that_lead_nowhere_are_one_line(run: Run, store: str, tmp_path: Path) -> None:
    run.save(4, 3.0)
    run.register()
    name = run.name
    for written, why in {
        "models:/": "names no version; write models:/NAME@best",
        f"models:/{name}": "names no version",
        f"models:/{name}@best/3": "names no version",
        f"models:/{name}x@best": f"no registered model of that name; did you mean '{name}'",
        f"models:/{name}@champion": "no such version or alias; there are: best, latest, 1 to 1",
        f"models:/{name}/7": "no such version or alias; there are: best, latest, 1 to 1",
        "models:/o'hara/7": "can be no model's name",
    }.items():
        with pytest.raises(UserError, match=r"^checkpoint: [^\n]*$") as error:
            address(written, store)
        assert why in str(error.value)
    absent = f"sqlite:///{tmp_path}/none.db"
    with pytest.raises(UserError, match="there is no registry at sqlite"):
        address(f"models:/{name}/1", absent)
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(UserError, match=r"does not answer: .*; start it, or write another"):
        address(f"models:/{name}/1", "http://127.0.0.1:9")
    folder = run.storage.checkpoint_folder(4)
    assert address(f"models:/{name}@best", store) == str(folder)
    (folder / "COMMIT").write_text("other weights")
    with pytest.raises(
        UserError, match=r"version 1 is not what is at .*ba0000004, which was changed or replaced"
    ):
        address(f"models:/{name}@best", store)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"version 1 names .*ba0000004, and nothing is there"):
        address(f"models:/{name}@best", store)


def test_an_export_that_was_uploaded_is_in_mlflow_where_it_is_gone(
    run: Run, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    export = tmp_path / "hf"
    (export / "deeper").mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "deeper" / "x.bin").write_bytes(b"1234")
    known = str(fingerprint(export))
    weights = VersionSource("hf", str(export), known, {}, is_uploaded=True)
    experiment = find_experiment(run.client, store, "tests")
    made = [register(run.client, run.name, weights, None, experiment) for _ in range(2)]
    assert [str(v.version) for v in (*made, *versions(run.client, run.name))] == ["1", "1", "1"]
    assert settle_best(run.client, run.name) is None  # exports are not compared
    named = f"models:/{run.name}/latest"
    assert address(named, store) == str(export)
    (export / "config.json").write_text("[]")
    assert fingerprint(export) != known
    with pytest.raises(UserError, match="version 1 is not what is at"):
        address(named, store)
    shutil.rmtree(export)
    with pytest.raises(UserError, match=f"artifacts download -u models:/{run.name}/1 -d FOLDER"):
        address(named, store)
    (tmp_path / "copy").mkdir()
    copy = mlflow.artifacts.download_artifacts(
        f"models:/{run.name}/1", dst_path=str(tmp_path / "copy")
    )
    assert (Path(copy) / "config.json").read_text() == "{}"
    assert (Path(copy) / "deeper" / "x.bin").read_bytes() == b"1234"
