"""Callbacks: what they log, when they end a run, and what they leave behind."""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry.builders import callbacks as builders
from llmfoundry.builders import trainer as build
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.logger import EarlyStopperConfig
from llmfoundry.recipe.optimizer import OPTIMIZERS
from llmfoundry.train.callbacks import EarlyStopper, GarbageCollection, LRMonitor, RuntimeEstimator
from llmfoundry.train.trainer import Callback
from tests.tiny import losses, write_recipe
from tests.train.here import rows, tensors, train_here
from tests.warm_scripts import on_ranks

LOSS = "metrics/eval/LanguageCrossEntropy"
NO_EVALUATION = ("eval=off", "max_duration=3ba")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("callbacks")
        write_recipe(folder)
        patch.chdir(folder)
        yield folder


def test_the_rate_of_every_group_is_logged_under_composers_name() -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    composers = {"adamw": "AdamW", "decoupled_adamw": "DecoupledAdamW", "muon": "Muon"}
    composers["decoupled_lionw"] = "DecoupledLionW"
    assert composers.keys() == OPTIMIZERS.keys()
    for name, kind in composers.items():
        recipe = SimpleNamespace(optimizer=SimpleNamespace(name=name))
        trainer: Any = SimpleNamespace(
            recipe=recipe, optimizer=SimpleNamespace(param_groups=groups)
        )
        assert LRMonitor().measure(trainer) == {f"lr-{kind}/group0": 0.5, f"lr-{kind}/group1": 0.25}


def test_rates_of_a_runs_groups_follow_one_schedule(place: Path) -> None:
    group = "optimizer.param_groups=[{param_str_match: norm, lr: 1e-4}]"
    folder = train_here("groups", group, *NO_EVALUATION)
    for row in rows(folder, "lr-DecoupledAdamW/group1").values():
        rates = [row[f"lr-DecoupledAdamW/group{i}"] for i in range(2)]
        assert rates[1] / rates[0] == pytest.approx(1e-4 / 3e-3)


def test_speed_counts_rows_and_tokens_alike(place: Path) -> None:
    folder = train_here("speed", *NO_EVALUATION)
    for row in rows(folder, "throughput/tokens_per_sec").values():
        assert row["throughput/tokens_per_sec"] == pytest.approx(
            64 * row["throughput/samples_per_sec"]
        )
        assert row["throughput/samples_per_sec"] == pytest.approx(
            4 * row["throughput/batches_per_sec"]
        )


@pytest.mark.parametrize("total", [90, 100])
@pytest.mark.parametrize("interval", [0, 7, 25, 200])
@pytest.mark.parametrize("batch", [20, 49, 50, 88])
def test_what_remains_is_steps_and_evaluations_at_their_means(
    total: int, interval: int, batch: int
) -> None:
    """Steps take 2 s; evaluations, of which there were two, took 30 s each."""
    trainer: Any = SimpleNamespace(
        logged_batch=batch,
        first_batch=10,
        clock=SimpleNamespace(total=total, batches=lambda every: every),
        recipe=SimpleNamespace(eval_interval=interval),
        train_seconds=2.0 * (batch - 10),
        eval_seconds=60.0,
        evaluations=2,
    )
    due = [n for n in range(batch, total + 1) if n == total or (interval and n % interval == 0)]
    metrics: dict[str, float] = {}
    RuntimeEstimator().on_log(trainer, metrics)
    expected = 2 * (total - batch) + 30 * len(due)
    assert metrics["time/remaining_estimate"] == pytest.approx(expected)


PEAK = "import torch; from llmfoundry.train.callbacks import peak_memory as peak"
PEAK += "; print(peak(torch.device('cpu')))"


@pytest.mark.slow
def test_the_peak_is_not_that_of_the_process_that_started_this_one() -> None:
    code = "import subprocess, sys; held = b'1' * (2 << 30)"
    code += "; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    words = [sys.executable, "-c", code, PEAK]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert 0 < int(said) < 1 << 30


def test_norms_are_those_of_the_tensors_and_only_where_a_step_is_logged(
    place: Path, tmp_path: Path
) -> None:
    options = ("callbacks.optimizer_monitor=true", "log_interval=2ba")
    folder = train_here("norms", *options, *NO_EVALUATION)
    logged = rows(folder, "l2_norm/param/global")
    assert sorted(logged) == [2, 3]
    saved, row = tensors(folder / "checkpoints/ba0000003", tmp_path / "whole.pt"), logged[3]
    moments = {n: s["exp_avg"] for n, s in saved["optimizer"]["state"].items()}
    for kind, found in (("param", saved["model"]), ("moment", moments)):
        exact = {name: float(tensor.double().norm()) for name, tensor in found.items()}
        for name, norm in exact.items():
            assert row[f"l2_norm/{kind}/{name}"] == pytest.approx(norm, rel=1e-5)
        assert row[f"l2_norm/{kind}/global"] == pytest.approx(math.hypot(*exact.values()), rel=1e-5)
    gradients = [row[f"l2_norm/grad/{name}"] for name in saved["model"]]
    assert math.hypot(*gradients) == pytest.approx(row["l2_norm/grad/global"], rel=1e-5)
    without = train_here("no-norms", "log_interval=2ba", *NO_EVALUATION)
    assert losses(folder) == losses(without)


class Recorder(Callback):
    """Keeps the gradients that callbacks are shown."""

    def __init__(self) -> None:
        self.norms: dict[int, float] = {}

    def on_gradients(self, trainer: Any) -> None:
        gradients = [p.grad.flatten() for p in trainer.root.parameters()]
        self.norms[trainer.batch + 1] = float(torch.cat(gradients).norm())


def test_callbacks_see_gradients_before_clipping(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(build, "build_callbacks", lambda job: [recorder])
    folder = train_here("seen", "gradient_clipping.clipping_threshold=0.01", *NO_EVALUATION)
    logged = {b: r["l2_norm/grad/global"] for b, r in rows(folder, "loss/train/total").items()}
    assert recorder.norms == pytest.approx(logged, rel=1e-5)
    assert min(logged.values()) > 1, "the bound must bind"


def test_a_hook_that_is_set_on_a_callback_is_called(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback, seen = Callback(), []
    callback.on_step = lambda trainer: seen.append(trainer.batch)  # type: ignore[method-assign]
    monkeypatch.setattr(build, "build_callbacks", lambda job: [callback])
    train_here("set", "max_duration=3ba", *NO_EVALUATION)
    assert seen == [1, 2, 3]


def stop_batch(values: Sequence[float], mode: str, patience: int, min_delta: float) -> int | None:
    """After how many measurements a run ends: a slow look back at each of them."""
    sign = 1 if mode == "max" else -1
    for n in range(1, len(values) + 1):
        best_at = 0
        for i in range(1, n):
            if sign * values[i] > sign * values[best_at] + min_delta:
                best_at = i
        if n - 1 - best_at >= patience:
            return n
    return None


class FakeTrainer:
    """What an early stopper asks of a trainer."""

    def __init__(self, world: World) -> None:
        self.world, self.batch, self.done = world, 0, False
        self.why = ""

    def end(self, why: str) -> None:
        self.done, self.why = True, why


def measure(stopper: EarlyStopper, values: Sequence[float], world: World) -> int | None:
    """The measurement at which a stopper ends the run."""
    trainer: Any = FakeTrainer(world)
    for n, value in enumerate(values, start=1):
        trainer.batch = n
        stopper.on_log(trainer, {"throughput/tokens_per_sec": 1.0})
        stopper.on_evaluate(trainer, {"metrics/x/accuracy": value})
        if trainer.done:
            return n
    return None


ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("min_delta", [0.0, 0.2])
def test_a_run_ends_when_nothing_has_improved_for_long(
    mode: str, patience: int, min_delta: float
) -> None:
    generator = torch.Generator().manual_seed(patience)
    config = EarlyStopperConfig("metrics/x/accuracy", mode, patience, min_delta)
    for _ in range(20):
        values = torch.rand(12, generator=generator).tolist()
        expected = stop_batch(values, mode, patience, min_delta)
        assert measure(EarlyStopper(config), values, ALONE) == expected
        half = EarlyStopper(config)  # and in two processes, one after the other
        if measure(half, values[:5], ALONE) is None:
            rest = EarlyStopper(config)
            rest.restore(json.loads(json.dumps(half.state())))
            found = measure(rest, values[5:], ALONE)
            assert (found and found + 5) == expected


def test_what_is_no_number_is_no_improvement() -> None:
    config = EarlyStopperConfig("metrics/x/accuracy", "max", 2, 0.0)
    assert measure(EarlyStopper(config), [math.nan, 0.5, math.nan, 0.4], ALONE) == 4
    assert measure(EarlyStopper(config), [math.nan, math.nan], ALONE) == 2


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    falling = [3.0, 2.0, 1.5, 1.0, 0.5]
    values = falling if rank == 1 else [1.0, 2.0, 2.0, 2.0, 2.0]  # rank 1 alone would never stop
    stopper = EarlyStopper(EarlyStopperConfig("metrics/x/accuracy", "min", 2, 0.0))
    ended = measure(stopper, values, World(rank, 2, rank, torch.device("cpu")))
    (folder / f"rank{rank}").write_text(f"{ended} {json.dumps(stopper.state())}")
    dist.destroy_process_group()


def test_all_processes_end_where_process_0_does(tmp_path: Path) -> None:
    on_ranks(work, (tmp_path,), 2)
    said = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    assert said[0].startswith("3 ") and said[1] == said[0]


WORSE = (f"callbacks.early_stopper.metric={LOSS}", "callbacks.early_stopper.mode=max")
STOP = (*WORSE, "callbacks.early_stopper.patience=2", "eval_interval=1ba", "save_interval=0ba")


def test_a_run_ended_early_is_complete_and_stays_so(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss falls, and a falling loss is no improvement here."""
    folder = train_here("stopped", *STOP)
    assert sorted(losses(folder)) == sorted(rows(folder, LOSS)) == [1, 2, 3]
    assert [f.name for f in (folder / "checkpoints").iterdir()] == ["ba0000003"]
    assert json.loads((folder / "run.json").read_text())["summary"]["status"] == "finished"
    assert f"stopped early after batch 3: {LOSS} has not improved" in capsys.readouterr().out
    before = (folder / "metrics.jsonl").read_text()
    train_here("stopped", *STOP)
    assert (folder / "metrics.jsonl").read_text() == before
    assert "complete" in capsys.readouterr().out
    train_here("stopped", *STOP, "callbacks.early_stopper.patience=4")
    assert sorted(losses(folder)) == [1, 2, 3, 4, 5]


def test_patience_is_counted_across_a_resume(place: Path) -> None:
    folder = train_here("patient", *STOP, "save_interval=1ba")
    shutil.rmtree(folder / "checkpoints/ba0000003")
    train_here("patient", *STOP, "save_interval=1ba")  # from batch 2
    assert sorted(losses(folder)) == [1, 2, 3]


@pytest.mark.parametrize("first", ["true", "false"])
def test_a_metric_that_is_never_measured_is_an_error_with_the_work_saved(
    place: Path, first: str
) -> None:
    name = f"unknown-{first}"
    arguments = (f"callbacks.early_stopper.metric={LOSS[:-2]}yx", "eval_interval=2ba")
    with pytest.raises(UserError, match=f"did you mean '{LOSS}'") as caught:
        train_here(name, *arguments, f"eval_first={first}")
    assert str(caught.value).startswith("callbacks.early_stopper.metric: ")
    saved = [f.name for f in Path(f"runs/{name}/checkpoints").iterdir()]
    assert saved == ["ba0000001" if first == "true" else "ba0000002"]


def test_a_metric_measured_only_in_training_is_no_error(place: Path) -> None:
    arguments = ("callbacks.early_stopper.metric=loss/train/total", "eval_interval=2ba")
    folder = train_here("known", *arguments, "eval_first=true", "max_duration=4ba")
    assert sorted(losses(folder)) == [1, 2, 3, 4]


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_a_program_froze_before_it_trains_stays_frozen(place: Path) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    train_here("frozen", "eval_interval=0ba", "save_interval=0ba", "max_duration=2ba")
    assert gc.get_freeze_count() >= before and gc.isenabled()


@pytest.mark.usefixtures("nothing_frozen")
def test_garbage_is_collected_at_known_batches_only(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collections: list[tuple[int, int]] = []
    at = {"batch": 0}

    class Watch(GarbageCollection):
        def on_step(self, trainer: Any) -> None:
            at["batch"] = trainer.batch
            super().on_step(trainer)
            at["batch"] = -1
            assert not gc.isenabled()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            collections.append((at["batch"], info["generation"]))

    monkeypatch.setattr(builders, "GarbageCollection", Watch)
    gc.callbacks.append(note)
    try:
        arguments = ("eval_interval=4ba", "save_interval=0ba", "callbacks.gc_interval=3")
        train_here("garbage", *arguments, "max_duration=7ba")
    finally:
        gc.callbacks.remove(note)
    assert collections == [(1, 2), (3, 1), (4, 2), (6, 1)]
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_pythons_collector_comes_back_after_an_error(place: Path) -> None:
    with pytest.raises(UserError, match="not finite"):
        train_here("broken", "optimizer.lr=1e30", "schedule.t_warmup=0ba")
    assert gc.isenabled() and gc.get_freeze_count() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_of_a_gpu_is_distinguished(place: Path) -> None:
    row = rows(train_here("memory", *NO_EVALUATION), "loss/train/total")[3]
    allocated, reserved = (
        [row[f"memory/{when}_{kind}_mem"] for when in ("current", "peak")]
        for kind in ("allocated", "reserved")
    )
    assert 0 < allocated[0] <= allocated[1] <= reserved[1] and reserved[0] <= reserved[1]
    assert row["memory/alloc_retries"] == 0
