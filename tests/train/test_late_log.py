"""A logged step does not wait for the GPU: its values are read a step later, under its number."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry.builders import trainer as build
from llmfoundry.errors import UserError
from llmfoundry.train import trainer as loop
from llmfoundry.train.step_metrics import HostCopy
from llmfoundry.train.trainer import Callback
from tests.fake_cuda import run_on_fake_cuda
from tests.selection import slow_but
from tests.tiny import write_recipe
from tests.train.here import train_here

CLOCKS = ("time/", "throughput/", "memory/")  # of the machine, not of the training
ALL = (
    "callbacks.optimizer_monitor=true",
    "model.ffn_config.ffn_type=dmoe",
    "model.ffn_config.moe_num_experts=4",
    "model.ffn_config.moe_top_k=2",
    "model.no_bias=true",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("late")
        write_recipe(folder)
        patch.chdir(folder)
        yield folder


def late_here(name: str, *overrides: str) -> Path:
    """A run that treats the CPU as a device that works on while the host goes ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "lags", lambda device: True)
        return train_here(name, *overrides)


def logged(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, in order, without what the clock decides."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    kept = ("time/batch", "time/token", "time/epoch")
    return [{n: v for n, v in row.items() if n in kept or not n.startswith(CLOCKS)} for row in rows]


@pytest.mark.parametrize("interval", slow_but([2], [1, 2, 3]))
def test_values_read_late_are_those_read_at_once(place: Path, interval: int) -> None:
    """Every metric of every batch, in the same order, experts' loads and all."""
    settings = (*ALL, f"log_interval={interval}ba", "eval_interval=3ba", "max_duration=8ba")
    found = [run(f"{run.__name__}-{interval}", *settings) for run in (train_here, late_here)]
    rows = logged(found[0])
    assert rows == logged(found[1])
    step = next(row for row in reversed(rows) if "l2_norm/moment/global" in row)
    last = {"time/batch", "time/token", "time/epoch", "l2_norm/moment/global", "moe/load_max"}
    assert last <= step.keys() and step["time/batch"] == 8
    loads = [(folder / "routing.jsonl").read_text() for folder in found]
    assert loads[0] == loads[1]


def test_the_first_rate_and_the_rest_of_the_time_are_of_the_logged_batch(place: Path) -> None:
    folder = late_here("rates", "max_duration=4ba")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/remaining_estimate" in row]
    for row in rows:
        batch, seconds = row["time/batch"], row["time/train"]
        assert row["time/remaining_estimate"] == pytest.approx((4 - batch) * seconds / batch)
    assert [row["time/batch"] for row in rows] == [1, 2, 3, 4]


def test_a_run_that_went_wrong_ends_a_step_later_with_the_same_record(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[int] = []

    class Count(Callback):
        def on_step(self, trainer: Any) -> None:
            steps.append(trainer.batch)

    found, ran = [], []
    for run in (train_here, late_here):
        name = f"wrong-{run.__name__}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "build_callbacks", lambda job: [Count()])
            with pytest.raises(UserError, match="not finite in step") as caught:
                run(name, "optimizer.lr=1e30", "schedule.t_warmup=0ba", "save_interval=0ba")
        found.append((str(caught.value), logged(Path("runs") / name)))
        ran.append(steps.copy())
        steps.clear()
    assert found[0] == found[1] and found[0][1]
    assert ran[1] == [*ran[0], len(ran[0]) + 1]  # the wrong step's end was passed, and no other's
    assert all(math.isfinite(row["loss/train/total"]) for row in found[1][1])


@pytest.mark.parametrize("save", slow_but(["3ba"], ["2ba", "3ba"]))
def test_each_batch_is_logged_once_across_a_resume(place: Path, save: str) -> None:
    """Whatever was on its way when the run died is computed again."""
    whole = logged(late_here(f"whole-{save}", "max_duration=7ba", f"save_interval={save}"))
    folder = late_here(f"cut-{save}", "max_duration=7ba", f"save_interval={save}")
    newest = sorted((folder / "checkpoints").iterdir())
    shutil.rmtree(newest[-1])
    assert logged(late_here(f"cut-{save}", "max_duration=7ba", f"save_interval={save}")) == whole


def test_an_error_in_the_next_step_loses_no_values(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = loop.train_step

    def broken(*args: Any, **kwargs: Any) -> Any:
        if kwargs["number"] == 3:
            raise UserError("data.paths: gone")
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(UserError, match="gone"):
        late_here("gone", "save_interval=0ba")
    rows = logged(Path("runs/gone"))
    assert [row["time/batch"] for row in rows] == [1, 2, 3]


def test_a_loss_that_no_longer_improves_ends_the_run_at_its_batch(place: Path) -> None:
    """The early stopper looks at every step, and so the trainer waits for each."""
    stop = ("callbacks.early_stopper.metric=loss/train/total", "callbacks.early_stopper.mode=max")
    settings = (*stop, "callbacks.early_stopper.patience=2", "save_interval=0ba")
    found = [logged(run(f"stop-{run.__name__}", *settings)) for run in (train_here, late_here)]
    assert found[0] == found[1]
    assert max(row["time/batch"] for row in found[0]) < 12


@pytest.mark.parametrize("may_lag", [False, True])
def test_a_callback_says_whether_the_model_may_be_a_step_on(
    place: Path, monkeypatch: pytest.MonkeyPatch, may_lag: bool
) -> None:
    seen: list[tuple[int, int]] = []

    class Look(Callback):
        def on_log(self, trainer: Any, metrics: dict[str, float]) -> None:
            assert metrics["loss/train/total"] > 0
            seen.append((trainer.logged_batch, trainer.batch))

    Look.may_lag = may_lag
    monkeypatch.setattr(build, "build_callbacks", lambda job: [Look()])
    late_here(f"look-{may_lag}", "max_duration=5ba", "save_interval=3ba")
    flushed = [(3, 3), (5, 5)]  # before a checkpoint and at the end nothing is on its way
    late = [(1, 2), (2, 3), *flushed[:1], (4, 5), *flushed[1:]]
    assert seen == (late if may_lag else [(n, n) for n in range(1, 6)])


def test_a_copy_keeps_dtypes_shapes_and_every_bit() -> None:
    tensors = {
        "scalar": torch.tensor(0.1),
        "count": torch.tensor(2**52 + 1),
        "matrix": torch.rand(3, 4).bfloat16(),
        "wide": torch.rand(2, dtype=torch.float64),
        "nan": torch.tensor([math.nan, math.inf]),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copy = HostCopy(tensors)
    for tensor in tensors.values():
        tensor.zero_()  # what comes after it changes nothing
    found = copy.read()
    assert list(found) == list(tensors)
    for name, tensor in before.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)


SCRIPT = """
import torch
from contextlib import nullcontext
from types import SimpleNamespace
from torch.utils._python_dispatch import TorchDispatchMode
from llmfoundry.models.decoder import Decoder, Root
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.distributed.process_group import World
from llmfoundry.recipe.model import ModelConfig
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.checks import Clock, Duration
from llmfoundry.train.callbacks import (
    EarlyStopper, LRMonitor, OptimizerMonitor, RuntimeEstimator, SpeedMonitor
)
from llmfoundry.train.step_metrics import LoggedStep
from llmfoundry.train.optim.optimizers import build_optimizer
from llmfoundry.train.step import StepSettings
from llmfoundry.train.trainer import Trainer

class Waits(TorchDispatchMode):
    "Copies to the host for which the host waits, and copies from memory that is not pinned."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            ends, blocking = (args[0].device, out.device), not kwargs.get("non_blocking")
        elif func is torch.ops.aten.copy_.default:
            ends = (args[1].device, args[0].device)
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            return out
        if blocking and [end.type for end in ends] == ["cuda", "cpu"]:
            raise AssertionError(f"{func} waits for the device")
        return out

found = []

class Read(SimpleNamespace):
    first_bad, routing, verdicts = None, None, ()
    def metrics(self, objective, bytes_per_token):
        return {"loss/train/total": 1.0}

def read(step):
    found.append((step.batch, trainer.batch))
    return Read(batch=step.batch)

LoggedStep.read = read
Decoder.init_weights = lambda self, seed: None  # there is no generator of random numbers
recipe = TrainRecipe(
    model=ModelConfig(d_model=64, n_heads=2, n_layers=2, vocab_size=512),
    max_seq_len=32, precision="fp32", global_train_batch_size=4, save_interval="0ba",
    eval_interval="0ba",
)
recipe = recipe.resolve()
recipe.callbacks.watch.spike_window = 2  # so that all but the first are compared
nothing = SimpleNamespace(log=lambda *a: None, routing=lambda *a: None, metrics=lambda: {},
                          check=lambda: None, event=lambda *a, **more: None,
                          begin=lambda *a: None)
with FakeTensorMode(), Waits():
    with torch.device("cuda"):
        root = Root(Decoder(recipe.model))
    recipe.callbacks.early_stopper.metric = "metrics/eval/LanguageCrossEntropy"
    recipe.callbacks.early_stopper.patience = 2
    trainer = Trainer(
        recipe=recipe, world=World(0, 1, 0, torch.device("cuda", 0)), root=root, module=root,
        optimizer=build_optimizer(root.model, recipe.optimizer), loader=None,
        clock=Clock(4, 128, 10, Duration.parse("10ba")), bytes_per_token=1.0,
        settings=StepSettings(2, nullcontext, recipe.gradient_clipping), tracker=nothing,
        checkpointer=SimpleNamespace(before_update=lambda: None), roll_back=None, evaluate=None,
        identity={},
        callbacks=[SpeedMonitor(window=2, flops_per_token=1.0, peak_flops=None), LRMonitor(),
                   OptimizerMonitor(), RuntimeEstimator(),
                   EarlyStopper(recipe.callbacks.early_stopper)],
    )
    trainer._batches = nothing
    for _ in range(4):
        tokens = torch.zeros(4, 32, dtype=torch.int64)
        trainer._step(Batch(tokens, tokens, None), nothing)
print(found)
"""


def test_a_logged_step_asks_a_gpu_for_nothing() -> None:
    """Four steps with every log and monitor on tensors that have no values to be asked for."""
    assert run_on_fake_cuda(SCRIPT).splitlines()[-1] == "[(1, 2), (2, 3), (3, 4)]"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_logged_step_waits_for_no_gpu(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = loop.Trainer._step

    def watched(trainer: Any, *args: Any) -> None:
        warm = trainer.batch in (3, 4)  # kernels are chosen, memory is had, nothing is due
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            step(trainer, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loop.Trainer, "_step", watched)
    folder = train_here("gpu", "callbacks.optimizer_monitor=true", "save_interval=0ba")
    assert [row["time/batch"] for row in logged(folder) if "loss/train/total" in row] == [
        *range(1, 13)
    ]
