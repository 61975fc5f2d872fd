"""What is read before a checkpoint is used: by whom, how long it may take, and which files."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.builders.pretrained import open_pretrained
from llmfoundry.builders.resume import find_start
from llmfoundry.checkpoint.storage import Checkpoint, Storage
from llmfoundry.checkpoint.verify import ChecksumSelection, find_damage
from llmfoundry.distributed.process_group import World, set_group_timeouts
from llmfoundry.errors import RunFailure
from llmfoundry.recipe.adapter import PretrainedConfig
from tests.tiny import write_recipe
from tests.train.here import train_here
from tests.warm_scripts import on_ranks

ALONE = World(0, 1, 0, torch.device("cpu"))
RANKS = 2
TIMEOUT = 10.0  # seconds of a collective; reading takes longer


def write_checkpoint(run: Path, batch: int) -> Path:
    """A folder that counts as a checkpoint; what its files hold does not matter here."""
    folder = run / "checkpoints" / f"ba{batch:07d}"
    folder.mkdir(parents=True)
    names = [".metadata", "state.json", "recipe.yaml", *(f"__{n}_0.distcp" for n in range(10))]
    files = {}
    for name in names:
        content = os.urandom(50_000)
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / "COMMIT").write_text(json.dumps({"version": 1, "files": files}))
    return folder


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def resume(run: Path, world: World) -> tuple[str, list[str]]:
    """The checkpoint that a run resumes from, and what was said."""
    said: list[str] = []
    recipe: Any = SimpleNamespace(
        save_folder=str(run), autoresume=True, save_overwrite=False, load_path=None
    )
    checkpoint = find_start(recipe, Storage(run), world, said.append).checkpoint
    assert checkpoint is not None
    return checkpoint.name, said


def work(rank: int, folder: Path) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    world = World(rank, RANKS, rank, torch.device("cpu"), timedelta(seconds=TIMEOUT))
    group = dist.group.WORLD
    assert group is not None
    reported: dict[str, Any] = {}
    real, lengths = zlib.crc32, list[int]()

    def slow(block: bytes, crc: int = 0) -> int:
        lengths.append(len(block))
        time.sleep(2)
        return real(block, crc)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlib, "crc32", slow)
        dist.barrier()
        set_group_timeouts(group, world)
        began = time.monotonic()
        reported["whole"] = resume(folder / "whole", world)
        reported["seconds"] = time.monotonic() - began
        set_group_timeouts(group, replace(world, timeout=timedelta(seconds=60)))
        reported["bytes"] = sum(lengths)
    reported["damaged"] = resume(folder / "damaged", world)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(zlib, "crc32", lambda *_: threading.Event().wait())
        with pytest.raises(RunFailure) as caught:
            resume(folder / "whole", replace(world, timeout=timedelta(seconds=6)))
        reported["hung"] = str(caught.value)
    (folder / f"rank{rank}").write_text(json.dumps(reported))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the processes found in runs that are whole, damaged, and not readable."""
    folder = tmp_path_factory.mktemp("reads")
    for name in ("whole", "damaged"):
        write_checkpoint(folder / name, 1)
        newest = write_checkpoint(folder / name, 2)
    spoil(newest / "__7_0.distcp")
    on_ranks(work, (folder,), RANKS)
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(RANKS)]


def test_each_process_reads_the_files_that_it_wrote_however_long_that_takes(
    reported: list[dict[str, Any]],
) -> None:
    """Rank 0 read all of it before, and the others waited for it within dist_timeout."""
    assert [one["whole"] for one in reported] == [["ba0000002", []]] * RANKS
    # of ten writers every second one each; and rank 0 the small files
    assert [one["bytes"] for one in reported] == [8 * 50_000, 5 * 50_000]
    assert min(one["seconds"] for one in reported) > TIMEOUT, "too fast to show anything"


def test_all_processes_pass_over_what_one_of_them_finds_damaged(
    reported: list[dict[str, Any]],
) -> None:
    assert [one["damaged"][0] for one in reported] == ["ba0000001"] * RANKS
    [line], *others = [one["damaged"][1] for one in reported]
    assert line.endswith("ba0000002 is refused: its file __7_0.distcp is damaged (checksum)")
    assert others == [[]] * (RANKS - 1)


def test_a_process_whose_reading_hangs_is_named_by_all(reported: list[dict[str, Any]]) -> None:
    for one in reported:
        assert one["hung"].startswith("parallel.dist_timeout: rank 1 has read nothing of ")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs/whole, saved after batches 1 and 2."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("weights")
        write_recipe(folder)
        patch.chdir(folder)
        train_here("whole", "max_duration=2ba", "save_interval=1ba", "eval=off")
        yield folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that are read of each file by its name, as they come from the system."""
    read: Counter[str] = Counter()

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            n = super().readinto(buffer)
            read[Path(str(self.name)).name] += n or 0
            return n

        def readall(self) -> bytes:
            content = super().readall()
            read[Path(str(self.name)).name] += len(content)
            return content

    real = Path.open

    def opened(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            return real(self, mode, *args, **kwargs)
        return io.BufferedReader(Counted(str(self), "rb"))

    monkeypatch.setattr(Path, "open", opened)
    return read


@pytest.mark.parametrize("how", ["generate", "pretrained"])
def test_weights_are_opened_without_a_look_at_the_optimizer(
    place: Path, read: Counter[str], how: str
) -> None:
    """AdamW's moments are twice the weights."""
    if how == "generate":
        load_checkpoint("runs/whole", ALONE, note=pytest.fail)
    else:
        open_pretrained(PretrainedConfig(pretrained="runs/whole"), ALONE, note=pytest.fail)
    files = list(Path("runs/whole/checkpoints/ba0000002").glob("*.distcp"))
    sizes = {file.name: file.stat().st_size for file in files}
    held = {name for name in sizes if "optimizer" in name}
    assert sum(sizes[name] for name in held) > 1.5 * sum(sizes[n] for n in sizes.keys() - held)
    assert not held & read.keys()
    [weights] = sizes.keys() - held
    if how == "pretrained":  # whose weights come in later
        assert read[weights] == sizes[weights]
    else:
        assert read[weights] > sizes[weights]


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_without_a_sound_optimizer_a_model_answers_and_a_run_resumes_from_before(
    place: Path, how: str
) -> None:
    run = Path("runs") / how
    shutil.copytree("runs/whole", run)
    [file] = (run / "checkpoints/ba0000002").glob("optimizer*.distcp")
    spoil(file) if how == "damaged" else file.unlink()
    loaded = load_checkpoint(str(run), ALONE, note=pytest.fail)
    assert loaded.folder.name == "ba0000002"
    checkpoint, said = resume(run, ALONE)
    assert checkpoint == "ba0000001" and f"its file {file.name} is {how}" in said[0]


def test_a_record_is_read_without_tensors(place: Path, read: Counter[str]) -> None:
    checkpoint = Checkpoint.at(Path("runs/whole/checkpoints/ba0000002"))
    assert find_damage(checkpoint, sums=ChecksumSelection.RECORD) is None
    assert "state.json" in read and not any(name.endswith(".distcp") for name in read)
