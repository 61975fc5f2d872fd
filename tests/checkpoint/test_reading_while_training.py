"""Reading a run while it trains, saves and prunes: a checkpoint that is read is not removed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmfoundry.builders.checkpoint import load_checkpoint
from llmfoundry.checkpoint import verify
from llmfoundry.checkpoint.retention import prune
from llmfoundry.checkpoint.storage import Checkpoint, Storage, remove_unpinned
from llmfoundry.checkpoint.verify import ChecksumSelection, find_checkpoint
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.files import try_lock
from tests.tiny import ENV, command, run, write_recipe
from tests.train.here import train_here

CPU = World(0, 1, 0, torch.device("cpu"))
PRUNING = ("save_interval=1ba", "save_num_checkpoints_to_keep=1", "save_async=true")


def ignore(line: str) -> None:
    """No note of a checkpoint that is still being written is of interest."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read")
    write_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def pruning(place: Path) -> Iterator[Path]:
    """A run that saves after each step, and keeps one checkpoint, for the last tests here."""
    process = subprocess.Popen(
        command("train.py", "tiny.yaml", "run_name=live", "max_duration=100000ba", *PRUNING),
        cwd=place,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    folder = place / "runs/live"
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints").is_dir() or len(Storage(folder).checkpoints()) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    yield folder
    still_trained = process.poll() is None
    process.kill()
    process.wait()
    assert still_trained


def test_pruning_leaves_what_another_process_reads_until_it_has_read_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    folder = train_here("pinned", "max_duration=4ba", "save_interval=1ba").absolute()
    storage = Storage(folder)
    read = folder / "checkpoints/ba0000002"
    reader = subprocess.Popen(
        [
            *command("train.py")[:1],
            "-c",
            "import sys; from pathlib import Path;"
            "from llmfoundry.checkpoint.storage import Checkpoint;"
            f"read = Checkpoint.at(Path({str(read)!r}));"
            "print(read.pin(), flush=True); sys.stdin.read()",
        ],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None and reader.stdout.readline() == "True\n"
    prune(storage, 4, keep=1)
    assert [f.name for f in storage.checkpoints()] == ["ba0000004", "ba0000002"]
    checkpoint = Checkpoint.at(read)
    assert find_checkpoint(checkpoint, note=ignore) == checkpoint  # whole, with its marker
    checkpoint.unpin()
    reader.kill()  # as any end releases it
    reader.wait()
    prune(storage, 4, keep=1)
    assert [f.name for f in storage.checkpoints()] == ["ba0000004"]


def test_what_is_being_removed_is_not_chosen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pruner holds COMMIT's lock alone, while all files are still there."""
    monkeypatch.chdir(place)
    folder = train_here("removed", "max_duration=2ba", "save_interval=1ba").absolute()
    storage = Storage(folder)
    newest, older = storage.checkpoints()
    taken = try_lock(newest / "COMMIT")
    assert taken is not None
    notes: list[str] = []
    with taken:
        found = find_checkpoint(storage, note=notes.append)
    assert found == Checkpoint.at(older)
    assert "it is being removed" in notes[0]
    found.unpin()
    missing = storage.checkpoint("ba0000009")
    assert not missing.pin()
    with pytest.raises(UserError, match="it is not there; choose another"):
        find_checkpoint(missing, note=ignore)
    assert remove_unpinned(older)


def test_where_the_only_checkpoint_vanishes_the_newer_one_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an object store, where nothing can be locked: between the list and the reading."""
    monkeypatch.chdir(place)
    folder = train_here("moved", "max_duration=1ba", "save_interval=1ba").absolute()
    run = Storage(folder)
    first = run.checkpoint("ba0000001")
    damage = verify.find_damage

    def pruned_meanwhile(at: Checkpoint, *, sums: ChecksumSelection, world: World) -> str | None:
        if at == first:
            at.folder.rename(folder / "checkpoints/ba0000002")
        return damage(at, sums=sums, world=world)

    monkeypatch.setattr(verify, "find_damage", pruned_meanwhile)
    monkeypatch.setattr(Storage, "lock", lambda self, folder: True)
    notes: list[str] = []
    found = find_checkpoint(run, note=notes.append)
    assert found == run.checkpoint("ba0000002") and "ba0000001 is refused" in notes[0]


@pytest.mark.parametrize("reads", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_a_run_that_saves_and_prunes_can_always_be_read(pruning: Path, reads: int) -> None:
    batches = [load_checkpoint(str(pruning), CPU, note=ignore).state["batch"] for _ in range(reads)]
    assert batches == sorted(batches) and batches[-1] > batches[0]  # it pruned meanwhile


@pytest.mark.slow
def test_commands_read_a_run_that_prunes(pruning: Path, place: Path) -> None:
    short = ("max_new_tokens=2", "prompt=line")
    run("generate.py", "runs/live", *short, cwd=place)
    run("eval.py", "runs/live", cwd=place)
