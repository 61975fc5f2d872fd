"""Imports obey what import-linter cannot see: cycles in functions, and modules named by strings.

No module imports, by any way, one that imports it: not in a function, not for types alone. A string
that names a module (`"llmfoundry.loggers.wandb_logger:wandb_target"`) names one of the same package
or of a lower layer, as an import would. The layers are import-linter's (pyproject.toml).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.tiny import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def imported(module: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [node.module, *names]


def cycle(root: Path, *packages: str) -> list[str]:
    """Modules of `root` that import each other in a ring, the first of them again last."""
    files = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for package in packages
        for file in (root / package).rglob("*.py")
    }
    graph = {name: files.keys() & {*imported(file)} - {name} for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_one_that_imports_it() -> None:
    assert cycle(ROOT, "llmfoundry", "benchmarks", "scripts") == []


def test_a_cycle_is_found_that_only_type_checkers_and_calls_enter(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    lazy, typed = (
        "def f():\n    from package import b\n",
        "if TYPE_CHECKING:\n    import package.a\n",
    )
    for name, text in {"a": lazy, "b": "from package.c import C\n", "c": typed}.items():
        (package / f"{name}.py").write_text(text)
    assert {*cycle(tmp_path, "package")} == {"package.a", "package.b", "package.c"}
    (package / "c.py").write_text("import torch\n")
    assert cycle(tmp_path, "package") == []


def layer_numbers() -> dict[str, int]:
    """Each top-level package or module of the layers contract, the lowest layer 0."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (contract,) = (c for c in tool["importlinter"]["contracts"] if c["type"] == "layers")
    lowest_first = reversed(contract["layers"])
    return {
        name.strip(): number
        for number, layer in enumerate(lowest_first)
        for name in layer.split("|")
    }


def top_package(module: str) -> str:
    """`llmfoundry.loggers` of `llmfoundry.loggers.wandb_logger`."""
    return ".".join(module.split(".")[:2])


def named_modules(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each string, or part of an f-string, that names a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = re.match(r"(llmfoundry(?:\.\w+)+)\.?(?::[\w.]*)?$", node.value)
            if match and is_module(match[1]):
                yield node.lineno, match[1]


def is_module(name: str) -> bool:
    """Whether a dotted name, or its beginning, is a package or module of ours below llmfoundry."""
    path = ROOT.joinpath(*top_package(name).split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def upward_strings(module: str, source: str, layers: dict[str, int]) -> list[str]:
    """The strings of a module that name a package of its layer or above, but for its own."""
    own = top_package(module)
    return [
        f"{module}:{line} names {name}"
        for line, name in named_modules(source)
        if top_package(name) != own and layers[top_package(name)] >= layers[own]
    ]


def test_a_string_names_a_module_of_its_package_or_of_a_lower_layer() -> None:
    layers, upward, n_named = layer_numbers(), [], 0
    for file in sorted((ROOT / "llmfoundry").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        source = file.read_text()
        n_named += len([*named_modules(source)])
        if top_package(module) in layers:  # else llmfoundry/__init__.py or __main__.py
            upward += upward_strings(module, source, layers)
    assert upward == []
    assert n_named >= 5, "the strings that name modules are found"


@pytest.mark.parametrize(
    ("source", "n_upward"),
    [
        ('"llmfoundry.train.step:train_step"', 1),
        ('f"llmfoundry.loggers.{name}_logger:target"', 1),
        ('_BUILT = "llmfoundry.train.optim"', 1),
        ('"llmfoundry.recipe.train:TrainRecipe"', 0),
        ('"llmfoundry.errors"', 0),
        ('"llmfoundry.kind"', 0),  # a tag, no module
        ('"""A docstring of llmfoundry.train."""', 0),
    ],
)
def test_a_string_upward_is_found(source: str, n_upward: int) -> None:
    found = upward_strings("llmfoundry.recipe.schedule", source, layer_numbers())
    assert len(found) == n_upward
