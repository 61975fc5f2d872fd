"""The tracker as the trainer uses it: files of the run's folder, resume, ranks."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.events import read_events
from llmfoundry.loggers import tracker as tracker_module
from llmfoundry.loggers.console import Console
from llmfoundry.loggers.metrics_file import WALL, read_metrics
from llmfoundry.loggers.tracker import Tracker, flatten
from llmfoundry.recipe.train import TrainRecipe


def recipe() -> TrainRecipe:
    made = TrainRecipe(run_name="tiny")
    made.logger.mlflow = False
    made = made.resolve()
    return made


def train(folder: Path, first: int, last: int, *, is_main: bool = True) -> tuple[Tracker, str]:
    stream = io.StringIO()
    console = Console(is_main=is_main, stream=stream)
    tracker = Tracker(recipe(), folder, is_main=is_main, console=console)
    tracker.start(first, total=10, facts=[("model", "dbrx")])
    for batch in range(first + 1, last + 1):
        tracker.log(batch, batch * 8, {"loss/train/total": 1 / batch})
        if batch % 2 == 0:
            tracker.log(batch, batch * 8, {"metrics/eval/LanguageCrossEntropy": 2 / batch})
            result = {"tasks": [], "categories": {}, "average": None, "problems": []}
            tracker.gauntlet(batch, result)
            tracker.samples(batch, [("a", f"b{batch}")])
    return tracker, stream.getvalue()


def record(folder: Path) -> dict[str, str]:
    files = [folder / "metrics.jsonl", folder / "samples.jsonl", *folder.glob("eval/*")]
    clock = re.compile(rf'"{WALL}": \d+, ')
    return {str(path.relative_to(folder)): clock.sub("", path.read_text()) for path in files}


def test_a_resumed_run_leaves_the_record_of_an_uninterrupted_one(tmp_path: Path) -> None:
    train(tmp_path / "whole", 0, 10)[0].close("finished")
    train(tmp_path / "cut", 0, 7)  # killed: never closed
    tracker, text = train(tmp_path / "cut", 4, 10)
    tracker.close("finished")
    assert record(tmp_path / "cut") == record(tmp_path / "whole")
    # Batches 5, 6, 7: three training lines, an evaluation, a sample, a gauntlet.
    assert "dropped 6 records of steps after batch 4" in text


def test_a_run_that_begins_anew_keeps_nothing(tmp_path: Path) -> None:
    train(tmp_path / "whole", 0, 2)[0].close("finished")
    train(tmp_path / "again", 0, 8)[0].close("killed")
    train(tmp_path / "again", 0, 2)[0].close("finished")
    assert record(tmp_path / "again") == record(tmp_path / "whole")


def test_a_line_a_training_step_and_none_for_evaluations(tmp_path: Path) -> None:
    _, text = train(tmp_path, 0, 4)
    steps = [line for line in text.splitlines() if "loss" in line]
    assert [line.split()[0] for line in steps] == ["1/10", "2/10", "3/10", "4/10"]
    assert "  model  dbrx\n" in text


def test_the_report_reports_how_the_run_ended(tmp_path: Path) -> None:
    tracker, _ = train(tmp_path, 0, 3)
    tracker.report()
    assert "not finished" in (tmp_path / "report.html").read_text()
    tracker.close("failed", {"reason": "loss is not finite", "loss": float("nan")})
    tracker.close("finished")  # the first word counts
    html = (tmp_path / "report.html").read_text()
    assert '<span class="status failed">failed</span>' in html and "loss is not finite" in html
    run = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    assert run["summary"]["status"] == "failed"
    assert run["environment"]["torch"] and run["facts"] == [["model", "dbrx"]]


def test_a_run_that_never_began_leaves_the_record_alone(tmp_path: Path) -> None:
    train(tmp_path, 0, 4)[0].close("finished")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    Tracker(recipe(), tmp_path, is_main=True, console=Console(stream=io.StringIO())).close("failed")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_resume_without_steps_keeps_what_the_run_said_of_its_place(tmp_path: Path) -> None:
    train(tmp_path, 0, 4)[0].close("finished")
    train(tmp_path, 4, 4)[0].close("finished")
    assert json.loads((tmp_path / "run.json").read_text())["environment"]["torch"]


def test_other_ranks_do_nothing(tmp_path: Path) -> None:
    tracker, text = train(tmp_path / "run", 0, 4, is_main=False)
    assert tracker.report() is None
    tracker.close("finished")
    assert text == "" and not (tmp_path / "run").exists()


@pytest.mark.parametrize("at_the_end", [False, True])
def test_events_of_a_full_disk_follow_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    """In their order, with their own times; the line that the disk tore is left out."""
    stream, full = io.StringIO(), [True]
    tracker = Tracker(recipe(), tmp_path, is_main=True, console=Console(stream=stream))
    tracker.start(0, total=9)
    tracker.event("loss_spike", "a spike", "nothing done", step=1, action="log")
    write = os.write

    def write_some(descriptor: int, data: bytes) -> int:
        is_event = full[0] and b'"kind"' in data
        return write(descriptor, data[:20] if is_event else data)

    monkeypatch.setattr(os, "write", write_some)
    began = time.time()
    for step in (2, 3):
        tracker.event("save_failed", f"batch {step} was not saved", "", step=step, action="log")
        tracker.log(step, 8, {"loss/train/total": 1.0})
    assert [event["step"] for event in read_events(tmp_path)] == [1]
    assert "events.jsonl was not written: No space left on device; its line" in stream.getvalue()
    ended, full[0] = time.time(), False
    if at_the_end:
        tracker.close("finished")
    else:
        tracker.log(4, 8, {"loss/train/total": 1.0})
    _, first, second = read_events(tmp_path)
    assert (first["kind"], first["step"], second["step"]) == ("save_failed", 2, 3)
    assert began - 1e-2 <= first["time"] <= second["time"] <= ended + 1e-2


def test_a_report_that_fails_is_said_and_ends_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    tracker = Tracker(recipe(), tmp_path, is_main=True, console=Console(stream=stream))
    tracker.start(0, total=3)
    tracker.log(1, 8, {"loss/train/total": 1.0})
    (tmp_path / "report.html").mkdir()
    tracker.close("finished")
    assert "warning: report.html was not written" in stream.getvalue()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["time/token"] == 8


def test_a_recipe_is_flat_and_its_passwords_hidden() -> None:
    made = TrainRecipe(run_name="tiny")
    made.logger.tracking_uri = "http://me:hunter-2@host:5000"
    made = made.resolve()
    flat = flatten(made)
    assert flat["optimizer.betas"] == [0.9, 0.95]
    assert flat["model.attn_config.attn_type"] == "multihead_attention"
    assert flat["load_path"] is None and flat["save_async"] is True
    assert flat["logger.tracking_uri"] == "http://me:***@host:5000"
    assert "hunter-2" not in str(flat)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("runs/mlflow.db", "is a path"),
        ("file:///tmp/mlruns", "is a path"),
        ("sqlite://runs/mlflow.db", "three slashes"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///~/mlflow.db", "~ is not expanded here"),
        ("htp://server:5000", "did you mean 'http'"),
        ("http://:5000", "names no host"),
    ],
)
def test_an_address_that_mlflow_has_no_store_for_is_a_user_error(
    tmp_path: Path, uri: str, words: str
) -> None:
    made = TrainRecipe(run_name="tiny")
    made.logger.tracking_uri = uri
    made = made.resolve()
    with pytest.raises(UserError, match=r"logger\.tracking_uri") as caught:
        Tracker(made, tmp_path, is_main=True)
    assert words in str(caught.value) and "; write sqlite:///" in str(caught.value)


def test_metrics_are_kept_in_memory_for_a_program(tmp_path: Path) -> None:
    for wanted in (True, False):
        made = recipe()
        made.logger.in_memory = wanted
        tracker = Tracker(made, tmp_path, is_main=True, console=Console(stream=io.StringIO()))
        tracker.start(4, total=7)
        for batch in (5, 6):
            tracker.log(batch, batch * 8, {"loss/train/total": 1 / batch})
        tracker.log(6, 48, {"metrics/eval/bits_per_byte": 2.5})
        tracker.close("finished")
        kept = {
            "loss/train/total": [(5, 1 / 5), (6, 1 / 6)],
            "metrics/eval/bits_per_byte": [(6, 2.5)],
        }
        assert tracker.history == (kept if wanted else {})


def test_a_logger_gets_what_the_run_reports(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    made, folder, stream = recipe(), tmp_path / "run", io.StringIO()
    made.logger.tensorboard = True
    folder.mkdir()
    (folder / "recipe.yaml").write_text("run_name: tiny\n")
    tracker = Tracker(made, folder, is_main=True, console=Console(stream=stream))
    tracker.start(0, total=3)
    for batch in (1, 2, 3):
        tracker.log(batch, batch * 8, {"loss/train/total": 1 / batch})
    tracker.samples(3, [("a", "b")])
    tracker.close("finished")
    seen = EventAccumulator(str(folder / "tensorboard")).Reload()
    for name in ("loss/train/total", "time/token"):
        drawn = [(e.step, make_ndarray(e.tensor_proto).item()) for e in seen.Tensors(name)]
        rows = read_metrics(folder / "metrics.jsonl")
        assert drawn == [(r["time/batch"], pytest.approx(r[name], rel=1e-6)) for r in rows]
    assert {"samples", "recipe"} <= set(seen.Tags()["tensors"])
    assert "warning" not in stream.getvalue()


def test_an_evaluation_that_cannot_be_kept_is_said_and_ends_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    tracker = Tracker(recipe(), tmp_path / "run", is_main=True, console=Console(stream=stream))
    tracker.start(0, total=3)
    tracker.log(1, 8, {"loss/train/total": 1.0})
    (tmp_path / "run" / "eval").write_text("in the way")
    tracker.gauntlet(1, {"tasks": []})
    tracker.close("finished")
    assert "ba0000001.json was not written: File exists" in stream.getvalue()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0]["time/token"] == 8


def test_the_report_is_there_while_the_run_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "_REPORT_SECONDS", 0.0)
    recipe = TrainRecipe(run_name="live", save_folder=str(tmp_path))
    recipe.logger.mlflow = False
    recipe = recipe.resolve()
    record = Tracker(recipe, tmp_path, is_main=True, console=Console(stream=io.StringIO()))
    record.start(0, total=3)
    record.log(1, 8, {"loss/train/total": 2.0})
    record._reporting.join()
    html = (tmp_path / "report.html").read_text()
    assert 'data-written="' in html and "1 batches" in html
    record.close("finished")
    assert 'data-written="' not in (tmp_path / "report.html").read_text()
