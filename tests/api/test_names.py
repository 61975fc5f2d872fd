"""`import llmfoundry`: what it exports, what it costs, and the examples of its docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import llmfoundry as lf
from tests.tiny import ENV, ROOT

PROBE = """
import sys, time
started = time.process_time()
import llmfoundry
seconds = time.process_time() - started
heavy = {"torch", "numpy", "omegaconf", "hydra", "yaml", "psutil"} & sys.modules.keys()
print(round(seconds, 3), sorted(heavy))
assert not heavy and seconds < 0.3
"""


def test_the_import_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, env=ENV, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


COMMANDS = ("chat", "evaluate", "generate", "inspect_data", "plan", "scaling", "serve", "train")
LOADED = f"""
import importlib, sys
for command in {COMMANDS}:
    importlib.import_module("llmfoundry.cli.commands." + command)
    heavy = {{"transformers", "scipy", "torch._dynamo"}} & sys.modules.keys()
    assert not heavy, (command, heavy)
"""


def test_commands_load_no_transformers_before_a_model_needs_it() -> None:
    """Half of the time in which `generate.py` starts, and 130 MB."""
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, env=ENV, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_every_name_is_there_and_documented() -> None:
    for name in lf.__all__:
        value = getattr(lf, name)
        assert callable(value) and inspect.getdoc(value), name
        assert name in dir(lf)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lf.trian  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", ["train", "data", "recipe"])
def test_a_package_is_the_function_of_its_name_too(name: str) -> None:
    package = importlib.import_module(f"llmfoundry.{name}")
    assert getattr(lf, name) is package
    assert [*inspect.signature(package).parameters][1] == "overrides"
    (value,) = {getattr(lf, name), package}
    with pytest.raises(lf.UserError):
        value("no-such-recipe")


@pytest.mark.parametrize(
    "module", ["batches", "evaluation", "exports", "model", "recipes", "run", "training"]
)
def test_the_examples_of_docstrings_are_right(here: Path, module: str) -> None:
    found = importlib.import_module(f"llmfoundry.api.{module}")
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    examples = 0
    for test in finder.find(found, extraglobs={"lf": lf}):
        examples += len(test.examples)
        runner.run(test)
    assert examples and not runner.summarize(verbose=False).failed
