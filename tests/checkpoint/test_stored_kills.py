"""A run on S3 that fails now and then, killed at moments of its requests: what counts is whole.

The proxy kills: before it passes a request on, or after the store has answered and before the run
hears of it. It ends as a run that nobody disturbed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from llmfoundry.data import store as store_module
from llmfoundry.data import store_clients
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import Store
from tests.data.s3_server import BUCKET, FaultyS3, s3_server
from tests.tiny import losses, write_recipe
from tests.train.here import train_here
from tests.warm_scripts import on_ranks

LENGTH = ("max_duration=6ba", "save_interval=2ba", "save_num_checkpoints_to_keep=2", "eval=off")
FAULTS = ("internal", "slow down", "reset", "cut", "slow")
EVERY = 11  # requests, one of which fails
CHANGES = ("PUT", "POST", "DELETE")


def work(rank: int, folder: Path, name: str, url: str) -> None:
    """One start of a run; a part of a file is small, so that there are several."""
    os.environ |= json.loads((folder / "env.json").read_text())
    os.chdir(folder)
    (folder / "pid").write_text(str(os.getpid()))
    store_module._BACKOFF_S = 0.01
    store_clients._FIRST_PAUSE = timedelta(milliseconds=10)
    with (folder / f"{name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    train_here(name, f"save_folder={url}", "save_async=true", "save_max_wait=3600", *LENGTH)


class Killer:
    """Makes faults as they come, and kills the run at one of its changes."""

    def __init__(self, server: FaultyS3, folder: Path) -> None:
        self.changes = self.at = 0
        self.after = False
        self._folder, self._faults = folder, itertools.cycle(FAULTS)
        self._requests = itertools.count(1)
        server.next_fault = self.fault  # type: ignore[method-assign]

    def fault(self, key: str, method: str) -> str | None:
        fault = next(self._faults) if next(self._requests) % EVERY == 0 else None
        if method not in CHANGES:
            return fault
        self.changes += 1
        if self.changes != self.at:
            return fault
        if self.after:
            return "kill"  # once the store has done it
        self.kill()
        return "reset"

    def kill(self) -> None:
        os.kill(int((self._folder / "pid").read_text()), signal.SIGKILL)


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    with s3_server() as (faulty, _):
        yield faulty


def check_newest(store: Store) -> str:
    """The newest checkpoint that counts, once each of its files is what its marker says."""
    for name in reversed(store.folders("checkpoints")):
        files = store.files(f"checkpoints/{name}")
        if f"checkpoints/{name}/COMMIT" not in files:
            continue
        marker = json.loads(store.read(f"checkpoints/{name}/COMMIT"))["files"]
        for file, reported in marker.items():
            data = store.read(f"checkpoints/{name}/{file}")
            assert (len(data), zlib.crc32(data)) == (reported["bytes"], reported["crc32"]), (
                name,
                file,
            )
        return name
    return ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moments", [range(20)])
def test_killed_at_twenty_moments_it_ends_as_one_left_alone(
    moments: range, server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"S3_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(store_module, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(store_clients, "_FIRST_PAUSE", timedelta(milliseconds=10))
    (tmp_path / "env.json").write_text(json.dumps(env))
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    train_here("alone", *LENGTH)
    killer = Killer(server, tmp_path)
    server.killed = killer.kill
    on_ranks(work, (tmp_path, "whole", f"s3://{BUCKET}/whole"), 1)
    total, hit = killer.changes, 0
    seen: set[str] = set()
    for moment in moments:
        url, name = f"s3://{BUCKET}/run{moment}", f"run{moment}"
        killer.changes, killer.after = 0, moment % 2 == 1
        killer.at = 1 + total * moment // len(moments)
        store = Store(url, FetchOptions(), key="save_folder")
        try:
            on_ranks(work, (tmp_path, name, url), 1)
        except AssertionError:
            hit += 1
        killer.at = 0
        seen.add(check_newest(store))
        on_ranks(work, (tmp_path, name, url), 1)
        assert check_newest(store) == "ba0000006"
        assert store.folders("checkpoints") == ["ba0000004", "ba0000006"], killer.at
        read = tmp_path / f"read{moment}"
        read.mkdir()
        (read / "metrics.jsonl").write_bytes(store.read("metrics.jsonl"))
        assert losses(read) == losses(Path("runs/alone"))
        assert "run.lock" not in store.files()
    assert hit >= len(moments) - 2 and seen >= {"", "ba0000002", "ba0000004"}
