"""What happened to a run is reported by tags; what MLflow has of them: test_mlflow.py."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.events import add_event, read_events
from llmfoundry.loggers.background_queue import event_tags
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.resilience.supervise import notify
from tests.loggers.hearing import closed_port


def decide(folder: Path, attempt: int, why: str, action: str, **more: Any) -> None:
    add_event(folder, "start", f"attempt {attempt}", action="start", attempt=attempt)
    add_event(folder, "decision", f"attempt {attempt} ended: {why}", action=action, **more)


def test_tags_count_kinds_and_name_the_newest(tmp_path: Path) -> None:
    assert event_tags([]) == {}
    add_event(tmp_path, "loss_spike", "a loss of 9 at http://me:secret@host", step=7, action="log")
    add_event(tmp_path, "loss_spike", "a loss of 8", step=9, action="log", done="nothing is done")
    decide(tmp_path, 1, "hang: rank 3 hangs", "restart", cause="hang", bad_nodes=["n2", "n1"])
    decide(tmp_path, 2, "complete", "finish", cause="done", bad_nodes=[])
    events = [{**event, "time": 1_767_323_045.5} for event in read_events(tmp_path)]
    assert event_tags(events) == {
        "events.loss_spike": "2",
        "events.last": "2026-01-02 03:04:05 UTC step 9 loss_spike: a loss of 8; nothing is done",
        "supervise.attempts": "2",
        "supervise.restarts": "1",
        "supervise.last": "2026-01-02 03:04:05 UTC attempt 2 ended: complete; finish",
        "supervise.cause": "done",
        "supervise.bad_nodes": "n1, n2",
    }
    assert "secret" not in str(event_tags(events[:1]))


def test_they_are_few_and_short_however_long_the_run() -> None:
    events = [{"time": i, "kind": f"k{i % 50}", "what": "x" * 9000} for i in range(1000)]
    tags = event_tags(events)
    assert len(tags) == 22 and max(map(len, tags.values())) == 500
    assert tags["events.k3"] == "20" and tags["events.others"] == "600"


def test_a_store_that_does_not_answer_holds_no_supervisor_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setattr(notify, "FINAL_SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        config = LoggerConfig(tracking_uri=f"http://127.0.0.1:{silent.getsockname()[1]}")
        config.fill()
        began = time.monotonic()
        said = notify.send_to_mlflow(config, tmp_path, "failed")
    assert time.monotonic() - began < 60 and "no answer in" in said


@pytest.mark.slow
def test_the_store_of_a_runs_url_has_the_last_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "FINAL_SECONDS", 300.0)  # a busy machine
    folder, bucket = tmp_path / "copy", tmp_path / "bucket"
    decide(folder, 1, "killed", "stop", cause="unknown")
    (folder / "supervise/attempt-1").mkdir(parents=True)
    (folder / "supervise/attempt-1/rank-0.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("of the run's own processes")
    options = FetchOptions(retry=0, timeout=1.0, storage_options={"s3": {"secret": "kanarie12"}})
    assert notify.send_to_store(f"file://{bucket}", options, folder) == ""
    sent = sorted(p.relative_to(bucket).as_posix() for p in bucket.rglob("*") if p.is_file())
    assert sent == ["events.jsonl", "supervise/attempt-1/rank-0.json"]
    assert (bucket / "events.jsonl").read_bytes() == (folder / "events.jsonl").read_bytes()
    (tmp_path / "file").touch()
    said = notify.send_to_store(f"file://{tmp_path}/file/kanarie12", options, folder)
    assert "lacks the last decision: " in said and "kanarie12" not in said.partition(": ")[2]


@pytest.mark.slow
def test_a_store_that_is_away_is_reported_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "FINAL_SECONDS", 300.0)
    (tmp_path / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef\n")
    config = LoggerConfig(tracking_uri=f"http://me:secret@127.0.0.1:{closed_port()}")
    config.fill()
    said = notify.send_to_mlflow(config, tmp_path, "failed")
    assert said.startswith("MLflow lacks the last decision: ") and "me:***@127.0.0.1" in said
