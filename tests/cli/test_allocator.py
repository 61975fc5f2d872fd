"""Which settings of PyTorch's allocator a script's process has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.check import environment
from llmfoundry.processes import ALLOCATOR_VARIABLES, allocator_settings
from tests.tiny import ROOT

PROGRAM = """
from llmfoundry.cli.script import run
from llmfoundry.recipe.train import TrainRecipe
run(TrainRecipe, "seen:seen", ["quickstart"])
"""
SEEN = """
import os, sys
assert "torch" not in sys.modules, "it would be too late"
def seen(recipe):
    print(os.environ["PYTORCH_ALLOC_CONF"])
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("expandable_segments:True", None, None)),
        ({ALLOCATOR_VARIABLES[0]: "max_split_size_mb:64"}, ("max_split_size_mb:64", None, None)),
        (
            {ALLOCATOR_VARIABLES[1]: "expandable_segments:False"},
            (None, "expandable_segments:False", None),
        ),
        ({ALLOCATOR_VARIABLES[2]: ""}, (None, None, "")),
    ],
)
def test_segments_grow_unless_the_user_set_any_name(
    given: dict[str, str], expected: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    added = allocator_settings(os.environ)
    items = environment("cuda")
    assert tuple({**os.environ, **added}.get(name) for name in ALLOCATOR_VARIABLES) == expected
    assert tuple(items.get(name) for name in ALLOCATOR_VARIABLES) == expected


def test_a_script_sets_it_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "seen.py").write_text(SEEN)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "expandable_segments:True"
