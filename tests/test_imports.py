"""No module imports, by whatever way, one that imports it: not in a function, not for types alone.

The layers of the packages, and that there are no cycles between packages of `llmfoundry`, are
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
