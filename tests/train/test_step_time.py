"""Where a step's time goes: parts that add up to the whole, on a clock and on a device's events."""

from __future__ import annotations

import json
import time
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from llmfoundry.loggers.pages.run_time import run_parts, time_bar
from llmfoundry.ops.torch_private import watch_fsdp
from llmfoundry.telemetry import SpanClock, observe_spans, span, stop_observing
from llmfoundry.train.callbacks import PREFIX, REPORTED
from tests.tiny import write_recipe
from tests.train.here import train_here


class Stream:
    """A device that comes to its events when the test says so; milliseconds."""

    def __init__(self) -> None:
        self.done = 0
        self.times: deque[float] = deque()
        self.recorded = self.made = 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.number, self.at = stream, -1, 0.0

    def record(self) -> None:
        self.number, self.at = self.stream.recorded, self.stream.times.popleft()
        self.stream.recorded += 1

    def query(self) -> bool:
        return self.number < self.stream.done

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query(), "the host would wait"
        return end.at - self.at


def test_a_device_is_read_once_it_is_there_and_parts_are_the_innermost_spans() -> None:
    stream = Stream()
    #               begin  +f  +m  -m  -f  cut  +d  -d  cut
    stream.times.extend([0, 10, 30, 35, 60, 61, 71, 72, 80])
    clock = SpanClock(stream.event)
    clock.enter("forward")
    clock.enter("messages")
    clock.leave()
    clock.leave()
    clock.cut()
    clock.read_done()  # nothing is there: nothing is asked
    stream.done = 6
    clock.enter("data")
    clock.read_done()  # reads up to the cut, and not beyond
    first = {"other": 0.011, "forward": 0.045, "messages": 0.005}
    assert clock.take() == pytest.approx(first)
    clock.leave()
    clock.cut()
    stream.done = 9
    assert clock.take() == pytest.approx({"other": 0.018, "data": 0.001})
    assert stream.made < stream.recorded, "events that were read are used again"


def test_the_rest_of_a_span_may_be_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 6.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = SpanClock()
    clock.enter("backward")
    clock.turn("messages")
    clock.leave()
    clock.cut()
    assert clock.take() == {"other": 1.0, "backward": 3.0, "messages": 2.0}


def test_an_error_leaves_no_span_open() -> None:
    clock = SpanClock()
    observe_spans(clock)
    with pytest.raises(ValueError), span("forward"), span("messages"):
        stop_observing(clock)  # a run that ends within a span
        raise ValueError
    clock.cut()
    assert clock._open == ["other"]


def test_fsdp_s_waits_are_messages() -> None:
    names: list[str] = []

    class Observer:
        def enter(self, name: str) -> None:
            names.append(name)

        def leave(self) -> None:
            names.append("end")

    observer = Observer()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        fully_shard(model)
        undo = watch_fsdp(partial(span, "messages"))
        observe_spans(observer)
        with span("forward"):
            loss = model(torch.ones(2, 4)).sum()
        with span("backward"):
            loss.backward()
        undo()
        forward = names[: names.index("backward") - 1]
        assert forward[:2] == ["forward", "messages"]
        assert names[names.index("backward") :].count("messages") >= 2  # its gradients, at least
        seen = len(names)
        model(torch.ones(2, 4))
        assert len(names) == seen
    finally:
        stop_observing(observer)
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps, logged every second one, evaluated and saved."""
    folder = tmp_path_factory.mktemp("times")
    write_recipe(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = ("max_duration=6ba", "log_interval=2ba", "eval_interval=3ba")
        off = train_here("off", *settings, "callbacks.step_times=false")
        on = train_here("on", *settings)
        assert [_losses(off)] == [_losses(on)]
        assert not any(PREFIX in line for line in (off / "metrics.jsonl").read_text().splitlines())
        return folder / on


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _losses(run: Path) -> list[float]:
    return [row["loss/train/total"] for row in _rows(run) if "loss/train/total" in row]


def test_parts_add_up_to_the_time_of_training(run: Path) -> None:
    timed = [row for row in _rows(run) if f"{PREFIX}forward" in row]
    assert [row["time/batch"] for row in timed] == [2, 4, 6]
    parts = sum(2 * row[f"{PREFIX}{name}"] for row in timed for name in REPORTED)
    assert parts == pytest.approx(timed[-1]["time/train"], rel=0.15, abs=0.02)
    for row in timed:
        assert row[f"{PREFIX}data"] == pytest.approx(row["time/data_wait"], rel=0.5, abs=2e-2)
        assert min(row[f"{PREFIX}{name}"] for name in ("forward", "backward", "optimizer")) > 0


def test_the_report_s_bar_has_every_part(run: Path) -> None:
    html = (run / "report.html").read_text()
    for name in ("forward", "backward", "optimizer", "evaluation", "saving"):
        assert f'title="{name}: ' in html
    shares = {part.name: part.seconds for part in run_parts(_rows(run))}
    spent = [row["time/val"] for row in _rows(run) if "metrics/eval/bits_per_byte" in row]
    assert shares["evaluation"] == pytest.approx(spent[-1])


def test_a_bar_by_hand() -> None:
    """Steps count once each: a row stands for those since the row before."""
    rows = [
        {"time/batch": 10, "time/token": 1, "time/step/forward": 0.2, "time/step/data": 0.0},
        {"time/batch": 10, "time/token": 1, "time/val": 3.0},
        {"time/batch": 15, "time/token": 2, "time/step/forward": 0.4, "time/step/data": 0.1},
        {"time/batch": 15, "time/token": 2, "time/checkpoint_blocking": 0.5, "time/val": 3.0},
    ]
    found = {part.name: part.seconds for part in run_parts(rows)}
    assert found == pytest.approx({"data": 0.5, "forward": 4.0, "evaluation": 3.0, "saving": 0.5})
    assert "forward 50.0%" in time_bar(rows)
    assert time_bar([{"time/batch": 1, "time/token": 1}]) == ""
