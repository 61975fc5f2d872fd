"""Runs the front in this process, with a target that only remembers the recipe it was given.

A folder's conftest.py imports the two fixtures for its tests.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from llmfoundry import redaction
from llmfoundry.cli.script import run
from llmfoundry.migrate.other_tools import register_other_tools
from llmfoundry.recipe.train import TrainRecipe

register_other_tools()  # as each script does, for tests that load recipes without one


@dataclass
class Outcome:
    """What a user sees of one command, and the recipe that its target got."""

    status: int
    out: str
    errors: list[str]
    recipe: Any


Front = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test calls a secret is an ordinary text of the next."""
    monkeypatch.setattr(redaction, "_known", [])


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Front:
    """`front("RECIPE", "key=value", ..., schema=TrainRecipe)`."""
    received: list[Any] = []
    module = types.ModuleType("remembering_target")
    module.remember = received.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "remembering_target", module)
    monkeypatch.delenv("RANK", raising=False)

    def call(*argv: object, schema: type = TrainRecipe) -> Outcome:
        received.clear()
        status = 0
        try:
            run(schema, "remembering_target:remember", [str(a) for a in argv], help="What it does.")
        except SystemExit as error:
            status = int(error.code or 0)
        out, err = capsys.readouterr()
        recipe = received[-1] if received else None  # resolved; tests look at the user's
        recipe = getattr(recipe, "user_recipe", recipe)
        return Outcome(status, out, err.splitlines(), recipe)

    return call
