"""Checkpoints become versions: once, compared rightly, marked when they go, whoever else writes.

The registry is MLflow's own, in a SQLite file, read back through its client.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.builders.registry import find_version, link_scores, version_of
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.errors import UserError
from llmfoundry.loggers import registry
from llmfoundry.loggers.mlflow_logger import find_experiment, open_client
from llmfoundry.loggers.registry import (
    Evaluations,
    Tag,
    Weights,
    fingerprint_of_files,
    register,
    register_saved,
    settle_best,
    versions,
)
from llmfoundry.loggers.tracker import registration
from llmfoundry.recipe.registry import CROSS_ENTROPY, BestConfig, RegistryConfig
from tests.loggers.hearing import Hears, facts, finish, writer

ACCURACY = "icl/metrics/eval_gauntlet/core_average"


@dataclass
class Session:
    """MLflow's run of a folder, as the logger has it open."""

    client: Any
    run_id: str


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


class Run:
    """A run's folder with checkpoints that are COMMIT alone, and its side of the registry."""

    def __init__(self, uri: str, folder: Path, name: str, best: BestConfig | None = None) -> None:
        self.client, self.name, self.storage = open_client(uri), name, Storage(folder)
        experiment = find_experiment(self.client, uri, "tests")
        self.session = Session(self.client, self.client.create_run(experiment).info.run_id)
        config = RegistryConfig(name=name, best=best or BestConfig())
        config.fill(has_validation=True)
        self.evaluations, self.heard = Evaluations(config), Hears()

    def save(self, batch: int, loss: float | None = None, **more: float) -> Path:
        folder = self.storage.checkpoint_folder(batch)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "COMMIT").write_text(f"{self.storage.folder} {batch} {loss}")
        scores = {} if loss is None else {CROSS_ENTROPY: loss}
        self.evaluations.add(batch, 1000 + batch, {**scores, **more, "loss/train/total": 1.0})
        return folder

    def register(self) -> list[str]:
        """What was said; the alias `best` is as `bests` says then."""
        self.heard.clear()
        register_saved(
            self.session,
            self.heard.append,
            name=self.name,
            run=self.storage,
            facts={Tag.RUN: "tiny"},
            evaluations=self.evaluations,
        )
        return [*self.heard]

    def best(self) -> str | None:
        holder = self.client.get_registered_model(self.name).aliases.get("best")
        return None if holder is None else str(holder)

    def tags(self, version: int) -> dict[str, str]:
        return dict(self.client.get_model_version(self.name, str(version)).tags)


@pytest.fixture
def run(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    return Run(store, tmp_path / "run", request.node.name[:60])


def test_versions_are_what_the_folder_has(run: Run, store: str) -> None:
    first = run.save(4, 3.0, **{"metrics/eval/bits_per_byte": 4.5})
    run.session.client.log_metric(run.session.run_id, CROSS_ENTROPY, 3.0, 1004, 4)  # as it is sent
    run.save(8, 2.0)
    (run.storage.checkpoint_folder(12)).mkdir()  # being written
    assert run.register() == [
        f"ba0000004 is version 1 of {run.name}",
        f"ba0000008 is version 2 of {run.name}, the best",
    ]
    assert run.register() == [] and run.best() == "2"
    tags = run.tags(1)
    assert tags[Tag.ADDRESS] == str(first.resolve()) and tags[Tag.STEP] == "4"
    assert tags[Tag.RECIPE] == f"{first.resolve()}/recipe.yaml" and tags[Tag.RUN] == "tiny"
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


def test_what_is_pruned_or_replaced_is_marked_and_never_the_best(run: Run, store: str) -> None:
    for batch, loss in ((4, 1.0), (8, 2.0), (12, 3.0)):
        run.save(batch, loss)
    run.register()
    assert run.best() == "1"
    shutil.rmtree(run.storage.checkpoint_folder(4))
    run.register()
    assert run.best() == "2" and Tag.PRUNED in run.tags(1) and Tag.PRUNED not in run.tags(2)
    with pytest.raises(UserError, match="the weights of version 1 are gone, as of 20"):
        find_version(f"models:/{run.name}/1", "checkpoint", uri=store)
    run.evaluations.drop_after(4)  # the run went back, and saves other weights in the same place
    run.save(8, 5.0)
    run.save(12, 4.0)
    assert run.register()[1].endswith(", the best")
    assert [Tag.PRUNED in run.tags(n) for n in range(1, 6)] == [True, True, True, False, False]
    assert run.best() == "5"
    shutil.rmtree(run.storage.folder)
    run.register()
    assert run.best() is None
    with pytest.raises(UserError, match=r"no alias 'best', or no version .*; there are: latest"):
        find_version(f"models:/{run.name}@best", "checkpoint", uri=store)
    with pytest.raises(UserError, match="version 5 are gone"):
        find_version(f"models:/{run.name}/latest", "checkpoint", uri=store)


def test_best_is_by_one_metric_and_whoever_has_another_is_told(store: str, tmp_path: Path) -> None:
    loss = Run(store, tmp_path / "a", "two-metrics")
    score = Run(store, tmp_path / "b", "two-metrics", BestConfig(metric=ACCURACY))
    loss.save(1, 3.0)
    loss.save(2)  # which was not evaluated
    loss.register()
    score.save(1, 1.0, **{ACCURACY: 0.9})
    said = score.register()
    assert loss.best() == "1" and len(said) == 2
    assert f"best of two-metrics is compared by {CROSS_ENTROPY} (min), and stays" in said[1]
    assert [score.evaluations.mode, Tag.VALUE in loss.tags(2)] == ["max", False]
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
    create, failures = registry.register, []

    def fails(*words: Any, **given: Any) -> Any:
        failures.append(1)
        if len(failures) < 3:
            raise OSError("connection lost")
        return create(*words, **given)

    monkeypatch.setattr(registry, "register", fails)
    mlflow = writer("mlflow", tmp_path / "run", heard, tracking_uri=store)
    mlflow.start(facts(tmp_path / "run"))
    run.save(4, 3.0)
    mlflow.registry(registration("outage", run.storage, "tiny", run.evaluations))
    finish(mlflow)
    assert "ba0000004 is version 1 of outage, the best" in heard and len(failures) == 3

    monkeypatch.setattr(registry, "register", lambda *words, **given: 1 / 0)
    mlflow = writer("mlflow", tmp_path / "run", heard, tracking_uri=store)
    mlflow.start(facts(tmp_path / "run", 4))
    run.save(8, 2.0)
    mlflow.registry(registration("outage", run.storage, "tiny", run.evaluations))
    finish(mlflow, timeout=4.0)
    assert "lacks versions of outage: division by zero" in heard[-1] and not mlflow.has_all


def test_scores_of_an_evaluation_reach_its_version(run: Run, store: str, tmp_path: Path) -> None:
    run.save(4, 3.0)
    run.save(8)
    run.register()
    checkpoint = Checkpoint(run.storage, run.storage.checkpoint_folder(8))
    found = version_of(checkpoint, run.name, store)
    assert found is not None and str(found.version.version) == "2"
    scores = {CROSS_ENTROPY: 2.5, ACCURACY: 0.5}
    line = link_scores(found, scores, batch=8, folder=tmp_path / "eval", name="tiny ba8")
    assert line == f"models:/{run.name}/2, the best" and run.best() == "2"
    tags = run.tags(2)
    run_id, folder = tags[Tag.EVALUATED].split(" ")
    assert folder == str(tmp_path / "eval") and run_id != run.session.run_id
    model = run.client.get_logged_model(tags[Tag.MODEL])
    assert {m.key: m.value for m in model.metrics} == scores
    assert run.client.get_run(run_id).data.metrics == scores
    # What training measured stays what versions are compared by.
    again = version_of(checkpoint, run.name, store)
    assert again is not None
    link_scores(again, {CROSS_ENTROPY: 9.0}, batch=8, folder=tmp_path / "eval", name="tiny ba8")
    assert run.tags(2)[Tag.VALUE] == "2.5"


def test_names_that_lead_nowhere_are_one_line(run: Run, store: str, tmp_path: Path) -> None:
    run.save(4, 3.0)
    run.register()
    name = run.name
    for written, why in {
        "models:/": "names no version; write models:/NAME@best",
        f"models:/{name}": "names no version",
        f"models:/{name}@best/3": "names no version",
        f"models:/{name}x@best": f"no registered model of that name; did you mean '{name}'",
        f"models:/{name}@champion": "there is no alias 'champion'; there are: best, latest",
        f"models:/{name}/7": "no version 7; the newest is 1",
        "models:/o'hara/7": "can be no model's name",
    }.items():
        with pytest.raises(UserError, match=r"^checkpoint: [^\n]*$") as error:
            find_version(written, "checkpoint", uri=store)
        assert why in str(error.value)
    absent = f"sqlite:///{tmp_path}/none.db"
    with pytest.raises(UserError, match="there is no registry at sqlite"):
        find_version(f"models:/{name}/1", "checkpoint", uri=absent)
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(UserError, match=r"does not answer: .*; start it, or write another"):
        find_version(f"models:/{name}/1", "checkpoint", uri="http://127.0.0.1:9")
    folder = run.storage.checkpoint_folder(4)
    assert find_version(f"models:/{name}@best", "checkpoint", uri=store).address == str(folder)
    (folder / "COMMIT").write_text("other weights")
    with pytest.raises(UserError, match="is not what became version 1: it was changed or replaced"):
        find_version(f"models:/{name}@best", "checkpoint", uri=store)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"version 1 names .*ba0000004, and nothing is there"):
        find_version(f"models:/{name}@best", "checkpoint", uri=store)


def test_an_export_that_was_uploaded_is_fetched_where_it_is_gone(
    run: Run, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    export = tmp_path / "hf"
    (export / "deeper").mkdir(parents=True)
    (export / "config.json").write_text("{}")
    (export / "deeper" / "x.bin").write_bytes(b"1234")
    known = fingerprint_of_files(export)
    weights = Weights("hf", str(export), known, upload=export)
    register(run.client, run.name, weights, run_id=run.session.run_id)
    assert settle_best(run.client, run.name) is None  # exports are not compared
    named = f"models:/{run.name}/latest"
    assert find_version(named, "checkpoint", uri=store).address == str(export)
    (export / "config.json").write_text("[]")
    assert fingerprint_of_files(export) != known
    with pytest.raises(UserError, match="is not what became version 1"):
        find_version(named, "checkpoint", uri=store)
    shutil.rmtree(export)
    for _ in range(2):  # fetched, and there already
        fetched = Path(find_version(named, "checkpoint", uri=store).address)
        assert fingerprint_of_files(fetched) == known and fetched.is_relative_to(tmp_path / "home")
    assert [str(v.version) for v in versions(run.client, run.name)] == ["1"]
