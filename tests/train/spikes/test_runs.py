"""Whole runs with a poisoned block of rows: what is left out leaves no trace, also after a kill."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmfoundry.data.loader import Loader
from llmfoundry.data.sources import OrderedStream
from llmfoundry.errors import NoRestart, UserError
from llmfoundry.events import read_events
from llmfoundry.models.decoder import Block
from llmfoundry.resilience.watch import watch
from llmfoundry.train import trainer as loop
from llmfoundry.train.step import StepResult
from tests.faults.plugin import reading_noise
from tests.tiny import losses, write_recipe
from tests.train.here import tensors, train_here
from tests.warm_scripts import on_ranks

SETTINGS = (
    "max_duration=34ba",
    "max_seq_len=32",
    "save_interval=8ba",
    "eval=off",
    "schedule.t_warmup=2ba",
    "callbacks.watch.spike_window=16",
)
SPIKE, KEPT, SKIPPED = 24, 16, 24 + 1 + 5 - 16  # the checkpoint, and batches left out from there
BACK = (
    "callbacks.watch.loss_spike=roll_back",
    "callbacks.watch.roll_back_steps=6",
    "callbacks.watch.roll_back_skip=5",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("watch")
        write_recipe(folder)
        patch.chdir(folder)
        yield folder


def poison(patch: pytest.MonkeyPatch, places: set[int]) -> None:
    """Make rows of noise, which nothing that was learned foretells, of some rows of the source."""
    patch.setattr(OrderedStream, "read", reading_noise(places))


def poisoned_places(patch: pytest.MonkeyPatch, batches: range) -> set[int]:
    """The rows of some batches of an undisturbed run, by their number in the source."""
    found: set[int] = set()
    rows = Loader.rows

    def noted(loader: Loader, step: int) -> Any:
        if step in batches:
            plan = loader._plan_of(step)
            found.update(plan.places[step - plan.step])
        return rows(loader, step)

    patch.setattr(Loader, "rows", noted)
    train_here("plain", *SETTINGS, "save_interval=0ba")
    return found


@pytest.fixture(scope="module")
def places(place: Path) -> set[int]:
    with pytest.MonkeyPatch.context() as patch:
        return poisoned_places(patch, range(SPIKE, SPIKE + 3))


@pytest.fixture(scope="module")
def without(place: Path) -> Path:
    """The run that never had the batches: the loader gives it later ones in their place."""
    with pytest.MonkeyPatch.context() as patch:
        rows = Loader.rows
        patch.setattr(
            Loader, "rows", lambda own, step: rows(own, step + (SKIPPED if step >= KEPT else 0))
        )
        return train_here("without", *SETTINGS)


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").iterdir())
    return tensors(newest, run / "weights.pt")["model"]


def same(one: Path, other: Path) -> None:
    """Bit for bit: every loss, and the weights at the end."""
    assert losses(one) == losses(other)
    mine, others = weights(one), weights(other)
    assert mine.keys() == others.keys()
    assert all(torch.equal(mine[name], others[name]) for name in mine)


def events(run: Path) -> list[tuple[str, int, str]]:
    return [(event["kind"], event["step"], event["action"]) for event in read_events(run)]


def test_a_poisoned_block_hurts_a_run_that_only_logs(place: Path, places: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, places)
        run = train_here("logged", *SETTINGS)
    found = losses(run)
    assert found[SPIKE + 1] > found[SPIKE] + 1.5
    assert events(run)[0] == ("loss_spike", SPIKE + 1, "log")


def test_after_going_back_a_run_is_one_that_never_had_the_block(
    place: Path, places: set[int], without: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, places)
        run = train_here("back", *SETTINGS, *BACK)
    same(run, without)
    assert events(run) == [("loss_spike", SPIKE + 1, "roll_back")]
    reported = next(read_events(run))["done"]
    assert (
        "ba0000016" in reported
        and f"batches {KEPT + 1} to {KEPT + SKIPPED} are left out" in reported
    )
    assert "warning: step 25: the loss is" in capsys.readouterr().out
    names = sorted(folder.name for folder in (run / "checkpoints").iterdir())
    assert "ba0000017" in names  # saved at once, so that a kill does not cost the decision


@pytest.mark.parametrize("newest", ["ba0000016", "ba0000017", "ba0000024"])
def test_a_resume_after_going_back_is_exact(
    place: Path, places: set[int], without: Path, newest: str
) -> None:
    run = Path("runs") / f"resumed-{newest}"
    shutil.copytree("runs/back", run)
    for folder in (run / "checkpoints").iterdir():
        if folder.name > newest:
            shutil.rmtree(folder)
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, places)
        train_here(run.name, *SETTINGS, *BACK)
    same(run, without)
    again = newest == "ba0000016"  # which knows nothing of it yet: the same is decided once more
    assert len(events(run)) == 1 + again


def test_without_an_old_checkpoint_the_weights_of_before_continue(
    place: Path, places: set[int]
) -> None:
    """Behind the log, so that steps have passed since."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, places)
        patch.setattr(loop, "lags", lambda device: True)
        words = ("save_interval=0ba", "log_interval=4ba", "callbacks.watch.roll_back_steps=30")
        run = train_here("in-memory", *SETTINGS, *BACK, *words)
    with pytest.MonkeyPatch.context() as patch:
        rows = Loader.rows
        patch.setattr(Loader, "rows", lambda own, n: rows(own, n + (6 if n >= SPIKE else 0)))
        other = train_here("in-memory-without", *SETTINGS, "save_interval=0ba", "log_interval=4ba")
    same(run, other)
    assert "to the step before" in next(read_events(run))["done"]


def spoil_step(patch: pytest.MonkeyPatch, number: int, factor: float) -> None:
    """Multiply what the model gives by a factor, in one step."""
    step = loop.train_step

    def spoilt(module: Any, *args: Any, **kwargs: Any) -> StepResult:
        if kwargs["number"] != number:
            return step(module, *args, **kwargs)
        norm = module.model.norm_f
        handle = norm.register_forward_hook(lambda m, i, out: out * factor)
        try:
            return step(module, *args, **kwargs)
        finally:
            handle.remove()

    patch.setattr(loop, "train_step", spoilt)


def leave_out_step(patch: pytest.MonkeyPatch, number: int) -> None:
    """Do nothing at all in one step."""
    step = loop.train_step

    def left_out(*args: Any, **kwargs: Any) -> StepResult:
        if kwargs["number"] != number:
            return step(*args, **kwargs)
        hooks = kwargs["hooks"]
        hooks.after_backward("")
        hooks.before_update()
        return StepResult(torch.tensor(3.0), torch.tensor(1.0), torch.tensor(1))

    patch.setattr(loop, "train_step", left_out)


@pytest.mark.parametrize("factor", [math.nan, 100.0])
def test_a_step_that_is_skipped_might_not_have_been(place: Path, factor: float) -> None:
    skip = [f"callbacks.watch.{kind}=skip" for kind in ("loss_spike", "not_finite")]
    words = ("max_duration=16ba", "log_interval=4ba")
    with pytest.MonkeyPatch.context() as patch:
        spoil_step(patch, 13, factor)
        run = train_here(f"skipped-{factor}", *SETTINGS, *skip, *words)
    with pytest.MonkeyPatch.context() as patch:
        leave_out_step(patch, 13)
        other = train_here(f"left-out-{factor}", *SETTINGS, *words)
    mine, others = weights(run), weights(other)
    assert all(torch.equal(mine[name], others[name]) for name in others)
    kind = "not_finite" if math.isnan(factor) else "loss_spike"
    assert events(run) == [(kind, 14, "skip")]
    assert math.isfinite(losses(run)[16])  # the mean of the steps that were finite


def test_stop_leaves_the_weights_and_has_its_exit_status(place: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        spoil_step(patch, 13, 100.0)
        with pytest.raises(
            NoRestart, match=r"step 14: the loss is .*what was saved before is sound"
        ):
            train_here("stopped", *SETTINGS, "callbacks.watch.loss_spike=stop")
    assert NoRestart.status == 93
    assert events(Path("runs/stopped")) == [("loss_spike", 14, "stop")]
    with pytest.MonkeyPatch.context() as patch:
        spoil_step(patch, 13, math.nan)
        with pytest.raises(UserError, match=r"optimizer.lr: .* not finite in step 14"):
            train_here("not-finite", *SETTINGS)


def test_a_step_that_is_not_finite_again_and_again_ends_a_run_that_goes_back(place: Path) -> None:
    words = ("callbacks.watch.not_finite=roll_back", "callbacks.watch.roll_back_most=2")
    far = ("callbacks.watch.roll_back_steps=6", "callbacks.watch.roll_back_skip=0")
    with pytest.MonkeyPatch.context() as patch:
        spoil_step(patch, SPIKE, math.nan)
        with pytest.raises(
            NoRestart, match=r"step 25: .*it went back 2 times without passing this"
        ):
            train_here("again", *SETTINGS, *words, *far)
    run, at = Path("runs/again"), ("not_finite", SPIKE + 1)
    assert events(run) == [(*at, "roll_back"), (*at, "roll_back"), (*at, "stop")]
    newest = max(folder.name for folder in (run / "checkpoints").iterdir())
    assert newest == "ba0000024"  # of before the step


def test_a_stall_that_stops_a_run_saves_it_and_the_next_start_resumes(place: Path) -> None:
    words = (*SETTINGS, "max_duration=12ba", "save_interval=0ba", "callbacks.watch.interval=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "astuple", lambda own: (math.nan, 0.0, 0.1, 99.0, *[0.0] * 5))
        with pytest.raises(SystemExit) as ended:
            train_here("stalled", *words, "callbacks.watch.stall=stop")
    assert ended.value.code == 75
    run = Path("runs/stalled")
    (event,) = read_events(run)
    assert (event["kind"], event["action"], event["step"]) == ("stall", "stop", 3)
    assert "took 99 s longer than usual" in event["what"]
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["ba0000003"]
    train_here("stalled", *words)
    assert losses(run) == losses(train_here("not-stalled", *words))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_four(rank: int, folder: str, port: int, places: set[int], *words: str) -> None:
    """One rank of a run, the third of which is slow."""
    os.chdir(folder)
    torch.set_num_threads(1)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 4)):
        os.environ[name] = str(value)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("error", FutureWarning)  # what a user would see
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, places)
        if rank == 2:
            forward = Block.forward

            def late(*args: Any, **named: Any) -> Any:
                time.sleep(0.03)
                return forward(*args, **named)

            patch.setattr(Block, "forward", late)
        train_here(*words)


def test_four_shards_go_back_together_and_name_the_slow_one(
    place: Path, places: set[int], without: Path
) -> None:
    more = ("parallel.data_parallel_shard_degree=4", "callbacks.watch.interval=5")
    on_ranks(on_four, (str(place), free_port(), places, "four", *SETTINGS, *BACK, *more), 4)
    run = Path("runs/four")
    found, expected = losses(run), losses(without)
    assert found.keys() == expected.keys()
    assert all(found[n] == pytest.approx(expected[n], rel=1e-6) for n in expected)
    reported = list(read_events(run))
    assert [(e["kind"], e["action"]) for e in reported if e["kind"] == "loss_spike"] == [
        ("loss_spike", "roll_back")
    ]
    slow = [e for e in reported if e["kind"] == "slow_rank"]
    assert {e["rank"] for e in slow} == {2}
    assert slow[0]["host"] == socket.gethostname() and slow[0]["action"] == "log"
    assert "rank 2 (" in slow[0]["what"] and "as long as the median of 4" in slow[0]["what"]


def test_the_record_is_the_one_of_a_run_that_never_had_the_block(
    place: Path, without: Path
) -> None:
    """Steps that are made anew are in it once."""
    lines = (Path("runs/back") / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss/train/total" in row]
    assert [row["time/batch"] for row in rows] == [*range(1, 35)]
    assert all(row["throughput/tokens_per_sec"] > 0 for row in rows)
    assert all(0 <= row["time/remaining_estimate"] < 3600 for row in rows)


def test_state_of_other_settings_begins_anew() -> None:
    """A checkpoint of another window, or of a version without one, says nothing."""
    from llmfoundry.recipe.resilience import WatchConfig
    from llmfoundry.train.spikes import SpikeHandler

    log: Any = SimpleNamespace()
    cpu = torch.device("cpu")
    old = SpikeHandler(WatchConfig(spike_window=8), cpu, log, {}).state()
    assert old["guard"]["window"] == [[0.0] * 8] * 2
    for state in ({}, old):
        guard = SpikeHandler(WatchConfig(spike_window=16), cpu, log, state).guard
        assert guard.state()["seen"] == 0


def test_a_record_of_a_later_version_is_read_as_far_as_it_is_known() -> None:
    from llmfoundry.recipe.resilience import WatchConfig
    from llmfoundry.train.spikes import SpikeHandler

    state = {"record": {"skipped": 3, "since": "a later version"}}
    handler = SpikeHandler(WatchConfig(), torch.device("cpu"), SimpleNamespace(), state)
    assert handler.record.skipped == 3


@pytest.mark.slow
def test_two_thousand_steps_of_a_real_run_have_no_spike(place: Path) -> None:
    words = ("max_duration=2000ba", "save_interval=0ba", "callbacks.watch.spike_window=128")
    run = train_here("quiet", *SETTINGS, *words)
    assert [event for event in read_events(run) if "spike" in event["kind"]] == []
