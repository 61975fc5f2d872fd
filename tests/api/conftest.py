"""A folder with the recipes of tests/tiny.py, and a run of them that Python has trained."""

from __future__ import annotations

from pathlib import Path

import pytest

import llmfoundry as lf
from tests.tiny import finetune_recipe, write_recipe


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder; the run is runs/quickstart, as the examples call it."""
    folder = tmp_path_factory.mktemp("api")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_recipe(folder)
        finetune_recipe(folder, model={"pretrained": "runs/quickstart"})
        recipe = lf.recipe("tiny.yaml", {"run_name": "quickstart", "max_duration": "4ba"})
        lf.train(recipe, show="nothing")
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, as the working folder."""
    monkeypatch.chdir(trained)
    return trained
