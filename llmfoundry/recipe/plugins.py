"""The key `plugins` of every recipe: files and modules that extend the tables of choices.

The command line calls `import_plugins` before a recipe is checked, and worker processes call it
with the result of `imported`. Only the command line and the recipe that it names import code. A
run's folder that is only opened, by scripts/eval.py for instance, imports nothing, whatever its
recipe says. The recipe.yaml of a resumed run imports nothing from a run's folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from llmfoundry.errors import UserError, one_line
from llmfoundry.recipe.choice_table import Origin, not_imported, now_adding
from llmfoundry.recipe.paths import find_file, show

_imported: dict[str, str] = {}
"""Of this process: each plugin's place, or the module's name, by its name in sys.modules."""
_OF_A_RUN = ("checkpoints", "metrics.jsonl", "state.json")


def import_plugins(names: Iterable[str], *, recipe: Path | None = None) -> None:
    """Import each plugin once; its records are then part of the tables.

    Args:
        names: the value of `plugins`.
        recipe: the file that names them; None: the command line, or one of our processes.

    Raises:
        UserError: a plugin is missing, fails, or adds an invalid record; or both the plugin and the
            recipe that names it are in a run's folder.
    """
    for name in names:
        if name.endswith(".py") or "/" in name:
            path = find_file(name, "plugins").resolve()
            _refuse_strangers(name, path, recipe)
            module = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
            if module not in _imported:
                _import_file(module, path)
        elif name not in _imported:
            _import_module(name, recipe)


def imported() -> list[str]:
    """Return the plugins that this process has imported, for another process."""
    return list(_imported.values())


def leave_out(names: Iterable[str], recipe: Path) -> None:
    """Record the plugins of a recipe that was only opened, for messages about missing choices."""
    here = (*_imported.values(),)
    not_imported.update({n: show(recipe) for n in names if not any(p.endswith(n) for p in here)})


def _import_file(module: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(module, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"plugins: {show(path)} is not a Python file; write one, my_file.py")
    plugin = importlib.util.module_from_spec(spec)
    code = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
    sys.modules[module] = plugin
    try:
        _run(show(path), code, str(path), partial(spec.loader.exec_module, plugin))
    except BaseException:
        del sys.modules[module]
        raise
    _imported[module] = str(path)


def _import_module(name: str, recipe: Path | None) -> None:
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(f"plugins: no module {name!r} is installed; a file is written my_file.py")
    _refuse_strangers(name, Path(spec.origin), recipe)
    _run(name, "", spec.origin, partial(importlib.import_module, name))
    _imported[name] = name


def _run(label: str, code: str, file: str, execute: Callable[[], object]) -> None:
    """Execute a plugin and attribute its records to it.

    Raises:
        UserError: it fails; one line with the location in the plugin.
    """
    now_adding.append(Origin(label, code))
    try:
        execute()
    except (Exception, SystemExit) as error:
        where = f"plugins: {_place(label, file, error)}"
        if isinstance(error, UserError):
            raise UserError(*(f"{where}: {problem}" for problem in error.problems)) from error
        raise UserError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        now_adding.pop()


def _place(label: str, file: str, error: BaseException) -> str:
    """Return the plugin and the line that failed."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{label}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{label}:{frames[-1].lineno}" if frames else label


def _refuse_strangers(name: str, path: Path, recipe: Path | None) -> None:
    """Refuse plugins in an untrusted run's folder that the recipe of the run names."""
    if recipe is not None and _is_of_a_run(recipe) and _is_of_a_run(path):
        raise UserError(
            f"plugins: {name} lies in a run's folder, and so does {show(recipe)}, which names it; a"
            f" run's own recipe imports none from there: write plugins=[{name}] if you trust it"
        )


def _is_of_a_run(path: Path) -> bool:
    folders = path.absolute().parents
    return any(
        (folder / "recipe.yaml").is_file() and any((folder / name).exists() for name in _OF_A_RUN)
        for folder in {*folders, *path.resolve().parents}
    )
