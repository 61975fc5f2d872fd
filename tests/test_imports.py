"""No module imports, by whatever way, one that imports it: not in a function, not for types alone.

The floors of the rooms, and that there are no circles between packages of `llmfoundry`, are
import-linter's (pyproject.toml); benchmarks and scripts are looked at here alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.tiny import ROOT


def imported(module: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [node.module, *names]


def circle(root: Path, *packages: str) -> list[str]:
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
    assert circle(ROOT, "llmfoundry", "benchmarks", "scripts") == []


def test_a_circle_is_found_that_only_type_checkers_and_calls_enter(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").touch()
    lazy, typed = "def f():\n    from house import b\n", "if TYPE_CHECKING:\n    import house.a\n"
    for name, text in {"a": lazy, "b": "from house.c import C\n", "c": typed}.items():
        (house / f"{name}.py").write_text(text)
    assert {*circle(tmp_path, "house")} == {"house.a", "house.b", "house.c"}
    (house / "c.py").write_text("import torch\n")
    assert circle(tmp_path, "house") == []
