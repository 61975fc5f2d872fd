"""Threads compute on the GPU of their process, and none begins on GPU 0."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import llmfoundry
from llmfoundry.checkpoint import save
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.loader import BatchPrefetcher
from llmfoundry.distributed.process_group import World
from llmfoundry.ops.devices import device_thread

ROOT = Path(llmfoundry.__file__).parent
# Threads of modules that import PyTorch and compute nothing: they wait for files or for others.
COMPUTE_NOTHING = {"gauntlet/models/endpoint.py", "distributed/failures.py"}


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Of a process whose GPU is 5: the device that each thread has set, by its name."""
    found: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda n: found.update({threading.current_thread().name: n})
    )
    yield found


def test_a_thread_has_its_makers_device_before_it_does_anything(
    set_devices: dict[str, int],
) -> None:
    seen: list[tuple[object, dict[str, int]]] = []
    thread = device_thread(
        lambda word: seen.append((word, dict(set_devices))), "word", name="beside"
    )
    assert not set_devices
    thread.start()
    thread.join()
    assert seen == [("word", {"beside": 5})]


def test_the_loaders_thread_has_the_device(set_devices: dict[str, int]) -> None:
    loader = SimpleNamespace(workers=0, rows=lambda step: 1 / 0, close=lambda: None)
    prefetcher = BatchPrefetcher(loader, 0)
    prefetcher._thread.join(60)
    assert set_devices == {"loader": 5}


def test_the_checkpoints_thread_has_the_device(
    set_devices: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(save, "training_state", lambda model, optimizer: {})
    monkeypatch.setattr(
        save.Checkpointer,
        "_write",
        lambda self, batch, *_: written.append(f"{threading.current_thread().name} {batch}"),
    )
    saving = save.Checkpointer(
        Storage(tmp_path),
        World(0, 1, 0, torch.device("cpu")),
        save.Contents({}, {}),
        save.SavePolicy(keep=-1, background=True, max_failures=1),
        save.Reports(print),
    )
    saving.save(3, cast(Any, None), cast(Any, None), {})
    saving.wait()
    assert (written, set_devices) == (["checkpoint 3"], {"checkpoint": 5})


def test_no_other_thread_is_made_beside_tensors() -> None:
    """A module that imports PyTorch makes its threads by `device_thread`."""
    makers = set()
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        names = {name.rpartition(".")[2] for name in called}
        if names & {"Thread", "ThreadPoolExecutor", "Timer"} and imports_torch(tree):
            makers.add(path.relative_to(ROOT).as_posix())
    assert makers - COMPUTE_NOTHING == {"ops/devices.py"}


def imports_torch(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(
            a.name.split(".")[0] == "torch" for a in node.names
        ):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            return True
    return False
