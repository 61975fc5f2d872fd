"""trackio gets the run: its own storage gives each step once, after a kill or a full disk too.

The package is not among those of the tests (`pip install 'llmfoundry-recipes[trackio]'`).
"""

from __future__ import annotations

import importlib
import math
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.loggers import trackio_logger
from llmfoundry.loggers.writers import make_target
from llmfoundry.recipe.logger import LoggerConfig
from tests.loggers.hearing import Hears, facts, finish, writer

needs_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="the extra trackio is not installed"
)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trackio's reader and writer of a folder of the test's own."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("trackio.sqlite_storage").SQLiteStorage


def points(storage: Any, name: str) -> list[tuple[int, float]]:
    [run] = storage.get_run_records("llmfoundry")
    rows = storage.get_logs("llmfoundry", run_id=run["id"])
    return sorted((row["step"], row[name]) for row in rows if name in row)


@needs_trackio
def test_a_run_reads_back_with_trackios_reader(
    storage: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    heard, folder = Hears(), tmp_path / "tiny"
    (tmp_path / "recipe.yaml").write_text("seed: 17\nlogger: {tracking_uri: 'http://a:pw@b'}\n")
    sender = writer("trackio", folder, heard)
    sender.log(0, {"metrics/eval/bits_per_byte": 8.0})  # before the first step: kept
    sender.file(tmp_path / "recipe.yaml")
    sender.start(facts(folder, params={"optimizer.lr": 0.1}, tags={"torch": "2.13"}))
    for batch in range(1, 301):
        sender.log(batch, {"loss/train/total": 1 / batch, "step": float(batch), "bad": math.nan})
    sender.samples(300, [("def f(", "x):\n  # *not bold*"), ("a", "b")])
    sender.file(tmp_path / "report.html")  # never written, and not needed
    finish(sender)
    assert heard == [] and capfd.readouterr() == ("", "")
    assert points(storage, "loss/train/total") == [(b, 1 / b) for b in range(1, 301)]
    assert points(storage, "metrics/eval/bits_per_byte") == [(0, 8.0)]
    assert points(storage, "metric/step")[-1] == (300, 300.0)
    assert len(points(storage, "bad")) == 300 and math.isnan(points(storage, "bad")[0][1])
    [(_, samples)] = points(storage, "samples")
    assert samples["_value"].startswith("    def f(x):\n      # *not bold*\n\n---")  # type: ignore[index]
    [(_, kept)] = points(storage, "recipe")
    assert "a:***@b" in kept["_value"]  # type: ignore[index]
    [run] = storage.get_run_records("llmfoundry")
    assert run["name"] == "tiny" and run["id"] == (folder / "trackio_run_id").read_text().strip()
    config = storage.get_run_config("llmfoundry", run_id=run["id"])
    assert config["optimizer.lr"] == 0.1 and config["run.torch"] == "2.13"


@needs_trackio
def test_a_resumed_run_is_one_run_with_each_step_once_and_a_new_one_another(
    storage: Any, tmp_path: Path
) -> None:
    heard = Hears()
    for first, last in ((0, 14), (9, 20)):  # the second was resumed after 9
        sender = writer("trackio", tmp_path, heard)
        sender.start(facts(tmp_path, first))
        for batch in range(first + 1, last + 1):
            sender.log(batch, {"loss": 1 / batch, "time": float(first)})
        finish(sender)
    assert points(storage, "loss") == [(b, 1 / b) for b in range(1, 21)]
    assert dict(points(storage, "metric/time"))[12] == 0.0  # of the first time
    sender = writer("trackio", tmp_path, heard)
    sender.start(facts(tmp_path))  # from the first batch
    sender.log(1, {"loss": 5.0})
    finish(sender)
    assert len(storage.get_run_records("llmfoundry")) == 2 and heard == []


@needs_trackio
def test_a_disk_that_is_full_for_a_while_loses_nothing_and_a_try_is_not_counted_twice(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, write, failures = Hears(), storage.bulk_log, list[int]()

    def bulk_log(**given: Any) -> None:
        failures.append(1)
        if len(failures) < 3:
            raise sqlite3.OperationalError("database or disk is full")
        write(**given)
        if len(failures) == 3:
            raise sqlite3.OperationalError("disk I/O error")  # though it was written

    monkeypatch.setattr(storage, "bulk_log", bulk_log)
    sender = writer("trackio", tmp_path, heard)
    sender.start(facts(tmp_path))
    for batch in range(1, 6):
        sender.log(batch, {"loss": float(batch)})
    finish(sender)
    assert points(storage, "loss") == [(b, float(b)) for b in range(1, 6)] and sender.has_all
    assert len(failures) == 4


@needs_trackio
def test_what_the_database_lacks_comes_from_metrics_jsonl(storage: Any, tmp_path: Path) -> None:
    lines = [f'{{"time/batch": {b}, "time/unix_ms": {b}000, "loss": {b}.5}}\n' for b in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    for said in (["has 3 values that it lacked"], []):  # and then nothing is lacking
        heard = Hears()
        sender = writer("trackio", tmp_path, heard)
        sender.start(facts(tmp_path, 3))
        finish(sender)
        assert [line.split("llmfoundry) ")[1] for line in heard] == said
    assert points(storage, "loss") == [(1, 1.5), (2, 2.5), (3, 3.5)]


@needs_trackio
def test_a_project_that_trackio_keeps_for_itself_is_refused_once(
    storage: Any, tmp_path: Path
) -> None:
    heard = Hears()
    sender = writer("trackio", tmp_path, heard, trackio_project="registry-x")
    sender.start(facts(tmp_path))
    sender.log(1, {"loss": 1.0})
    finish(sender)
    assert "refuses the run" in heard[0] and "reserved for trackio" in heard[0]


def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr(trackio_logger, "find_spec", find)
    config = LoggerConfig(mlflow=False, trackio=True)
    config.fill()
    with pytest.raises(UserError, match=r"logger.trackio: needs .*recipes\[trackio\]"):
        make_target("trackio", config, tmp_path)
