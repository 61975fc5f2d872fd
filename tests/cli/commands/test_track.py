"""scripts/track.py: which folders it takes, and whose stores it asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from llmfoundry.checkpoint.run_lock import only_run
from llmfoundry.cli.commands import track as command
from llmfoundry.cli.commands.track import run_with_record, track
from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import TrackRecipe
from llmfoundry.recipe.load import checked
from tests.tiny import RECIPE

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
TENSORBOARD = {"mlflow": False, "tensorboard": True}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with a run's recipe and a record of one step."""
    folder = tmp_path / "run"
    folder.mkdir()
    data = {"name": "files", "paths": [str(tmp_path)]}
    recipe = {**RECIPE, "data": data, "logger": TENSORBOARD, "save_folder": str(folder)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "metrics.jsonl").write_text('{"time/batch": 1, "loss/train/total": 2.5}\n')
    return folder


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path]]:
    """What would be sent: recipes and folders."""
    found: list[tuple[Any, Path]] = []
    monkeypatch.setattr(
        command, "send_record", lambda recipe, folder, task, **_: found.append((recipe, folder))
    )
    return found


def asked(run: Path, *words: str) -> TrackRecipe:
    recipe = checked(TrackRecipe, None, [f"run={run}", *words])
    assert isinstance(recipe, TrackRecipe)
    return recipe


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl"])
def test_a_folder_without_a_record_is_refused(name: str, run: Path) -> None:
    assert run_with_record(asked(run)).folder == run
    (run / name).unlink()
    with pytest.raises(UserError, match=r"run: .* has no recipe.yaml or no metrics.jsonl"):
        run_with_record(asked(run))


def test_the_runs_own_stores_are_asked_or_those_that_are_named(
    run: Path, sent: list[tuple[Any, Path]]
) -> None:
    track(asked(run))
    track(asked(run, "logger.mlflow=false", "logger.tensorboard=false", "logger.wandb=true"))
    (own, folder), (named, _) = sent
    assert folder == run
    assert (own.logger.mlflow, own.logger.tensorboard, own.logger.wandb) == (False, True, False)
    loggers = (named.logger.mlflow, named.logger.tensorboard, named.logger.wandb)
    assert loggers == (False, False, True)


def test_a_run_under_way_is_left_to_itself(
    run: Path, sent: list[tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmfoundry.checkpoint.run_lock._PATIENCE", 0.1)
    with only_run(run, ALONE, note=print), pytest.raises(UserError, match="is in use"):
        track(asked(run))
    assert sent == []
