"""What activation checkpointing's `auto` stood for: reported, saved, kept when the run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import losses, write_recipe
from tests.train.here import train_here

OPTIONS = ("max_duration=4ba", "schedule.t_warmup=1ba", "schedule.t_max=4ba", "eval=off")


def saved(folder: Path, batch: int) -> str:
    state = folder / "checkpoints" / f"ba{batch:07d}" / "state.json"
    return str(json.loads(state.read_text())["activation_checkpointing"])


def test_a_run_resumes_as_it_began_and_its_losses_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    plain = train_here("plain", *OPTIONS)
    auto = "parallel.activation_checkpointing=auto"
    again = "parallel.activation_checkpointing=selective"
    train_here("mixed", *OPTIONS, again, "max_duration=2ba")
    capsys.readouterr()
    mixed = train_here("mixed", *OPTIONS, auto)
    assert "auto is selective, as the run began" in capsys.readouterr().out
    assert saved(mixed, 2) == saved(mixed, 4) == "selective"
    assert losses(mixed) == losses(plain)
    train_here("fresh", *OPTIONS, auto, "max_duration=2ba")
    assert "auto is none, all that" in capsys.readouterr().out
