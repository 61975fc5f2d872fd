"""The callback: what it measures of a step, and what it does with a round."""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llmfoundry.errors import RunFailure
from llmfoundry.recipe.resilience import WatchConfig
from llmfoundry.resilience.watch import watch as module
from llmfoundry.resilience.watch.anomalies import RankTimes
from llmfoundry.resilience.watch.rapl import RaplReader
from llmfoundry.resilience.watch.watch import ForwardTimer, Watch
from tests.tiny import write_recipe
from tests.train.here import train_here


class Clock:
    """Stands in for `time`, and goes as it is reported."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def make_trainer() -> Any:
    return SimpleNamespace(
        batch=0,
        first_batch=0,
        logged_batch=0,
        waited=0.0,
        paused_seconds=0.0,
        done=False,
        checkpointer=SimpleNamespace(is_writing=False),
        world=SimpleNamespace(size=1, local_rank=0, device=torch.device("cpu")),
        spikes=SimpleNamespace(record=SimpleNamespace(skipped=0)),
        tracker=SimpleNamespace(event=lambda *a, **k: None),
    )


def test_a_round_is_of_steps_without_evaluation_saving_compilation_and_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, rounds = Clock(), list[RankTimes]()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(
        module,
        "find_anomalies",
        lambda table, history, config: (rounds.extend(table) or [], history),
    )
    watch, trainer = Watch(WatchConfig(interval=10), {}), make_trainer()
    watch.on_start(trainer)
    for batch in range(1, 22):
        trainer.batch, trainer.waited = batch, 0.25
        clock.now += 30.0 if batch == 1 else 1.25  # the first compiles
        if batch == 7:  # an evaluation before the callback
            clock.now += 50.0
            trainer.paused_seconds += 50.0
        trainer.checkpointer.is_writing = batch == 15
        if batch in (15, 16):
            clock.now += 2.0  # beside a save
        watch.on_step(trainer)
    assert [round(times.step, 6) for times in rounds] == [1.0, 1.0]
    assert [round(times.data_wait, 6) for times in rounds] == [0.25, 0.25]
    assert all(math.isnan(times.compute) for times in rounds)


def test_the_longest_stretch_between_two_logs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    watch, trainer = Watch(WatchConfig(), {}), make_trainer()
    watch.on_start(trainer)
    for log in range(1, 12):
        trainer.logged_batch = 4 * log
        clock.now += 4.0 + 40.0 * (log == 9)
        watch.on_log(trainer, {"time/data_wait": 9.5 if log == 9 else 0.1})
    assert watch._stall == pytest.approx(40.0) and watch._stall_wait == pytest.approx(38.0)


def test_processes_that_left_out_other_updates_end_the_run() -> None:
    watch, trainer = Watch(WatchConfig(), {}), make_trainer()
    table = [RankTimes(skipped=n) for n in (2.0, 2.0, 3.0, 2.0)]
    watch._pending = (None, torch.tensor([astuple(times) for times in table], dtype=torch.float64))
    with pytest.raises(RunFailure, match=r"skipped different updates.*\[2, 2, 3, 2\]"):
        watch._judge_round(trainer)


def test_a_timer_times_blocks_while_it_is_on_and_changes_nothing() -> None:
    blocks = [nn.Linear(64, 64) for _ in range(3)]
    expected = [block(torch.ones(64)) for block in blocks]
    timer = ForwardTimer(blocks, torch.device("cpu"))
    assert [torch.equal(b(torch.ones(64)), e) for b, e in zip(blocks, expected, strict=True)]
    timer.end_step()
    assert math.isnan(timer.take())
    timer.is_on = True
    for block in blocks:
        block(torch.ones(64))
    timer.end_step()
    assert not timer.is_on
    assert 0 < timer.take() < 5
    assert math.isnan(timer.take())


def test_the_energy_of_all_gpus_is_summed_over_rounds_and_logged_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, trainer = Watch(WatchConfig(interval=10), {}), make_trainer()
    logged: list[Any] = []
    trainer.tracker.log = lambda *values: logged.append(values)
    trainer.clock = SimpleNamespace(tokens_per_batch=8)
    for _ in range(2):  # rounds of two ranks
        table = [RankTimes(energy=joules, cpu_energy=360.0) for joules in (1.0e6, 0.8e6)]
        rows = torch.tensor([astuple(times) for times in table], dtype=torch.float64)
        watch._pending = (None, rows)
        watch._judge_round(trainer)
    metrics: dict[str, float] = {}
    watch.on_log(trainer, metrics)
    assert metrics["gpu/energy_kwh"] == pytest.approx(1.0)
    assert metrics["cpu/energy_kwh"] == pytest.approx(0.0004)
    # the last step, whose round is not full
    reader = SimpleNamespace(take=lambda: SimpleNamespace(energy=0.36e6))
    others = (0.36e6, 720.0)
    monkeypatch.setattr(module, "all_gather_object", lambda world, value: [value, others])
    watch._gpu, trainer.batch, trainer.done = reader, 23, True  # type: ignore[assignment]
    trainer.world.device = torch.device("cuda")
    watch.on_step(trainer)
    energy = {"gpu/energy_kwh": pytest.approx(1.2), "cpu/energy_kwh": pytest.approx(0.0006)}
    assert logged == [(23, 184, energy)]
    # a signal after further steps
    watch.on_stop(trainer)
    assert logged[-1][2]["gpu/energy_kwh"] == pytest.approx(1.4)


def test_a_run_that_pauses_and_one_that_ends_log_their_energy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        module,
        "RaplReader",
        lambda: SimpleNamespace(read=lambda: None, take=lambda: 1.8e6),
    )
    words = ("eval=off", "max_duration=4ba")
    train_here("paused", *words, "pause_at=2ba")
    train_here("paused", *words, "pause_at=null")
    lines = Path("runs/paused/metrics.jsonl").read_text().splitlines()
    energy = [row["cpu/energy_kwh"] for row in map(json.loads, lines) if "cpu/energy_kwh" in row]
    assert energy == [0.5, 0.5]  # each process counts from 0


def write_zone(folder: Path, zone: str, name: str, value: int, largest: int = 10**9) -> Path:
    path = folder / zone
    path.mkdir(exist_ok=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{largest}\n")
    (path / "energy_uj").write_text(f"{value}\n")
    return path


def test_counters_of_processors_and_memory_are_summed_and_start_again(tmp_path: Path) -> None:
    zones = {
        "intel-rapl": "intel-rapl",
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",  # in the package
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",  # all of them
        "intel-rapl-mmio:0": "package-0",  # the same counter elsewhere
    }
    for zone, name in zones.items():
        write_zone(tmp_path, zone, name, 900_000_000)
    write_zone(tmp_path, "intel-rapl:3", "package-3", 5)
    (tmp_path / "intel-rapl:3/energy_uj").unlink()  # as one that may not be read
    reader = RaplReader(tmp_path)
    for zone, name in zones.items():
        write_zone(tmp_path, zone, name, 903_000_000)
    assert reader.take() == pytest.approx(9.0)
    write_zone(tmp_path, "intel-rapl:1", "package-1", 2_000_000)  # past its largest value
    assert reader.take() == pytest.approx(99.0)
    (tmp_path / "intel-rapl:1/energy_uj").write_text("?")
    assert reader.take() == 0.0
    assert RaplReader(tmp_path / "none").take() == 0.0


def test_a_counter_that_overflows_several_times_in_a_round_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    monkeypatch.setattr(module, "RaplReader", lambda: RaplReader(tmp_path))
    watch, trainer = Watch(WatchConfig(interval=100), {}), make_trainer()
    logged: list[Any] = []
    trainer.tracker.log = lambda *values: logged.append(values)
    trainer.clock = SimpleNamespace(tokens_per_batch=8)
    watch.on_start(trainer)
    for step in range(1, 11):  # 600 J each, of a counter that starts again after 1,000 J
        write_zone(tmp_path, "intel-rapl:0", "package-0", step * 600_000_000 % 10**9)
        trainer.batch, trainer.done = step, step == 10
        watch.on_step(trainer)
    assert logged == [(10, 80, {"cpu/energy_kwh": pytest.approx(6000 / 3.6e6)})]


@pytest.mark.parametrize("largest", [0, 1000])
def test_a_counter_that_its_machine_has_reset_takes_no_energy_back(
    tmp_path: Path, largest: int
) -> None:
    zone = write_zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000_000, largest)
    reader = RaplReader(tmp_path)
    (zone / "energy_uj").write_text("2000000")
    assert reader.take() == pytest.approx(2.0)
    (zone / "energy_uj").write_text("9" * 5000)  # no number of the kernel's
    assert reader.take() == 0.0


def test_a_run_on_a_cpu_logs_no_energy() -> None:
    watch, trainer = Watch(WatchConfig(interval=10), {}), make_trainer()
    trainer.batch, trainer.done, metrics = 3, True, {}
    watch.on_step(trainer)
    watch.on_log(trainer, metrics)
    assert "gpu/energy_kwh" not in metrics
