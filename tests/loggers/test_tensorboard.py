"""TensorBoard gets the run: its own reader sees each step once, after a kill or a full disk too."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmfoundry.errors import UserError
from llmfoundry.loggers.writers import log_evaluation
from llmfoundry.recipe.logger import LoggerConfig
from tests.loggers.hearing import Hears, facts, finish, writer

pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")


def read(folder: Path) -> Any:
    """What TensorBoard shows of a run's folder: the reader that its pages use."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0}).Reload()


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.util.tensor_util import make_ndarray

    found = read(folder).Tensors(name)
    return [(event.step, make_ndarray(event.tensor_proto).item()) for event in found]


def texts(folder: Path, name: str) -> list[tuple[int, str]]:
    found = read(folder).Tensors(name)
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_a_run_reads_back_with_tensorboards_reader(tmp_path: Path) -> None:
    heard, began = Hears(), time.time()
    (tmp_path / "recipe.yaml").write_text("seed: 17\nlogger: {tracking_uri: 'http://a:pw@b'}\n")
    sender = writer("tensorboard", tmp_path, heard)
    sender.log(0, {"metrics/eval/bits_per_byte": 8.0})  # before the first step: kept
    sender.file(tmp_path / "recipe.yaml")
    sender.start(facts(tmp_path))
    for batch in range(1, 301):
        sender.log(batch, {"loss/train/total": 1 / batch, "l2_norm/grad/global": math.nan})
    sender.samples(300, [("def f(", "x):\n  # <b>*not bold*</b>"), ("a", "b")])
    sender.file(tmp_path / "report.html")  # never written, and not needed
    finish(sender)

    assert heard == []
    single = [(b, pytest.approx(1 / b, rel=1e-7)) for b in range(1, 301)]
    assert scalars(tmp_path, "loss/train/total") == single
    assert scalars(tmp_path, "metrics/eval/bits_per_byte") == [(0, 8.0)]
    assert all(math.isnan(v) for _, v in scalars(tmp_path, "l2_norm/grad/global"))
    assert abs(read(tmp_path).Tensors("loss/train/total")[0].wall_time - began) < 5
    [(step, text)] = texts(tmp_path, "samples")
    assert step == 300
    assert text == "    def f(x):\n      # <b>*not bold*</b>\n\n---\n\n    ab"
    [(_, recipe)] = texts(tmp_path, "recipe")
    assert "    seed: 17" in recipe and "http://a:***@b" in recipe
    assert read(tmp_path).SummaryMetadata("samples").plugin_data.plugin_name == "text"


def test_a_resumed_run_shows_each_step_once_and_the_later_value(tmp_path: Path) -> None:
    heard = Hears()
    for first, last, factor in ((0, 14, 1.0), (9, 20, 2.0)):  # the second was resumed after 9
        sender = writer("tensorboard", tmp_path, heard)
        sender.start(facts(tmp_path, first))
        for batch in range(first + 1, last + 1):
            sender.log(batch, {"loss": factor * batch})
            if batch % 3 == 0:
                sender.samples(batch, [("a", f"{factor}")])
        finish(sender, "killed")
    assert scalars(tmp_path, "loss") == [(b, b * (1.0 if b <= 9 else 2.0)) for b in range(1, 21)]
    assert texts(tmp_path, "samples") == [
        (b, f"    a{1.0 if b <= 9 else 2.0}") for b in (3, 6, 9, 12, 15, 18)
    ]
    sender = writer("tensorboard", tmp_path, heard)
    sender.start(facts(tmp_path))  # from the first batch: nothing of the earlier run is left
    sender.log(1, {"loss": 7.0})
    finish(sender)
    assert scalars(tmp_path, "loss") == [(1, 7.0)] and heard == []


def test_a_full_disk_is_said_once_and_tears_no_event(tmp_path: Path) -> None:
    """The file may not grow beyond 4000 bytes, then may again: a disk that fills and is cleared."""
    code = (
        "import json, resource, sys, time; from pathlib import Path\n"
        "from tests.loggers.hearing import *\n"
        "folder, heard = Path(sys.argv[1]), Hears()\n"
        "sender = writer('tensorboard', folder, heard)\n"
        "sender.start(facts(folder))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))\n"
        "batch, cleared = 0, int(sys.argv[2])\n"
        "until = time.monotonic() + 120\n"
        "while time.monotonic() < until and len(heard) < 1 + cleared:\n"
        "    batch += 1\n"
        "    if cleared and heard:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "    sender.log(batch, {'loss': float(batch)})\n"
        "    time.sleep(0.01)\n"
        "began = time.monotonic()\n"
        "finish(sender, timeout=1.0 + 29 * cleared)\n"
        "print(json.dumps([batch, time.monotonic() - began, heard]))\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / str(cleared)), str(int(cleared))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cleared in (False, True)
    ]
    for cleared, process in zip((False, True), started, strict=True):
        folder = tmp_path / str(cleared)
        out, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
        batches, seconds, heard = json.loads(out)
        kept = scalars(folder, "loss") if "loss" in read(folder).Tags()["tensors"] else []
        assert kept == [(b, float(b)) for b in range(1, len(kept) + 1)]  # no torn record between
        assert "TensorBoard" in heard[0] and "File too large" in heard[0]
        assert "training continues" in heard[0]
        if cleared:
            assert len(kept) == batches and "works again" in heard[1] and len(heard) == 2
        else:
            lost = batches - len(kept)
            assert len(heard) == 2 and seconds < 20
            assert f"lacks {lost} metric values" in heard[1]


def test_a_missing_package_is_a_user_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UserError) as caught:
            writer(package, tmp_path, Hears())
        assert str(caught.value) == (
            f"logger.{package}: needs the package {package};"
            f" pip install 'llmfoundry-recipes[{package}]'"
        )


def test_an_evaluation_has_its_metrics_and_its_results_there(tmp_path: Path) -> None:
    results = {"metrics": {"metrics/copa/0-shot/Accuracy": 0.625}}
    (tmp_path / "results.json").write_text(json.dumps(results))
    found = SimpleNamespace(name="a model", folder=tmp_path, results=results, batch=7, link=None)
    heard = Hears()
    config = LoggerConfig(mlflow=False, tensorboard=True)
    places = log_evaluation(found, config, note=heard.append, warn=heard.append)
    assert heard == [] and places == [f"TensorBoard ({tmp_path / 'tensorboard'})"]
    assert scalars(tmp_path, "metrics/copa/0-shot/Accuracy") == [(7, 0.625)]
    assert "0.625" in texts(tmp_path, "results")[0][1]
