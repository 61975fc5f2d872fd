"""Traces and snapshots of a run, read back by programs that are not ours."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from llmfoundry.errors import UserError
from llmfoundry.recipe.logger import ProfileConfig
from llmfoundry.train import profiler
from llmfoundry.train.callbacks import StepTimes
from llmfoundry.train.profiler import (
    MemorySnapshots,
    ProfileFiles,
    contents,
    out_of_memory_snapshot,
)
from tests.selection import slow_but
from tests.tiny import write_recipe
from tests.train.here import train_here

TRACE = ("profile.trace=true", "profile.skip_first=1", "profile.active=2")
SHORT = ("eval=off", "save_interval=0ba")
STEPS, MICROBATCHES = 2, 4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.yaml."""
    folder = tmp_path_factory.mktemp("profiles")
    write_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    """A run with a trace of steps 3 and 4, and a snapshot of step 6."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        memory = ("profile.memory_snapshot=true", "profile.memory_snapshot_step=6")
        traced = train_here("traced", *TRACE, *memory, *SHORT, "max_duration=7ba")
        plain = train_here("plain", *SHORT, "max_duration=7ba")
        assert _losses(traced) == _losses(plain)
        return place / traced


def _losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss/train/total"] for row in rows if "loss/train/total" in row]


def _events(run: Path) -> list[dict[str, Any]]:
    with gzip.open(run / "profile" / "trace-step-4-rank-0.json.gz") as file:
        found = json.load(file)["traceEvents"]
    return [event for event in found if event["ph"] == "X"]


def test_spans_are_in_the_trace_above_the_operators(run: Path) -> None:
    events = _events(run)
    spans = Counter(event["name"] for event in events if event["cat"] == "user_annotation")
    assert spans["forward"] == spans["backward"] == STEPS * MICROBATCHES
    assert spans["data"] == STEPS * 2  # the wait, and the copy to the device
    assert spans["optimizer"] == STEPS * 3 and spans["logging"] >= STEPS
    forward = [e for e in events if e["name"] == "forward"]

    def within(event: dict[str, Any]) -> bool:
        start = float(event["ts"])
        return any(e["ts"] <= start <= e["ts"] + e["dur"] for e in forward)

    attention = [e for e in events if e["name"] == "aten::scaled_dot_product_attention"]
    assert len(attention) >= STEPS * MICROBATCHES * 2 and all(map(within, attention))
    updates = [e for e in events if e["name"] == "aten::_fused_adamw_"]
    assert updates and not any(map(within, updates))


def test_the_largest_operations_are_those_of_the_trace(run: Path) -> None:
    """Self times by the nesting of the trace's events, on each thread."""
    own: dict[str, float] = defaultdict(float)
    threads = defaultdict(list)
    for event in _events(run):
        if event["cat"] in ("cpu_op", "user_annotation"):
            threads[event["tid"]].append(event)
    for events in threads.values():
        stack: list[dict[str, Any]] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
                stack.pop()
            own[event["name"]] += event["dur"]
            if stack:
                own[stack[-1]["name"]] -= event["dur"]
            stack.append(event)
    lines = (run / "profile" / "operations-step-4-rank-0.txt").read_text().splitlines()
    assert lines[0].split() == ["ms", "share", "calls", "operator"] and len(lines) == 11
    times = [(float(ms), name) for ms, _, _, name in (line.split(maxsplit=3) for line in lines[1:])]
    assert times == sorted(times, key=lambda pair: pair[0], reverse=True)
    for ms, name in times[:3]:
        assert ms == pytest.approx(own[name] / 1e3, rel=0.05, abs=0.02)


def test_pytorch_s_viewer_reads_a_cpu_s_snapshot(run: Path) -> None:
    snapshot = pickle.loads((run / "profile" / "memory-step-6-rank-0.pickle").read_bytes())
    assert "total_allocated" in _memory_viz.segsum(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    sizes = [b["size"] for s in snapshot["segments"] for b in s["blocks"] if "frames" in b]
    embedding = 320 * 32 * 4  # rows of 257 tokens, padded
    assert sizes.count(embedding) >= 3, "the weight and its two moments"
    in_use, history = contents(snapshot)
    assert in_use == len(sizes) and history > 100


def test_a_signal_asks_for_a_snapshot(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    before, own = signal.getsignal(signal.SIGUSR2), StepTimes.on_step

    def on_step(self: StepTimes, trainer: Any) -> None:
        own(self, trainer)
        if trainer.batch == 2:
            os.kill(os.getpid(), signal.SIGUSR2)

    monkeypatch.setattr(StepTimes, "on_step", on_step)
    folder = train_here("asked", "profile.memory_snapshot=true", *SHORT, "max_duration=4ba")
    assert [p.name for p in (folder / "profile").iterdir()] == ["memory-step-3-rank-0.pickle"]
    assert "memory_viz" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGUSR2) == before


# the cycle is steps 2 to 4, the first of which is discarded
@pytest.mark.parametrize("step", slow_but([2], [1, 2, 4, 5]))
def test_a_cpu_snapshot_of_a_traced_step_is_of_the_step_after_the_cycle(
    step: int,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    memory = ("profile.memory_snapshot=true", f"profile.memory_snapshot_step={step}")
    folder = train_here(f"both{step}", *TRACE, *memory, *SHORT, "max_duration=6ba")
    names = {path.name for path in (folder / "profile").iterdir()}
    assert names == {
        "memory-step-5-rank-0.pickle",
        "trace-step-4-rank-0.json.gz",
        "operations-step-4-rank-0.txt",
    }
    line = f"profile.memory_snapshot: that of step {step} waits for the end of the trace"
    assert (line in capsys.readouterr().out) == (step != 5)


def test_a_snapshot_that_no_step_is_left_for_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    memory = ("profile.memory_snapshot=true", "profile.memory_snapshot_step=3")
    folder = train_here("late", *TRACE, *memory, *SHORT, "max_duration=4ba")
    assert (folder / "profile" / "trace-step-4-rank-0.json.gz").exists()
    assert "profile.memory_snapshot: none, as the run ends first" in capsys.readouterr().out


def test_what_cannot_be_written_is_a_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No room by the recipe; a disk that refuses; another profiler: the run goes on."""
    monkeypatch.chdir(place)
    settings = (*TRACE, *SHORT, "max_duration=5ba")
    small = train_here("small", *settings, "profile.max_gib=1e-6")
    assert "profile.max_gib: trace-step-4-rank-0.json.gz is left out" in capsys.readouterr().out
    assert [path.name for path in (small / "profile").iterdir()] == ["operations-step-4-rank-0.txt"]
    (place / "runs" / "full").mkdir(parents=True)
    (place / "runs" / "full" / "profile").write_text("a file where the folder would be")
    train_here("full", *settings)
    assert "could not be written" in capsys.readouterr().out
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        twice = train_here("twice", *settings)
    assert "step 2 is not traced: another profiler" in capsys.readouterr().out
    assert len(_losses(twice)) == 5 and not (twice / "profile").exists()


class FakeWorld:
    """What files ask of a process."""

    rank, is_main, device = 0, True, torch.device("cuda")


def test_a_failed_allocation_leaves_a_snapshot_unless_it_were_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The allocator's call, on what a GPU's history looks like."""
    config = ProfileConfig(memory_snapshot=True)
    config.fill()
    files = ProfileFiles(tmp_path, FakeWorld(), max_gib=1.0)  # type: ignore[arg-type]
    snapshots = MemorySnapshots(config, files)
    held: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    monkeypatch.setattr(profiler, "memory_history", lambda: held)
    snapshots._allocation_failed(0, 2**30, 2**34, 2**20)
    assert "would be empty" in capsys.readouterr().err and out_of_memory_snapshot() is None
    block = {"size": 512, "requested_size": 500, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 0, "total_size": 2**21, "stream": 0, "blocks": [block]}
    failed = {"action": "oom", "device_free": 2**20, "size": 2**30, "stream": 0, "frames": []}
    held |= {"segments": [segment | {"allocated_size": 512}], "device_traces": [[failed]]}
    snapshots._allocation_failed(0, 2**30, 2**34, 2**20)
    path = out_of_memory_snapshot()
    assert path is not None and path.parent == tmp_path / "profile"
    assert "raise OutOfMemoryError # 1.0GiB requested" in _memory_viz.trace(
        pickle.loads(path.read_bytes())
    )
    assert "out of memory in step 1: 1,024 MiB asked for; memory: 1 blocks in use" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "override, said",
    [
        ("profile.active=2", "has no effect with profile.trace: false"),
        ("profile.memory_snapshot_step=2", "has no effect with profile.memory_snapshot: false"),
        (
            "profile.max_gib=2",
            "has no effect with profile.trace: false and profile.memory_snapshot: false",
        ),
        ("profile={trace: true, ranks: []}", "names no process"),
        ("profile={trace: true, ranks: some}", "not a choice"),
        ("profile={trace: true, ranks: [1]}", "ranks 0 to 0"),
        ("profile={trace: true, active: 101}", "too large"),
    ],
)
def test_what_cannot_be_profiled_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=r"profile\.\w+: ") as refused:
        train_here("refused", override)
    assert said in str(refused.value)
