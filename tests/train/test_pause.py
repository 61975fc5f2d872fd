"""`pause_at`: a run ends there, evaluated and saved, and goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.train import TrainRecipe
from tests.tiny import losses, run, write_recipe

BITS = "metrics/eval/bits_per_byte"


def evaluated(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["time/batch"] for row in rows if BITS in row]


def test_a_paused_run_ends_as_one_that_never_paused(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    words = ("tiny.yaml", "max_duration=6ba", "save_interval=0ba")
    run("train.py", *words, "run_name=straight", cwd=tmp_path)
    paused = tmp_path / "runs/paused"
    done = run("train.py", *words, "run_name=paused", "pause_at=0.5dur", cwd=tmp_path)
    assert "stopped by pause_at after batch 3, and saved" in done.stdout
    assert sorted(losses(paused)) == [1, 2, 3] and evaluated(paused) == [3]
    again = run("train.py", *words, "run_name=paused", "pause_at=2ba", cwd=tmp_path)  # has been
    assert "stopped by pause_at after batch 3" in again.stdout and len(losses(paused)) == 3
    run("train.py", *words, "run_name=paused", "pause_at=null", cwd=tmp_path)
    assert losses(paused) == losses(tmp_path / "runs/straight") and evaluated(paused) == [3, 6]
    folders = [
        tmp_path / "runs" / name / "checkpoints/ba0000006" for name in ("straight", "paused")
    ]
    one, other = ((folder / "__0_0.distcp").read_bytes() for folder in folders)
    assert one == other


@pytest.mark.parametrize("text", ["0ba", "3", "-1ba"])
def test_a_pause_is_a_duration(tmp_path: Path, text: str) -> None:
    write_recipe(tmp_path)
    with pytest.raises(UserError, match="pause_at: "):
        checked(TrainRecipe, tmp_path / "tiny.yaml", [f"pause_at={text}"])
