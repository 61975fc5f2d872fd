"""Runs of several processes and machines at a URL: what each sends, keeps and reads."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import Store
from tests.data.s3_server import BUCKET, FaultyS3, s3_server
from tests.tiny import losses, write_recipe
from tests.train.here import train_here
from tests.warm_scripts import on_ranks

SCHEDULE = ("schedule.t_max=6ba", "schedule.t_warmup=1ba")
BRIEF = ("max_duration=6ba", "save_interval=2ba", "eval=off", "device_train_microbatch_size=1")


def work(rank: int, folder: Path, ranks: int, machines: int, port: int, words: list[str]) -> None:
    """One process of a run; each machine has a disk, and a cache, of its own."""
    local = ranks // machines
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= json.loads((folder / "env.json").read_text())
    os.chdir(folder)
    disk = folder / f"machine{rank // local}"
    log = folder / f"rank{rank}.log"
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
    train_here("many", f"save_local_folder={disk}", *BRIEF, *words)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with s3_server() as (faulty, _):
        yield faulty


@pytest.fixture
def place(server: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    server.reset()
    env = {"S3_ENDPOINT_URL": server.url, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "env.json").write_text(json.dumps(env))
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_on(ranks: int, machines: int, *words: str) -> str:
    """Train on so many processes; what the first one said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parallel = "parallel=fsdp" if ranks > 1 else "parallel=ddp"
    on_ranks(work, (Path.cwd(), ranks, machines, port, [parallel, *words]), ranks)
    return Path("rank0.log").read_text()


def url_of(folder: Path) -> str:
    return f"s3://{BUCKET}/{folder.name}/many"


def losses_at(url: str) -> dict[int, float]:
    store = Store(url, FetchOptions(), key="save_folder")
    Path("read").mkdir(exist_ok=True)
    Path("read/metrics.jsonl").write_bytes(store.read("metrics.jsonl"))
    return losses(Path("read"))


def fetched(server: FaultyS3) -> set[str]:
    """Tensor files of checkpoints that were read since the last reset."""
    return {k.rpartition("/")[2] for k, n in server.gets.items() if n and k.endswith(".distcp")}


@pytest.mark.slow
def test_it_resumes_on_any_number_of_processes_and_machines(place: Path, server: FaultyS3) -> None:
    train_here("alone", *BRIEF, *SCHEDULE)
    url = url_of(place)
    store = Store(url, FetchOptions(), key="save_folder")
    said = [train_on(2, 2, f"save_folder={url}", *SCHEDULE, "max_duration=2ba")]
    assert store.folders("checkpoints") == ["ba0000002"]
    for n, (ranks, machines) in enumerate([(1, 1), (4, 2)], start=2):
        for disk in place.glob("machine*"):
            shutil.rmtree(disk)
        words = (f"save_folder={url}", *SCHEDULE, f"max_duration={2 * n}ba")
        said.append(train_on(ranks, machines, *words))
        assert f"resuming from {url}/checkpoints/ba000000{2 * n - 2}" in said[-1]
    alone = losses(Path("runs/alone"))
    assert losses_at(url) == pytest.approx(alone, rel=1e-5)
    assert not list(place.glob("machine*/*/checkpoints/*"))


@pytest.mark.slow
def test_machines_read_what_they_kept_and_a_lost_one_reads_the_store(
    place: Path, server: FaultyS3
) -> None:
    url = url_of(place)
    words = (f"save_folder={url}", "save_local_copies=1", "global_train_batch_size=3")
    train_on(3, 3, *words, "max_duration=4ba", *SCHEDULE)
    kept = {
        n: {f.name for f in (place / f"machine{n}").glob("*/checkpoints/ba0000004/*.distcp")}
        for n in range(3)
    }
    for n in range(3):  # what it wrote
        assert kept[n] == {f"{kind}__{n}_0.distcp" for kind in ("", "optimizer")}
    assert not list(place.glob("machine*/*/checkpoints/ba0000002"))
    for lost, wanted in (((), 0), ((1,), 2), ((1, 2), 4)):
        shutil.rmtree(place / "saved", ignore_errors=True)
        for n in range(3):
            shutil.copytree(place / f"machine{n}", place / "saved" / f"machine{n}")
        for n in lost:
            shutil.rmtree(place / f"machine{n}")
        server.reset()
        said = train_on(3, 3, *words, "max_duration=4ba", *SCHEDULE)
        assert "resuming from" in said and "refused" not in said
        assert len(fetched(server)) == wanted, (lost, fetched(server))
        for n in range(3):
            shutil.rmtree(place / f"machine{n}", ignore_errors=True)
            shutil.copytree(place / "saved" / f"machine{n}", place / f"machine{n}")
    copy = next((place / "machine0").glob("*/checkpoints/ba0000004/__0_0.distcp"))
    spoilt = bytearray(copy.read_bytes())
    spoilt[len(spoilt) // 2] ^= 1
    copy.write_bytes(bytes(spoilt))
    server.reset()
    said = train_on(3, 3, *words, "max_duration=6ba", *SCHEDULE)
    assert f"resuming from {url}/checkpoints/ba0000004" in said and "refused" not in said
