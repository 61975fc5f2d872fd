"""Locations of recipes, groups and the files that a recipe names.

A relative path refers to the working folder. A recipe, a gauntlet or another file that may be
shipped is then searched for below the root of the repository, so that
`eval/gauntlets/generated.yaml` in a shipped recipe works from anywhere. A wheel contains the files
of the repository in a folder of the package.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmfoundry.errors import UserError
from llmfoundry.files import RUN_LOCK
from llmfoundry.recipe.schema import Schema

_PACKED = Path(__file__).resolve().parents[1] / "shipped"  # setup.py fills it in a wheel
IS_REPOSITORY = not _PACKED.is_dir()
ROOT = Path(__file__).resolve().parents[2] if IS_REPOSITORY else _PACKED
"""The folder that holds yamls/, eval/ and scripts/: the repository, or the wheel's copy."""
YAMLS = ROOT / "yamls"
"""The shipped recipes, and a folder for each group."""
_SUFFIXES = (".yaml", ".yml")
_TEXTS = (".txt", ".md", ".py", ".jsonl", ".json", ".csv", ".parquet", ".gz", ".zst")


def find_shipped(path: str | Path, key: str) -> Path:
    """Return the file or folder at `path`, the value of a key that may name a file of the project.

    Raises:
        UserError: neither the working folder nor the repository has it; names the nearest path.
    """
    return _find(path, key, (Path(), ROOT))


def find_file(path: str | Path, key: str) -> Path:
    """Return the file or folder at `path`, the value of a key that names a user's file.

    The repository is not searched: a run of the same name there may be another model.

    Raises:
        UserError: the working folder does not have it. The error names the command of the shipped
            recipe that trains such a run, or else the nearest path.
    """
    return _find(path, key, (Path(),), hint=_training_command(Path(path)))


def _find(path: str | Path, key: str, folders: Sequence[Path], *, hint: str = "") -> Path:
    given = Path(os.path.expanduser(path))
    for folder in folders:
        if os.path.exists(folder / given):  # unlike Path's, False for what no path can be
            return Path.cwd() / folder / given
    candidates = [each for folder in folders for each in _siblings(folder / given)]
    raise UserError(f"{key}: nothing at {path}{hint or nearest_path(given, candidates)}")


def _training_command(path: Path) -> str:
    """Return the clause `; train it first: COMMAND` if `path` is a shipped recipe's default run."""
    is_run = path.parent == Path("runs")
    recipe = _shipped_recipe(Path(path.name)) if is_run and path.suffix not in _SUFFIXES else None
    if recipe is None:
        return ""
    script = "train" if recipe.parent == YAMLS else recipe.parent.name
    return f"; train it first: python scripts/{script}.py {recipe_name(recipe)}"


def find_recipe(path: str | Path) -> Path:
    """Return the recipe at `path`: a file, or the name of a shipped recipe, `quickstart`.

    Raises:
        UserError: there is no such recipe, with the nearest path; or the name is ambiguous.
    """
    given = Path(os.path.expanduser(path))
    # A file, or a run's folder, which is a common mistake.
    if os.path.isfile(given):
        if given.suffix in _TEXTS:
            raise UserError(
                f"{path} is no recipe; to train on it, write RECIPE.yaml data=files"
                f" data.paths=[{path}], such as quickstart"
            )
        return given
    if os.path.isfile(given / "recipe.yaml"):
        raise UserError(f"{path} is a folder; did you mean {given / 'recipe.yaml'}?")
    # A shipped recipe, unless a file here has the same name.
    if (recipe := _shipped_recipe(given)) is not None:
        beside = given.with_name(f"{given.name}.yaml")
        if given.suffix not in _SUFFIXES and beside.is_file() and not beside.samefile(recipe):
            name = recipe.relative_to(ROOT)
            raise UserError(
                f"{path} can be {beside} or the shipped recipe; write {beside} or {name}"
            )
        return recipe
    # Nothing: name what is there, and the nearest recipe.
    what = f"{path} is a folder, no recipe" if os.path.isdir(given) else f"no recipe at {path}"
    if os.path.exists(given) and not os.path.isdir(given):
        what = f"{path} is not a file; a device or a pipe cannot be a recipe"
    recipes = [p for p in _siblings(given) if p.suffix in _SUFFIXES]
    raise UserError(
        what
        + nearest_path(given, [*recipes, *YAMLS.glob("*.yaml"), *YAMLS.glob("finetune/*.yaml")])
    )


def is_recipe(word: str) -> bool:
    """Return whether a word names a recipe file, or a shipped recipe."""
    return word.endswith(_SUFFIXES) or _shipped_recipe(Path(word)) is not None


def _shipped_recipe(given: Path) -> Path | None:
    """Find `yamls/quickstart.yaml`, `quickstart`, `finetune/mpt-7b-sft` or `mpt-7b-sft`."""
    if given.is_absolute() or ".." in given.parts:
        return None
    if given.suffix in _SUFFIXES:
        places = [ROOT / given] if given.parts[0] == YAMLS.name else []
    else:
        places = [YAMLS / f"{given}.yaml", YAMLS / "finetune" / f"{given}.yaml"]
    return next((place for place in places if os.path.isfile(place)), None)


def recipe_name(path: Path) -> str:
    """Return a recipe as users write it: its path below the working folder, or its shipped name."""
    is_here = path.absolute().is_relative_to(Path.cwd())
    if is_here or path.suffix not in _SUFFIXES or not path.is_relative_to(YAMLS):
        return show(path)
    return path.relative_to(YAMLS).with_suffix("").as_posix()


def nearest_path(given: Path, candidates: Iterable[Path]) -> str:
    """Return the clause `; did you mean PATH?` for the closest file name and path."""
    by_name: dict[str, list[str]] = {}
    for path in candidates:
        by_name.setdefault(path.name.removesuffix(".yaml"), []).append(recipe_name(path))
    match = difflib.get_close_matches(given.name.removesuffix(".yaml"), by_name, n=1)
    if not match:
        return ""
    closest = difflib.get_close_matches(str(given), by_name[match[0]], n=1, cutoff=0)
    return f"; did you mean {closest[0]}?"


def show(path: Path) -> str:
    """Return `path` as users write it: relative if it is below the working folder."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


def search_folders(recipe: Path | None) -> list[Path]:
    """Return the folders that may hold groups, in order: the recipe's folder, then yamls/.

    For a recipe at the root of the repository yamls/ comes first, because eval/ there is not a
    group.
    """
    folders = [YAMLS]
    if recipe is not None:
        recipe_folder = recipe.absolute().parent
        at_root = (recipe_folder / "eval").resolve() == ROOT / "eval"
        folders = [YAMLS, recipe_folder] if at_root else [recipe_folder, YAMLS]
    return list(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def group_options(folders: Iterable[Path], schema: Schema) -> dict[str, list[str]]:
    """Return the groups of a schema with their choices: `{"model": ["mpt-125m", ...]}`.

    A group is a folder in one of `folders` with YAML files and the name of a section.
    """
    choices_by_group = {
        name: {file.stem for folder in folders for file in (folder / name).glob("*.yaml")}
        for name, key in schema.keys.items()
        if key.section is not None and name not in getattr(schema.cls, "NOT_GROUPS", ())
    }
    return {group: sorted(options) for group, options in choices_by_group.items() if options}


def shipped(schema: Schema) -> list[Path]:
    """Return the recipes under yamls/ for `schema`."""
    return sorted((YAMLS / getattr(schema.cls, "FOLDER", "")).glob("*.yaml"))


def _siblings(path: Path) -> list[Path]:
    """Return the files next to `path`, and files of the same name in neighboring folders.

    A folder that has nothing but the lock of a run is left out: the process that fails to find
    `path` may have just created it.
    """
    beside, above = path.parent, path.parent.parent
    cousins = (above / name / path.name for name in _names(above))
    candidates = [beside / name for name in _names(beside)]
    candidates += [cousin for cousin in cousins if os.path.exists(cousin)]
    return [candidate for candidate in candidates if _names(candidate) != [RUN_LOCK]]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; empty if it cannot be read."""
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []
