"""Which checkpoints are removed once a newer one is complete."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmfoundry.checkpoint.commit import sums_of_small_files, write_commit
from llmfoundry.checkpoint.retention import prune
from llmfoundry.checkpoint.storage import Storage, batch_of


def save(storage: Storage, batch: int, *, commits: bool = True) -> Path:
    """Write the files that each checkpoint has; without COMMIT its save was interrupted."""
    folder = storage.checkpoint_folder(batch)
    folder.mkdir(parents=True)
    for name in (".metadata", "state.json", "recipe.yaml"):
        (folder / name).write_text(f"{name} of batch {batch}")
    if commits:
        write_commit(folder, [sums_of_small_files(folder)])
    return folder


def left(storage: Storage) -> list[int]:
    return sorted(map(batch_of, storage.checkpoints()))


@pytest.mark.parametrize(
    ("keep", "best", "expected"),
    [
        (-1, None, [1, 2, 3, 4, 5, 9]),
        (1, None, [5, 9]),
        (3, None, [3, 4, 5, 9]),
        (5, None, [1, 2, 3, 4, 5, 9]),
        (7, None, [1, 2, 3, 4, 5, 9]),
        (2, 1, [1, 4, 5, 9]),
        (2, 4, [4, 5, 9]),
    ],
)
def test_the_newest_and_the_best_stay(
    tmp_path: Path, keep: int, best: int | None, expected: list[int]
) -> None:
    """Batch 9 is of a run that was refused at its start: it stays until a later save."""
    storage = Storage(tmp_path)
    for batch in (1, 2, 3, 4, 5, 9):
        save(storage, batch)
    asked: list[list[int]] = []

    def choose(batches: list[int]) -> int | None:
        asked.append(sorted(batches))
        return best

    chooser: Callable[[list[int]], int | None] | None = None if best is None else choose
    prune(storage, 5, keep=keep, choose_best=chooser)
    assert left(storage) == expected
    assert asked == ([] if best is None else [[1, 2, 3, 4, 5, 9]])


def test_a_lowered_number_removes_what_the_higher_one_kept(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    for batch in range(1, 5):
        save(storage, batch)
        prune(storage, batch, keep=3)
    assert left(storage) == [2, 3, 4]
    save(storage, 5)
    prune(storage, 5, keep=2)
    assert left(storage) == [4, 5]


def test_only_saves_interrupted_before_this_run_are_removed(tmp_path: Path) -> None:
    """A folder without COMMIT that changed since the run began may be one that is being written."""
    storage = Storage(tmp_path)
    before, during = (save(storage, batch, commits=False) for batch in (1, 2))
    for folder, since_begin in ((before, -10), (during, 10)):
        changed = storage.began + since_begin
        for path in (*folder.iterdir(), folder):
            os.utime(path, (changed, changed))
    for batch in (3, 4):
        save(storage, batch)
    prune(storage, 4, keep=1)
    assert left(storage) == [2, 4]


def test_a_damaged_checkpoint_does_not_count_and_goes_with_those_of_its_age(
    tmp_path: Path,
) -> None:
    storage = Storage(tmp_path)
    for batch in range(1, 6):
        save(storage, batch)
    for batch in (1, 4):
        (storage.checkpoint_folder(batch) / "state.json").unlink()
    prune(storage, 5, keep=2)
    assert left(storage) == [3, 4, 5], "3 and 5 are the newest complete ones"
