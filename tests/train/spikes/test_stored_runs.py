"""A run in an object store that goes back before a spike, and its next start from there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.store import Store
from tests.tiny import losses, write_recipe
from tests.train.here import train_here
from tests.train.spikes.test_runs import (
    BACK,
    SETTINGS,
    SPIKE,
    poison,
    poisoned_places,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with tiny.yaml, whose poisoned rows are in places.json."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("watch-stored")
        write_recipe(folder)
        patch.chdir(folder)
        with pytest.MonkeyPatch.context() as inner:
            places = poisoned_places(inner, range(SPIKE, SPIKE + 3))
        (folder / "places.json").write_text(json.dumps(sorted(places)))
        poisoned_run(folder, "local")
        yield folder


def poisoned_run(place: Path, name: str, *overrides: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, set(json.loads((place / "places.json").read_text())))
        train_here(name, *SETTINGS, *BACK, *overrides)


def store_at(url: str) -> Store:
    return Store(url, FetchOptions(), key="save_folder")


def losses_at(url: str, folder: Path) -> dict[int, float]:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(store_at(url).read("metrics.jsonl"))
    return losses(folder)


def go_on(place: Path, url: str, newest: str, *overrides: str) -> None:
    """Start once more, on a machine on which nothing is left, from an older checkpoint."""
    store = store_at(url)
    for name in store.folders("checkpoints"):
        if name > newest:
            store.delete(list(store.files(f"checkpoints/{name}")))
    shutil.rmtree("cache/runs")
    poisoned_run(place, "back", *overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("background", "copies", "newest"),
    [
        ("true", 1, "ba0000017"),
        pytest.param("true", 0, "ba0000024", marks=pytest.mark.slow),
        pytest.param("false", 1, "ba0000016", marks=pytest.mark.slow),
        pytest.param("false", 0, "ba0000016", marks=pytest.mark.slow),
    ],
)
def test_a_run_in_a_store_goes_back_as_one_in_a_folder(
    place: Path, tmp_path: Path, background: str, copies: int, newest: str
) -> None:
    shutil.rmtree("cache/runs", ignore_errors=True)
    url = f"file://{tmp_path}/runs/back"
    words = (f"save_folder={url}", f"save_async={background}", f"save_local_copies={copies}")
    poisoned_run(place, "back", *words)
    local, store = Path("runs/local"), store_at(url)
    assert losses_at(url, tmp_path / "read") == losses(local)
    names = sorted(folder.name for folder in (local / "checkpoints").iterdir())
    assert store.folders("checkpoints") == names
    assert store.read("events.jsonl").count(b"roll_back") >= 1
    (kept,) = Path("cache/runs").glob("back-*/checkpoints")
    assert [folder.name for folder in kept.glob("ba*")] == names[-1:] * copies
    go_on(place, url, newest, *words)
    assert losses_at(url, tmp_path / "again") == losses(local)
