"""Copies that a save makes: whole whatever happens to the weights, in memory that stays; waits."""

from __future__ import annotations

import gc
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmfoundry.checkpoint import storage
from llmfoundry.checkpoint.dcp import Staging, TensorFiles
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.ops import devices
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.checkpoint.test_save import make_saver, names, parts
from tests.tiny import write_recipe
from tests.train.here import rows, train_here
from tests.warm_scripts import on_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_what_the_sources_were_and_are_written_as_they_are(dtype: torch.dtype) -> None:
    whole = torch.arange(60).view(6, 10).to(dtype)
    sources = [whole.clone(), whole.clone().t(), whole[1:3, 2:4], whole[0, 0], whole[:0]]
    expected = [source.clone() for source in sources]
    copies = Staging().copy(sources)
    for source in sources:
        source.zero_()
    whole.zero_()
    copies.wait()
    for copy, was in zip(copies.tensors, expected, strict=True):
        assert copy.dtype == dtype and copy.shape == was.shape and copy.equal(was)
        assert copy.untyped_storage().nbytes() == copy.nbytes, "PyTorch would copy it once more"


def test_the_memory_of_one_save_serves_the_next() -> None:
    staging = Staging()
    first = staging.copy([torch.ones(1000), torch.ones(7)]).tensors
    places = [tensor.data_ptr() for tensor in first]
    second = staging.copy([torch.zeros(1000), torch.zeros(7)]).tensors
    assert [tensor.data_ptr() for tensor in second] == places
    assert not first[0].any(), "it is the same memory"
    larger = staging.copy([torch.ones(5000)]).tensors[0]
    assert larger.sum() == 5000 and staging.copy([torch.ones(10)]).tensors[0].sum() == 10


class Runtime:
    """CUDA's, as far as memory is pinned."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.calls = refuses, list[tuple[Any, ...]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("pin", address, size))
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("release", address))
        return 0


@pytest.mark.parametrize("refuses", [False, True])
def test_memory_is_pinned_where_there_is_a_gpu_and_released_before_it_is_freed(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    runtime = Runtime(refuses=refuses)
    assert devices.host_buffer(64).nbytes == 64 and not runtime.calls
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffer = devices.host_buffer(4096)
    copy = torch.frombuffer(buffer[:8], dtype=torch.uint8)
    address = copy.data_ptr()
    assert runtime.calls == [("pin", address, 4096)]
    del buffer
    gc.collect()
    assert len(runtime.calls) == 1, "a copy in it still stands"
    del copy
    gc.collect()
    assert runtime.calls[1:] == ([] if refuses else [("release", address)])


class OnGpu(Tensor):
    """A tensor that says so."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a GPU is asked to do, and waited for, in order."""
    found: list[str] = []

    class Stream:
        def __init__(self, name: str = "copies") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            found.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Any) -> None:
            found.append(f"{self.name} waits for the copies")

    @contextmanager
    def stream(of: Stream) -> Iterator[None]:
        found.append(f"on {of.name}")
        yield
        found.append("back")

    event = SimpleNamespace(
        record=lambda of: found.append(f"mark {of.name}"),
        synchronize=lambda: found.append("the host waits"),
    )
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("steps"))
    return found


def test_a_gpu_copies_beside_the_steps_and_the_update_waits_for_it(reported: list[str]) -> None:
    source = torch.ones(8).as_subclass(OnGpu)
    copies = Staging().copy([torch.zeros(2), source])
    assert reported == ["copies waits for steps", "on copies", "mark copies", "back"]
    reported.clear()
    copies.before_update()
    assert reported == ["steps waits for the copies"], "the host continues"
    reported.clear()
    assert len(copies.sources) == 2, "nothing else may take their memory"
    copies.wait()
    assert reported == ["the host waits"] and not copies.sources
    assert copies.tensors[1].sum() == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_weights_that_change_after_the_wait_are_copied_as_they_were() -> None:
    source = torch.full((1 << 26,), 3.0, device="cuda")
    staging = Staging()
    for _ in range(3):
        copies = staging.copy([source])
        copies.before_update()
        source.add_(1)
        copies.wait()
        assert (copies.tensors[0] == source.cpu() - 1).all()
    assert copies.tensors[0].is_pinned()


def slow_saves(rank: int, folder: Path) -> None:
    """Two processes save; what rank 0 writes of batch 1 takes until it is let go."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    world = World(rank, 2, rank, torch.device("cpu"), timedelta(seconds=60))
    saver, said = make_saver(folder, world, background=True, max_wait=0.3)
    model, optimizer = parts()
    let_go, write = threading.Event(), TensorFiles.write
    found = []
    with pytest.MonkeyPatch.context() as patch:

        def slow(self: Any, *args: Any) -> Any:
            assert rank or let_go.wait(50)
            return write(self, *args)

        patch.setattr(TensorFiles, "write", slow)
        for batch in (1, 2, 3):
            if batch == 3:
                let_go.set()
                saver.wait()
            saver.save(batch, model, optimizer, {"batch": batch})
            found.append([saver.waits.before, saver.waits.total])
        saver.save(4, model, optimizer, {"batch": 4}, last=True)
    (folder / f"{rank}.json").write_text(json.dumps({"said": said, "waits": found}))
    dist.barrier()
    dist.destroy_process_group()


def test_a_save_that_is_due_too_early_is_left_out_by_all_and_reported(tmp_path: Path) -> None:
    on_ranks(slow_saves, (tmp_path,), 2)
    reported = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    [line] = reported[0]["said"]
    assert line.startswith("save_max_wait: the checkpoint of batch 2 is left out: the one before")
    assert "after 0.3 s more; write a longer save_interval" in line and not reported[1]["said"]
    assert names(tmp_path) == ["ba0000001", "ba0000003", "ba0000004"]
    (first, _), (second, whole), (third, _) = reported[0]["waits"]
    assert second >= 0.3 > first and third < 0.3 and whole >= second


def test_the_end_of_a_run_waits_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(0, 1, 0, torch.device("cpu"))
    saver, said = make_saver(tmp_path, world, background=True, max_wait=0.0)
    let_go, write = threading.Event(), TensorFiles.write

    def slow(self: Any, *args: Any) -> Any:
        assert let_go.wait(50)
        return write(self, *args)

    monkeypatch.setattr(TensorFiles, "write", slow)
    saver.save(1, *parts(), {"batch": 1})
    timer = threading.Timer(0.2, let_go.set)
    timer.start()
    saver.save(2, *parts(), {"batch": 2}, last=True)
    assert names(tmp_path) == ["ba0000001", "ba0000002"] and not said


def test_what_a_save_holds_training_up_is_logged_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = train_here(
        "reported", "max_duration=4ba", "save_interval=2ba", "save_async=true", "eval=off"
    )
    found = rows(run, "time/checkpoint_blocking")
    assert [*found] == [2, 4]
    for row in found.values():
        assert 0 <= row["time/checkpoint_wait"] <= row["time/checkpoint_blocking"] < 60
    lines = [line for line in capsys.readouterr().out.splitlines() if "saved runs/reported" in line]
    assert len(lines) == 2
    for line in lines:
        assert re.search(
            r"ba000000\d \([\d.]+ MB in [\d.]+ s; blocked training for [\d.]+ s\)", line
        )


def test_a_bound_without_saves_in_the_background_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="save_max_wait: has no effect with save_async: false"):
        checked(TrainRecipe, "tiny.yaml", ["save_async=false", "save_max_wait=5"])
    recipe = checked(TrainRecipe, "tiny.yaml", ["save_async=true"])
    recipe = recipe.resolve()
    assert recipe.save_max_wait == 30.0


def test_machines_that_do_not_share_the_folder_are_found_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LATE_S", 0.1)
    (tmp_path / "__0_0.distcp").touch()
    reported = [
        {"__0_0.distcp": {"bytes": 0, "crc32": 0}},
        {"__1_0.distcp": {"bytes": 9, "crc32": 1}},
    ]
    with pytest.raises(OSError, match=r"__1_0.distcp, which rank 1 wrote, is not in .* rank 0;"):
        storage._await_files(tmp_path, reported)
    (tmp_path / "__1_0.distcp").touch()
    storage._await_files(tmp_path, reported)
